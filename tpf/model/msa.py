"""MSA sampling, embedding and module (AF3 Alg 8-10)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tpf.config import ModelConfig
from tpf.model.pairformer import ROWS, PairDims, PairStack
from tpf.model.primitives import (
    MASKED,
    Blocks,
    Layer,
    LayerNorm,
    Linear,
    Transition,
    at_least_fp32,
    head_bias,
    no_autocast,
    remat,
    shared_dropout,
)

C_MSA = 34
"""MSA features: residue type 32, has deletion, deletion value."""


class MSAEmbedder(nn.Module):
    """Draw MSA rows and embed them (AF3 Alg 8 steps 1-4).

    Up to ``cfg.msa_rows`` of the non-empty rows, at random; the rest is filled with empty rows.
    Features and s_input [B, N, c_s_input] -> m [B, M, N, c_m], mask [B, M, N].
    """

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.rows = cfg.msa_rows
        self.linear_m = Linear(C_MSA, cfg.c_m)
        self.linear_s_input = Linear(cfg.c_s_input, cfg.c_m)

    def forward(self, f: dict[str, Any], s_input: Tensor) -> tuple[Tensor, Tensor]:
        msa, deletion, value, mask = (
            f[name] for name in ("msa", "has_deletion", "deletion_value", "msa_mask")
        )
        if mask.shape[1] > self.rows:
            empty = ~(mask > 0).any(-1)
            order = torch.rand(empty.shape, device=mask.device) + empty
            rows = order.topk(self.rows, dim=1, largest=False).indices
            batch = torch.arange(len(rows), device=mask.device)[:, None]
            msa, deletion, value, mask = (x[batch, rows] for x in (msa, deletion, value, mask))
        dtype = s_input.dtype
        features = [msa.to(dtype), deletion.to(dtype)[..., None], value.to(dtype)[..., None]]
        m = self.linear_m(torch.cat(features, -1)) + self.linear_s_input(s_input)[:, None]
        return m, mask > 0


class OuterProductMean(Layer):
    """Outer product mean (AF3 Alg 9): m [B, M, N, c_m], mask [B, M, N] -> [B, N, N, c_z]."""

    def __init__(self, c_m: int, c_hidden: int, c_z: int) -> None:
        super().__init__()
        self.layer_norm = LayerNorm(c_m)
        self.linear_1 = Linear(c_m, c_hidden)
        self.linear_2 = Linear(c_m, c_hidden)
        self.linear_out = Linear(c_hidden * c_hidden, c_z, bias=True, init="final")

    def forward(self, m: Tensor, mask: Tensor) -> Tensor:
        m = self.layer_norm(m)
        a = self.linear_1(m) * mask[..., None]
        b = self.linear_2(m) * mask[..., None]
        n, c = a.shape[-2:]
        # [B, (i, c), M] x [B, M, (j, d)]: one matrix product over the rows.
        outer = torch.bmm(a.flatten(2).mT, b.flatten(2)).view(-1, n, c, n, c)
        update = self.linear_out(outer.transpose(2, 3).flatten(-2))
        with no_autocast(m.device):  # counts must stay exact
            rows = mask.to(at_least_fp32(m).dtype)
            count = torch.bmm(rows.mT, rows)
        return update / (count[..., None] + 1e-3).to(update.dtype)


class PairWeightedAveraging(Layer):
    """MSA pair-weighted averaging (AF3 Alg 10).

    m [B, M, N, c_m], z [B, N, N, c_z], mask [B, N] -> update [B, M, N, c_m].
    """

    def __init__(self, c_m: int, c_z: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.layer_norm_m = LayerNorm(c_m)
        self.layer_norm_z = LayerNorm(c_z)
        self.linear_z = Linear(c_z, heads)
        self.linear_v = Linear(c_m, heads * head_dim)
        self.linear_g = Linear(c_m, heads * head_dim, init="gating")
        self.linear_o = Linear(heads * head_dim, c_m, init="final")

    def forward(self, m: Tensor, z: Tensor, mask: Tensor) -> Tensor:
        m = self.layer_norm_m(m)
        logits = head_bias(self.layer_norm_z(z), self.linear_z.weight)
        logits = at_least_fp32(logits).masked_fill(~mask[:, None, None], MASKED)
        weights = logits.softmax(-1).to(m.dtype)
        v = torch.unflatten(self.linear_v(m), -1, (self.heads, -1))
        rows, head_dim = v.shape[1], v.shape[-1]
        # [B, H, i, j] x [B, H, j, (M, D)]: one matrix product per head for all rows.
        o = weights @ v.permute(0, 3, 2, 1, 4).flatten(-2)
        o = torch.unflatten(o, -1, (rows, head_dim)).permute(0, 3, 2, 1, 4).flatten(-2)
        return self.linear_o(torch.sigmoid(self.linear_g(m)) * o)


class MSABlock(nn.Module):
    """One MSA block (AF3 Alg 8 steps 6-9); the last block has no MSA update."""

    def __init__(self, cfg: ModelConfig, *, last: bool) -> None:
        super().__init__()
        self.last, self.dropout = last, cfg.dropout_msa
        if not last:
            self.msa_att_row = PairWeightedAveraging(
                cfg.c_m, cfg.c_z, cfg.msa_heads, cfg.msa_head_dim
            )
            self.msa_transition = Transition(cfg.c_m, 4)
        self.outer_product_mean = OuterProductMean(cfg.c_m, cfg.c_opm, cfg.c_z)
        self.pair_stack = PairStack(PairDims.trunk(cfg))

    def forward(
        self, m: Tensor, z: Tensor, msa_mask: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        z = z + self.outer_product_mean(m, msa_mask)
        if not self.last:
            update = self.msa_att_row(m, z, mask)
            m = m + shared_dropout(update, self.dropout, ROWS, self.training)
            m = m + self.msa_transition(m, msa_mask)
        return m, self.pair_stack(z, mask[:, :, None] & mask[:, None])


class MSAModule(Layer):
    """MSA module (AF3 Alg 8): m [B, M, N, c_m], z [B, N, N, c_z] and their masks -> z."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.checkpoint = cfg.checkpoint
        last = cfg.msa_blocks - 1
        self.blocks: Blocks[MSABlock] = Blocks(
            MSABlock(cfg, last=i == last) for i in range(cfg.msa_blocks)
        )

    def forward(self, m: Tensor, z: Tensor, msa_mask: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            m, z = remat(block, m, z, msa_mask, mask, enabled=self.checkpoint)
        return z
