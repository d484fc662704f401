"""Triangle operators in plain PyTorch: the specification of the kernels, for any device and dtype.

Attention works on [B, O, H, N, D] (B merged batch, O outer slices) and never holds the scores of
more outer slices than ``CHUNK_BYTES`` allows. Low-precision inputs are computed in FP32. Row
log-sums are in base 2, as the kernels keep them: ``lse = log2(sum(2 ** (score * log2(e))))``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK_BYTES = 1 << 26
"""Largest score tensor of one chunk of outer slices, in bytes."""

LAYER_NORM_EPS = 1e-5

Direction = Literal["outgoing", "incoming"]


class TriMulWeights(NamedTuple):
    """Parameters of one triangle multiplicative update (AF3 Alg 12, 13), usually FP32.

    Layer norms are [C_z] (in) and [C_hidden] (out); linear_{a,b}_{p,g} are [C_hidden, C_z];
    linear_g is [C_z, C_z]; linear_z is [C_z, C_hidden].
    """

    layer_norm_in_weight: Tensor
    layer_norm_in_bias: Tensor
    linear_a_p: Tensor
    linear_a_g: Tensor
    linear_b_p: Tensor
    linear_b_g: Tensor
    layer_norm_out_weight: Tensor
    layer_norm_out_bias: Tensor
    linear_g: Tensor
    linear_z: Tensor


def needs_grad(*tensors: Tensor) -> bool:
    """Return whether autograd will ask for a gradient of any of the tensors."""
    return torch.is_grad_enabled() and any([x.requires_grad for x in tensors])


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of intermediate results: FP64 for FP64, else FP32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_dense_like(x: Tensor) -> Tensor:
    """Allocate a dense tensor of the shape, dtype and memory order of x (broadcast: row-major)."""
    shape, strides = x.shape, x.stride()
    order = sorted(range(x.dim()), key=lambda d: -strides[d])
    if any(strides[d] == 0 and shape[d] > 1 for d in range(x.dim())):
        order = list(range(x.dim()))
    dense, step = [0] * x.dim(), 1
    for d in reversed(order):
        dense[d] = step
        step *= max(shape[d], 1)
    return torch.empty_strided(shape, dense, dtype=x.dtype, device=x.device)


def empty_output(q: Tensor) -> Tensor:
    """Allocate [B, O, H, N, D] stored as [B, O, N, H, D], so that merging heads is a view."""
    b, o, h, n, d = q.shape
    return q.new_empty((b, o, n, h, d)).transpose(2, 3)


def _chunks(q: Tensor) -> Iterator[slice]:
    """Yield slices of the outer axis whose scores fit into CHUNK_BYTES."""
    b, o, h, n, _ = q.shape
    per_slice = b * h * n * n * compute_dtype(q.dtype).itemsize
    step = max(1, CHUNK_BYTES // max(per_slice, 1))
    for start in range(0, o, step):
        yield slice(start, min(start + step, o))


def _scores(q: Tensor, k: Tensor, bias: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Return masked scores [B, o, H, N, N] of one chunk."""
    scores = torch.matmul(q * scale, k.transpose(-1, -2))
    scores += bias[:, None]
    if mask is not None:
        scores.masked_fill_(~mask[:, :, None, None, :], -math.inf)
    return scores


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    scale: float,
    save_residual: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute triangle attention (AF3 Alg 14, 15 without projections).

    q, k, v [B, O, H, N, D]; bias [B, H, N, N]; mask bool [B, O, N] (True keeps the key) or None.
    Returns out [B, O, H, N, D] in the dtype of q, lse [B, O, H, N] (base 2, +inf for a row without
    keys) and the rounding residual of out (no elements unless saved).
    """
    dtype = compute_dtype(q.dtype)
    out = empty_output(q)
    residual = empty_output(q) if save_residual else q.new_empty(0)
    lse = q.new_empty(q.shape[:-1], dtype=dtype)
    bias = bias.to(dtype)
    with torch.autocast(q.device.type, enabled=False):
        for part in _chunks(q):
            part_mask = None if mask is None else mask[:, part]
            scores = _scores(q[:, part].to(dtype), k[:, part].to(dtype), bias, part_mask, scale)
            top = scores.amax(-1, keepdim=True)
            top.masked_fill_(top == -math.inf, 0.0)
            weights = scores.sub_(top).exp_()
            total = weights.sum(-1, keepdim=True)
            empty = total == 0
            exact = torch.matmul(weights, v[:, part].to(dtype)) / total.masked_fill(empty, 1.0)
            out[:, part] = exact
            if save_residual:
                residual[:, part] = exact - out[:, part]
            lse[:, part] = (
                (top + total.log()).mul_(1 / math.log(2)).masked_fill_(empty, math.inf)[..., 0]
            )
    return out, lse, residual


def attention_backward(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients (dq, dk, dv, dbias) of ``attention_forward`` chunk by chunk.

    The softmax correction is rowsum(dout * (out + residual)) when a residual was saved.
    """
    dtype = compute_dtype(q.dtype)
    dq, dk, dv = empty_dense_like(q), empty_dense_like(k), empty_dense_like(v)
    dbias = torch.zeros(bias.shape, dtype=dtype, device=bias.device)
    wide_bias = bias.to(dtype)
    with torch.autocast(q.device.type, enabled=False):
        for part in _chunks(q):
            part_mask = None if mask is None else mask[:, part]
            q_part, k_part = q[:, part].to(dtype), k[:, part].to(dtype)
            g_part, exact = dout[:, part].to(dtype), out[:, part].to(dtype)
            if residual.numel():
                exact = exact + residual[:, part]
            scores = _scores(q_part, k_part, wide_bias, part_mask, scale)
            weights = scores.sub_(lse[:, part, ..., None] * math.log(2)).exp_()
            dv[:, part] = torch.matmul(weights.transpose(-1, -2), g_part)
            dscores = torch.matmul(g_part, v[:, part].to(dtype).transpose(-1, -2))
            dscores.sub_((g_part * exact).sum(-1, keepdim=True)).mul_(weights)
            dbias += dscores.sum(1)
            dq[:, part] = torch.matmul(dscores, k_part) * scale
            dk[:, part] = torch.matmul(dscores.transpose(-1, -2), q_part) * scale
    return dq, dk, dv, empty_dense_like(bias).copy_(dbias)


