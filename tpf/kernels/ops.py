"""The two triangle operators of the network: arguments, choice of the implementation.

Implementations: ``cuda`` (own kernels, sm_90), ``flex`` (compiled
flex_attention, other GPUs) and ``torch`` (the reference, everywhere).
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from tpf.errors import UsageError
from tpf.kernels import library
from tpf.kernels.reference import Direction, TriMulWeights

__all__ = ["Direction", "Impl", "TriMulWeights", "triangle_attention", "triangle_multiplication"]

Impl = Literal["auto", "cuda", "flex", "torch"]
IMPLS = ("auto", "cuda", "flex", "torch")
MAX_HEAD_DIM = 64
MAX_CHANNELS = 256
"""Widest z and hidden layer of the multiplicative update's kernels."""

_log = logging.getLogger(__name__)


class ArgumentError(UsageError, ValueError):
    """A tensor that an operator cannot take: which tensor, its value, and the rule."""


@functools.cache
def _say_once(message: str) -> None:
    _log.info(message)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


Chosen = Literal["cuda", "flex", "torch"]
REMEMBERED = 4096
"""Signatures of calls whose arguments were found right, with what was chosen for them."""

_chosen: dict[tuple[object, ...], Chosen] = {}


def _choose(signature: tuple[object, ...], decide: Callable[[], Chosen]) -> Chosen:
    """Return what ``decide`` chooses, which depends on the signature alone, or let it raise."""
    if torch.compiler.is_compiling():  # sizes may be symbols there
        return decide()
    if (found := _chosen.get(signature)) is None:
        if len(_chosen) >= REMEMBERED:
            _chosen.clear()
        found = _chosen[signature] = decide()
    return found


# ---------------------------------------------------------------------------- attention


def _check_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> None:
    """Raise ArgumentError unless the five tensors obey the contract of triangle_attention."""
    if q.dim() < 4 or not q.is_floating_point():
        raise ArgumentError(
            f"q is {q.dtype} {tuple(q.shape)}; give a floating tensor [*B, O, H, N, D]"
        )
    for name, x in (("k", k), ("v", v)):
        if x.shape != q.shape or x.dtype != q.dtype or x.device != q.device:
            raise ArgumentError(
                f"{name} is {x.dtype} {tuple(x.shape)} on {x.device}; it must match q, "
                f"{q.dtype} {tuple(q.shape)} on {q.device}"
            )
    *batch, o, h, n, _ = q.shape
    if bias.device != q.device or not bias.is_floating_point() or bias.dim() != q.dim():
        raise ArgumentError(
            f"bias is {bias.dtype} {tuple(bias.shape)} on {bias.device}; give a floating tensor "
            f"[*B, 1, H, N, N] on {q.device}"
        )
    if bias.shape[-4:] != (1, h, n, n) or not _expands(bias.shape[:-4], batch):
        raise ArgumentError(
            f"bias has shape {tuple(bias.shape)}; q needs {(*batch, 1, h, n, n)} "
            "(batch axes may be 1)"
        )
    if mask is None:
        return
    if mask.dtype != torch.bool or mask.device != q.device:
        raise ArgumentError(f"mask is {mask.dtype} on {mask.device}; give bool on {q.device}")
    if mask.shape[-4:] != (o, 1, 1, n) or not _expands(mask.shape[:-4], batch):
        raise ArgumentError(f"mask has shape {tuple(mask.shape)}; q needs {(*batch, o, 1, 1, n)}")


def _expands(shape: torch.Size, batch: list[int]) -> bool:
    return len(shape) == len(batch) and all(s in (1, b) for s, b in zip(shape, batch, strict=True))


def _why_not_cuda(q: Tensor, bias: Tensor, scale: float) -> str | None:
    """Return the rule of the Hopper kernels that the inputs break, or None."""
    if q.dtype != torch.bfloat16:
        return f"q is {q.dtype}; the CUDA kernels take torch.bfloat16"
    if bias.dtype not in (torch.bfloat16, torch.float32):
        return f"bias is {bias.dtype}; the CUDA kernels take torch.bfloat16 or torch.float32"
    if not scale > 0:
        return f"scale is {scale}; the CUDA kernels take a scale above 0"
    if not 1 <= q.shape[-1] <= MAX_HEAD_DIM:
        return f"q has head width D = {q.shape[-1]}; the CUDA kernels take 1 to {MAX_HEAD_DIM}"
    return _why_not_hopper("q", q)


