"""Whole layers of the pair block on Hopper: triangle attention, transition, dropout with residual.

Each takes its input with the residual stream in BF16, FP32 parameters, and returns the stream after
the layer. Products are cuBLAS; everything between them is one kernel a pass (kernels/README.md,
"Pair block"). z is never transposed: the ending node differs by strides. ``fusable`` tells whether
a layer can run here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tpf.kernels import norm, pair_kernels, pair_transition, tri_attn, tri_attn_bwd
from tpf.kernels.norm import as_rows, dense, layer_norm
from tpf.kernels.ops import MAX_HEAD_DIM
from tpf.kernels.pair_kernels import add_scaled, weight_gradient

__all__ = [
    "AttentionWeights", "TransitionWeights", "add_attention", "add_transition", "add_update",
    "fusable", "layer_norm",
]  # fmt: skip

CHUNK_BYTES = 160 << 20
"""Largest [a | b] of a transition that exists at once, in bytes."""


class AttentionWeights(NamedTuple):
    """FP32 parameters of a triangle attention layer: H heads of width D, C channels.

    norm_weight, norm_bias [C]; bias [H, C]; query, key, value, gate [H D, C]; out [C, H D].
    """

    norm_weight: Tensor
    norm_bias: Tensor
    bias: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    gate: Tensor
    out: Tensor

    @property
    def heads(self) -> int:
        return self.bias.shape[0]


class TransitionWeights(NamedTuple):
    """FP32 parameters of a SwiGLU transition: norm [C]; a, b [E, C]; out [C, E]."""

    norm_weight: Tensor
    norm_bias: Tensor
    a: Tensor
    b: Tensor
    out: Tensor


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def fusable(x: Tensor, mask: Tensor, impl: str, *weights: tuple[Tensor, ...]) -> bool:
    """Return whether the layers of this module take x [..., C] with this mask and these weights.

    Not under torch.compile, which sees only the operators of ``tpf.kernels.library``.
    """
    if torch.compiler.is_compiling() or impl not in ("auto", "cuda"):
        return False
    if x.dtype != torch.bfloat16 or mask.dtype != torch.bool or not _is_hopper(x.device):
        return False
    if x.numel() == 0 or x.shape[-1] % 8 or x.shape[-1] > norm.MAX_CHANNELS:
        return False
    return all(_weights_fit(w, x.device) for w in weights)


def _weights_fit(weights: tuple[Tensor, ...], device: torch.device) -> bool:
    if any(w.dtype != torch.float32 or w.device != device for w in weights):
        return False
    if isinstance(weights, TransitionWeights):
        return weights.a.shape[0] % 8 == 0
    if isinstance(weights, AttentionWeights):
        head_dim, channels = weights.query.shape[0] // weights.heads, len(weights.norm_weight)
        narrow = head_dim % 8 == 0 and head_dim <= MAX_HEAD_DIM
        return narrow and weights.heads <= norm.MAX_HEADS and channels <= norm.MAX_HEAD_CHANNELS
    return True


# ------------------------------------------------------------------ dropout and residual


class _AddUpdate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, update: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return add_scaled(dense(z), dense(update), scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor, Tensor, None]:
        (scale,) = ctx.saved_tensors
        return dz, add_scaled(None, dense(dz), scale), None


def add_update(z: Tensor, update: Tensor, scale: Tensor | None) -> Tensor:
    """Return z + update * scale for z, update [B, I, J, C] and a scale that broadcasts to them."""
    if scale is None:
        return z + update
    run: Any = _AddUpdate.apply
    return cast(Tensor, run(z, update, scale))


# ------------------------------------------------------------------ triangle attention


class _Views(NamedTuple):
    """The operands of attention inside a buffer [B, N, N, 4 H D] of query, key, value and gate."""

    query: Tensor
    key: Tensor
    value: Tensor
    gate: Tensor


def _views(buffer: Tensor, heads: int, ending: bool) -> _Views:
    """Return query, key, value as [B, slice, H, position, D] and the gate as [B, N, N, H D]."""
    *operands, gate = buffer.chunk(4, -1)
    query, key, value = (_sliced(x, heads, ending) for x in operands)
    return _Views(query, key, value, gate)


def _sliced(x: Tensor, heads: int, ending: bool) -> Tensor:
    """View pairs [B, i, j, H D] as [B, slice, H, position, D]."""
    x = torch.unflatten(x, -1, (heads, -1))
    return x.permute(0, 2, 3, 1, 4) if ending else x.permute(0, 1, 3, 2, 4)


def _paired(x: Tensor, ending: bool) -> Tensor:
    """View [B, slice, H, position, D], stored with positions before heads, as [B, i, j, H D]."""
    return x.permute(0, 3, 1, 2, 4).flatten(-2) if ending else x.transpose(2, 3).flatten(-2)


def _attention_forward(
    z: Tensor, mask: Tensor, scale: Tensor | None, w: AttentionWeights, ending: bool, save: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the stream after the layer and what the backward needs."""
    b, n, _, c = z.shape
    wide = w.query.shape[0]
    packed = pair_kernels.pack_weights((w.query, w.key, w.value, w.gate, w.out))
    w_in, w_out = packed[: 4 * wide * c].view(-1, c), packed[4 * wide * c :].view(c, wide)
    normed, bias = norm.norm_forward(as_rows(z), w.norm_weight, w.norm_bias, w.bias, n * n)
    bias = bias.view(b, w.heads, n, n)
    projected = torch.mm(normed, w_in.t()).view(b, n, n, 4 * wide)
    del normed
    query, key, value, gate = _views(projected, w.heads, ending)
    keys = mask.mT if ending else mask
    factor = 1 / math.sqrt(wide // w.heads)
    o, lse, residual = tri_attn.tri_attn_fwd(query, key, value, bias, keys, factor, save)
    gated = pair_kernels.gate_forward(_paired(o, ending), gate)
    update = torch.mm(gated.view(-1, wide), w_out.t()).view(z.shape)
    return add_scaled(z, update, scale), (packed, projected, bias, o, lse, residual)


def _attention_backward(
    dz: Tensor,
    z: Tensor,
    mask: Tensor,
    scale: Tensor | None,
    norm_and_bias: tuple[Tensor, Tensor, Tensor],
    saved: tuple[Tensor, ...],
    ending: bool,
) -> tuple[Tensor, AttentionWeights]:
    """Return the gradients of z and of the weights."""
    packed, projected, bias, o, lse, residual = saved
    norm_weight, norm_bias, bias_weight = norm_and_bias
    (b, n, _, c), heads = z.shape, len(bias_weight)
    wide = projected.shape[-1] // 4
    w_in, w_out = packed[: 4 * wide * c].view(-1, c), packed[4 * wide * c :].view(c, wide)
    query, key, value, gate = _views(projected, heads, ending)
    dprojected = torch.empty_like(projected)
    dviews = _views(dprojected, heads, ending)

    dupdate = dz if scale is None else add_scaled(None, dz, scale)
    gated = torch.mm(as_rows(dupdate), w_out)  # its gradient, until gate_backward
    do = pair_kernels.gate_backward(gated, _paired(o, ending), gate, dviews.gate)
    dw_out = weight_gradient(as_rows(dupdate), gated)
    del dupdate, gated
    keys = mask.mT if ending else mask
    *_, dbias = tri_attn_bwd.tri_attn_bwd(
        query, key, value, bias, keys, 1 / math.sqrt(wide // heads), o, lse, residual,
        _sliced(do, heads, ending), into=dviews[:3],
    )  # fmt: skip
    del do
    drows = dprojected.view(-1, 4 * wide)
    normed = torch.mm(drows, w_in)  # its gradient, until norm_backward
    dz, dnorm = norm.norm_backward(
        normed, as_rows(z), norm_weight, norm_bias, dz, bias_weight,
        dbias.view(b, heads, n * n), keep_y=True,
    )  # fmt: skip
    dw_in = weight_gradient(drows, normed)
    return dz.view(z.shape), AttentionWeights._make(
        (dnorm[0], dnorm[1], dnorm[2:], *dw_in.chunk(4), dw_out)
    )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        mask: Tensor,
        scale: Tensor | None,
        ending: bool,
        save: bool,
        *weights: Tensor,
    ) -> Tensor:
        w = AttentionWeights(*weights)
        z = dense(z)
        out, saved = _attention_forward(z, mask, scale, w, ending, save)
        if save:
            ctx.ending = ending
            ctx.save_for_backward(z, mask, scale, w.norm_weight, w.norm_bias, w.bias, *saved)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> Any:
        z, mask, scale, norm_weight, norm_bias, bias, *saved = ctx.saved_tensors
        dz, grads = _attention_backward(
            dense(dz), z, mask, scale, (norm_weight, norm_bias, bias), saved, ctx.ending
        )
        return dz, None, None, None, None, *grads


def add_attention(
    z: Tensor,
    mask: Tensor,
    scale: Tensor | None,
    weights: AttentionWeights,
    *,
    ending: bool,
) -> Tensor:
    """Return z + scale * triangle attention of z (AF3 Alg 14; ending: Alg 15).

    z [B, N, N, C]; mask [B, N, N] bool; scale, the dropout, broadcasts to z.
    """
    save = _needs_grad(z, weights)
    run: Any = _Attention.apply
    return cast(Tensor, run(z, mask, scale, ending, save, *weights))


def _needs_grad(x: Tensor, weights: tuple[Tensor, ...]) -> bool:
    return torch.is_grad_enabled() and (
        x.requires_grad or any(weight.requires_grad for weight in weights)
    )


# ------------------------------------------------------------------ transition


def _chunks(rows: int, expanded: int) -> Iterator[slice]:
    """Cut the rows evenly so that a chunk of [a | b], twice ``expanded`` wide, fits CHUNK_BYTES."""
    count = -(-rows * 4 * expanded // CHUNK_BYTES)
    size = -(-rows // count)
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def _transition_forward(x: Tensor, keep: Tensor, w: TransitionWeights) -> tuple[Tensor, Tensor]:
    """Return rows x [M, C] after the layer and the packed weights; keep [M]."""
    (rows, c), expanded = x.shape, w.a.shape[0]
    packed = pair_kernels.pack_weights((w.a, w.b, w.out))
    w_in, w_out = packed[: 2 * expanded * c].view(-1, c), packed[2 * expanded * c :].view(c, -1)
    normed, _ = norm.norm_forward(x, w.norm_weight, w.norm_bias)
    if pair_transition.fits(c, expanded):
        out = torch.empty_like(x)
        pair_transition.transition_forward(x, normed, keep, w_in, w_out, out)
        return out, packed
    out = x.clone()
    for part in _chunks(rows, expanded):
        hidden = torch.mm(normed[part], w_in.t())
        product = hidden.new_empty(len(hidden), expanded)
        pair_kernels.swiglu_forward(hidden, keep[part], product)
        out[part].addmm_(product, w_out.t())
    return out, packed


def _transition_backward(
    dout: Tensor,
    x: Tensor,
    keep: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    packed: Tensor,
) -> tuple[Tensor, TransitionWeights]:
    """Return the gradients of x and of the weights; [a | b] is computed again chunk by chunk."""
    rows, c = x.shape
    expanded = packed.numel() // (3 * c)
    w_in, w_out = packed[: 2 * expanded * c].view(-1, c), packed[2 * expanded * c :].view(c, -1)
    normed, _ = norm.norm_forward(x, norm_weight, norm_bias)
    dnormed = torch.empty_like(normed)
    totals: list[Tensor] = []
    for part in _chunks(rows, expanded):
        operands = normed[part], dout[part], keep[part], w_in, w_out
        dhidden, product = _hidden_gradients(*operands, dnormed[part])
        grads = weight_gradient(dhidden, normed[part]), weight_gradient(dout[part], product)
        totals = [t.add_(g) for t, g in zip(totals, grads, strict=True)] if totals else [*grads]
    del normed, operands, dhidden, product
    dx, dnorm = norm.norm_backward(dnormed, x, norm_weight, norm_bias, dout)
    return dx, TransitionWeights._make((dnorm[0], dnorm[1], *totals[0].chunk(2), totals[1]))


def _hidden_gradients(
    normed: Tensor, dout: Tensor, keep: Tensor, w_in: Tensor, w_out: Tensor, dnormed: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradient of [a | b] and keep * silu(a) b; write the gradient of ``normed``."""
    (rows, c), expanded = normed.shape, w_out.shape[1]
    if pair_transition.fits(c, expanded):
        dhidden, product = (normed.new_empty(rows, k * expanded) for k in (2, 1))
        pair_transition.transition_backward(
            normed, dout, keep, w_in, w_out, dhidden, product, dnormed
        )
        return dhidden, product
    hidden = torch.mm(normed, w_in.t())  # [a | b], until swiglu_backward
    product = torch.mm(dout, w_out)  # its gradient, until swiglu_backward
    pair_kernels.swiglu_backward(hidden, keep, product)
    torch.mm(hidden, w_in, out=dnormed)
    return hidden, product


class _Transition(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, *weights: Tensor) -> Tensor:
        w = TransitionWeights(*weights)
        rows, keep = dense(as_rows(x)), mask.reshape(-1)
        out, packed = _transition_forward(rows, keep, w)
        ctx.save_for_backward(x, keep, w.norm_weight, w.norm_bias, packed)
        return out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Any:
        x, *saved = ctx.saved_tensors
        dx, grads = _transition_backward(dense(as_rows(dout)), as_rows(x), *saved)
        return dx.view(x.shape), None, *grads


def add_transition(x: Tensor, mask: Tensor, weights: TransitionWeights) -> Tensor:
    """Return x + mask * transition of x (AF3 Alg 11): x [..., C], mask bool [...]."""
    run: Any = _Transition.apply
    return cast(Tensor, run(x, mask, *weights))
