"""Launches of the elementwise kernels of the pair block, ``kernels/pair_*.cu``.

All work on eight BF16 channels at a time: channel counts are multiples of 8, rows start at
multiples of 16 bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from tpf.kernels import jit, tri_attn

THREADS = 256
MOST_MATRICES = 5
"""Matrices that one launch of pair_pack writes."""
SPLIT_ROWS = 2048
"""Fewest rows of one part of a weight gradient."""
SPLIT_TILES = 128
"""Output tiles of 128 x 128 among which a weight gradient is divided: one for a multiprocessor."""

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


def _launch(
    name: str, width: int | None, vectors: int, params: ctypes.Structure, like: Tensor
) -> None:
    """Launch one thread for eight channels; width: channels of a row, a constant of the kernel."""
    device = tri_attn.device_index(like)
    variant = {} if width is None else {"TPF_VECTORS": width // 8}
    kernel = jit.load(name, variant, device)
    kernel.launch((-(-vectors // THREADS), 1, 1), THREADS, params, tri_attn.raw_stream(device))


def pack_weights(matrices: Sequence[Tensor]) -> Tensor:
    """Return up to five FP32 matrices, one after the other, as one BF16 vector."""
    ends, total = [], 0
    for matrix in matrices:
        total += matrix.numel() // 8
        ends.append(total)
    spare = MOST_MATRICES - len(ends)
    out = torch.empty(8 * total, dtype=torch.bfloat16, device=matrices[0].device)
    params = _PackParams(
        (_POINTER * MOST_MATRICES)(*(m.data_ptr() for m in matrices)),
        (_U32 * MOST_MATRICES)(*ends, *[total] * spare),
        out.data_ptr(),
    )
    _launch("pair_pack", None, total, params, out)
    return out


def add_scaled(x: Tensor | None, update: Tensor, scale: Tensor | None) -> Tensor:
    """Return x + update * scale for [B, I, J, C] tensors; a missing x is 0, a missing scale 1.

    x and update are dense; scale may have size 1 along any of B, I, J.
    """
    b, i, j, c = update.shape
    out = torch.empty_like(update)
    strides = (0, 0, 0) if scale is None else scale.expand(b, i, j, c).stride()[:3]
    params = _ResidualParams(
        None if x is None else x.data_ptr(), update.data_ptr(),
        None if scale is None else scale.data_ptr(), out.data_ptr(),
        strides, update.numel() // 8, j, i * j,
    )  # fmt: skip
    _launch("pair_residual", c, update.numel() // 8, params, out)
    return out


def gate_forward(o: Tensor, gate: Tensor) -> Tensor:
    """Return o * sigmoid(gate) [B, I, J, W], dense; unit stride in W, any other strides of o.

    The rows of gate are evenly spaced.
    """
    b, i, j, width = gate.shape
    out = torch.empty((b, i, j, width), dtype=torch.bfloat16, device=gate.device)
    params = _GateForwardParams(
        o.data_ptr(), gate.data_ptr(), out.data_ptr(), o.stride()[:3], gate.stride(2),
        out.numel() // 8, j, i * j,
    )  # fmt: skip
    _launch("pair_gate_fwd", width, out.numel() // 8, params, out)
    return out


def gate_backward(gated: Tensor, o: Tensor, gate: Tensor, dgate: Tensor) -> Tensor:
    """Return the gradient of o, with the strides of o; write that of gate into ``dgate``.

    gated [B, I, J, W], dense, holds the gradient of ``gate_forward(o, gate)`` on entry and that
    result on exit.
    """
    _, i, j, width = gate.shape
    d_o = torch.empty_strided(o.shape, o.stride(), dtype=o.dtype, device=o.device)
    params = _GateBackwardParams(
        gated.data_ptr(), o.data_ptr(), gate.data_ptr(), d_o.data_ptr(), dgate.data_ptr(),
        o.stride()[:3], gate.stride(2), dgate.stride(2), gated.numel() // 8, j, i * j,
    )  # fmt: skip
    _launch("pair_gate_bwd", width, gated.numel() // 8, params, gated)
    return d_o


def swiglu_forward(hidden: Tensor, keep: Tensor, out: Tensor) -> None:
    """Write keep * silu(a) * b into out [rows, W]; hidden [rows, 2 W] is [a | b], keep [rows]."""
    vectors = out.numel() // 8
    params = _SwigluParams(hidden.data_ptr(), keep.data_ptr(), out.data_ptr(), vectors)
    _launch("pair_swiglu_fwd", out.shape[1], vectors, params, out)


def swiglu_backward(hidden: Tensor, keep: Tensor, out: Tensor) -> None:
    """Turn hidden [a | b] into its gradient, and out from gradient into result, in place."""
    vectors = out.numel() // 8
    params = _SwigluParams(hidden.data_ptr(), keep.data_ptr(), out.data_ptr(), vectors)
    _launch("pair_swiglu_bwd", out.shape[1], vectors, params, out)


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """Return dy^T x [K, C] in FP32 of BF16 rows dy [rows, K], x [rows, C].

    The rows are divided into parts, so that the few output tiles fill the GPU, and the parts added
    in order.
    """
    rows = len(x)
    if x.device.type == "cpu":
        return dy.float().t() @ x.float()
    tiles = -(-dy.shape[1] // 128) * -(-x.shape[1] // 128)
    parts = max(1, min(SPLIT_TILES // tiles, rows // SPLIT_ROWS))
    if parts == 1:
        return torch.mm(dy.t(), x, out_dtype=torch.float32)
    cut = rows // parts * parts
    dy_parts, x_parts = (t[:cut].view(parts, -1, t.shape[1]) for t in (dy, x))
    total = torch.bmm(dy_parts.mT, x_parts, out_dtype=torch.float32).sum(0)
    if cut < rows:
        total += torch.mm(dy[cut:].t(), x[cut:], out_dtype=torch.float32)
    return total
