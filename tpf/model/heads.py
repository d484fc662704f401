"""Distogram and confidence heads (AF3 Alg 1 step 17, Alg 31)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tpf.config import ModelConfig
from tpf.geometry import gather_atoms
from tpf.model.diffusion import Trunk
from tpf.model.pairformer import PairformerStack
from tpf.model.primitives import Layer, LayerNorm, Linear, no_autocast
from tpf.model.windows import gather_rows

MAX_ATOMS_PER_TOKEN = 23
DISTOGRAM_BINS, PLDDT_BINS, PAE_BINS, PDE_BINS, RESOLVED_BINS = 64, 50, 64, 64, 2
DISTANCE_BINS, DISTANCE_MIN, DISTANCE_MAX = 39, 3.25, 50.75
"""Bins of the distances that the confidence head sees, Angstrom; the last bin is open."""


class DistogramHead(Layer):
    """Distances of representative atoms: z [B, N, N, c_z] -> logits [B, N, N, 64], symmetric."""

    def __init__(self, c_z: int) -> None:
        super().__init__()
        self.linear = Linear(c_z, DISTOGRAM_BINS, init="final")

    def forward(self, z: Tensor) -> Tensor:
        logits = self.linear(z)
        return logits + logits.transpose(1, 2)


class NormedHead(Layer):
    """Layer norm and linear map to logits."""

    def __init__(self, channels: int, n_logits: int) -> None:
        super().__init__()
        self.layer_norm = LayerNorm(channels)
        self.linear = Linear(channels, n_logits, init="final")

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.layer_norm(x))


class PairformerEmbedding(nn.Module):
    """Trunk and predicted distances to confidence representations (AF3 Alg 31 steps 1-4)."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.linear_i = Linear(cfg.c_s_input, cfg.c_z)
        self.linear_j = Linear(cfg.c_s_input, cfg.c_z)
        self.linear_distance = Linear(DISTANCE_BINS, cfg.c_z)
        self.pairformer_stack = PairformerStack(cfg, cfg.confidence_blocks)

    def forward(self, trunk: Trunk, x_rep: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """x_rep: representative atoms [B, N, 3]; returns s [B, N, c_s] and z [B, N, N, c_z]."""
        z = trunk.z + self.linear_i(trunk.s_input)[:, :, None]
        z = z + self.linear_j(trunk.s_input)[:, None]
        z = z + self.linear_distance(distance_bins(x_rep))
        s, z = self.pairformer_stack(trunk.s, z, mask)
        return s, z


def distance_bins(x: Tensor) -> Tensor:
    """One-hot of pair distances, compared on squares: x [B, N, 3] -> [B, N, N, 39]."""
    lower = torch.linspace(
        DISTANCE_MIN, DISTANCE_MAX, DISTANCE_BINS, device=x.device, dtype=x.dtype
    ).square()
    upper = torch.cat([lower[1:], lower.new_full((1,), torch.inf)])
    square = (x[:, :, None] - x[:, None]).square().sum(-1, keepdim=True)
    return ((square > lower) & (square < upper)).to(x.dtype)


class AuxHeads(nn.Module):
    """All heads on top of the trunk."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.pairformer_embedding = PairformerEmbedding(cfg)
        self.pae = NormedHead(cfg.c_z, PAE_BINS)
        self.pde = NormedHead(cfg.c_z, PDE_BINS)
        self.plddt = NormedHead(cfg.c_s, MAX_ATOMS_PER_TOKEN * PLDDT_BINS)
        self.experimentally_resolved = NormedHead(cfg.c_s, MAX_ATOMS_PER_TOKEN * RESOLVED_BINS)
        self.distogram = DistogramHead(cfg.c_z)

    def confidence(self, f: dict[str, Any], trunk: Trunk, x: Tensor) -> dict[str, Tensor]:
        """Predict confidence of structures x [B, S, A, 3]; gradients stop at trunk and x.

        Samples go through the pair stack one by one, which bounds the memory. Returns logits
        plddt [B, S, A, 50], resolved [B, S, A, 2], pae and pde [B, S, N, N, 64].
        """
        detached = Trunk(*(part.detach() for part in trunk))
        with no_autocast(x.device):
            x_rep = gather_atoms(x.detach(), f["rep_atom_index"])
            samples = [self._one(f, detached, rep) for rep in x_rep.unbind(1)]
        return {name: torch.stack([sample[name] for sample in samples], 1) for name in samples[0]}

    def _one(self, f: dict[str, Any], trunk: Trunk, x_rep: Tensor) -> dict[str, Tensor]:
        s, z = self.pairformer_embedding(trunk, x_rep, f["token_mask"] > 0)
        pde = self.pde(z)
        slot = atom_slots(f)
        return {
            "plddt": _per_atom(self.plddt(s), slot),
            "resolved": _per_atom(self.experimentally_resolved(s), slot),
            "pae": self.pae(z),
            "pde": pde + pde.transpose(1, 2),
        }


def atom_slots(f: dict[str, Any]) -> Tensor:
    """Return the row of each atom [B, A] in a table of 23 rows per token."""
    token: Tensor = f["atom_to_token_index"].long()
    first: Tensor = f["start_atom_index"].long().gather(1, token)
    place = torch.arange(token.shape[1], device=token.device) - first
    return token * MAX_ATOMS_PER_TOKEN + place.clamp(0, MAX_ATOMS_PER_TOKEN - 1)


def _per_atom(logits: Tensor, slot: Tensor) -> Tensor:
    """Pick the rows of real atoms: logits [B, N, 23 * bins] -> [B, A, bins]."""
    table = torch.unflatten(logits, -1, (MAX_ATOMS_PER_TOKEN, -1)).flatten(1, 2)
    return gather_rows(table, slot)
