"""The multiplicative update's kernels: emulated on the CPU, compiled for Hopper, run on a GPU."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).parent))

import emulate  # noqa: E402
from emulate import emulated  # noqa: E402

from tpf.kernels import jit, library, reference, tri_attn, tri_mul, tri_mul_bwd  # noqa: E402
from tpf.kernels.ops import Direction, TriMulWeights, triangle_multiplication  # noqa: E402
from tpf.kernels.tri_mul_layout import Saved, Shape, Sizes  # noqa: E402

NAMES = ("update", "dz", *TriMulWeights._fields)
LIMIT, WEIGHT_LIMIT = 1e-2, 2e-2
"""Relative L2 error of bf16 kernels (weights: of few positions); bf16 PyTorch is at 5e-3 - 7e-3."""


def load(name: str) -> ModuleType:
    """Import a module of benchmarks/."""
    path = Path(__file__).resolve().parents[2] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


check = load("trimul_check")


def weights(c: int, hidden: int) -> TriMulWeights:
    def linear(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns) / columns**0.5

    branches = (linear(hidden, c) for _ in range(4))
    norm_in, norm_out = (0.3 * torch.randn(2, width) for width in (c, hidden))
    return TriMulWeights(
        1 + norm_in[0], norm_in[1], *branches, 1 + norm_out[0], norm_out[1],
        linear(c, c), linear(c, hidden),
    )  # fmt: skip


def results(
    z: Tensor, mask: Tensor | None, w: TriMulWeights, direction: Direction, dout: Tensor, impl: str
) -> list[Tensor]:
    """Return the update and all gradients through the operator's functions."""
    leaves = [x.detach().requires_grad_() for x in (z, *w)]
    packed = TriMulWeights(*leaves[1:])
    out = library.multiplication(leaves[0], mask, packed, direction, impl)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def compare(z: Tensor, mask: Tensor | None, w: TriMulWeights, direction: Direction) -> None:
    """Compare the emulated kernels with FP64."""
    dout = torch.randn(z.shape).bfloat16()
    with emulated():
        got = results(z, mask, w, direction, dout, "cuda")
    wide = TriMulWeights(*(x.double() for x in w))
    want = results(z.double(), mask, wide, direction, dout.double(), "torch")
    for name, x, exact in zip(NAMES, got, want, strict=True):
        wide_result = name not in ("update", "dz")
        assert x.dtype == (torch.float32 if wide_result else torch.bfloat16)
        assert (x - exact).norm() <= (WEIGHT_LIMIT if wide_result else LIMIT) * exact.norm(), name


def make_mask(kind: str | None, shape: tuple[int, ...]) -> Tensor | None:
    if kind is None:
        return None
    kept = torch.rand(shape)
    return kept > 0.3 if kind == "bool" else kept.to(getattr(torch, kind))


# ------------------------------------------------------------------------------ on the CPU


@pytest.mark.parametrize(
    ("b", "n", "c", "hidden", "direction", "mask"),
    [
        (2, 9, 16, 16, "incoming", "bool"),  # a and b in one unit, teams of one
        (1, 1, 16, 16, "outgoing", None),
        (1, 66, 16, 16, "outgoing", "float32"),  # two items a row
        (1, 14, 64, 64, "outgoing", None),  # one pass
        (1, 9, 64, 64, "incoming", "bfloat16"),
        (1, 9, 128, 128, "incoming", "bool"),  # two passes, teams of two
        (2, 5, 144, 144, "incoming", "float32"),  # slices; the backward is not fused
        pytest.param(1, 9, 256, 256, "outgoing", "bool", marks=pytest.mark.slow),
        pytest.param(2, 7, 192, 208, "incoming", None, marks=pytest.mark.slow),
        pytest.param(1, 66, 256, 16, "outgoing", "bfloat16", marks=pytest.mark.slow),
        pytest.param(1, 12, 128, 128, "outgoing", None, marks=pytest.mark.slow),
        pytest.param(1, 10, 96, 96, "outgoing", "bool", marks=pytest.mark.slow),
        pytest.param(1, 8, 48, 80, "outgoing", "bool", marks=pytest.mark.slow),
        pytest.param(2, 7, 128, 32, "incoming", None, marks=pytest.mark.slow),
        pytest.param(1, 65, 32, 128, "incoming", "float32", marks=pytest.mark.slow),
    ],
)
def test_against_fp64(
    b: int, n: int, c: int, hidden: int, direction: Direction, mask: str | None
) -> None:
    z = (torch.randn(b, n, n, c) + 0.5).bfloat16()
    compare(z, make_mask(mask, (b, n, n)), weights(c, hidden), direction)