def _why_not_hopper(name: str, x: Tensor) -> str | None:
    """Return why kernels for Hopper cannot run where x is, or None."""
    if x.device.type != "cuda":
        return f"{name} is on {x.device}; the CUDA kernels need an NVIDIA GPU"
    if (found := _capability(x.device)) != (9, 0):
        return f"{name} is on a GPU of compute capability {found}; the CUDA kernels need (9, 0)"
    return None


def _attention_impl(impl: Impl, q: Tensor, bias: Tensor, scale: float) -> Chosen:
    """Resolve impl for these inputs; "auto" says in the log why it does not take the kernels."""
    if impl == "torch":
        return "torch"
    if impl not in IMPLS:
        raise ArgumentError(f"impl is {impl!r}; choose from {', '.join(IMPLS)}")
    if impl == "flex":
        if q.device.type != "cuda":
            raise ArgumentError(f"q is on {q.device}; impl='flex' needs a GPU")
        return "flex"
    reason = _why_not_cuda(q, bias, scale)
    if reason is None:
        return "cuda"
    if impl == "cuda":
        raise ArgumentError(reason)
    chosen: Chosen = "torch"
    if q.device.type == "cuda" and _capability(q.device) >= (8, 0) and q.dtype == torch.bfloat16:
        chosen = "flex"
    if not torch.compiler.is_compiling():
        _say_once(f"triangle attention runs as impl={chosen!r}: {reason}")
    return chosen


def _checked_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, scale: float, impl: Impl
) -> Chosen:
    """Check the arguments and resolve impl; inputs without elements take no kernel."""
    _check_attention(q, k, v, bias, mask)
    return _attention_impl(impl, q, bias, scale) if q.numel() else "torch"


def triangle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    *,
    impl: Impl = "auto",
) -> Tensor:
    """Attend within each outer slice with a pair bias that all slices share (AF3 Alg 14, 15).

    q, k, v [*B, O, H, N, D], any strides; bias [*B, 1, H, N, N]; mask bool [*B, O, 1, 1, N] (True
    keeps the key) or None; scale defaults to 1/sqrt(D). Returns [*B, O, H, N, D], stored as
    [*B, O, N, H, D]. A slice without keys gives zeros and no gradient. Raises ArgumentError (a
    ValueError) naming the tensor, its value and the rule.
    """
    factor = 1 / math.sqrt(max(q.shape[-1], 1)) if scale is None else float(scale)
    inputs = (q, k, v, bias) if mask is None else (q, k, v, bias, mask)
    chosen = _choose(
        (impl, factor, *[(x.shape, x.dtype, x.device) for x in inputs]),
        lambda: _checked_attention(q, k, v, bias, mask, factor, impl),
    )
    *batch, o, h, n, d = shape = q.shape
    if q.numel() == 0:
        return 0 * (q + k + v) + 0 * bias.sum()
    if len(batch) != 1 or bias.shape[0] != shape[0]:
        q, k, v = (x.reshape(-1, o, h, n, d) for x in (q, k, v))
        bias = bias.expand(*batch, 1, h, n, n).reshape(-1, 1, h, n, n)
    if mask is not None:
        whole = mask if mask.shape[:-4] == shape[:-4] else mask.expand(*batch, o, 1, 1, n)
        mask = whole.reshape(-1, o, n)
    if chosen == "flex":
        from tpf.kernels.flex import flex_triangle_attention

        out = flex_triangle_attention(q, k, v, bias.squeeze(1), mask, factor)
    else:
        out = library.attention(q, k, v, bias, mask, factor, chosen)
    return out if len(batch) == 1 else out.reshape(*batch, o, h, n, d)


# ---------------------------------------------------------------- multiplicative update


