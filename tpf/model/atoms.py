"""Atom attention encoder and decoder (AF3 Alg 5, 6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpf.config import ModelConfig
from tpf.model.primitives import Init, Layer, LayerNorm, Linear, remat
from tpf.model.transformer import AtomConditioning, AtomTransformer
from tpf.model.windows import AtomLayout

N_ELEMENTS = 119
N_NAME_CHARS = 4 * 64


class RefAtomFeatureEmbedder(nn.Module):
    """Embed the reference conformers (AF3 Alg 5 steps 1-6).

    Returns c [B, L, c_atom] and p [B, W, n_query, n_key, c_atom_pair]; p is zero between different
    reference spaces.
    """

    def __init__(self, c_atom: int, c_atom_pair: int) -> None:
        super().__init__()
        self.linear_ref_pos = Linear(3, c_atom)
        self.linear_ref_charge = Linear(1, c_atom)
        self.linear_ref_mask = Linear(1, c_atom)
        self.linear_ref_element = Linear(N_ELEMENTS, c_atom)
        self.linear_ref_atom_chars = Linear(N_NAME_CHARS, c_atom)
        self.linear_ref_offset = Linear(3, c_atom_pair)
        self.linear_inv_sq_dists = Linear(1, c_atom_pair)
        self.linear_valid_mask = Linear(1, c_atom_pair)

    def forward(self, f: dict[str, Any], layout: AtomLayout) -> tuple[Tensor, Tensor]:
        dtype = self.linear_ref_pos.weight.dtype
        pos = f["ref_pos"].to(dtype)
        c = (
            self.linear_ref_pos(pos)
            + self.linear_ref_charge(torch.asinh(f["ref_charge"].to(dtype))[..., None])
            + self.linear_ref_mask(f["ref_mask"].to(dtype)[..., None])
            + self.linear_ref_element(f["ref_element"].to(dtype))
            + self.linear_ref_atom_chars(f["ref_atom_name_chars"].to(dtype).flatten(2))
        )
        pos = layout.pad(pos)
        space = layout.pad(f["ref_space_uid"][..., None])
        offset = layout.queries(pos)[..., None, :] - layout.gather_keys(pos)[:, :, None]
        space_k = layout.gather_key_ids(space[..., 0])[:, :, None]
        same = (layout.queries(space) == space_k).to(dtype)[..., None]
        inverse = 1 / (1 + offset.square().sum(-1, keepdim=True))
        p = self.linear_ref_offset(offset) + self.linear_inv_sq_dists(inverse)
        return layout.pad(c), (p + self.linear_valid_mask(same)) * same


class NoisyPositionEmbedder(nn.Module):
    """Embed the trunk and the noisy positions for the atoms (AF3 Alg 5 steps 8-11)."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.layer_norm_s = LayerNorm(cfg.c_s, offset=False)
        self.linear_s = Linear(cfg.c_s, cfg.c_atom, init="final")
        self.layer_norm_z = LayerNorm(cfg.c_z, offset=False)
        self.linear_z = Linear(cfg.c_z, cfg.c_atom_pair, init="final")
        self.linear_r = Linear(3, cfg.c_atom)

    def single(self, s_trunk: Tensor, layout: AtomLayout) -> Tensor:
        """[B, N, c_s] -> [B, L, c_atom]."""
        return layout.to_atoms(self.linear_s(self.layer_norm_s(s_trunk)))

    def pair(self, z: Tensor, layout: AtomLayout) -> Tensor:
        """[B, N, N, c_z] -> [B, W, n_query, n_key, c_atom_pair]."""
        return layout.gather_pairs(self.linear_z(self.layer_norm_z(z)))


@dataclass(frozen=True, eq=False)
class AtomFeatures:
    """Atoms and atom pairs without the noisy positions, and what blocks take of both."""

    c: Tensor
    """[B, L, c_atom]"""
    p: Tensor
    """[B, W, n_query, n_key, c_atom_pair]"""
    conditioning: AtomConditioning


