"""The attention backward: kernels run on the CPU, compiled variants, division of the work."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import emulate
from tests.kernels.emulate import emulated
from tpf.kernels import jit, reference
from tpf.kernels import tri_attn_bwd as backward
from tpf.kernels import tri_attn_bwd_paper as paper
from tpf.kernels import tri_attn_bwd_plan as plans
from tpf.kernels.tri_attn_bwd_plan import Problem
from tpf.kernels.tri_attn_bwd_walk import Walk

GRADIENTS = ("dq", "dk", "dv", "dbias")
REASON = jit.compiler_available()
needs_compiler = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def inputs(
    shape: tuple[int, int, int, int, int], *, fp32_bias: bool = False, end: bool = False
) -> list[Tensor]:
    """Return q, k, v, bias and dout as the projections lay them out (end: of a transposed pair)."""
    b, o, h, n, d = shape

    def operand() -> Tensor:
        if end:
            return torch.randn(b, n, o, h, d).bfloat16().permute(0, 2, 3, 1, 4)
        return torch.randn(b, o, n, h, d).bfloat16().transpose(2, 3)

    q, k, v, dout = (operand() for _ in range(4))
    bias = torch.randn(b, n, n, h).permute(0, 3, 1, 2) if end else torch.randn(b, h, n, n)
    return [q, k, v, bias.to(torch.float32 if fp32_bias else torch.bfloat16), dout]


def random_mask(shape: tuple[int, int, int, int, int]) -> Tensor:
    mask = torch.rand(shape[0], shape[1], shape[3]) > 0.3
    mask[:, 0] = False
    return mask


def gradients(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dout: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, ...]:
    saved = reference.attention_forward(q, k, v, bias, mask, scale, True)
    return backward.tri_attn_bwd(q, k, v, bias, mask, scale, *saved, dout)


def run(*args: Any) -> tuple[Tensor, ...]:
    with emulated():
        return gradients(*args)


def exact(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dout: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, ...]:
    wide = [x.double() for x in (q, k, v, bias)]
    saved = reference.attention_forward(*wide, mask, scale, False)
    return reference.attention_backward(dout.double(), *wide, mask, scale, *saved)


def check(tensors: list[Tensor], mask: Tensor | None, scale: float) -> tuple[Tensor, ...]:
    """Compare with FP64: rounding the result (.17 %) and, unless split, one factor (.24 %)."""
    got = run(*tensors, mask, scale)
    want = exact(*tensors, mask, scale)
    width = next(w for w in (16, 32, 64) if w >= tensors[0].shape[-1])
    split = plans.TUNING[plans.Q_BIAS, width].split
    limits = (0.0019 if split else 0.0028, 0.0028, 0.0028, 0.0021)
    for name, g, w, x, limit in zip(GRADIENTS, got, want, tensors, limits, strict=False):
        assert g.shape == x.shape and g.dtype == x.dtype, name
        assert g.isfinite().all(), name
        assert (g - w).norm() <= limit * w.norm() + 1e-6, name
    return got


@pytest.mark.parametrize(
    ("shape", "masked", "fp32_bias", "end"),
    [
        ((1, 3, 2, 70, 32), True, False, False),
        ((2, 5, 1, 130, 16), True, True, True),
        ((1, 2, 1, 65, 64), False, False, False),
        ((1, 2, 2, 9, 24), True, False, True),
        ((1, 1, 1, 1, 1), False, True, False),
    ],
)
def test_gradients_match_fp64(
    shape: tuple[int, int, int, int, int], masked: bool, fp32_bias: bool, end: bool
) -> None:
    tensors = inputs(shape, fp32_bias=fp32_bias, end=end)
    got = check(tensors, random_mask(shape) if masked else None, 1 / math.sqrt(shape[-1]))
    if masked:  # the first slice has no keys
        assert all(not g[:, 0].any() for g in got[:3])


@pytest.mark.parametrize(
    ("kernel", "width", "tuning"),
    [
        (plans.KV, 16, plans.Tuning(2, True, False)),
        (plans.KV, 16, plans.Tuning(2, False, True)),
        (plans.KV, 32, plans.Tuning(1, True, False)),
        (plans.Q_BIAS, 16, plans.Tuning(2, True, True)),
        (plans.Q_BIAS, 16, plans.Tuning(4, True)),
        (plans.Q_BIAS, 32, plans.Tuning(4, True)),
        (plans.Q_BIAS, 32, plans.Tuning(2, True, True)),
        (plans.Q_BIAS, 64, plans.Tuning(2, False)),
        (plans.KV, 32, plans.Tuning(2, False)),
    ],
)
def test_other_tunings_match_fp64(
    kernel: str, width: int, tuning: plans.Tuning, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(plans.TUNING, (kernel, width), tuning)
    check(inputs((1, 5, 1, 130, width)), random_mask((1, 5, 1, 130, width)), 0.3)


def test_blocks_that_share_a_strip_and_walk_several_add_up() -> None:
    """Three blocks have 3 x 2 strips of 7 groups: each begins or ends inside one."""
    check(inputs((1, 50, 3, 66, 16)), None, 0.25)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
def test_any_scale(scale: float) -> None:
    check(inputs((1, 2, 1, 20, 16)), None, scale)


def test_calls_of_one_plan_and_of_other_addresses_are_independent() -> None:
    shape = (1, 2, 1, 20, 16)
    first, second = inputs(shape), inputs(shape)
    moved = torch.empty(second[4].numel() + 1).bfloat16()[1:]  # rows no longer start at 16 bytes
    third = [*second[:4], moved.as_strided(shape, second[4].stride()).copy_(second[4])]
    want = [run(*tensors, None, 0.25) for tensors in (first, second, third)]
    with emulated():
        for tensors, alone, built in zip((first, second, third), want, (1, 1, 2), strict=True):
            got = gradients(*tensors, None, 0.25)
            assert all(torch.equal(x, y) for x, y in zip(got, alone, strict=True))
            assert plans.plan.cache_info().misses == built  # type: ignore[attr-defined]
    for tensors in (first, second, third):
        check(tensors, None, 0.25)


def test_fp32_bias_gets_an_exact_gradient() -> None:
    tensors = inputs((1, 4, 1, 40, 16), fp32_bias=True)
    dbias = run(*tensors, None, 0.25)[3]
    want = exact(*tensors, None, 0.25)[3]
    assert (dbias - want).norm() < 1e-5 * want.norm()


def test_unaligned_operands_are_copied_and_gradients_keep_their_layout() -> None:
    tensors = [torch.randn(1, 3, 2, 20, 10).bfloat16()[..., 1:8] for _ in range(3)]
    bias = torch.randn(1, 2, 20, 20).bfloat16()
    dout = torch.randn(1, 3, 20, 2, 7).bfloat16().transpose(2, 3)
    got = check([*tensors, bias, dout], None, 0.4)
    for g, x in zip(got, tensors, strict=False):
        assert g.stride() == reference.empty_dense_like(x).stride()


def test_unwritten_memory_does_not_reach_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        backward, "workspace", lambda size, device: torch.full((size,), 0xFF, dtype=torch.uint8)
    )
    check(inputs((1, 3, 1, 33, 16)), random_mask((1, 3, 1, 33, 16)), 0.25)


def test_bits_do_not_depend_on_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warps that stand still at random change nothing: every wait is a real one."""
    tensors = inputs((1, 20, 2, 70, 32))
    found = []
    for seed in (0, 1, 2):
        monkeypatch.setattr(emulate, "SEED", seed)
        found.append(run(*tensors, None, 0.4))
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))


