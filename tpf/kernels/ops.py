"""The two triangle operators of the network, with their PyTorch operators and gradients.

``triangle_attention`` and ``triangle_multiplication`` check their arguments, choose an
implementation and call one opaque operator forward and one backward, so torch.compile and CUDA
graphs see few, coarse nodes. Implementations: ``cuda`` (own kernels, sm_90), ``flex`` (compiled
flex_attention, other GPUs) and ``torch`` (the reference, everywhere).
"""

from __future__ import annotations

import functools
import logging
import math
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from tpf.errors import UsageError
from tpf.kernels import reference
from tpf.kernels.reference import Direction, TriMulWeights, empty_dense_like, empty_output

__all__ = ["Direction", "Impl", "TriMulWeights", "triangle_attention", "triangle_multiplication"]

Impl = Literal["auto", "cuda", "flex", "torch"]
IMPLS = ("auto", "cuda", "flex", "torch")
MAX_HEAD_DIM = 64

_log = logging.getLogger(__name__)


class ArgumentError(UsageError, ValueError):
    """A tensor that an operator cannot take: which tensor, its value, and the rule."""


class _Context(Protocol):
    """What the gradients use of PyTorch's autograd context, and what they keep in it."""

    scale: float
    impl: str
    direction: str
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...
    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...


@functools.cache
def _say_once(message: str) -> None:
    _log.info(message)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


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
    if q.device.type != "cuda":
        return f"q is on {q.device}; the CUDA kernels need an NVIDIA GPU"
    if (found := _capability(q.device)) != (9, 0):
        return f"q is on a GPU of compute capability {found}; the CUDA kernels need (9, 0)"
    return None


def _attention_impl(
    impl: Impl, q: Tensor, bias: Tensor, scale: float
) -> Literal["cuda", "flex", "torch"]:
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
    chosen: Literal["flex", "torch"] = "torch"
    if q.device.type == "cuda" and _capability(q.device) >= (8, 0) and q.dtype == torch.bfloat16:
        chosen = "flex"
    _say_once(f"triangle attention runs as impl={chosen!r}: {reason}")
    return chosen


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
    _check_attention(q, k, v, bias, mask)
    *batch, o, h, n, d = q.shape
    scale = 1 / math.sqrt(max(d, 1)) if scale is None else float(scale)
    if q.numel() == 0:
        return 0 * (q + k + v) + 0 * bias.sum()
    chosen = _attention_impl(impl, q, bias, scale)
    if q.dim() != 5 or bias.shape[0] != q.shape[0]:
        q, k, v = (x.reshape(-1, o, h, n, d) for x in (q, k, v))
        bias = bias.expand(*batch, 1, h, n, n).reshape(-1, 1, h, n, n)
    bias = bias[:, 0]
    if mask is not None:
        mask = mask.expand(*batch, o, 1, 1, n).reshape(-1, o, n)
    if chosen == "flex":
        from tpf.kernels.flex import flex_triangle_attention

        out = flex_triangle_attention(q, k, v, bias, mask, scale)
    else:
        save = torch.is_grad_enabled() and (
            q.requires_grad or k.requires_grad or bias.requires_grad
        )
        save = save and q.dtype.itemsize < 4
        out = cast(Tensor, tri_attn_fwd(q, k, v, bias, mask, scale, save, chosen)[0])
    return out if len(batch) == 1 else out.reshape(*batch, o, h, n, d)


@torch.library.custom_op("tpf::tri_attn_fwd", mutates_args=())
def tri_attn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    scale: float,
    save_residual: bool,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (out, lse, residual) of ``reference.attention_forward``; impl is cuda or torch."""
    if impl == "cuda":
        from tpf.kernels.tri_attn import tri_attn_fwd as forward

        return forward(q, k, v, bias, mask, scale, save_residual)
    return reference.attention_forward(q, k, v, bias, mask, scale, save_residual)


@tri_attn_fwd.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    scale: float,
    save_residual: bool,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    lse = q.new_empty(q.shape[:-1], dtype=reference.compute_dtype(q.dtype))
    return empty_output(q), lse, empty_output(q) if save_residual else q.new_empty(0)


@torch.library.custom_op("tpf::tri_attn_bwd", mutates_args=())
def tri_attn_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    scale: float,
    out: Tensor,
    lse: Tensor,
    residual: Tensor,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv, dbias) of ``reference.attention_backward``; impl is cuda or torch."""
    if impl == "cuda":
        from tpf.kernels.tri_attn_bwd import tri_attn_bwd as backward

        return backward(q, k, v, bias, mask, scale, out, lse, residual, dout)
    return reference.attention_backward(dout, q, k, v, bias, mask, scale, out, lse, residual)


