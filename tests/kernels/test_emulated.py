"""The CUDA kernels and their host code, run thread by thread on the CPU, against the reference."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.kernels.emulate import emulated
from tpf.kernels import library, reference, tri_attn


def inputs(
    b: int, o: int, h: int, n: int, d: int, bias_dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(b, o, n, h, d).bfloat16().transpose(2, 3) for _ in range(3))
    return q, k, v, torch.randn(b, h, n, n).to(bias_dtype)


def make_mask(kind: str, b: int, o: int, n: int) -> Tensor:
    """Return random keys, a slice without keys, or a padded tail."""
    mask = torch.rand(b, o, n) > 0.3
    if kind == "rows":
        mask[:, 0] = False
    if kind == "tail":
        mask = (torch.arange(n) < n * 2 // 3).expand(b, o, n)
    return mask


@pytest.fixture(params=[False, True], ids=["drained", "stream"])
def stream(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run a test with both settings of ``tri_attn.STREAM``."""
    monkeypatch.setattr(tri_attn, "STREAM", request.param)
    return bool(request.param)


def check_forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> None:
    scale = 1 / math.sqrt(q.shape[-1])
    with emulated():
        out, lse, residual = tri_attn.tri_attn_fwd(q, k, v, bias, mask, scale, True)
    wide = [x.double() for x in (q, k, v, bias)]
    exact, exact_lse, _ = reference.attention_forward(*wide, mask, scale, False)
    assert torch.equal(lse.isinf(), exact_lse.isinf())
    finite = lse.isfinite()
    torch.testing.assert_close(lse[finite].double(), exact_lse[finite], rtol=0, atol=2e-4)
    assert (out - exact).norm() <= 4e-3 * exact.norm() + 1e-6
    assert torch.equal(out[~finite], torch.zeros_like(out[~finite]))
    restored = out.double() + residual.double()
    assert (restored - exact).norm() <= 3.5e-3 * exact.norm() + 1e-6


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize("n", [1, 64, 65, 200])
@pytest.mark.parametrize("d", [16, 32])
def test_forward(n: int, d: int) -> None:
    check_forward(*inputs(1, 5, 2, n, d), None)


@pytest.mark.parametrize("kind", ["random", "rows", "tail"])
def test_forward_masked(kind: str) -> None:
    check_forward(*inputs(2, 3, 1, 130, 32), make_mask(kind, 2, 3, 130))


@pytest.mark.parametrize(("d", "shift"), [(32, -40.0), (16, -3.0)], ids=["all", "some"])
def test_forward_of_negative_scores(d: int, shift: float) -> None:
    """Rows whose maximum is negative, which the kernel does not find by integers."""
    q, k, v, bias = inputs(1, 5, 2, 130, d)
    check_forward(q, k, v, bias + shift, None)


def test_forward_with_every_lane_at_barriers(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = tri_attn.forward_defines
    monkeypatch.setattr(tri_attn, "forward_defines", lambda *a: usual(*a) | {"EVERY_LANE": 1})
    check_forward(*inputs(1, 5, 2, 200, 32), None)


def test_forward_of_other_layouts() -> None:
    n, h, d = 70, 2, 32
    z = torch.randn(1, n, n, 3 * h * d).bfloat16()
    q, k, v = (x.view(1, n, n, h, d).permute(0, 2, 3, 1, 4)[:, :4] for x in z.split(h * d, -1))
    bias = torch.randn(1, n, n, h).bfloat16().permute(0, 3, 1, 2)
    check_forward(q, k, v, bias, None)


@pytest.mark.slow
@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize("n", [63, 127, 257, 400])
@pytest.mark.parametrize("d", [5, 24, 48, 64])
@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32])
def test_forward_everywhere(n: int, d: int, bias_dtype: torch.dtype) -> None:
    check_forward(*inputs(1, 5, 2, n, d, bias_dtype), None)
    check_forward(*inputs(2, 3, 1, n, d, bias_dtype), make_mask("rows", 2, 3, n))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "d", "kind", "bias_dtype"),
    [
        (70, 16, None, torch.bfloat16),
        (130, 32, "rows", torch.bfloat16),
        (65, 32, None, torch.float32),
        (40, 64, "random", torch.bfloat16),
    ],
)
def test_gradients(n: int, d: int, kind: str | None, bias_dtype: torch.dtype) -> None:
    """Forward and backward kernels together, through the operator's functions."""
    leaves = [x.requires_grad_() for x in inputs(1, 3, 2, n, d, bias_dtype)]
    mask = None if kind is None else make_mask(kind, 1, 3, n)
    dout = torch.randn(1, 3, n, 2, d).bfloat16().transpose(2, 3)
    scale = 1 / math.sqrt(d)
    with emulated():
        out = library.attention(*leaves, mask, scale, "cuda")
        grads = torch.autograd.grad(out, leaves, dout)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    exact = torch.autograd.grad(library.attention(*wide, mask, scale, "torch"), wide, dout.double())
    for name, got, want in zip(("dq", "dk", "dv", "dbias"), grads, exact, strict=True):
        assert got.dtype == (bias_dtype if name == "dbias" else torch.bfloat16)
        assert (got - want).norm() <= 6e-3 * want.norm(), name


def test_deadlock_is_reported() -> None:
    """One block with five one-tile items lacks Q buffers, which ``blocks_for`` avoids."""
    q, k, v, bias = inputs(1, 9, 1, 64, 32)
    with emulated(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(tri_attn, "STREAM", True)
        patch.setattr(tri_attn, "blocks_for", lambda items, key_tiles, device: 1)
        with pytest.raises(RuntimeError, match="deadlock"):
            tri_attn.tri_attn_fwd(q, k, v, bias, None, 0.2, True)
