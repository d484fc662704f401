"""Implementations of the triangle multiplicative update; third parties by their public functions.

What a third party's interface wants its parameters to be (joined branches, BF16) is done once
before the calls, as a module of theirs would keep them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tpf.bench.backends import Backend, configure_compiler
from tpf.bench.trimul_cases import Multiplier
from tpf.kernels.ops import Direction, Impl, TriMulWeights, triangle_multiplication


def _operator(impl: Impl) -> Callable[[], Multiplier]:
    def update(
        z: Tensor, mask: Tensor | None, parameters: Sequence[Tensor], direction: Direction
    ) -> Tensor:
        weights = TriMulWeights._make(parameters)
        return triangle_multiplication(z, mask, weights, direction, impl=impl)

    return lambda: Multiplier(update)


def plain_update(
    z: Tensor, mask: Tensor | None, parameters: Sequence[Tensor], direction: Direction
) -> Tensor:
    """Compute the formula as it stands, in the dtype of z."""
    w = TriMulWeights._make(x.to(z.dtype) for x in parameters)
    zn = F.layer_norm(z, z.shape[-1:], w.layer_norm_in_weight, w.layer_norm_in_bias)
    a = F.linear(zn, w.linear_a_p) * F.linear(zn, w.linear_a_g).sigmoid()
    b = F.linear(zn, w.linear_b_p) * F.linear(zn, w.linear_b_g).sigmoid()
    if mask is not None:
        keep = mask[..., None].to(z.dtype)
        a, b = a * keep, b * keep
    a, b = a.permute(0, 3, 1, 2), b.permute(0, 3, 1, 2)
    x = a @ b.mT if direction == "outgoing" else a.mT @ b
    x = x.permute(0, 2, 3, 1)
    xn = F.layer_norm(x, x.shape[-1:], w.layer_norm_out_weight, w.layer_norm_out_bias)
    return F.linear(xn, w.linear_z) * F.linear(zn, w.linear_g).sigmoid()


def _compiled() -> Multiplier:
    configure_compiler()
    return Multiplier(torch.compile(plain_update, dynamic=False))


def _joined(dtype: torch.dtype) -> Callable[[TriMulWeights], tuple[Tensor, ...]]:
    """Return a function that joins branches a and b: p_in, g_in [2 C, C], in this dtype."""

    def pack(w: TriMulWeights) -> tuple[Tensor, ...]:
        joined = (
            w.layer_norm_in_weight, w.layer_norm_in_bias,
            torch.cat([w.linear_a_p, w.linear_b_p]), torch.cat([w.linear_a_g, w.linear_b_g]),
            w.layer_norm_out_weight, w.layer_norm_out_bias, w.linear_z, w.linear_g,
        )  # fmt: skip
        return tuple(x.to(dtype) for x in joined)

    return pack


def _divided(gradients: Sequence[Tensor]) -> TriMulWeights:
    """Undo the joining for gradients."""
    in_weight, in_bias, p_in, g_in, out_weight, out_bias, p_out, g_out = gradients
    a_p, b_p = p_in.chunk(2)
    a_g, b_g = g_in.chunk(2)
    return TriMulWeights(
        in_weight, in_bias, a_p, a_g, b_p, b_g, out_weight, out_bias, g_out, p_out
    )  # fmt: skip


JOINED = (
    "norm_in_weight", "norm_in_bias", "p_in_weight", "g_in_weight", "norm_out_weight",
    "norm_out_bias", "p_out_weight", "g_out_weight",
)  # fmt: skip
"""Names of the joined parameters, the same in both third-party interfaces."""


def _third_party(
    module: str, function: str, dtype: torch.dtype
) -> Callable[[], Multiplier]:  # fmt: skip
    def load() -> Multiplier:
        kernel = getattr(importlib.import_module(module), function)

        def update(
            z: Tensor, mask: Tensor | None, parameters: Sequence[Tensor], direction: Direction
        ) -> Tensor:
            named = dict(zip(JOINED, parameters, strict=True))
            keep = None if mask is None else mask.to(z.dtype)
            out: Tensor = kernel(z, direction=direction, mask=keep, **named)
            return out

        return Multiplier(update, _joined(dtype), _divided)

    return load


_CUEQUIVARIANCE = "cuequivariance_torch", "triangle_multiplicative_update"

MULTIPLIERS: dict[str, Backend[Multiplier]] = {
    "cuda": Backend(_operator("cuda"), "hopper"),
    "torch": Backend(_operator("torch"), "anything"),
    "eager": Backend(lambda: Multiplier(plain_update), "anything"),
    "compiled": Backend(_compiled),
    "cuequivariance": Backend(
        _third_party(*_CUEQUIVARIANCE, torch.bfloat16), peer="cuequivariance"
    ),
    "cuequivariance-fp32": Backend(
        _third_party(*_CUEQUIVARIANCE, torch.float32), peer="cuequivariance"
    ),
    "turbopairformer": Backend(
        _third_party("turbopairformer", "turbo_trimul", torch.float32), "hopper",
        peer="turbopairformer",
    ),
    **{
        name: Backend(None, absent="has no kernel of this update")
        for name in ("openfold3", "protenix", "trifast", "megafold", "deepspeed")
    },
    "scalefold": Backend(None, absent="has no public kernel"),
}  # fmt: skip
"""By the name that ``--impls`` takes. cuequivariance has its parameters in BF16, which its fast
kernels want, cuequivariance-fp32 in FP32, as optimisers keep them."""