def _check_multiplication(
    z: Tensor, mask: Tensor | None, weights: TriMulWeights, direction: str, impl: str
) -> None:
    """Raise ArgumentError unless the arguments obey the contract of triangle_multiplication."""
    if direction not in ("outgoing", "incoming"):
        raise ArgumentError(f"direction is {direction!r}; choose outgoing or incoming")
    if impl not in IMPLS or impl == "flex":
        raise ArgumentError(f"impl is {impl!r}; choose from auto, cuda, torch")
    if z.dim() < 3 or z.shape[-2] != z.shape[-3] or not z.is_floating_point():
        raise ArgumentError(f"z is {z.dtype} {tuple(z.shape)}; give a floating [*B, N, N, C]")
    if mask is not None and (mask.shape != z.shape[:-1] or mask.device != z.device):
        raise ArgumentError(
            f"mask has shape {tuple(mask.shape)} on {mask.device}; z needs "
            f"{tuple(z.shape[:-1])} on {z.device}"
        )
    c, hidden = z.shape[-1], weights.linear_a_p.shape[0]
    expected = {
        "layer_norm_in_weight": (c,),
        "layer_norm_in_bias": (c,),
        "layer_norm_out_weight": (hidden,),
        "layer_norm_out_bias": (hidden,),
        "linear_g": (c, c),
        "linear_z": (c, hidden),
    }
    for name, weight in zip(TriMulWeights._fields, weights, strict=True):
        shape = expected.get(name, (hidden, c))
        if weight.shape != shape or weight.device != z.device:
            raise ArgumentError(
                f"weights.{name} has shape {tuple(weight.shape)} on {weight.device}; needs {shape} "
                f"on {z.device}"
            )


def _why_not_cuda_multiplication(z: Tensor, weights: TriMulWeights) -> str | None:
    """Return the rule of the Hopper kernels that the inputs break, or None."""
    if z.dtype != torch.bfloat16:
        return f"z is {z.dtype}; the CUDA kernels take torch.bfloat16"
    for name, width in (("z", z.shape[-1]), ("hidden layer", weights.linear_a_p.shape[0])):
        if width % 16 or not 16 <= width <= MAX_CHANNELS:
            return (
                f"the {name} has {width} channels; the CUDA kernels take multiples of 16 up to "
                f"{MAX_CHANNELS}"
            )
    return _why_not_hopper("z", z)


def _multiplication_impl(impl: Impl, z: Tensor, weights: TriMulWeights) -> Literal["cuda", "torch"]:
    """Resolve impl for these inputs; "auto" says in the log why it does not take the kernels."""
    if impl == "torch" or not z.numel():
        return "torch"
    reason = _why_not_cuda_multiplication(z, weights)
    if reason is None:
        return "cuda"
    if impl == "cuda":
        raise ArgumentError(reason)
    if z.is_cuda and not torch.compiler.is_compiling():
        _say_once(f"triangle multiplication runs as impl='torch': {reason}")
    return "torch"


def _checked_multiplication(
    z: Tensor, mask: Tensor | None, weights: TriMulWeights, direction: Direction, impl: Impl
) -> Chosen:
    """Check the arguments and resolve impl; a z without elements takes no kernel."""
    _check_multiplication(z, mask, weights, direction, impl)
    return _multiplication_impl(impl, z, weights)


def triangle_multiplication(
    z: Tensor,
    mask: Tensor | None,
    weights: TriMulWeights,
    direction: Direction,
    *,
    impl: Impl = "auto",
) -> Tensor:
    """Compute the triangle multiplicative update (AF3 Alg 12 outgoing, Alg 13 incoming).

    z [*B, N, N, C]; mask [*B, N, N] bool or float, or None; no gradient goes to the mask. impl is
    auto, cuda (bf16 z, usually FP32 weights) or torch. Returns the update [*B, N, N, C] in the
    dtype of z, without the residual. Raises ArgumentError (a ValueError) naming the tensor, its
    value and the rule.
    """
    tensors = (z, *weights) if mask is None else (z, *weights, mask)
    chosen = _choose(
        (direction, impl, z.dtype, *[(x.shape, x.device) for x in tensors]),
        lambda: _checked_multiplication(z, mask, weights, direction, impl),
    )
    if z.dim() == 4:
        return library.multiplication(z, mask, weights, direction, chosen)
    z4 = z.reshape(-1, *z.shape[-3:])
    mask3 = None if mask is None else mask.reshape(z4.shape[:-1])
    return library.multiplication(z4, mask3, weights, direction, chosen).reshape(z.shape)