class _Branch(NamedTuple):
    """One gated projection of the normalised input: value = mask * gate * projection."""

    value: Tensor
    gate: Tensor
    projection: Tensor


def _branch(normed: Tensor, mask: Tensor | None, weight_p: Tensor, weight_g: Tensor) -> _Branch:
    projection = F.linear(normed, weight_p)
    gate = torch.sigmoid(F.linear(normed, weight_g))
    value = gate * projection
    return _Branch(value if mask is None else value * mask, gate, projection)


def _contract(a: Tensor, b: Tensor, direction: Direction) -> Tensor:
    """Sum over the third edge: outgoing a_ik b_jk, incoming a_ki b_kj; tensors are [B, N, N, C]."""
    a, b = a.permute(0, 3, 1, 2), b.permute(0, 3, 1, 2)
    x = a @ b.mT if direction == "outgoing" else a.mT @ b
    return x.permute(0, 2, 3, 1)


def contract_backward(
    dx: Tensor, a: Tensor, b: Tensor, direction: Direction
) -> tuple[Tensor, Tensor]:
    """Return the gradients of a and b in x_ij = sum_k a_ik b_jk or a_ki b_kj, all [B, N, N, C]."""
    dx, a, b = (t.permute(0, 3, 1, 2) for t in (dx, a, b))
    da, db = (dx @ b, dx.mT @ a) if direction == "outgoing" else (b @ dx.mT, a @ dx)
    return da.permute(0, 2, 3, 1), db.permute(0, 2, 3, 1)


class _Normed(NamedTuple):
    """A layer norm: its result and the statistics that its gradient needs."""

    value: Tensor
    mean: Tensor
    rstd: Tensor


def _norm(x: Tensor, weight: Tensor, bias: Tensor) -> _Normed:
    return _Normed(*torch.native_layer_norm(x, x.shape[-1:], weight, bias, LAYER_NORM_EPS))


