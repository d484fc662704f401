"""Diffusion transformer over tokens and over atom windows (AF3 Alg 7, 23-26).

The conditioning of a block is split from its use: ``modulation`` maps the conditioning signal to
gates and shifts, which are computed once where the signal is shared by all samples and steps.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpf.model.primitives import (
    MASKED,
    AttentionProjections,
    Blocks,
    Layer,
    LayerNorm,
    Linear,
    SwiGLU,
    attention,
    head_bias,
    remat,
)
from tpf.model.windows import AtomLayout


class Affine(NamedTuple):
    """Gate and shift of an adaptive layer norm."""

    gate: Tensor
    shift: Tensor


class Modulation(NamedTuple):
    """What one block takes from the conditioning signal, each [..., n, C]."""

    query: Affine
    key: Affine | None
    """Of the keys in atom blocks; None where keys share the norm of the queries."""
    attention_gate: Tensor
    transition: Affine
    transition_gate: Tensor


class AdaLN(nn.Module):
    """Adaptive layer norm (AF3 Alg 26): sigmoid(W_g LN(s) + b) * LN(a) + W_s LN(s)."""

    def __init__(self, c_a: int, c_s: int) -> None:
        super().__init__()
        self.layer_norm_s = LayerNorm(c_s, offset=False)
        self.linear_g = Linear(c_s, c_a, bias=True, init="final")
        self.linear_s = Linear(c_s, c_a, init="final")

    def modulation(self, s: Tensor) -> Affine:
        s = self.layer_norm_s(s)
        return Affine(torch.sigmoid(self.linear_g(s)), self.linear_s(s))

    def forward(self, a: Tensor, affine: Affine) -> Tensor:
        return torch.addcmul(affine.shift, affine.gate, F.layer_norm(a, a.shape[-1:]))


class ConditionedAttention(Layer):
    """Projections of attention with pair bias and conditioning (AF3 Alg 24).

    ``windowed`` blocks normalise queries and keys apart.
    """

    def __init__(self, c_a: int, c_s: int, c_z: int, heads: int, *, windowed: bool) -> None:
        super().__init__()
        self.windowed = windowed
        if windowed:
            self.layer_norm_a_q = AdaLN(c_a, c_s)
            self.layer_norm_a_k = AdaLN(c_a, c_s)
        else:
            self.layer_norm_a = AdaLN(c_a, c_s)
        self.linear_ada_out = Linear(c_s, c_a, bias=True, init="gating_ada_zero")
        self.linear_z = Linear(c_z, heads)
        self.mha = AttentionProjections(c_a, heads, c_a // heads, q_bias=True, out="default")

    def forward(
        self, a: Tensor, mod: Modulation, bias: Tensor, layout: AtomLayout | None
    ) -> Tensor:
        """Update a [B, S, n, C]; bias [B, H, n, n], or [B, H, W, n_query, n_key] with windows."""
        if layout is None or mod.key is None:
            a_q = a_k = self.layer_norm_a(a, mod.query)
        else:
            a_q, a_k = self.layer_norm_a_q(a, mod.query), self.layer_norm_a_k(a, mod.key)
        q, k, v = (x.transpose(2, 3) for x in self.mha.qkv(a_q, a_k))
        bias = bias[:, None].expand(-1, a.shape[1], *(-1,) * (bias.dim() - 1))
        if layout is not None:  # windows become heads: [B, S, H, W, n, D]
            q, k, v = layout.queries(q), layout.gather_keys(k), layout.gather_keys(v)
        # Batch and samples merge, as do heads and windows; with B = 1 the bias is not copied.
        o = attention(*(x.flatten(2, -3).flatten(0, 1) for x in (q, k, v, bias)))
        o = o.reshape(*a.shape[:2], self.mha.heads, -1, o.shape[-1]).transpose(2, 3)
        return self.mha.output(a_q, o) * mod.attention_gate


class ConditionedTransition(Layer):
    """Transition with conditioning (AF3 Alg 25)."""

    def __init__(self, c_a: int, c_s: int, expansion: int = 2) -> None:
        super().__init__()
        self.layer_norm = AdaLN(c_a, c_s)
        self.swiglu = SwiGLU(c_a, expansion * c_a)
        self.linear_g = Linear(c_s, c_a, bias=True, init="gating_ada_zero")
        self.linear_out = Linear(expansion * c_a, c_a)

    def forward(self, a: Tensor, mod: Modulation, mask: Tensor) -> Tensor:
        update = self.linear_out(self.swiglu(self.layer_norm(a, mod.transition)))
        return update * mod.transition_gate * mask[..., None]


class ConditionedBlock(Layer):
    """Attention, then transition, each added to a (AF3 Alg 23; OpenFold3's sequential order)."""

    def __init__(self, c_a: int, c_s: int, c_z: int, heads: int, *, windowed: bool) -> None:
        super().__init__()
        self.attention_pair_bias = ConditionedAttention(c_a, c_s, c_z, heads, windowed=windowed)
        self.conditioned_transition = ConditionedTransition(c_a, c_s)

    def modulation(self, s: Tensor) -> Modulation:
        """Map the conditioning signal s [..., n, c_s] to gates and shifts."""
        att, transition = self.attention_pair_bias, self.conditioned_transition
        query = att.layer_norm_a_q if att.windowed else att.layer_norm_a
        return Modulation(
            query=query.modulation(s),
            key=att.layer_norm_a_k.modulation(s) if att.windowed else None,
            attention_gate=torch.sigmoid(att.linear_ada_out(s)),
            transition=transition.layer_norm.modulation(s),
            transition_gate=torch.sigmoid(transition.linear_g(s)),
        )

    def forward(
        self,
        a: Tensor,
        mod: Modulation,
        bias: Tensor,
        mask: Tensor,
        layout: AtomLayout | None = None,
    ) -> Tensor:
        a = a + self.attention_pair_bias(a, mod, bias, layout)
        return a + self.conditioned_transition(a, mod, mask)

    def conditioned(self, a: Tensor, s: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
        # The view makes the block's gradient of s one sum, before that of other blocks is added.
        return self(a, self.modulation(s.view_as(s)), bias, mask)


class ConditionedStack(Layer):
    """Blocks that share one layer norm of the pair representation."""

    windowed: ClassVar[bool]

    def __init__(
        self, c_a: int, c_s: int, c_z: int, *, blocks: int, heads: int, checkpoint: bool
    ) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.layer_norm_z = LayerNorm(c_z, offset=False)
        self.blocks: Blocks[ConditionedBlock] = Blocks(
            ConditionedBlock(c_a, c_s, c_z, heads, windowed=self.windowed) for _ in range(blocks)
        )

    def pair_biases(self, z: Tensor, key_mask: Tensor) -> list[Tensor]:
        """Return each block's bias [B, H, *P] from z [B, *P, c_z], masked where not key_mask.

        ``key_mask`` broadcasts to [B, 1, *P].
        """
        weights: list[Tensor] = [b.attention_pair_bias.linear_z.weight for b in self.blocks]
        bias = head_bias(self.layer_norm_z(z), torch.cat(weights))
        return list(bias.masked_fill(~key_mask, MASKED).chunk(len(weights), dim=1))


class DiffusionTransformer(ConditionedStack):
    """Attention over all tokens (AF3 Alg 23).

    a [B, S, N, C], s [B, S, N, c_s], biases per block [B, H, N, N], mask [B, N] -> a.
    """

    windowed = False

    def forward(self, a: Tensor, s: Tensor, biases: list[Tensor], mask: Tensor) -> Tensor:
        for block, bias in zip(self.blocks, biases, strict=True):
            a = remat(block.conditioned, a, s, bias, mask[:, None], enabled=self.checkpoint)
        return a


class AtomConditioning(NamedTuple):
    """What the blocks of an atom transformer take from the atom features, one entry per block."""

    modulations: list[Modulation]
    biases: list[Tensor]


class AtomTransformer(ConditionedStack):
    """Attention in atom windows (AF3 Alg 7): q [B, S, L, c_atom] -> q."""

    windowed = True

    def condition(self, c: Tensor, p: Tensor, layout: AtomLayout) -> AtomConditioning:
        """Prepare from c [B, L, c_atom] and p [B, W, n_query, n_key, c_atom_pair]."""
        return AtomConditioning(
            [block.modulation(c[:, None]) for block in self.blocks],
            self.pair_biases(p, layout.key_mask[:, None, :, None]),
        )

    def forward(self, q: Tensor, cond: AtomConditioning, layout: AtomLayout) -> Tensor:
        mask = layout.mask[:, None]
        for block, mod, bias in zip(self.blocks, *cond, strict=True):
            q = remat(block, q, mod, bias, mask, layout, enabled=self.checkpoint)
        return q
