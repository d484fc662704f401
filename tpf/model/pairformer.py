"""Pair stack and Pairformer (AF3 Alg 12-15, 17, 24)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from torch import Tensor, nn

from tpf.config import ModelConfig
from tpf.kernels.ops import Impl, TriMulWeights, triangle_attention, triangle_multiplication
from tpf.kernels.pair_layers import (
    AttentionWeights,
    add_attention,
    add_transition,
    add_update,
    fusable,
    layer_norm,
)
from tpf.model.primitives import (
    MASKED,
    AttentionProjections,
    Blocks,
    Layer,
    LayerNorm,
    Linear,
    Transition,
    attention,
    dropout_scale,
    head_bias,
    remat,
    shared_dropout,
)

ROWS, COLUMNS = -3, -2
"""Pair axes along which the two dropouts share their mask: D_row the first, D_col the second."""


@dataclass(frozen=True, kw_only=True)
class PairDims:
    """Sizes of a pair stack."""

    channels: int
    c_hidden_mul: int
    heads: int
    head_dim: int
    expansion: int
    """Widening factor of the transition."""
    dropout: float
    impl: Impl
    """Backend of the triangle operators."""

    @classmethod
    def trunk(cls, cfg: ModelConfig) -> PairDims:
        return cls(
            channels=cfg.c_z,
            c_hidden_mul=cfg.c_hidden_mul,
            heads=cfg.tri_heads,
            head_dim=cfg.tri_dim,
            expansion=4,
            dropout=cfg.dropout_pair,
            impl=cast(Impl, cfg.impl),
        )

    @classmethod
    def template(cls, cfg: ModelConfig) -> PairDims:
        return cls(
            channels=cfg.c_t,
            c_hidden_mul=cfg.c_t,
            heads=cfg.template_heads,
            head_dim=cfg.template_dim,
            expansion=2,
            dropout=cfg.dropout_pair,
            impl=cast(Impl, cfg.impl),
        )


class TriangleMultiplication(Layer):
    """Triangle multiplicative update (AF3 Alg 12 outgoing, 13 incoming).

    z [B, N, N, C], mask [B, N, N] -> update [B, N, N, C].
    """

    def __init__(self, dims: PairDims, direction: Literal["outgoing", "incoming"]) -> None:
        super().__init__()
        c_z, c_hidden = dims.channels, dims.c_hidden_mul
        self.direction = direction
        self.impl: Impl = "torch" if dims.impl == "flex" else dims.impl
        self.layer_norm_in = LayerNorm(c_z)
        self.linear_a_p = Linear(c_z, c_hidden)
        self.linear_a_g = Linear(c_z, c_hidden, init="gating")
        self.linear_b_p = Linear(c_z, c_hidden)
        self.linear_b_g = Linear(c_z, c_hidden, init="gating")
        self.layer_norm_out = LayerNorm(c_hidden)
        self.linear_g = Linear(c_z, c_z, init="gating")
        self.linear_z = Linear(c_hidden, c_z, init="final")

    def forward(self, z: Tensor, mask: Tensor) -> Tensor:
        weights = TriMulWeights(
            layer_norm_in_weight=self.layer_norm_in.weight,
            layer_norm_in_bias=cast(Tensor, self.layer_norm_in.bias),
            linear_a_p=self.linear_a_p.weight,
            linear_a_g=self.linear_a_g.weight,
            linear_b_p=self.linear_b_p.weight,
            linear_b_g=self.linear_b_g.weight,
            layer_norm_out_weight=self.layer_norm_out.weight,
            layer_norm_out_bias=cast(Tensor, self.layer_norm_out.bias),
            linear_g=self.linear_g.weight,
            linear_z=self.linear_z.weight,
        )
        return triangle_multiplication(z, mask, weights, self.direction, impl=self.impl)


class TriangleAttention(Layer):
    """Triangle attention around the starting (AF3 Alg 14) or ending node (Alg 15).

    z [B, N, N, C], mask [B, N, N] -> update [B, N, N, C]. At the ending node slice j holds the
    queries i and keys k of z[:, j]; its bias is that of z[i, k] (as in DeepMind's code; the
    supplement prints z[k, i]). The transposition is a matter of strides: nothing is copied.
    """

    def __init__(self, dims: PairDims, node: Literal["starting", "ending"]) -> None:
        super().__init__()
        self.impl = dims.impl
        # Axes B, i, j, H, D of a projection in the order B, slice, H, position, D, and back.
        starting = node == "starting"
        self.to_slices = (0, 1, 3, 2, 4) if starting else (0, 2, 3, 1, 4)
        self.from_slices = (0, 1, 3, 2, 4) if starting else (0, 3, 1, 2, 4)
        self.starting = starting
        self.layer_norm = LayerNorm(dims.channels)
        self.linear_z = Linear(dims.channels, dims.heads)
        self.mha = AttentionProjections(dims.channels, dims.heads, dims.head_dim)

    def forward(self, z: Tensor, mask: Tensor) -> Tensor:
        z = self.layer_norm(z)
        bias = head_bias(z, self.linear_z.weight)[:, None]
        keys = mask if self.starting else mask.mT
        q, k, v = (x.permute(self.to_slices) for x in self.mha.qkv(z, z))
        o = triangle_attention(q, k, v, bias, keys[:, :, None, None], impl=self.impl)
        return self.mha.output(z, o.permute(self.from_slices))

    def weights(self) -> AttentionWeights:
        """Return the parameters as the fused layer takes them."""
        return AttentionWeights(
            norm_weight=self.layer_norm.weight,
            norm_bias=cast(Tensor, self.layer_norm.bias),
            bias=self.linear_z.weight,
            query=self.mha.linear_q.weight,
            key=self.mha.linear_k.weight,
            value=self.mha.linear_v.weight,
            gate=self.mha.linear_g.weight,
            out=self.mha.linear_o.weight,
        )


class PairStack(Layer):
    """The pair half of a Pairformer block (AF3 Alg 17 steps 1-5): z [B, N, N, C] -> z."""

    def __init__(self, dims: PairDims) -> None:
        super().__init__()
        self.dropout, self.impl = dims.dropout, dims.impl
        self.tri_mul_out = TriangleMultiplication(dims, "outgoing")
        self.tri_mul_in = TriangleMultiplication(dims, "incoming")
        self.tri_att_start = TriangleAttention(dims, "starting")
        self.tri_att_end = TriangleAttention(dims, "ending")
        self.pair_transition = Transition(dims.channels, dims.expansion)

    def forward(self, z: Tensor, mask: Tensor) -> Tensor:
        start, end = self.tri_att_start.weights(), self.tri_att_end.weights()
        transition = self.pair_transition.weights()
        if fusable(z, mask, self.impl, start, end, transition):
            for layer in (self.tri_mul_out, self.tri_mul_in):
                z = add_update(z, layer(z, mask), self._scale(z, ROWS))
            z = add_attention(z, mask, self._scale(z, ROWS), start, ending=False)
            z = add_attention(z, mask, self._scale(z, COLUMNS), end, ending=True)
            return add_transition(z, mask, transition)
        z = z + self._drop(self.tri_mul_out(z, mask), ROWS)
        z = z + self._drop(self.tri_mul_in(z, mask), ROWS)
        z = z + self._drop(self.tri_att_start(z, mask), ROWS)
        z = z + self._drop(self.tri_att_end(z, mask), COLUMNS)
        return z + self.pair_transition(z, mask)

    def _drop(self, update: Tensor, axis: int) -> Tensor:
        return shared_dropout(update, self.dropout, axis, self.training)

    def _scale(self, z: Tensor, axis: int) -> Tensor | None:
        return dropout_scale(z, self.dropout, axis, self.training)


class AttentionPairBias(Layer):
    """Attention over tokens with pair bias (AF3 Alg 24 without conditioning).

    s [B, N, c_s], z [B, N, N, c_z], mask [B, N] -> update [B, N, c_s].
    """

    def __init__(self, c_s: int, c_z: int, heads: int, impl: Impl = "torch") -> None:
        super().__init__()
        self.impl = impl
        self.layer_norm_a = LayerNorm(c_s)
        self.layer_norm_z = LayerNorm(c_z)
        self.linear_z = Linear(c_z, heads)
        self.mha = AttentionProjections(c_s, heads, c_s // heads, q_bias=True)

    def forward(self, s: Tensor, z: Tensor, mask: Tensor) -> Tensor:
        s = self._norm(self.layer_norm_a, s, mask)
        bias = head_bias(self._norm(self.layer_norm_z, z, mask), self.linear_z.weight)
        bias = bias.masked_fill(~mask[:, None, None], MASKED)
        q, k, v = (x.transpose(-3, -2) for x in self.mha.qkv(s, s))
        return self.mha.output(s, attention(q, k, v, bias).transpose(-3, -2))

    def _norm(self, norm: LayerNorm, x: Tensor, mask: Tensor) -> Tensor:
        weights = norm.weight, cast(Tensor, norm.bias)
        return layer_norm(x, *weights) if fusable(x, mask, self.impl, weights) else norm(x)


class PairformerBlock(nn.Module):
    """One Pairformer block (AF3 Alg 17)."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.pair_stack = PairStack(PairDims.trunk(cfg))
        self.impl = cast(Impl, cfg.impl)
        self.attn_pair_bias = AttentionPairBias(cfg.c_s, cfg.c_z, cfg.single_heads, self.impl)
        self.single_transition = Transition(cfg.c_s, 4)

    def forward(
        self, s: Tensor, z: Tensor, mask: Tensor, pair_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        z = self.pair_stack(z, pair_mask)
        s = s + self.attn_pair_bias(s, z, mask)
        return self.single_transition.add_to(s, mask, self.impl), z


class PairformerStack(nn.Module):
    """Pairformer blocks (AF3 Alg 17): s [B, N, c_s], z [B, N, N, c_z], mask [B, N] -> s, z."""

    def __init__(self, cfg: ModelConfig, n_blocks: int) -> None:
        super().__init__()
        self.checkpoint = cfg.checkpoint
        self.blocks: Blocks[PairformerBlock] = Blocks(PairformerBlock(cfg) for _ in range(n_blocks))

    def forward(self, s: Tensor, z: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        pair_mask = mask[:, :, None] & mask[:, None]
        for block in self.blocks:
            s, z = remat(block, s, z, mask, pair_mask, enabled=self.checkpoint)
        return s, z