@tri_attn_bwd.register_fake
def _(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    scale: float,
    out: Tensor,
    lse: Tensor,
    residual: Tensor,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = empty_dense_like(q), empty_dense_like(k), empty_dense_like(v)
    return dq, dk, dv, empty_dense_like(bias)


def _save_attention(ctx: _Context, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, bias, mask, ctx.scale, _, ctx.impl = inputs
    ctx.save_for_backward(q, k, v, bias, mask, *output)
    ctx.mark_non_differentiable(output[1], output[2])


def _attention_backward(
    ctx: _Context, dout: Tensor | None, *_: Tensor | None
) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * 8
    q, k, v, bias, mask, out, lse, residual = ctx.saved_tensors
    grads = tri_attn_bwd(dout, q, k, v, bias, mask, ctx.scale, out, lse, residual, ctx.impl)
    needed = ctx.needs_input_grad
    return (*(g if needed[i] else None for i, g in enumerate(grads)), None, None, None, None)


tri_attn_fwd.register_autograd(_attention_backward, setup_context=_save_attention)


def _no_double_backward(ctx: _Context, *grads: Tensor | None) -> tuple[None, ...]:
    raise UsageError(
        "the gradient of a triangle operator was differentiated again; second derivatives are not "
        "supported: call backward() or autograd.grad() without create_graph=True"
    )


tri_attn_bwd.register_autograd(_no_double_backward)

# ---------------------------------------------------------------- multiplicative update


def _check_multiplication(
    z: Tensor, mask: Tensor | None, weights: TriMulWeights, direction: str, impl: str
) -> None:
    """Raise ArgumentError unless the arguments obey the contract of triangle_multiplication."""
    if direction not in ("outgoing", "incoming"):
        raise ArgumentError(f"direction is {direction!r}; choose outgoing or incoming")
    if impl not in IMPLS:
        raise ArgumentError(f"impl is {impl!r}; choose from {', '.join(IMPLS)}")
    if z.dim() < 3 or z.shape[-2] != z.shape[-3] or not z.is_floating_point():
        raise ArgumentError(f"z is {z.dtype} {tuple(z.shape)}; give a floating [*B, N, N, C]")
    if mask is not None and mask.shape != z.shape[:-1]:
        raise ArgumentError(f"mask has shape {tuple(mask.shape)}; z needs {tuple(z.shape[:-1])}")
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
        if weight.shape != shape:
            raise ArgumentError(f"weights.{name} has shape {tuple(weight.shape)}; needs {shape}")


def triangle_multiplication(
    z: Tensor,
    mask: Tensor | None,
    weights: TriMulWeights,
    direction: Direction,
    *,
    impl: Impl = "auto",
) -> Tensor:
    """Compute the triangle multiplicative update (AF3 Alg 12 outgoing, Alg 13 incoming).

    z [*B, N, N, C]; mask [*B, N, N] bool or float, or None. Returns the update [*B, N, N, C] in the
    dtype of z, without the residual. Raises ArgumentError (a ValueError) for a wrong shape.
    """
    _check_multiplication(z, mask, weights, direction, impl)
    if impl in ("cuda", "flex"):
        raise ArgumentError(f"impl is {impl!r}; triangle_multiplication has impl auto and torch")
    z4 = z.reshape(-1, *z.shape[-3:])
    mask3 = None if mask is None else mask.reshape(z4.shape[:-1])
    update: Tensor = tri_mul_fwd(z4, mask3, list(weights), direction)
    return update.reshape(z.shape)


@torch.library.custom_op("tpf::tri_mul_fwd", mutates_args=())
def tri_mul_fwd(z: Tensor, mask: Tensor | None, weights: list[Tensor], direction: str) -> Tensor:
    """Return ``reference.multiplication_forward``; weights in the order of TriMulWeights."""
    return reference.multiplication_forward(
        z, mask, TriMulWeights(*weights), cast(Direction, direction)
    )


@tri_mul_fwd.register_fake
def _(z: Tensor, mask: Tensor | None, weights: list[Tensor], direction: str) -> Tensor:
    return z.new_empty(z.shape)


@torch.library.custom_op("tpf::tri_mul_bwd", mutates_args=())
def tri_mul_bwd(
    dout: Tensor, z: Tensor, mask: Tensor | None, weights: list[Tensor], direction: str
) -> list[Tensor]:
    """Return the gradients of z and of the ten weights."""
    dz, grads = reference.multiplication_backward(
        dout, z, mask, TriMulWeights(*weights), cast(Direction, direction)
    )
    return [dz, *grads]


@tri_mul_bwd.register_fake
def _(
    dout: Tensor, z: Tensor, mask: Tensor | None, weights: list[Tensor], direction: str
) -> list[Tensor]:
    return [z.new_empty(z.shape), *(w.new_empty(w.shape) for w in weights)]


def _save_multiplication(ctx: _Context, inputs: tuple[Any, ...], output: Tensor) -> None:
    z, mask, weights, ctx.direction = inputs
    ctx.save_for_backward(z, mask, *weights)


def _multiplication_backward(
    ctx: _Context, dout: Tensor | None
) -> tuple[Tensor | None, None, list[Tensor] | list[None] | None, None]:
    if dout is None:
        return None, None, None, None
    z, mask, *weights = ctx.saved_tensors
    dz, *grads = tri_mul_bwd(dout, z, mask, weights, ctx.direction)
    return dz, None, grads, None


tri_mul_fwd.register_autograd(_multiplication_backward, setup_context=_save_multiplication)
tri_mul_bwd.register_autograd(_no_double_backward)
