"""Launches of the elementwise kernels of the pair block, ``kernels/pair_*.cu``.

All work on eight BF16 channels at a time: channel counts are multiples of 8, rows start at
multiples of 16 bytes.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tpf.kernels import jit, launch, tri_attn
from tpf.kernels.launch import Launch

THREADS = 256
MOST_MATRICES = 5
"""Matrices that one launch of pair_pack writes."""

_I64, _U32, _POINTER = ctypes.c_int64, ctypes.c_uint32, ctypes.c_void_p
_SIZES = [(name, _U32) for name in ("vectors", "columns", "plane")]


class _ResidualParams(ctypes.Structure):
    """``Params`` of pair_residual.cu."""

    _fields_ = [
        *((name, _POINTER) for name in ("x", "update", "scale", "out")),
        ("scale_stride", _I64 * 3),
        *_SIZES,
    ]


class _GateForwardParams(ctypes.Structure):
    """``Params`` of pair_gate_fwd.cu."""

    _fields_ = [
        *((name, _POINTER) for name in ("o", "gate", "out")),
        ("o_stride", _I64 * 3),
        ("gate_stride", _I64),
        *_SIZES,
    ]


class _GateBackwardParams(ctypes.Structure):
    """``Params`` of pair_gate_bwd.cu."""

    _fields_ = [
        *((name, _POINTER) for name in ("gated", "o", "gate", "d_o", "dgate")),
        ("o_stride", _I64 * 3),
        ("gate_stride", _I64),
        ("dgate_stride", _I64),
        *_SIZES,
    ]


class _SwigluParams(ctypes.Structure):
    """``Params`` of pair_swiglu_fwd.cu and pair_swiglu_bwd.cu."""

    _fields_ = [*((name, _POINTER) for name in ("hidden", "keep", "out")), ("vectors", _U32)]


class _PackParams(ctypes.Structure):
    """``Params`` of pair_pack.cu."""

    _fields_ = [
        ("matrix", _POINTER * MOST_MATRICES),
        ("end", _U32 * MOST_MATRICES),
        ("out", _POINTER),
    ]


def _prepare(
    name: str, width: int | None, vectors: int, params: ctypes.Structure,
    pointers: Sequence[str], device: int,
) -> Launch:  # fmt: skip
    """Prepare one thread for eight channels; width: channels of a row, a constant of the kernel."""
    variant = {} if width is None else {"TPF_VECTORS": width // 8}
    kernel = jit.load(name, variant, device)
    return Launch(kernel, -(-vectors // THREADS), THREADS, params, pointers=pointers)


@launch.plan
def _pack(sizes: tuple[int, ...], device: int) -> tuple[Launch, tuple[int, ...]]:
    """Return the launch for matrices of these sizes, and zeros in place of the missing ones."""
    ends = [end // 8 for end in itertools.accumulate(sizes)]
    spare = MOST_MATRICES - len(ends)
    params = _PackParams(end=(_U32 * MOST_MATRICES)(*ends, *ends[-1:] * spare))
    prepared = _prepare("pair_pack", None, ends[-1], params, ("matrix", "out"), device)
    return prepared, (0,) * spare


def pack_weights(matrices: Sequence[Tensor]) -> Tensor:
    """Return up to five FP32 matrices, one after the other, as one BF16 vector."""
    sizes, device = tuple([m.numel() for m in matrices]), tri_attn.device_index(matrices[0])
    prepared, missing = _pack(sizes, device)
    out = matrices[0].new_empty(sum(sizes), dtype=torch.bfloat16)
    addresses = *[m.data_ptr() for m in matrices], *missing, out.data_ptr()
    prepared(tri_attn.raw_stream(device), (), addresses)
    return out


@launch.plan
def _residual(
    shape: tuple[int, ...], scale_shape: tuple[int, ...], scale_strides: tuple[int, ...],
    device: int,
) -> Launch:  # fmt: skip
    _, i, j, c = shape
    sizes = zip(scale_shape[:3], scale_strides[:3], strict=True)
    strides = tuple(0 if n == 1 else s for n, s in sizes)
    vectors = math.prod(shape) // 8
    params = _ResidualParams(scale_stride=strides, vectors=vectors, columns=j, plane=i * j)
    pointers = "x", "update", "scale", "out"
    return _prepare("pair_residual", c, vectors, params, pointers, device)


def add_scaled(x: Tensor | None, update: Tensor, scale: Tensor | None) -> Tensor:
    """Return x + update * scale for [B, I, J, C] tensors; a missing x is 0, a missing scale 1.

    x and update are dense; scale [B, I, J, C] may have size 1 along any of B, I, J.
    """
    device, out = tri_attn.device_index(update), torch.empty_like(update)
    size, strides = ((), ()) if scale is None else (scale.shape, scale.stride())
    addresses = [0 if t is None else t.data_ptr() for t in (x, update, scale, out)]
    prepared = _residual(update.shape, size, strides, device)
    prepared(tri_attn.raw_stream(device), (), addresses)
    return out


@launch.plan
def _gate_forward(
    shape: tuple[int, ...], o_strides: tuple[int, ...], gate_strides: tuple[int, ...], device: int
) -> Launch:
    _, i, j, width = shape
    vectors = math.prod(shape) // 8
    params = _GateForwardParams(
        o_stride=o_strides[:3], gate_stride=gate_strides[2],
        vectors=vectors, columns=j, plane=i * j,
    )  # fmt: skip
    return _prepare("pair_gate_fwd", width, vectors, params, ("o", "gate", "out"), device)


def gate_forward(o: Tensor, gate: Tensor) -> Tensor:
    """Return o * sigmoid(gate) [B, I, J, W], dense; unit stride in W, any other strides of o.

    The rows of gate are evenly spaced.
    """
    device = tri_attn.device_index(gate)
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    prepared = _gate_forward(gate.shape, o.stride(), gate.stride(), device)
    addresses = o.data_ptr(), gate.data_ptr(), out.data_ptr()
    prepared(tri_attn.raw_stream(device), (), addresses)
    return out


@launch.plan
def _gate_backward(
    shape: tuple[int, ...], o_strides: tuple[int, ...], gate_strides: tuple[int, ...],
    dgate_strides: tuple[int, ...], device: int,
) -> Launch:  # fmt: skip
    _, i, j, width = shape
    vectors = math.prod(shape) // 8
    params = _GateBackwardParams(
        o_stride=o_strides[:3], gate_stride=gate_strides[2], dgate_stride=dgate_strides[2],
        vectors=vectors, columns=j, plane=i * j,
    )  # fmt: skip
    pointers = "gated", "o", "gate", "d_o", "dgate"
    return _prepare("pair_gate_bwd", width, vectors, params, pointers, device)


def gate_backward(gated: Tensor, o: Tensor, gate: Tensor, dgate: Tensor) -> Tensor:
    """Return the gradient of o, with the strides of o; write that of gate into ``dgate``.

    gated [B, I, J, W], dense, holds the gradient of ``gate_forward(o, gate)`` on entry and that
    result on exit.
    """
    device, strides = tri_attn.device_index(gated), o.stride()
    d_o = o.new_empty_strided(o.shape, strides)
    prepared = _gate_backward(gate.shape, strides, gate.stride(), dgate.stride(), device)
    addresses = [t.data_ptr() for t in (gated, o, gate, d_o, dgate)]
    prepared(tri_attn.raw_stream(device), (), addresses)
    return d_o


@launch.plan
def _swiglu(name: str, shape: tuple[int, ...], device: int) -> Launch:
    vectors = math.prod(shape) // 8
    params = _SwigluParams(vectors=vectors)
    return _prepare(name, shape[1], vectors, params, ("hidden", "keep", "out"), device)


def swiglu_forward(hidden: Tensor, keep: Tensor, out: Tensor) -> None:
    """Write keep * silu(a) * b into out [rows, W]; hidden [rows, 2 W] is [a | b], keep [rows]."""
    device = tri_attn.device_index(out)
    addresses = hidden.data_ptr(), keep.data_ptr(), out.data_ptr()
    _swiglu("pair_swiglu_fwd", out.shape, device)(tri_attn.raw_stream(device), (), addresses)


def swiglu_backward(hidden: Tensor, keep: Tensor, out: Tensor) -> None:
    """Turn hidden [a | b] into its gradient, and out from gradient into result, in place."""
    device = tri_attn.device_index(out)
    addresses = hidden.data_ptr(), keep.data_ptr(), out.data_ptr()
    _swiglu("pair_swiglu_bwd", out.shape, device)(tri_attn.raw_stream(device), (), addresses)


ROWS = 256
"""Products over rows take multiples of this.

Where cuBLAS splits a product over its inner dimension, it may drop what is left over beyond a
multiple of its tile (32 to 128 deep), on Hopper too; see ``kernels/README.md``.
"""


def _over_rows(dy: Tensor, x: Tensor) -> Tensor:
    """Return dy^T x in FP32."""
    if x.device.type == "cpu":
        return dy.float().t() @ x.float()
    return torch.mm(dy.t(), x, out_dtype=torch.float32)


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """Return dy^T x [K, C] in FP32 of BF16 rows dy [rows, K], x [rows, C]."""
    left = len(x) % ROWS
    if left == 0:
        return _over_rows(dy, x)
    whole = len(x) - left
    rest = _over_rows(*(F.pad(t[whole:], (0, 0, 0, ROWS - left)) for t in (dy, x)))
    return rest.add_(_over_rows(dy[:whole], x[:whole])) if whole else rest
