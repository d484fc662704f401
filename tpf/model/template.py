"""Template module (AF3 Alg 16)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpf.config import ModelConfig
from tpf.model.pairformer import PairDims, PairStack
from tpf.model.primitives import Blocks, Layer, LayerNorm, Linear, remat

N_DISTOGRAM = 39
N_RESTYPE = 32


class TemplatePairEmbedder(Layer):
    """Embed template features and the pair representation: z [B, N, N, c_z] -> [B, T, N, N, c_t].

    Geometry counts within a chain only.
    """

    def __init__(self, c_z: int, c_t: int) -> None:
        super().__init__()
        self.dgram_linear = Linear(N_DISTOGRAM, c_t)
        self.aatype_linear_1 = Linear(N_RESTYPE, c_t)
        self.aatype_linear_2 = Linear(N_RESTYPE, c_t)
        self.pseudo_beta_mask_linear = Linear(1, c_t)
        self.x_linear = Linear(1, c_t)
        self.y_linear = Linear(1, c_t)
        self.z_linear = Linear(1, c_t)
        self.backbone_mask_linear = Linear(1, c_t)
        self.layer_norm_z = LayerNorm(c_z)
        self.linear_z = Linear(c_z, c_t, init="relu")

    def forward(self, f: dict[str, Any], z: Tensor) -> Tensor:
        dtype = z.dtype
        asym_id: Tensor = f["asym_id"]
        same_chain = (asym_id[:, :, None] == asym_id[:, None])[:, None, :, :, None]
        pseudo_beta = f["template_pseudo_beta_mask"].to(dtype)
        backbone = f["template_backbone_frame_mask"].to(dtype)
        x, y, w = f["template_unit_vector"].to(dtype).split(1, -1)
        geometry = (
            self.dgram_linear(f["template_distogram"].to(dtype))
            + self.pseudo_beta_mask_linear(_pair_mask(pseudo_beta))
            + self.x_linear(x)
            + self.y_linear(y)
            + self.z_linear(w)
            + self.backbone_mask_linear(_pair_mask(backbone))
        )
        restype = f["template_restype"].to(dtype)
        types_i = self.aatype_linear_1(restype)[:, :, :, None]
        types_j = self.aatype_linear_2(restype)[:, :, None]
        pair = self.linear_z(self.layer_norm_z(z))[:, None]
        return geometry * same_chain + types_i + types_j + pair


def _pair_mask(mask: Tensor) -> Tensor:
    """[B, T, N] -> [B, T, N, N, 1]."""
    return (mask[..., :, None] * mask[..., None, :])[..., None]


class TemplatePairStack(Layer):
    """Pair blocks and a final layer norm: t [B*T, N, N, c_t], mask [B*T, N, N] -> t."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.checkpoint = cfg.checkpoint
        dims = PairDims.template(cfg)
        self.blocks: Blocks[PairStack] = Blocks(PairStack(dims) for _ in range(cfg.template_blocks))
        self.layer_norm = LayerNorm(cfg.c_t)

    def forward(self, t: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            t = remat(block, t, mask, enabled=self.checkpoint)
        return self.layer_norm(t)


class TemplateEmbedder(Layer):
    """Template module (AF3 Alg 16): z [B, N, N, c_z], mask [B, N] -> update [B, N, N, c_z]."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.template_pair_embedder = TemplatePairEmbedder(cfg.c_z, cfg.c_t)
        self.template_pair_stack = TemplatePairStack(cfg)
        self.linear_t = Linear(cfg.c_t, cfg.c_z)

    def forward(self, f: dict[str, Any], z: Tensor, mask: Tensor) -> Tensor:
        t = self.template_pair_embedder(f, z)
        n_batch, n_templates = t.shape[:2]
        pair_mask = (mask[:, :, None] & mask[:, None]).repeat_interleave(n_templates, 0)
        t = self.template_pair_stack(t.flatten(0, 1), pair_mask)
        mean = torch.unflatten(t, 0, (n_batch, n_templates)).mean(1)
        return self.linear_t(F.relu(mean))
