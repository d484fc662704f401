"""Losses of the distogram and confidence heads (AF3 SI 4.3-4.4).

Shapes: B batch, S rollout samples, N tokens, A atoms. Targets carry no gradient. Every loss is a
mean cross-entropy of one batch entry and sample, [B, S]; 0 where nothing is resolved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tpf.geometry import (
    express_in_frames,
    gather_atoms,
    gather_flags,
    length,
    pair_distances,
    token_frames,
)

_LDDT_THRESHOLDS = (0.5, 1.0, 2.0, 4.0)
_LDDT_RADIUS, _LDDT_RADIUS_NUCLEOTIDE = 15.0, 30.0
DISTOGRAM_RANGE = (2.0, 22.0)
"""Angstrom, 64 bins; the end bins are open."""
PAIR_ERROR_RANGE = (0.0, 32.0)
"""Angstrom, 64 bins of PAE and PDE."""


def nearest_bin(value: Tensor, low: float, high: float, n_bins: int) -> Tensor:
    """Return the bin of [low, high] whose centre is nearest; values outside take an end bin.

    NaN takes some valid bin: the loss is then NaN by its logits, not an index error.
    """
    width = (high - low) / n_bins
    return ((value - low) / width).floor().long().clamp(0, n_bins - 1)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Return -log softmax(logits)[target] of logits [..., C] and target [...]."""
    log_probability = logits.float().log_softmax(-1)
    return -log_probability.gather(-1, target.unsqueeze(-1)).squeeze(-1)