class AtomEncoder(nn.Module):
    """Atom attention encoder (AF3 Alg 5); ``noisy`` adds the trunk and noisy positions."""

    def __init__(self, cfg: ModelConfig, c_token: int, *, noisy: bool) -> None:
        super().__init__()
        self.noisy, self.checkpoint = noisy, cfg.checkpoint
        c, c_pair = cfg.c_atom, cfg.c_atom_pair
        self.ref_atom_feature_embedder = RefAtomFeatureEmbedder(c, c_pair)
        if noisy:
            self.noisy_position_embedder = NoisyPositionEmbedder(cfg)
        self.linear_l = Linear(c, c_pair)
        self.linear_m = Linear(c, c_pair)
        inits: tuple[Init, ...] = ("relu", "relu", "final")
        self.pair_mlp = nn.Sequential(
            *(layer for init in inits for layer in (nn.ReLU(), Linear(c_pair, c_pair, init=init)))
        )
        self.atom_transformer = atom_transformer(cfg)
        self.linear_q = nn.Sequential(Linear(c, c_token), nn.ReLU())

    def features(
        self,
        f: dict[str, Any],
        layout: AtomLayout,
        s_trunk: Tensor | None = None,
        z: Tensor | None = None,
    ) -> AtomFeatures:
        """Embed the atoms; a noisy encoder takes s_trunk [B, N, c_s] and z [B, N, N, c_z]."""
        c, p = remat(self._embed, f, layout, s_trunk, z, enabled=self.checkpoint)
        return AtomFeatures(c, p, self.atom_transformer.condition(c, p, layout))

    def _embed(
        self, f: dict[str, Any], layout: AtomLayout, s_trunk: Tensor | None, z: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        c, p = self.ref_atom_feature_embedder(f, layout)
        if s_trunk is not None and z is not None:
            c = c + self.noisy_position_embedder.single(s_trunk, layout)
            p = p + self.noisy_position_embedder.pair(z, layout)
        activated = F.relu(c)
        p = p + layout.queries(self.linear_l(activated))[:, :, :, None]
        p = p + layout.gather_keys(self.linear_m(activated))[:, :, None]
        p = p + self.pair_mlp(p)
        query_mask = layout.queries(layout.mask[..., None])
        return c, p * (query_mask & layout.key_mask[:, :, None])[..., None]

    def forward(
        self, features: AtomFeatures, layout: AtomLayout, r: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return tokens [B, S, N, c_token] and atoms q [B, S, L, c_atom].

        r: scaled noisy positions [B, S, L, 3]; None (S = 1) without.
        """
        q = features.c[:, None]
        if r is not None:
            q = q + self.noisy_position_embedder.linear_r(r)
        q = self.atom_transformer(q, features.conditioning, layout)
        return layout.mean_of_atoms(self.linear_q(q)), q


class AtomDecoder(Layer):
    """Atom attention decoder (AF3 Alg 6): tokens [B, S, N, c_token] -> updates [B, S, L, 3]."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.linear_q_in = Linear(cfg.c_token_diffusion, cfg.c_atom)
        self.atom_transformer = atom_transformer(cfg)
        self.layer_norm = LayerNorm(cfg.c_atom, offset=False)
        self.linear_q_out = Linear(cfg.c_atom, 3, init="final")

    def condition(self, features: AtomFeatures, layout: AtomLayout) -> AtomConditioning:
        return self.atom_transformer.condition(features.c, features.p, layout)

    def forward(
        self, a: Tensor, q: Tensor, conditioning: AtomConditioning, layout: AtomLayout
    ) -> Tensor:
        q = q + layout.to_atoms(self.linear_q_in(a))
        q = self.atom_transformer(q, conditioning, layout)
        return self.linear_q_out(self.layer_norm(q))


def atom_transformer(cfg: ModelConfig) -> AtomTransformer:
    """Build the atom transformer that encoders and the decoder share in shape."""
    return AtomTransformer(
        cfg.c_atom,
        cfg.c_atom,
        cfg.c_atom_pair,
        blocks=cfg.atom_blocks,
        heads=cfg.atom_heads,
        checkpoint=cfg.checkpoint,
    )
