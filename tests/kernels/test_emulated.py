"""The CUDA kernels, run thread by thread on the CPU, against the reference."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.kernels.emulate import emulated
from tpf.kernels import reference, tri_attn


def forward_inputs(
    b: int, o: int, h: int, n: int, d: int, bias_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(b, o, n, h, d).bfloat16().transpose(2, 3) for _ in range(3))
    return q, k, v, torch.randn(b, h, n, n).to(bias_dtype)


def check_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, save: bool = True
) -> None:
    scale = 1 / math.sqrt(q.shape[-1])
    with emulated():
        out, lse, residual = tri_attn.tri_attn_fwd(q, k, v, bias, mask, scale, save)
    wide = [x.double() for x in (q, k, v, bias)]
    exact, exact_lse, _ = reference.attention_forward(*wide, mask, scale, False)
    assert torch.equal(lse.isinf(), exact_lse.isinf())
    finite = lse.isfinite()
    torch.testing.assert_close(lse[finite].double(), exact_lse[finite], rtol=0, atol=2e-4)
    assert (out - exact).norm() <= 4e-3 * exact.norm() + 1e-6
    assert torch.equal(out[~finite], torch.zeros_like(out[~finite]))
    if save:
        restored = out.double() + residual.double()
        assert (restored - exact).norm() <= 3.5e-3 * exact.norm() + 1e-6


@pytest.mark.parametrize("n", [1, 65, 200])
@pytest.mark.parametrize("d", [16, 32, 64])
def test_forward(n: int, d: int) -> None:
    check_forward(*forward_inputs(1, 5, 1, n, d, torch.bfloat16), None)
