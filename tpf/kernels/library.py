"""The triangle operators as PyTorch sees them: custom operators, fakes, gradients.

Each operator exists twice over the same functions: as ``torch.library`` operator (``tpf::...``), an
opaque node for torch.compile and export, and as ``torch.autograd.Function``, which costs a third of
the dispatch time when called eagerly. ``attention`` and ``multiplication`` choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from tpf.errors import UsageError
from tpf.kernels import reference, tri_attn, tri_mul, tri_mul_layout, tri_mul_wide
from tpf.kernels import tri_attn_bwd as tri_attn_backward
from tpf.kernels import tri_mul_bwd as tri_mul_backward
from tpf.kernels.reference import (
    Direction,
    TriMulWeights,
    empty_dense_like,
    empty_output,
    needs_grad,
)


class _Context(Protocol):
    """What the gradients use of PyTorch's autograd context, and what they keep in it."""

    scale: float
    impl: str
    direction: str
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...
    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...


def _attention_forward(
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
        return tri_attn.tri_attn_fwd(q, k, v, bias, mask, scale, save_residual)
    return reference.attention_forward(q, k, v, bias, mask, scale, save_residual)


def _attention_gradients(
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
        return tri_attn_backward.tri_attn_bwd(q, k, v, bias, mask, scale, out, lse, residual, dout)
    return reference.attention_backward(dout, q, k, v, bias, mask, scale, out, lse, residual)


tri_attn_fwd = torch.library.custom_op("tpf::tri_attn_fwd", _attention_forward, mutates_args=())
tri_attn_bwd = torch.library.custom_op("tpf::tri_attn_bwd", _attention_gradients, mutates_args=())


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
    ctx.set_materialize_grads(False)  # zeros as large as the output otherwise


def _plain_bias(bias: Tensor) -> Tensor:
    """Return a bias [B, 1, H, N, N] as [B, H, N, N]."""
    return bias.squeeze(1) if bias.dim() == 5 else bias


def _attention_backward(
    ctx: _Context,
    dout: Tensor | None,
    gradients: Any,  # noqa: ANN401
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the eight arguments, computed by the function ``gradients``."""
    if dout is None:
        return (None,) * 8
    q, k, v, bias, mask, out, lse, residual = ctx.saved_tensors
    args = q, k, v, _plain_bias(bias), mask, ctx.scale, out, lse, residual, ctx.impl
    *grads, dbias = gradients(dout, *args)
    grads.append(dbias.unsqueeze(1) if bias.dim() == 5 else dbias)
    needed = ctx.needs_input_grad
    return (*(g if needed[i] else None for i, g in enumerate(grads)), None, None, None, None)


def _no_double_backward(ctx: _Context, *grads: Tensor | None) -> tuple[None, ...]:
    raise UsageError(
        "the gradient of a triangle operator was differentiated again; second derivatives are not "
        "supported: call backward() or autograd.grad() without create_graph=True"
    )


tri_attn_fwd.register_autograd(
    lambda ctx, dout, *_: _attention_backward(ctx, dout, tri_attn_bwd),
    setup_context=_save_attention,
)
tri_attn_bwd.register_autograd(_no_double_backward)


class _Attention(torch.autograd.Function):
    """The eager form of ``tpf::tri_attn_fwd`` and its gradient.

    forward takes the context itself: with setup_context every call inspects signatures (60 us).
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:  # noqa: ANN401
        q, k, v, bias, mask, ctx.scale, save_residual, ctx.impl = args
        options = ctx.scale, save_residual, ctx.impl
        result = _attention_forward(q, k, v, _plain_bias(bias), mask, *options)
        ctx.save_for_backward(q, k, v, bias, mask, *result)
        ctx.set_materialize_grads(False)
        return result[0]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None) -> Any:  # noqa: ANN401
        twice = torch.is_grad_enabled()  # create_graph=True: the operator refuses a second pass
        return _attention_backward(ctx, dout, tri_attn_bwd if twice else _attention_gradients)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    scale: float,
    impl: str,
) -> Tensor:
    """Return triangle attention of q, k, v [B, O, H, N, D], mask [B, O, N].

    bias is [B, H, N, N] or [B, 1, H, N, N]. The rounding residual of the output is saved when a
    gradient will need it.
    """
    differentiable = needs_grad(q, k, v, bias)
    options = scale, differentiable and q.dtype.itemsize < 4, impl
    if torch.compiler.is_compiling():
        return cast(Tensor, tri_attn_fwd(q, k, v, _plain_bias(bias), mask, *options)[0])
    if not differentiable:
        return _attention_forward(q, k, v, _plain_bias(bias), mask, *options)[0]
    run: Any = _Attention.apply
    return cast(Tensor, run(q, k, v, bias, mask, *options))


_Update = tuple[Tensor, Tensor]
"""An update and what its gradient needs: ``tri_mul_layout.Saved``, nothing in plain PyTorch."""


def _multiplication_forward(
    z: Tensor, mask: Tensor | None, weights: list[Tensor], direction: str, impl: str
) -> _Update:
    """Return the update and what its gradient needs; weights in the order of TriMulWeights."""
    packed = TriMulWeights(*weights)
    if impl == "cuda":
        return tri_mul.tri_mul_fwd(z, mask, packed, cast(Direction, direction))
    update = reference.multiplication_forward(z, mask, packed, cast(Direction, direction))
    return update, z.new_empty(0)


def _multiplication_gradients(
    dout: Tensor,
    z: Tensor,
    mask: Tensor | None,
    weights: list[Tensor],
    direction: str,
    saved: Tensor,
    impl: str,
    train_weights: bool,
) -> list[Tensor]:
    """Return the gradients of z and, with train_weights, of the ten weights."""
    packed, towards = TriMulWeights(*weights), cast(Direction, direction)
    grads: Sequence[Tensor]
    if impl == "torch":
        dz, grads = reference.multiplication_backward(dout, z, mask, packed, towards)
    elif tri_mul_layout.Sizes.of(packed).fused_backward:
        dz, grads = tri_mul_backward.tri_mul_bwd(dout, z, packed, towards, saved, train_weights)
    else:
        dz, grads = tri_mul_wide.tri_mul_bwd(dout, z, packed, towards, saved, train_weights)
    return [dz, *grads] if train_weights else [dz]


tri_mul_fwd = torch.library.custom_op("tpf::tri_mul_fwd", _multiplication_forward, mutates_args=())
tri_mul_bwd = torch.library.custom_op(
    "tpf::tri_mul_bwd", _multiplication_gradients, mutates_args=()
)


@tri_mul_fwd.register_fake
def _(z: Tensor, mask: Tensor | None, weights: list[Tensor], direction: str, impl: str) -> _Update:
    elements = 0
    if impl == "cuda":
        batch, n = z.shape[:2]
        shape = tri_mul_layout.Shape(batch, n, tri_mul_layout.Sizes.of(TriMulWeights(*weights)))
        elements = tri_mul_layout.Saved(shape).elements
    return z.new_empty(z.shape), z.new_empty(elements)


@tri_mul_bwd.register_fake
def _(
    dout: Tensor,
    z: Tensor,
    mask: Tensor | None,
    weights: list[Tensor],
    direction: str,
    saved: Tensor,
    impl: str,
    train_weights: bool,
) -> list[Tensor]:
    trained = weights if train_weights else []
    return [z.new_empty(z.shape), *(w.new_empty(w.shape) for w in trained)]


def _save_multiplication(ctx: _Context, inputs: tuple[Any, ...], output: _Update) -> None:
    z, mask, weights, ctx.direction, ctx.impl = inputs
    ctx.save_for_backward(z, mask, output[1], *weights)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _multiplication_backward(
    ctx: _Context,
    dout: Tensor | None,
    gradients: Any,  # noqa: ANN401
    train_weights: bool,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Return the gradients of z and of the weights, computed by the function ``gradients``."""
    z, mask, saved, *weights = ctx.saved_tensors
    none: list[Tensor | None] = [None] * len(weights)
    if dout is None:
        return None, none
    args = dout, z, mask, weights, ctx.direction, saved, ctx.impl, train_weights
    dz, *grads = gradients(*args)
    return dz, grads or none


def _multiplication_operator_backward(
    ctx: _Context, dout: Tensor | None, *_: Tensor | None
) -> tuple[Tensor | None, None, list[Tensor | None], None, None]:
    needed: Any = ctx.needs_input_grad
    dz, grads = _multiplication_backward(ctx, dout, tri_mul_bwd, any(needed[2]))
    return dz, None, grads, None, None


tri_mul_fwd.register_autograd(_multiplication_operator_backward, setup_context=_save_multiplication)
tri_mul_bwd.register_autograd(_no_double_backward)


class _Multiplication(torch.autograd.Function):
    """The eager form of ``tpf::tri_mul_fwd`` and its gradient."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        z: Tensor,
        mask: Tensor | None,
        direction: str,
        impl: str,
        *weights: Tensor,
    ) -> Tensor:
        result = _multiplication_forward(z, mask, list(weights), direction, impl)
        ctx.direction, ctx.impl = direction, impl
        ctx.save_for_backward(z, mask, result[1], *weights)
        ctx.set_materialize_grads(False)
        return result[0]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None) -> Any:  # noqa: ANN401
        twice = torch.is_grad_enabled()  # create_graph=True: the operator refuses a second pass
        gradients = tri_mul_bwd if twice else _multiplication_gradients
        train_weights = any(ctx.needs_input_grad[4:])
        dz, grads = _multiplication_backward(ctx, dout, gradients, train_weights)
        return dz, None, None, None, *grads


def multiplication(
    z: Tensor, mask: Tensor | None, weights: TriMulWeights, direction: Direction, impl: str
) -> Tensor:
    """Return the triangle multiplicative update of z [B, N, N, C] with mask [B, N, N] or None."""
    if torch.compiler.is_compiling():
        return cast(Tensor, tri_mul_fwd(z, mask, list(weights), direction, impl)[0])
    if not needs_grad(z, *weights):
        return _multiplication_forward(z, mask, list(weights), direction, impl)[0]
    run: Any = _Multiplication.apply
    return cast(Tensor, run(z, mask, direction, impl, *weights))