def masked_mean(value: Tensor, mask: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return the mean of value where mask over dims; 0 where the mask is empty."""
    weight = mask.to(value.dtype).expand_as(value)
    kept = torch.where(weight > 0, value, 0.0)
    return kept.sum(dims) / weight.sum(dims).clamp_min(1)


def distogram_loss(
    f: Mapping[str, Any], logits: Tensor, positions: Tensor, resolved: Tensor
) -> Tensor:
    """Return the distogram loss over resolved pairs of representative atoms (SI 4.4).

    logits [B, N, N, 64]; ground truth positions [B, S, A, 3] and resolved [B, S, A].
    """
    x, known = _representatives(f, positions, resolved)
    target = nearest_bin(pair_distances(x), *DISTOGRAM_RANGE, logits.shape[-1])
    expanded = logits.unsqueeze(1).expand(-1, x.shape[1], -1, -1, -1)
    return masked_mean(cross_entropy(expanded, target), _pairs(known), (-2, -1))


def plddt_loss(
    f: Mapping[str, Any], logits: Tensor, x: Tensor, positions: Tensor, resolved: Tensor
) -> Tensor:
    """Return the pLDDT loss over resolved atoms (SI 4.3.1).

    logits [B, S, A, 50]; prediction x and ground truth positions [B, S, A, 3]; resolved
    [B, S, A]. An atom without a partner in the ground truth has no target and is left out.
    """
    score, known = lddt_targets(f, x, positions, resolved)
    target = nearest_bin(score, 0.0, 1.0, logits.shape[-1])
    return masked_mean(cross_entropy(logits, target), known, (-1,))


@torch.no_grad()
def lddt_targets(
    f: Mapping[str, Any], x: Tensor, positions: Tensor, resolved: Tensor
) -> tuple[Tensor, Tensor]:
    """Return each atom's lDDT to its partners and whether it has any, both [B, S, A].

    Partners are the resolved CA and C1' of standard polymer tokens within 15 A (30 A for C1') in
    the ground truth; an atom is no partner of itself.
    """
    nucleic = (f["is_rna"] > 0) | (f["is_dna"] > 0)
    standard = (f["token_mask"] > 0) & (f["is_atomized"] == 0)
    centre = torch.where(standard & (nucleic | (f["is_protein"] > 0)), f["center_atom_index"], -1)
    radius = torch.where(nucleic, _LDDT_RADIUS_NUCLEOTIDE, _LDDT_RADIUS)[:, None, None]
    distance_gt = pair_distances(positions, gather_atoms(positions, centre))
    error = (pair_distances(x, gather_atoms(x, centre)) - distance_gt).abs()
    other = torch.arange(x.shape[2], device=x.device)[:, None] != centre[:, None, None]
    partner = gather_flags(resolved, centre).unsqueeze(-2) > 0
    pair = (distance_gt < radius) & other & partner & (resolved > 0).unsqueeze(-1)
    score = torch.zeros_like(error)
    for threshold in _LDDT_THRESHOLDS:
        score += (error < threshold) / len(_LDDT_THRESHOLDS)
    count = pair.sum(-1)
    return (score * pair).sum(-1) / count.clamp_min(1), count > 0


def pde_loss(
    f: Mapping[str, Any], logits: Tensor, x: Tensor, positions: Tensor, resolved: Tensor
) -> Tensor:
    """Return the distance error loss over resolved pairs of representative atoms (SI 4.3.3).

    logits [B, S, N, N, 64]; the other arguments as in ``plddt_loss``.
    """
    truth, known = _representatives(f, positions, resolved)
    predicted, _ = _representatives(f, x, resolved)
    error = (pair_distances(predicted) - pair_distances(truth)).abs()
    target = nearest_bin(error, *PAIR_ERROR_RANGE, logits.shape[-1])
    return masked_mean(cross_entropy(logits, target), _pairs(known), (-2, -1))


def pae_loss(
    f: Mapping[str, Any], logits: Tensor, x: Tensor, positions: Tensor, resolved: Tensor
) -> Tensor:
    """Return the aligned error loss: representative atom j in the frame of i (SI 4.3.2).

    logits [B, S, N, N, 64] indexed (i, j); the other arguments as in ``plddt_loss``. Frames must
    be valid in both structures; each structure chooses the neighbours of its atomised tokens.
    """
    error, mask = aligned_errors(f, x, positions, resolved)
    target = nearest_bin(error, *PAIR_ERROR_RANGE, logits.shape[-1])
    return masked_mean(cross_entropy(logits, target), mask, (-2, -1))


@torch.no_grad()
def aligned_errors(
    f: Mapping[str, Any], x: Tensor, positions: Tensor, resolved: Tensor
) -> tuple[Tensor, Tensor]:
    """Return errors in angstrom and whether they count, both [B, S, N, N] (AF3 Alg 30)."""
    present = (f["atom_mask"] > 0).unsqueeze(1).expand(x.shape[:-1])
    frames, frames_gt = token_frames(f, x, present), token_frames(f, positions, resolved)
    truth, known = _representatives(f, positions, resolved)
    predicted, _ = _representatives(f, x, resolved)
    difference = express_in_frames(predicted, frames) - express_in_frames(truth, frames_gt)
    mask = (frames.valid & frames_gt.valid).unsqueeze(-1) & known.unsqueeze(-2)
    return length(difference), mask


def resolved_loss(f: Mapping[str, Any], logits: Tensor, resolved: Tensor) -> Tensor:
    """Return the experimentally-resolved loss over all atoms (SI 4.3.4).

    logits [B, S, A, 2] (unresolved, resolved); resolved [B, S, A].
    """
    mask = (f["atom_mask"] > 0).unsqueeze(1)
    return masked_mean(cross_entropy(logits, (resolved > 0).long()), mask, (-1,))


@torch.no_grad()
def _representatives(
    f: Mapping[str, Any], positions: Tensor, resolved: Tensor
) -> tuple[Tensor, Tensor]:
    """Return representative atom positions [B, S, N, 3] and whether resolved [B, S, N]."""
    index = torch.where(f["token_mask"] > 0, f["rep_atom_index"], -1)
    return gather_atoms(positions, index), gather_flags(resolved, index) > 0


def _pairs(known: Tensor) -> Tensor:
    return known.unsqueeze(-1) & known.unsqueeze(-2)
