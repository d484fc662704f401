"""Backward of the triangle multiplicative update beyond 128 channels.

There the weight gradients do not fit into the registers of the fused kernels. So the normalised
rows are written, and the gated projections are recomputed and differentiated by cuBLAS, with the
norm and gate kernels of the pair block between the products.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tpf.kernels import tri_mul
from tpf.kernels.norm import norm_backward, norm_forward
from tpf.kernels.pair_kernels import gate_backward, weight_gradient
from tpf.kernels.reference import Direction, TriMulWeights, contract_backward
from tpf.kernels.tri_mul_layout import Saved, Shape, Sizes


def _unpack(saved: Tensor, shape: Shape) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a, b, x [B, N, N, H], strided as the kernels keep them, and the mask [B, N, N, 1]."""
    parts, batch, n = Saved(shape), shape.batch, shape.n
    by_batch, by_channel, by_row, step = shape.hidden_strides
    size = batch, n, n, shape.sizes.hidden
    strides = by_batch, by_row, step, by_channel
    a, b, x = (saved.as_strided(size, strides, byte // 2) for byte in (0, parts.b, parts.x))
    stats = saved.view(torch.float32)[parts.z_stats // 4 :][: 4 * batch * n * shape.pitch]
    stats = stats.view(batch, n, shape.pitch, 4)[:, :, :n]
    return a, b, x, stats[..., 2:3] / stats[..., :1]  # r times the mask, over r


def _gated_gradients(
    d: Tensor, x: Tensor, y: Tensor, value_weight: Tensor, gate_weight: Tensor
) -> Tensor:
    """Return the gradients [.., 2 W] of W_v x and W_g y in d sigmoid(W_g y) (W_v x); uses d up."""
    width = d.shape[-1]
    both = d.new_empty(*d.shape[:-1], 2 * width)
    value, gate = F.linear(x, value_weight), F.linear(y, gate_weight)
    both[..., :width] = gate_backward(d, value, gate, both[..., width:])
    return both


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2)


def tri_mul_bwd(
    dout: Tensor,
    z: Tensor,
    weights: TriMulWeights,
    direction: Direction,
    saved: Tensor,
    train_weights: bool = True,
) -> tuple[Tensor, list[Tensor]]:
    """Return dz bf16 [B, N, N, C] and, with train_weights, the weights' gradients in their dtypes.

    As ``tri_mul_bwd.tri_mul_bwd``, for multiples of 16 channels up to 256. Deterministic.
    """
    wide = tri_mul.float_weights(weights)
    low = TriMulWeights._make(w.bfloat16() for w in wide)
    norm_in = wide.layer_norm_in_weight, wide.layer_norm_in_bias
    norm_out = wide.layer_norm_out_weight, wide.layer_norm_out_bias
    saved = saved if saved.storage_offset() == 0 else saved.clone()
    a, b, x, mask = _unpack(saved, Shape(z.shape[0], z.shape[1], Sizes.of(weights)))
    x = x.contiguous()
    zn, xn = norm_forward(z, *norm_in), norm_forward(x, *norm_out)
    grads: dict[str, Tensor] = {}

    def keep(names: tuple[str, ...], d: Tensor, inputs: Tensor) -> None:
        if train_weights:
            found = weight_gradient(_rows(d), _rows(inputs))
            grads.update(zip(names, found.chunk(len(names)), strict=True))

    d = dout.clone(memory_format=torch.contiguous_format)
    d_value, d_gate = _gated_gradients(d, xn, zn, low.linear_z, low.linear_g).chunk(2, dim=-1)
    keep(("linear_z",), d_value, xn)
    keep(("linear_g",), d_gate, zn)
    dx, d_norm_out = norm_backward(d_value @ low.linear_z, x, *norm_out)
    dzn = _rows(d_gate) @ low.linear_g
    dx = dx.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    for name, branch in zip("ab", contract_backward(dx, a, b, direction), strict=True):
        names = f"linear_{name}_p", f"linear_{name}_g"
        value, gate = (getattr(low, x) for x in names)
        d = torch.mul(branch, mask, out=z.new_empty(branch.shape))
        d = _gated_gradients(d, zn, zn, value, gate)
        keep(names, d, zn)
        dzn.addmm_(_rows(d), torch.cat((value, gate)))
    dz, d_norm_in = norm_backward(dzn, z, *norm_in)
    dz = dz.contiguous()
    if not train_weights:
        return dz, []
    grads["layer_norm_in_weight"], grads["layer_norm_in_bias"] = d_norm_in.unbind()
    grads["layer_norm_out_weight"], grads["layer_norm_out_bias"] = d_norm_out.unbind()
    ordered = (grads[name] for name in TriMulWeights._fields)
    return dz, [g.to(w.dtype) for g, w in zip(ordered, weights, strict=True)]
