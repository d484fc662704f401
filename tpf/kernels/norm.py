"""Layer norm on Hopper: rows of channels with FP32 statistics and parameters, result in BF16.

The kernels (``kernels/pair_norm_*.cu``) compute narrow projections of the result beside it, for the
biases of triangle attention. Sums over rows are FP32 in a fixed order; nothing is atomic.
"""

from __future__ import annotations

import ctypes
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tpf.kernels import jit, tri_attn

MAX_CHANNELS = 512
MAX_HEADS, MAX_HEAD_CHANNELS = 8, 256
"""Most projections, and their most channels, that the registers of the backward kernel hold."""
FORWARD_THREADS, BACKWARD_THREADS = 256, 128

_I32, _I64, _POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


class _ForwardParams(ctypes.Structure):
    """``Params`` of pair_norm_fwd.cu."""

    _fields_ = [
        *((name, _POINTER) for name in ("x", "weight", "bias", "head_weight", "y", "heads")),
        ("x_stride", _I64),
        ("rows", _I32),
        ("plane", _I32),
    ]


class _BackwardParams(ctypes.Structure):
    """``Params`` of pair_norm_bwd.cu."""

    _fields_ = [
        *((name, _POINTER) for name in ("x", "dy", "residual", "dx", "weight", "bias")),
        *((name, _POINTER) for name in ("head_weight", "dheads", "partial")),
        ("x_stride", _I64),
        *((name, _I32) for name in ("rows", "plane", "keep_y")),
    ]


def lanes(channels: int) -> int:
    """Return how many lanes of a warp share a row."""
    return min(32, 1 << max(channels // 8 - 1, 0).bit_length())


def defines(channels: int, heads: int, wide: bool) -> dict[str, int]:
    """Return the constants of the variant for these sizes; wide: FP32 rows."""
    return {"TPF_CHANNELS": channels, "TPF_HEADS": heads, "TPF_WIDE": int(wide)}


def dense(x: Tensor) -> Tensor:
    """Return x in one piece at a multiple of 16 bytes; a copy only if it must be."""
    if x.is_contiguous() and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def as_rows(x: Tensor) -> Tensor:
    """Return x [..., C] as [rows, C], each at a multiple of 16 bytes; a copy only if it must be."""
    rows = x.reshape(-1, x.shape[-1])
    fits = rows.stride(-1) == 1 and rows.stride(0) % 8 == 0 and rows.data_ptr() % 16 == 0
    return rows if fits else dense(rows)


def _blocks(rows: int, channels: int, heads: int, threads: int, device: int) -> int:
    """Return the blocks that the rows need, at most those that run at once."""
    needed = -(-rows * lanes(channels) // threads)
    return min(needed, (2 if heads > 4 else 3) * tri_attn.processors(device))


def norm_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    head_weight: Tensor | None = None,
    plane: int = 1,
) -> tuple[Tensor, Tensor]:
    """Normalise rows x [rows, C] (BF16 or FP32) and project them: y [rows, C], heads, both BF16.

    weight, bias [C] and head_weight [H, C] are FP32; heads is [rows / plane, H, plane], without
    elements if there is no head_weight.
    """
    rows, channels = x.shape
    heads = 0 if head_weight is None else head_weight.shape[0]
    device = tri_attn.device_index(x)
    y = torch.empty((rows, channels), dtype=torch.bfloat16, device=x.device)
    projected = torch.empty((rows // plane, heads, plane), dtype=torch.bfloat16, device=x.device)
    params = _ForwardParams(
        x.data_ptr(), weight.data_ptr(), bias.data_ptr(),
        None if head_weight is None else head_weight.data_ptr(),
        y.data_ptr(), projected.data_ptr(), x.stride(0), rows, plane,
    )  # fmt: skip
    variant = defines(channels, heads, x.dtype == torch.float32)
    blocks = _blocks(rows, channels, heads, FORWARD_THREADS, device)
    stream = tri_attn.raw_stream(device)
    jit.load("pair_norm_fwd", variant, device).launch(
        (blocks, 1, 1), FORWARD_THREADS, params, stream
    )
    return y, projected


def norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None = None,
    head_weight: Tensor | None = None,
    dheads: Tensor | None = None,
    *,
    keep_y: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return dx [rows, C] in the dtype of x, plus ``residual``, and the parameters' gradients.

    The latter are FP32 [2 + H, C]: of weight, of bias, of the H rows of head_weight. dy is BF16
    [rows, C], dense, and holds y afterwards if keep_y; dheads [B, H, plane] is dense.
    """
    rows, channels = x.shape
    heads, plane = (0, 1) if dheads is None else (dheads.shape[1], dheads.shape[2])
    device = tri_attn.device_index(x)
    blocks = _blocks(rows, channels, heads, BACKWARD_THREADS, device)
    dx = torch.empty((rows, channels), dtype=x.dtype, device=x.device)
    partial = torch.empty((blocks, 2 + heads, channels), dtype=torch.float32, device=x.device)
    optional = (residual, head_weight, dheads)
    residual_at, head_weight_at, dheads_at = (None if t is None else t.data_ptr() for t in optional)
    params = _BackwardParams(
        x.data_ptr(), dy.data_ptr(), residual_at, dx.data_ptr(), weight.data_ptr(),
        bias.data_ptr(), head_weight_at, dheads_at, partial.data_ptr(),
        x.stride(0), rows, plane, keep_y,
    )  # fmt: skip
    variant = defines(channels, heads, x.dtype == torch.float32)
    stream = tri_attn.raw_stream(device)
    jit.load("pair_norm_bwd", variant, device).launch(
        (blocks, 1, 1), BACKWARD_THREADS, params, stream
    )
    return dx, partial.sum(0)


class _LayerNorm(torch.autograd.Function):
    """Layer norm of rows; the statistics are computed again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        return norm_forward(as_rows(x), weight, bias)[0].view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight, bias = ctx.saved_tensors
        dy = dense(dy.reshape(-1, x.shape[-1]))
        dx, grads = norm_backward(dy, as_rows(x), weight, bias)
        return dx.view(x.shape), grads[0], grads[1]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the layer norm of x [..., C] (BF16 or FP32, C a multiple of 8 up to 512) in BF16."""
    run: Any = _LayerNorm.apply
    return cast(Tensor, run(x, weight, bias))