def test_dbias_is_summed_where_dk_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With enough slices the copies of dbias lie in the memory of dK, which is written last."""
    sizes: list[int] = []

    def workspace(size: int, device: torch.device) -> torch.Tensor:
        sizes.append(size)
        return torch.full((size,), 0xFF, dtype=torch.uint8)

    monkeypatch.setattr(backward, "workspace", workspace)
    check(inputs((1, 40, 1, 40, 64)), None, 0.4)
    problem = Problem(1, 40, 1, 40, 64, False)
    fixed = problem.rows * 16 + problem.bias_bytes(False) + (plans.TILE + problem.padded) * 16
    assert sizes == [-(-fixed // 1024) * 1024]


@pytest.mark.parametrize("end", [False, True])
def test_gradients_in_place_change_nothing_beside_them(end: bool) -> None:
    """They lie between other tensors of one buffer, and are large enough for the workspace."""
    shape = b, o, h, n, d = 1, 40, 1, 40, 64
    tensors, mask, scale = inputs(shape, end=end), random_mask(shape), 0.4
    want = run(*tensors, mask, scale)
    buffer = torch.full((b, n, o, 4, h, d) if end else (b, o, n, 4, h, d), 7.0).bfloat16()
    order = (0, 2, 3, 1, 4) if end else (0, 1, 3, 2, 4)
    into = [part.permute(order) for part in buffer.unbind(3)[:3]]
    saved = reference.attention_forward(*tensors[:4], mask, scale, True)
    with emulated():
        got = backward.tri_attn_bwd(*tensors[:4], mask, scale, *saved, tensors[4], into=into)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    assert torch.all(buffer[..., 3, :, :] == 7)


@pytest.mark.parametrize(
    ("shape", "kept"), [((1, 6, 1, 70, 32), 8), ((2, 9, 1, 20, 10), 1), ((1, 3, 1, 66, 64), 8)]
)
def test_paper_variant_matches_fp64(
    shape: tuple[int, int, int, int, int], kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paper, "bias_groups", lambda problem: kept)
    tensors, mask, scale = inputs(shape), random_mask(shape), 0.3
    saved = reference.attention_forward(*tensors[:4], mask, scale, True)
    with emulated():
        got = paper.tri_attn_bwd_paper(*tensors[:4], mask, scale, *saved, tensors[4])
    for name, g, w in zip(GRADIENTS, got, exact(*tensors, mask, scale), strict=True):
        assert (g - w).norm() <= 0.0035 * w.norm(), name
    assert all(not g[:, 0].any() for g in got[:3])


@pytest.mark.parametrize(
    "atomic", [paper.Atomic("element", True), paper.Atomic("bulk", False), paper.Atomic("no", True)]
)
def test_atomic_ablations_match_fp64(atomic: paper.Atomic) -> None:
    shape = (1, 5, 1, 70, 16)
    tensors, scale = inputs(shape), 0.3
    saved = reference.attention_forward(*tensors[:4], None, scale, True)
    with emulated():
        got = paper.tri_attn_bwd_paper(*tensors[:4], None, scale, *saved, tensors[4], atomic)
    for name, g, w in zip(GRADIENTS, got, exact(*tensors, None, scale), strict=True):
        assert (g - w).norm() <= 0.0035 * w.norm(), name


@pytest.mark.parametrize(("n", "mib"), [(384, 108), (640, 500), (768, 252), (1024, 256)])
def test_paper_variant_reuses_dbias_partials_as_table_2(n: int, mib: int) -> None:
    problem = Problem(1, n, 4, n, 32, False)
    partial = problem.heads * n * n * 2
    assert paper.bias_groups(problem) * partial == mib << 20


@pytest.mark.parametrize(("strips", "groups"), [(48, 96), (24, 48), (4, 9), (1, 1), (300, 2)])
def test_walk_visits_every_group_once(strips: int, groups: int) -> None:
    walk = Walk(strips, groups, min(132, strips * groups))
    order = walk.order()
    assert sorted(code // 2 for code in order) == list(range(walk.items))
    starts = [x * walk.items // walk.blocks for x in range(walk.blocks + 1)]
    slots = []
    for x in range(walk.blocks):
        mine = [(code // 2 // groups, code % 2) for code in order[starts[x] : starts[x + 1]]]
        strips_of_block = {strip for strip, _ in mine}
        assert strips_of_block == {i // groups for i in range(starts[x], starts[x + 1])}
        assert [strip for strip, fresh in mine if fresh] == list(dict.fromkeys(s for s, _ in mine))
        slots += [x + strip for strip in strips_of_block]
    assert len(set(slots)) == len(slots) and max(slots) < walk.slots


def test_blocks_walk_the_same_slices_at_a_time() -> None:
    """At N = 768 all 132 blocks stay within 48 of the 768 slices, 22 of which are in work."""
    walk = Walk(48, 96, 132)
    order, length = walk.order(), walk.items // walk.blocks
    starts = [x * walk.items // walk.blocks for x in range(walk.blocks)]
    spread = [
        max(now) - min(now)
        for turn in range(length)
        for now in [[order[start + turn] // 2 % walk.groups for start in starts]]
    ]
    assert max(spread) <= 6


def test_workspace_stays_within_120_mib() -> None:
    problem = Problem(1, 768, 4, 768, 32, False)
    slots = plans.walk(problem, 132).slots
    fixed = problem.rows * 16 + problem.bias_bytes(True)
    assert fixed + slots * problem.used_tiles * plans.TILE**2 * 4 < 120 << 20


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPF_CACHE", str(folder))
        yield folder


@needs_compiler
@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("width", [16, 32, 64])
def test_variants_compile_without_spills(width: int, wide: bool) -> None:
    problem = Problem(1, 64, 4, 64, width, wide)
    found = {**plans.variants(problem), **paper.variants(problem, True)}
    for atomic in (paper.Atomic("element", True), paper.Atomic("bulk", True)):
        defines = paper.variants(problem, True, atomic)[paper.MAIN]
        assert jit.build(paper.MAIN, defines).spill_bytes == 0
        assert paper.shared_bytes(problem, atomic)[1] <= plans.SHARED_LIMIT
    for name, defines in found.items():
        binary = jit.build(name, defines)
        assert binary.spill_bytes == 0, binary.log
        assert not binary.warnings, binary.log
        if name in plans.MAIN:
            assert binary.registers == 168, binary.log  # 65536 / 384 threads
            assert plans.shared_bytes(name, problem)[1] <= plans.SHARED_LIMIT
    assert paper.shared_bytes(problem)[1] <= plans.SHARED_LIMIT
