"""Layers that every module is made of: linear, layer norm, transitions, attention, dropout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tpf.kernels.ops import Impl
from tpf.kernels.pair_layers import TransitionWeights, add_transition, fusable
from tpf.model import graphs
from tpf.model.dropout import dropout_factors

Init = Literal["default", "relu", "gating", "gating_ada_zero", "final"]

MASKED = -1e9
"""Added to the logits of masked keys; finite, so that a fully masked row stays finite."""

_TRUNCATED_STD = 0.879625661034
"""Standard deviation of a unit normal truncated to +-2."""

T = TypeVar("T")
Block = TypeVar("Block", bound=nn.Module)


def no_autocast(device: torch.device) -> torch.autocast:
    """Return a context in which operations keep the dtype of their inputs."""
    return torch.autocast(device.type, enabled=False)


def at_least_fp32(x: Tensor) -> Tensor:
    """Return ``x`` widened to FP32 if it is narrower."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def remat(function: Callable[..., T], *args: Any, enabled: bool) -> T:  # noqa: ANN401
    """Call ``function(*args)``; with ``enabled``, recompute its activations in the backward.

    Inside ``graphs.using`` it is replayed as a CUDA graph where it can be, then always recomputed.
    """
    again = enabled and torch.is_grad_enabled()
    eager: Callable[..., T] = (
        partial(checkpoint, function, use_reentrant=False) if again else function
    )
    return graphs.call(function, args, eager)


class Layer(nn.Module):
    """A module whose call returns one tensor."""

    if TYPE_CHECKING:
        __call__: Callable[..., Tensor]


class Blocks(nn.ModuleList, Generic[Block]):
    """A list of modules of one class."""

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[Block]: ...


class Linear(Layer):
    """Linear map with the initialisations of AF3: weight [c_out, c_in], optional bias [c_out].

    ``default`` and ``relu`` draw from a normal truncated to two standard deviations with variance
    1/c_in and 2/c_in; ``gating`` starts at weight 0, bias 1; ``gating_ada_zero`` at weight 0,
    bias -2; ``final`` at zero.
    """

    def __init__(
        self, c_in: int, c_out: int, *, bias: bool = False, init: Init = "default"
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(c_out, c_in))
        self.bias = nn.Parameter(torch.zeros(c_out)) if bias else None
        if init in ("default", "relu"):
            std = math.sqrt((2 if init == "relu" else 1) / c_in) / _TRUNCATED_STD
            nn.init.trunc_normal_(self.weight, std=std, a=-2 * std, b=2 * std)
        else:
            nn.init.zeros_(self.weight)
        if self.bias is not None and init in ("gating", "gating_ada_zero"):
            nn.init.constant_(self.bias, 1.0 if init == "gating" else -2.0)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class LayerNorm(Layer):
    """Layer norm over the last axis, computed in at least FP32 and cast back (eps 1e-5)."""

    def __init__(self, channels: int, *, offset: bool = True) -> None:
        super().__init__()
        self.shape = (channels,)
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels)) if offset else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(at_least_fp32(x), self.shape, self.weight, self.bias).to(x.dtype)


class SwiGLU(Layer):
    """silu(W_a x) * W_b x."""

    def __init__(self, c_in: int, c_hidden: int) -> None:
        super().__init__()
        self.linear_a = Linear(c_in, c_hidden, init="relu")
        self.linear_b = Linear(c_in, c_hidden, init="relu")

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.linear_a(x)) * self.linear_b(x)


class Transition(Layer):
    """Transition with SwiGLU (AF3 Alg 11): x [..., C], mask [...] -> update [..., C]."""

    def __init__(self, channels: int, expansion: int) -> None:
        super().__init__()
        self.layer_norm = LayerNorm(channels)
        self.swiglu = SwiGLU(channels, expansion * channels)
        self.linear_out = Linear(expansion * channels, channels, init="final")

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.linear_out(self.swiglu(self.layer_norm(x))) * mask[..., None]

    def weights(self) -> TransitionWeights:
        """Return the parameters as the fused layer takes them."""
        return TransitionWeights(
            norm_weight=self.layer_norm.weight,
            norm_bias=cast(Tensor, self.layer_norm.bias),
            a=self.swiglu.linear_a.weight,
            b=self.swiglu.linear_b.weight,
            out=self.linear_out.weight,
        )

    def add_to(self, x: Tensor, mask: Tensor, impl: Impl) -> Tensor:
        """Return x plus the update, in one fused layer where ``impl`` and x allow it."""
        weights = self.weights()
        if fusable(x, mask, impl, weights):
            return add_transition(x, mask, weights)
        return x + self(x, mask)


class AttentionProjections(nn.Module):
    """Query, key, value, gate and output maps of gated attention; rows are head-major."""

    def __init__(
        self, channels: int, heads: int, dim: int, *, q_bias: bool = False, out: Init = "final"
    ) -> None:
        super().__init__()
        self.heads = heads
        self.linear_q = Linear(channels, heads * dim, bias=q_bias)
        self.linear_k = Linear(channels, heads * dim)
        self.linear_v = Linear(channels, heads * dim)
        self.linear_g = Linear(channels, heads * dim, init="gating")
        self.linear_o = Linear(heads * dim, channels, init=out)

    def qkv(self, x_q: Tensor, x_kv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project [..., n, C] to query, key and value [..., n, H, D], views of the products."""
        q, k, v = self.linear_q(x_q), self.linear_k(x_kv), self.linear_v(x_kv)
        q, k, v = (torch.unflatten(x, -1, (self.heads, -1)) for x in (q, k, v))
        return q, k, v

    def output(self, x_q: Tensor, o: Tensor) -> Tensor:
        """Gate and project the attention result ``o`` [..., n, H, D] to [..., n, C]."""
        # The gate comes first so that its contiguous layout, not that of o, is kept.
        return self.linear_o(torch.sigmoid(self.linear_g(x_q)) * o.flatten(-2))


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Return softmax(q k^T / sqrt(D) + bias) v, computed in at least FP32 and cast back.

    q [B, H, n, D], k and v [B, H, m, D], bias broadcastable to [B, H, n, m].
    """
    with no_autocast(q.device):
        out = F.scaled_dot_product_attention(
            at_least_fp32(q), at_least_fp32(k), at_least_fp32(v), attn_mask=at_least_fp32(bias)
        )
    return out.to(q.dtype)


def head_bias(x: Tensor, weight: Tensor) -> Tensor:
    """Project x [B, *P, C] with weight [H, C] to attention biases [B, H, *P], stored in that order.

    Head-major storage is what attention reads; a linear layer would leave the heads innermost.
    """
    rows = x.flatten(1, -2).mT
    return torch.unflatten(torch.bmm(weight.expand(len(x), -1, -1), rows), -1, x.shape[1:-1])


def dropout_scale(x: Tensor, rate: float, axis: int, training: bool) -> Tensor | None:
    """Draw the factors of ``shared_dropout`` for x: 0 or 1/(1-rate), size 1 along ``axis``."""
    if not training or rate == 0:
        return None
    shape = list(x.shape)
    shape[axis] = 1
    return dropout_factors(x, shape, rate)


def shared_dropout(x: Tensor, rate: float, axis: int, training: bool) -> Tensor:
    """Drop entries of ``x`` with one mask for all positions along ``axis``; scale by 1/(1-rate)."""
    scale = dropout_scale(x, rate, axis, training)
    return x if scale is None else x * scale