def _norm_backward(
    grad: Tensor, x: Tensor, normed: _Normed, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        grad, x, x.shape[-1:], normed.mean, normed.rstd, weight, bias, [True, True, True]
    )
    return dx, dweight, dbias


def _weight_grad(dy: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of W in y = x W^T, summed over all rows."""
    return dy.reshape(-1, dy.shape[-1]).mT @ x.reshape(-1, x.shape[-1])


def multiplication_forward(
    z: Tensor, mask: Tensor | None, weights: TriMulWeights, direction: Direction
) -> Tensor:
    """Compute the triangle multiplicative update (AF3 Alg 12, 13) in FP32 (FP64 for FP64 input).

    z [B, N, N, C_z]; mask [B, N, N] or None. Returns the update [B, N, N, C_z] in the dtype of z.
    """
    dtype = compute_dtype(z.dtype)
    w = TriMulWeights(*(t.to(dtype) for t in weights))
    mask = None if mask is None else mask[..., None].to(dtype)
    with torch.autocast(z.device.type, enabled=False):
        normed = _norm(z.to(dtype), w.layer_norm_in_weight, w.layer_norm_in_bias).value
        a = _branch(normed, mask, w.linear_a_p, w.linear_a_g).value
        b = _branch(normed, mask, w.linear_b_p, w.linear_b_g).value
        x = _contract(a, b, direction)
        x_normed = _norm(x, w.layer_norm_out_weight, w.layer_norm_out_bias).value
        update = F.linear(x_normed, w.linear_z) * torch.sigmoid(F.linear(normed, w.linear_g))
    return update.to(z.dtype, memory_format=torch.contiguous_format)


def multiplication_backward(
    dout: Tensor, z: Tensor, mask: Tensor | None, weights: TriMulWeights, direction: Direction
) -> tuple[Tensor, TriMulWeights]:
    """Compute the gradients of ``multiplication_forward``; the forward is recomputed."""
    dtype = compute_dtype(z.dtype)
    w = TriMulWeights(*(t.to(dtype) for t in weights))
    mask = None if mask is None else mask[..., None].to(dtype)
    with torch.autocast(z.device.type, enabled=False):
        z_wide, dout = z.to(dtype), dout.to(dtype)
        norm_in = _norm(z_wide, w.layer_norm_in_weight, w.layer_norm_in_bias)
        normed = norm_in.value
        a = _branch(normed, mask, w.linear_a_p, w.linear_a_g)
        b = _branch(normed, mask, w.linear_b_p, w.linear_b_g)
        x = _contract(a.value, b.value, direction).contiguous()
        norm_out = _norm(x, w.layer_norm_out_weight, w.layer_norm_out_bias)
        gate = torch.sigmoid(F.linear(normed, w.linear_g))

        dy = dout * gate
        dgate = dout * F.linear(norm_out.value, w.linear_z) * gate * (1 - gate)
        dx, dw_out, db_out = _norm_backward(
            dy @ w.linear_z, x, norm_out, w.layer_norm_out_weight, w.layer_norm_out_bias
        )
        dnormed = dgate @ w.linear_g
        grads = []
        branches = ((a, w.linear_a_p, w.linear_a_g), (b, w.linear_b_p, w.linear_b_g))
        for dvalue, (branch, weight_p, weight_g) in zip(
            contract_backward(dx, a.value, b.value, direction), branches, strict=True
        ):
            dkept = dvalue if mask is None else dvalue * mask
            dprojection = dkept * branch.gate
            dlogit = dprojection * branch.projection * (1 - branch.gate)
            dnormed += dprojection @ weight_p + dlogit @ weight_g
            grads += [_weight_grad(dprojection, normed), _weight_grad(dlogit, normed)]
        dz, dw_in, db_in = _norm_backward(
            dnormed, z_wide, norm_in, w.layer_norm_in_weight, w.layer_norm_in_bias
        )
    last = (dw_out, db_out, _weight_grad(dgate, normed), _weight_grad(dy, norm_out.value))
    typed = (g.to(t.dtype) for g, t in zip((dw_in, db_in, *grads, *last), weights, strict=True))
    return dz.to(z.dtype, memory_format=torch.contiguous_format), TriMulWeights._make(typed)
