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

from tpf.kernels import launch, norm, pair_kernels, pair_transition, tri_attn, tri_attn_bwd
from tpf.kernels.norm import dense, differentiable_once, layer_norm
from tpf.kernels.ops import MAX_HEAD_DIM
from tpf.kernels.pair_kernels import add_scaled, weight_gradient
from tpf.kernels.reference import needs_grad

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
    @differentiable_once
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor, Tensor, None]:
        (scale,) = ctx.saved_tensors
        return dz, add_scaled(None, dense(dz), scale), None


def add_update(z: Tensor, update: Tensor, scale: Tensor | None) -> Tensor:
    """Return z + update * scale for z, update [B, I, J, C]; scale may have 1 for B, I or J."""
    if scale is None:
        return z + update
    if not needs_grad(z, update):
        return add_scaled(dense(z), dense(update), scale)
    run: Any = _AddUpdate.apply
    return cast(Tensor, run(z, update, scale))


# ------------------------------------------------------------------ triangle attention


class _Layout(NamedTuple):
    """How attention at a node sees a buffer [B, N, N, 4 W] of query, key, value and gate."""

    slices: tuple[int, ...]
    """Shape of query, key and value: [B, slice, H, position, D]."""
    strides: tuple[int, ...]
    """Of those in the buffer."""
    pairs: tuple[int, ...]
    """[B, i, j, W]."""
    gate_strides: tuple[int, ...]
    """Of the gate in the buffer."""
    out_strides: tuple[int, ...]
    """Of the result of attention as [B, i, j, W]; it is stored [B, slice, position, H, D]."""
    dout_strides: tuple[int, ...]
    """Of a tensor with these, as [B, slice, H, position, D]."""

    def views(self, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return query, key and value by slices and the gate by pairs."""
        width = self.pairs[-1]
        query, key, value = (
            buffer.as_strided(self.slices, self.strides, i * width) for i in range(3)
        )
        return query, key, value, buffer.as_strided(self.pairs, self.gate_strides, 3 * width)


@functools.lru_cache(maxsize=launch.PLANS)
def _layout(b: int, n: int, heads: int, width: int, ending: bool) -> _Layout:
    d = width // heads
    row, line, plane = 4 * width, 4 * n * width, 4 * n * n * width
    slice_, position = (row, line) if ending else (line, row)
    inner, outer = (width, n * width)[:: -1 if ending else 1], n * n * width
    return _Layout(
        slices=(b, n, heads, n, d),
        strides=(plane, slice_, d, position, 1),
        pairs=(b, n, n, width),
        gate_strides=(plane, line, row, 1),
        out_strides=(outer, *inner[::-1], 1),
        dout_strides=(outer, n * width, d, width, 1),
    )


def _attention_forward(
    z: Tensor, mask: Tensor, scale: Tensor | None, w: AttentionWeights, ending: bool, save: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the stream after the layer and what the backward needs."""
    (b, n, _, c), wide, heads = z.shape, w.query.shape[0], w.heads
    layout = _layout(b, n, heads, wide, ending)
    packed = pair_kernels.pack_weights((w.query, w.key, w.value, w.gate, w.out))
    w_in, w_out = _split(packed, 4 * wide, c)
    normed, bias = norm.norm_and_heads(z, w.norm_weight, w.norm_bias, w.bias, n * n)
    projected = torch.mm(normed.view(-1, c), w_in.t())
    del normed
    bias = bias.view(b, heads, n, n)
    query, key, value, gate = layout.views(projected)
    keys = mask.mT if ending else mask
    factor = 1 / math.sqrt(wide // heads)
    o, lse, residual = tri_attn.tri_attn_fwd(query, key, value, bias, keys, factor, save)
    gated = pair_kernels.gate_forward(o.as_strided(layout.pairs, layout.out_strides), gate)
    update = torch.mm(gated.view(-1, wide), w_out.t()).view(z.shape)
    return add_scaled(z, update, scale), (packed, projected, bias, o, lse, residual)


def _split(packed: Tensor, rows: int, c: int) -> tuple[Tensor, Tensor]:
    """Return the two matrices of packed weights: [rows, C] and [C, the rest]."""
    rest = packed.numel() // c - rows
    return packed.as_strided((rows, c), (c, 1)), packed.as_strided((c, rest), (rest, 1), rows * c)


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
    (b, n, _, c), heads, wide = z.shape, bias_weight.shape[0], projected.shape[1] // 4
    layout = _layout(b, n, heads, wide, ending)
    w_in, w_out = _split(packed, 4 * wide, c)
    query, key, value, gate = layout.views(projected)
    dprojected = torch.empty_like(projected)
    *into, dgate = layout.views(dprojected)

    dupdate = (dz if scale is None else add_scaled(None, dz, scale)).view(-1, c)
    gated = torch.mm(dupdate, w_out)  # its gradient, until gate_backward
    paired = o.as_strided(layout.pairs, layout.out_strides)
    do = pair_kernels.gate_backward(gated, paired, gate, dgate)
    dw_out = weight_gradient(dupdate, gated)
    del dupdate, gated
    keys, factor = mask.mT if ending else mask, 1 / math.sqrt(wide // heads)
    do = do.as_strided(layout.slices, layout.dout_strides)
    *_, dbias = tri_attn_bwd.tri_attn_bwd(
        query, key, value, bias, keys, factor, o, lse, residual, do, into=into
    )
    del do
    normed = torch.mm(dprojected, w_in)  # its gradient, until norm_backward
    dz, dnorm = norm.norm_backward(
        normed, z, norm_weight, norm_bias, dz, bias_weight, dbias.view(b, heads, n * n), keep_y=True
    )
    dw_in = weight_gradient(dprojected, normed)
    grads = dnorm[0], dnorm[1], dnorm[2:], *dw_in.chunk(4), dw_out
    return dz, AttentionWeights._make(grads)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        mask: Tensor,
        scale: Tensor | None,
        ending: bool,
        *weights: Tensor,
    ) -> Tensor:
        w, z, ctx.ending = AttentionWeights(*weights), dense(z), ending
        out, saved = _attention_forward(z, mask, scale, w, ending, True)
        ctx.save_for_backward(z, mask, scale, *weights[:3], *saved)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dz: Tensor) -> Any:
        z, mask, scale, norm_weight, norm_bias, bias, *saved = ctx.saved_tensors
        dz, grads = _attention_backward(
            dense(dz), z, mask, scale, (norm_weight, norm_bias, bias), saved, ctx.ending
        )
        return dz, None, None, None, *grads


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
    if not needs_grad(z, *weights):
        return _attention_forward(dense(z), mask, scale, weights, ending, False)[0]
    run: Any = _Attention.apply
    return cast(Tensor, run(z, mask, scale, ending, *weights))


# ------------------------------------------------------------------ transition


def _chunks(rows: int, expanded: int) -> Iterator[tuple[int, int]]:
    """Cut the rows evenly: first and end of each chunk.

    A chunk of [a | b], twice ``expanded`` wide, fits into CHUNK_BYTES.
    """
    count = -(-rows * 4 * expanded // CHUNK_BYTES)
    size = -(-rows // count)
    for start in range(0, rows, size):
        yield start, min(start + size, rows)


def _transition_forward(x: Tensor, keep: Tensor, w: TransitionWeights) -> tuple[Tensor, Tensor]:
    """Return rows x [M, C] after the layer and the packed weights; keep [M]."""
    (rows, c), expanded = x.shape, w.a.shape[0]
    packed = pair_kernels.pack_weights((w.a, w.b, w.out))
    w_in, w_out = _split(packed, 2 * expanded, c)
    normed = norm.norm_forward(x, w.norm_weight, w.norm_bias)
    if pair_transition.fits(c, expanded):
        out = torch.empty_like(x)
        pair_transition.transition_forward(x, normed, keep, w_in, w_out, out)
        return out, packed
    out = x.clone()
    for start, end in _chunks(rows, expanded):
        part = slice(start, end)
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
    w_in, w_out = _split(packed, 2 * expanded, c)
    normed = norm.norm_forward(x, norm_weight, norm_bias)
    dnormed = torch.empty_like(normed)
    whole = _Chunk(normed, dout, keep, dnormed)
    totals: list[Tensor] = []
    for start, end in _chunks(rows, expanded):
        chunk = _Chunk(*(t[start:end] if end - start < rows else t for t in whole))
        dhidden, product = _hidden_gradients(chunk, w_in, w_out)
        grads = weight_gradient(dhidden, chunk.normed), weight_gradient(chunk.dout, product)
        totals = [t.add_(g) for t, g in zip(totals, grads, strict=True)] if totals else [*grads]
    del normed, whole, chunk, dhidden, product
    dx, dnorm = norm.norm_backward(dnormed, x, norm_weight, norm_bias, dout)
    return dx, TransitionWeights._make((*dnorm.unbind(), *totals[0].chunk(2), totals[1]))


class _Chunk(NamedTuple):
    """Rows of the operands of the backward, and where the gradient of ``normed`` goes."""

    normed: Tensor
    dout: Tensor
    keep: Tensor
    dnormed: Tensor


def _hidden_gradients(x: _Chunk, w_in: Tensor, w_out: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of [a | b] and keep * silu(a) b; write the gradient of ``normed``."""
    (rows, c), expanded = x.normed.shape, w_out.shape[1]
    if pair_transition.fits(c, expanded):
        dhidden, product = (x.normed.new_empty(rows, k * expanded) for k in (2, 1))
        pair_transition.transition_backward(
            x.normed, x.dout, x.keep, w_in, w_out, dhidden, product, x.dnormed
        )
        return dhidden, product
    hidden = torch.mm(x.normed, w_in.t())  # [a | b], until swiglu_backward
    product = torch.mm(x.dout, w_out)  # its gradient, until swiglu_backward
    pair_kernels.swiglu_backward(hidden, x.keep, product)
    torch.mm(hidden, w_in, out=x.dnormed)
    return hidden, product


def _rows(x: Tensor) -> Tensor:
    """Return x [..., C] as dense rows [M, C]; a copy only if it must be."""
    return dense(x).view(-1, x.shape[-1])


class _Transition(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, *weights: Tensor) -> Tensor:
        rows, keep = _rows(x), mask.reshape(-1)
        out, packed = _transition_forward(rows, keep, TransitionWeights(*weights))
        ctx.save_for_backward(x, keep, *weights[:2], packed)
        return out.view(x.shape)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: Tensor) -> Any:
        x, *saved = ctx.saved_tensors
        dx, grads = _transition_backward(_rows(dout), _rows(x), *saved)
        return dx.view(x.shape), None, *grads


def add_transition(x: Tensor, mask: Tensor, weights: TransitionWeights) -> Tensor:
    """Return x + mask * transition of x (AF3 Alg 11): x [..., C], mask bool [...]."""
    if not needs_grad(x, *weights):
        return _transition_forward(_rows(x), mask.reshape(-1), weights)[0].view(x.shape)
    run: Any = _Transition.apply
    return cast(Tensor, run(x, mask, *weights))
