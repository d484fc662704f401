"""Layer norm on Hopper: rows of channels with FP32 statistics and parameters, result in BF16.

The kernels (``kernels/pair_norm_*.cu``) compute narrow projections of the result beside it, for the
biases of triangle attention. Sums over rows are FP32 in a fixed order; nothing is atomic.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tpf.kernels import jit, launch, tri_attn
from tpf.kernels.launch import Launch
from tpf.kernels.reference import needs_grad

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


@functools.lru_cache(maxsize=4096)
def _row_stride(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the elements from one row of channels to the next; 0 if it varies or is unaligned."""
    if strides[-1] != 1 and shape[-1] > 1:
        return 0
    axes = [(n, s) for n, s in zip(shape[:-1], strides[:-1], strict=True) if n != 1]
    step = axes[-1][1] if axes else shape[-1]
    even = all(s == m * t for (_, s), (m, t) in zip(axes[:-1], axes[1:], strict=True))
    return step if even and step % 8 == 0 else 0


def spaced(x: Tensor) -> Tensor:
    """Return x [..., C] with rows evenly spaced by 16 bytes; a copy only if it must be."""
    return x if x.data_ptr() % 16 == 0 and _row_stride(x.shape, x.stride()) else dense(x)


def _blocks(rows: int, channels: int, heads: int, threads: int, device: int) -> int:
    """Return the blocks that the rows need, at most those that run at once."""
    needed = -(-rows * lanes(channels) // threads)
    return min(needed, (2 if heads > 4 else 3) * tri_attn.processors(device))


@launch.plan
def _forward(
    shape: tuple[int, ...], strides: tuple[int, ...], heads: int, plane: int, wide: bool,
    device: int,
) -> Launch:  # fmt: skip
    rows, channels = math.prod(shape[:-1]), shape[-1]
    kernel = jit.load("pair_norm_fwd", defines(channels, heads, wide), device)
    blocks = _blocks(rows, channels, heads, FORWARD_THREADS, device)
    params = _ForwardParams(x_stride=_row_stride(shape, strides), rows=rows, plane=plane)
    pointers = "x", "weight", "bias", "head_weight", "y", "heads"
    return Launch(kernel, blocks, FORWARD_THREADS, params, pointers=pointers)


def norm_forward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Normalise rows x [..., C] (BF16 or FP32): y [..., C], dense, BF16; weight, bias [C] FP32."""
    x, device = spaced(x), tri_attn.device_index(x)
    y = torch.empty_like(x, dtype=torch.bfloat16, memory_format=torch.contiguous_format)
    prepared = _forward(x.shape, x.stride(), 0, 1, x.dtype is torch.float32, device)
    addresses = x.data_ptr(), weight.data_ptr(), bias.data_ptr(), 0, y.data_ptr(), 0
    prepared(tri_attn.raw_stream(device), (), addresses)
    return y


def norm_and_heads(
    x: Tensor, weight: Tensor, bias: Tensor, head_weight: Tensor, plane: int
) -> tuple[Tensor, Tensor]:
    """Return ``norm_forward`` and its projections by head_weight [H, C], FP32, to H channels.

    The latter are BF16 [rows / plane, H, plane].
    """
    x, heads, device = spaced(x), head_weight.shape[0], tri_attn.device_index(x)
    y = torch.empty_like(x, dtype=torch.bfloat16, memory_format=torch.contiguous_format)
    size = y.numel() // (plane * x.shape[-1]), heads, plane
    projected = y.new_empty(size)
    prepared = _forward(x.shape, x.stride(), heads, plane, x.dtype is torch.float32, device)
    tensors = x, weight, bias, head_weight, y, projected
    prepared(tri_attn.raw_stream(device), (), [t.data_ptr() for t in tensors])
    return y, projected


class _Backward:
    """Launch of the backward, and the shape of its partial sums."""

    def __init__(
        self, shape: tuple[int, ...], strides: tuple[int, ...], heads: int, plane: int,
        wide: bool, keep_y: bool, device: int,
    ) -> None:  # fmt: skip
        rows, channels = math.prod(shape[:-1]), shape[-1]
        kernel = jit.load("pair_norm_bwd", defines(channels, heads, wide), device)
        blocks = _blocks(rows, channels, heads, BACKWARD_THREADS, device)
        stride = _row_stride(shape, strides)
        params = _BackwardParams(x_stride=stride, rows=rows, plane=plane, keep_y=keep_y)
        pointers = [field[0] for field in _BackwardParams._fields_ if field[1] is _POINTER]
        self.launch = Launch(kernel, blocks, BACKWARD_THREADS, params, pointers=pointers)
        self.partial = blocks, 2 + heads, channels


_backward = launch.plan(_Backward)


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
    """Return dx [..., C] in the dtype of x, plus ``residual``, and the parameters' gradients.

    The latter are FP32 [2 + H, C]: of weight, of bias, of the H rows of head_weight. dy is BF16
    [..., C], dense, and holds y afterwards if keep_y; dheads [B, H, plane] is dense.
    """
    x, device = spaced(x), tri_attn.device_index(x)
    heads, plane = (0, 1) if dheads is None else (dheads.shape[1], dheads.shape[2])
    wide = x.dtype is torch.float32
    plan = _backward(x.shape, x.stride(), heads, plane, wide, keep_y, device)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    partial = x.new_empty(plan.partial, dtype=torch.float32)
    tensors = x, dy, residual, dx, weight, bias, head_weight, dheads, partial
    addresses = [0 if t is None else t.data_ptr() for t in tensors]
    plan.launch(tri_attn.raw_stream(device), (), addresses)
    return dx, partial.sum(0)


Backward = Callable[..., Any]


def differentiable_once(backward: Backward) -> Backward:
    """Refuse a second differentiation as PyTorch's decorator does, at no cost for the first."""
    checked: Backward = once_differentiable(backward)

    @functools.wraps(backward)
    def choose(*args: Any) -> Any:
        return (checked if torch.is_grad_enabled() else backward)(*args)

    return choose


class _LayerNorm(torch.autograd.Function):
    """Layer norm of rows; the statistics are computed again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        return norm_forward(x, weight, bias)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        dx, grads = norm_backward(dense(dy), *ctx.saved_tensors)
        return dx, *grads.unbind()


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the layer norm of x [..., C] (BF16 or FP32, C a multiple of 8 up to 512) in BF16."""
    run: Any = _LayerNorm.apply if needs_grad(x, weight, bias) else norm_forward
    return cast(Tensor, run(x, weight, bias))
