"""The attention kernels on a Hopper GPU: sizes, masks, layouts; repeatability; large offsets."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tpf.kernels import library, reference
from tpf.kernels.ops import triangle_attention

pytestmark = pytest.mark.gpu


def load_check() -> ModuleType:
    """Import benchmarks/attention_check.py, which holds the table of cases."""
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "attention_check.py"
    spec = importlib.util.spec_from_file_location("attention_check", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["attention_check"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


check = load_check()


@pytest.mark.parametrize("case", check.cases(), ids=str)
def test_against_fp64(case: object) -> None:
    errors = check.check_case(case, backward=True)
    assert not {k: e for k, e in errors.items() if not e <= check.LIMITS[k]}


def test_every_row_of_many_is_right() -> None:
    """A stage released too early shows in one row of many thousands."""
    case = check.Case(640, 32, 128, 1, 4)
    for _ in range(5):
        errors = check.check_case(case, backward=False)
        assert errors["row"] <= check.LIMITS["row"] and errors["lse"] <= check.LIMITS["lse"]


@pytest.mark.parametrize("shift", [-3.0, -40.0])
def test_negative_scores(shift: float) -> None:
    """Rows whose maximum is negative, which the kernel does not find by integers."""
    q, k, v, bias, _ = check.make(check.Case(200, 32, 5))
    bias = bias + shift
    out, lse, _ = library.tri_attn_fwd(q, k, v, bias, None, 0.2, True, "cuda")
    wide = [x.double() for x in (q, k, v, bias)]
    exact, exact_lse, _ = reference.attention_forward(*wide, None, 0.2, False)
    assert check.relative(out, exact) < 4e-3
    assert float((lse - exact_lse).abs().max()) <= check.LIMITS["lse"]


def test_offsets_beyond_32_bits() -> None:
    n, h, d = 2048, 17, 32  # more than 2**31 elements
    q, k, v = (
        torch.randn(1, n + 64, n, h, d, device="cuda", dtype=torch.bfloat16).transpose(2, 3)
        for _ in range(3)
    )
    bias = torch.randn(1, 1, h, n, n, device="cuda", dtype=torch.bfloat16)
    out = triangle_attention(q, k, v, bias, impl="cuda")
    for part in (slice(0, 2), slice(n + 62, n + 64)):
        wide = [x[:, part].double() for x in (q, k, v)]
        exact = reference.attention_forward(
            *wide, bias[:, 0].double(), None, 1 / math.sqrt(d), False
        )[0]
        assert check.relative(out[:, part], exact) < 4e-3


def test_launch_is_captured_in_a_graph() -> None:
    q, k, v, bias, _ = check.make(check.Case(200, 32))
    want = library.tri_attn_fwd(q, k, v, bias, None, 0.2, True, "cuda")
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        got = library.tri_attn_fwd(q, k, v, bias, None, 0.2, True, "cuda")
    for x in got:
        x.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_opcheck() -> None:
    q, k, v, bias, mask = check.make(check.Case(70, 32, mask="random"))
    leaves = [x.requires_grad_() for x in (q, k, v, bias)]
    torch.library.opcheck(
        library.tri_attn_fwd,
        (*leaves, mask, 0.2, True, "cuda"),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_flex_agrees() -> None:
    case = check.Case(130, 32, mask="rows")
    q, k, v, bias, mask = check.make(case)
    assert mask is not None
    leaves = [x.contiguous().detach().requires_grad_() for x in (q, k, v, bias[:, None])]
    dout = torch.randn_like(leaves[0])
    results = []
    for impl in ("cuda", "flex"):
        out = triangle_attention(*leaves, mask[:, :, None, None], impl=impl)
        results.append((out, *torch.autograd.grad(out, leaves, dout)))
    for ours, theirs in zip(*results, strict=True):
        assert check.relative(ours, theirs.double()) < 1e-2