def test_strides_and_a_mean_far_from_zero() -> None:
    """A transposed slice of a wider tensor whose channels share a large offset."""
    room = torch.full((1, 10, 10, 48), float("nan")).bfloat16()
    z = room[..., 16:32].transpose(1, 2)
    z.copy_(torch.randn(1, 10, 10, 16) + 30)
    mask = make_mask("bool", (1, 10, 10))
    assert mask is not None
    compare(z, mask.transpose(1, 2), weights(16, 16), "outgoing")


def test_layouts_that_the_copy_engine_cannot_read_are_copied() -> None:
    z = torch.randn(1, 6, 6, 20).bfloat16()[..., 2:18]
    compare(z, None, weights(16, 16), "incoming")
    row = torch.randn(1, 1, 6, 16).bfloat16().expand(1, 6, 6, 16)
    compare(row, None, weights(16, 16), "incoming")


@pytest.mark.parametrize("c", [16, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("impl", ["cuda", "torch"])
def test_frozen_weights_get_no_gradients(
    c: int, impl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of z is the same to the bit, and the last kernel is not launched."""
    z, w = torch.randn(1, 9, 9, c).bfloat16(), weights(c, c)
    dout, z2 = torch.randn_like(z), z.clone().requires_grad_()
    launched = []
    prepare = tri_mul.Variant.prepare

    def watch(variant: tri_mul.Variant, *args: Any) -> Any:
        launched.append(variant.name)
        return prepare(variant, *args)

    with emulated():
        want = results(z, None, w, "outgoing", dout, impl)[1]
        monkeypatch.setattr(tri_mul.Variant, "prepare", watch)
        out = library.multiplication(z2, None, w, "outgoing", impl)
        out.backward(dout)
    assert z2.grad is not None and torch.equal(z2.grad, want)
    assert all(x.grad is None for x in w)
    assert "tri_mul_grads" not in launched
    assert ("tri_mul_bwd_out" in launched) == (impl == "cuda")


@pytest.mark.parametrize("impl", ["cuda", "torch"])
def test_one_trained_weight_is_enough(impl: str) -> None:
    z, w = torch.randn(1, 6, 6, 16).bfloat16(), weights(16, 16)
    dout = torch.randn_like(z)
    with emulated():
        want = results(z, None, w, "incoming", dout, impl)
        w.linear_g.requires_grad_()
        library.multiplication(z, None, w, "incoming", impl).backward(dout)
    assert w.linear_g.grad is not None
    assert torch.equal(w.linear_g.grad, want[NAMES.index("linear_g")])


def test_autocast_and_weights_in_bf16() -> None:
    z, w = torch.randn(1, 6, 6, 16).bfloat16(), weights(16, 16)
    low = TriMulWeights(*(x.bfloat16() for x in w))
    dout = torch.randn_like(z)
    with emulated(), torch.autocast("cpu", dtype=torch.bfloat16):
        got = results(z, None, low, "outgoing", dout, "cuda")
    with emulated():
        want = results(z, None, TriMulWeights(*(x.float() for x in low)), "outgoing", dout, "cuda")
    for x, y in zip(got, want, strict=True):
        assert x.dtype == torch.bfloat16
        assert torch.equal(x, y.bfloat16())


def test_bits_do_not_depend_on_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warps that stand still at random change nothing: every wait is a real one."""
    z, w = torch.randn(1, 14, 14, 64).bfloat16(), weights(64, 64)
    dout = torch.randn_like(z)
    found = []
    for seed in (0, 1, 2):
        monkeypatch.setattr(emulate, "SEED", seed)
        with emulated():
            found.append(results(z, None, w, "incoming", dout, "cuda"))
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))


def test_three_units_in_boxes_of_32_do_not_depend_on_the_schedule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At 96 channels the output tiles of a consumer change their turn with every item."""
    z, w = torch.randn(1, 14, 14, 96).bfloat16(), weights(96, 96)
    monkeypatch.setattr(emulate, "PROCESSORS", 1)
    found = []
    for seed in (0, 1, 2):
        monkeypatch.setattr(emulate, "SEED", seed)
        with emulated():
            found.append(tri_mul.tri_mul_fwd(z, None, w, "outgoing"))
    views = Saved(Shape(1, 14, Sizes(96, 96))).views
    first, *others = ([out, *(view.of(saved) for view in views)] for out, saved in found)
    for other in others:
        assert all(torch.equal(x, y) for x, y in zip(first, other, strict=True))


def test_backward_repeats_bitwise_on_a_retained_graph() -> None:
    z, w = torch.randn(1, 9, 9, 16).bfloat16().requires_grad_(), weights(16, 16)
    with emulated():
        out = library.multiplication(z, None, w, "outgoing", "cuda")
        dout = torch.randn_like(out)
        first, second = (
            torch.autograd.grad(out, [z], dout, retain_graph=True)[0] for _ in range(2)
        )
    assert torch.equal(first, second)


def test_fake_tensors_have_the_shapes_of_the_kernels() -> None:
    z, w = torch.randn(1, 9, 9, 16).bfloat16(), weights(16, 32)
    with emulated():
        args = z, None, list(w), "outgoing", "cuda"
        real = library.tri_mul_fwd(*args)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (z, *w)]
        like = library.tri_mul_fwd(fakes[0], None, fakes[1:], "outgoing", "cuda")
    for x, fake in zip(real, like, strict=True):
        assert (x.shape, x.dtype, x.stride()) == (fake.shape, fake.dtype, fake.stride())


@pytest.mark.parametrize(
    ("c", "hidden", "message"),
    [(24, 16, "the z has 24 channels"), (16, 272, "hidden layer has 272 channels"),
     (16, 16, "z is on cpu")],
)  # fmt: skip
def test_unsupported_inputs_are_named(c: int, hidden: int, message: str) -> None:
    z = torch.zeros(1, 4, 4, c, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=message):
        triangle_multiplication(z, None, weights(c, hidden), "outgoing", impl="cuda")
    out = triangle_multiplication(z, None, weights(c, hidden), "outgoing")
    assert out.shape == z.shape


# -------------------------------------------------------------------------------- compiled

REASON = jit.compiler_available()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPF_CACHE", str(tmp_path_factory.mktemp("kernels")))
        yield


def all_variants(sizes: Sizes) -> dict[str, tri_mul.Variant]:
    found = dict(tri_mul.forward_variants(sizes))
    return found | (tri_mul_bwd.backward_variants(sizes) if sizes.fused_backward else {})


def compiled_variants() -> list[Any]:
    found = []
    narrow = (128, 128), (64, 64), (32, 32), (96, 96), (16, 128), (128, 32), (48, 80)
    for c, hidden in (*narrow, (256, 256), (192, 192), (144, 208), (256, 16), (16, 256)):
        marks = [] if c == hidden and c % 128 == 0 or c == 64 else [pytest.mark.slow]
        for name, variant in all_variants(Sizes(c, hidden)).items():
            found.append(pytest.param(variant, marks=marks, id=f"{name}-{c}-{hidden}"))
    return found


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("variant", compiled_variants())
def test_compiles_without_spills(variant: tri_mul.Variant) -> None:
    binary = jit.build(variant.name, variant.defines)
    assert binary.spill_bytes == 0, binary.log
    assert 0 < binary.registers <= 65536 // variant.threads // 8 * 8, binary.log
    assert not [w for w in binary.warnings if "serializ" in w.lower()], binary.log
    assert variant.shared <= tri_attn.MAX_SHARED


@pytest.mark.parametrize(
    ("channels", "copied"), [(64, False), (128, False), (32, True), (96, True)]
)
def test_channels_of_no_whole_tile_are_read_densely(channels: int, copied: bool) -> None:
    z = torch.randn(1, 6, 5, channels).bfloat16()
    assert tri_mul.readable(z) is z
    strided = z.transpose(1, 2)
    found = tri_mul.readable(strided)
    assert torch.equal(found, strided)
    assert (found is strided) != copied and found.is_contiguous() == copied


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
@pytest.mark.usefixtures("cache")
def test_means_over_96_channels_call_no_division() -> None:
    variant = tri_mul.forward_variants(Sizes(96, 96))[tri_mul.IN]
    assert b"_div_" not in jit.build(variant.name, variant.defines).cubin


# --------------------------------------------------------------------------------- on a GPU


def test_a_stage_serves_one_user() -> None:
    """Waiting by parity sees one lap only, so users that take turns need stages of their own."""
    for c in range(16, 257, 16):
        for hidden in range(16, 257, 16):
            sizes = Sizes(c, hidden)
            users = {"tri_mul_bwd_out": 2 // sizes.c_tiles}
            for name, variant in all_variants(sizes).items():
                if (stages := variant.defines.get("STAGES")) is None:
                    continue
                default = 2 // sizes.team if name.startswith("tri_mul_bwd_in") else 1
                by = variant.defines.get("CONSUMERS", users.get(name, default))
                assert stages >= by and stages % by == 0, (name, c, hidden, stages, by)


@pytest.mark.gpu
@pytest.mark.parametrize("case", check.cases(), ids=str)
def test_case_on_gpu(case: Any) -> None:
    assert not check.failed(case, check.check_case(case))


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [64, 96, 128])
def test_many_calls_agree_bitwise(channels: int) -> None:
    """A stage released too early shows in one row of many thousands."""
    case = check.Case(640, channels, channels)
    inputs = check.make(case)
    first = check.run(check.ours, inputs, "outgoing")
    for _ in range(10):
        again = check.run(check.ours, inputs, "outgoing")
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.gpu
def test_opcheck_and_compile_on_gpu() -> None:
    inputs = check.make(check.Case(70, 64, 64, mask="bool"))
    leaves = [x.requires_grad_() for x in inputs.weights]
    args = (inputs.z, inputs.mask, leaves, "incoming", "cuda")
    utils = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(library.tri_mul_fwd, args, test_utils=utils)
    compiled = torch.compile(check.ours, fullgraph=True)
    want = check.run(check.ours, inputs, "incoming")
    got = check.run(compiled, inputs, "incoming")
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.gpu
def test_gpu_autocast_with_fp32_parameters_takes_the_kernels() -> None:
    inputs = check.make(check.Case(130, 128, 128))
    want = check.run(check.ours, inputs, "outgoing")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        got = check.run(triangle_multiplication, inputs, "outgoing")
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.gpu
def test_offsets_beyond_32_bits_on_gpu() -> None:
    n, c = 4200, 128  # more than 2**31 elements
    inputs = check.make(check.Case(n, c, 16))
    out = check.ours(inputs.z, None, inputs.weights, "outgoing")
    rows = slice(n - 64, n)
    w = TriMulWeights(*(x.float() for x in inputs.weights))
    zn = torch.nn.functional.layer_norm(
        inputs.z.float(), (c,), w.layer_norm_in_weight, w.layer_norm_in_bias
    )
    a = (zn[:, rows] @ w.linear_a_p.mT) * (zn[:, rows] @ w.linear_a_g.mT).sigmoid()
    b = (zn @ w.linear_b_p.mT) * (zn @ w.linear_b_g.mT).sigmoid()
    x = torch.einsum("zikh,zjkh->zijh", a, b)
    xn = torch.nn.functional.layer_norm(
        x, (16,), w.layer_norm_out_weight, w.layer_norm_out_bias, reference.LAYER_NORM_EPS
    )
    exact = (zn[:, rows] @ w.linear_g.mT).sigmoid() * (xn @ w.linear_z.mT)
    assert (out[:, rows] - exact).norm() / exact.norm() < LIMIT
