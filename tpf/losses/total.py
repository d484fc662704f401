"""The training loss: terms, weights per sample, and their sum (spec model.md section 5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpf.config import LossConfig
from tpf.losses import confidence, diffusion
from tpf.permutation import Aligned

CONFIDENCE_TERMS = ("plddt", "pde", "pae", "resolved")
TERMS = ("mse", "bond", "smooth_lddt", "distogram", *CONFIDENCE_TERMS)
_FEATURE_NAMES = {"resolved": "experimentally_resolved"}
"""Names under ``loss_weights`` in the features, where they differ from the terms'."""


@dataclass(frozen=True)
class Loss:
    """A loss to call ``backward`` on, and what it is made of."""

    total: Tensor
    """Scalar; a constant 0, whose backward pass reaches nothing, if nothing has a weight."""
    terms: dict[str, Tensor]
    """Unweighted value of every evaluated term for every batch entry, [B]."""
    weights: dict[str, Tensor]
    """Weight of every evaluated term for every batch entry, [B]; 0 leaves the entry out."""


def sample_weights(
    f: Mapping[str, Any], cfg: LossConfig, valid: Tensor | None = None
) -> dict[str, Tensor]:
    """Return the weight [B] of every term for every batch entry.

    It is the entry's own ``loss_weights`` feature, or the configured weight if that is absent. The
    confidence terms get 0 unless the resolution is in the configured range (an unknown one, NaN,
    is not). All are 0 for an entry that is not ``valid`` [B].
    """
    mask = f["token_mask"]
    ones = torch.ones(mask.shape[0], device=mask.device)
    own: Mapping[str, Tensor] = f.get("loss_weights") or {}
    resolution = f.get("resolution")
    known = torch.zeros_like(ones)
    if resolution is not None:
        r = resolution.view(-1)
        inside = (r >= cfg.confidence_min_resolution) & (r <= cfg.confidence_max_resolution)
        known = inside.to(ones.dtype)
    weights = {}
    for term in TERMS:
        given = own.get(_FEATURE_NAMES.get(term, term))
        weight = getattr(cfg, term) * ones if given is None else given.view(-1)
        if term in CONFIDENCE_TERMS:
            weight = weight * known
        weights[term] = weight if valid is None else weight * valid
    return weights


def diffusion_loss(
    f: Mapping[str, Any],
    x: Tensor,
    noised: diffusion.Noised,
    positions: Tensor,
    resolved: Tensor,
    cfg: LossConfig,
    *,
    sigma_data: float = 16.0,
    chunk: int = 4,
) -> dict[str, Tensor]:
    """Return the means over copies of ``mse``, ``bond``, ``smooth_lddt``, [B] each.

    x [B, S, A, 3] is the denoised ``noised``; positions [B, A, 3] and resolved [B, A] the ground
    truth in the order of the prediction. mse and bond carry the noise weight of each copy. Terms
    with a configured weight of 0 are not evaluated.
    """
    with torch.autocast(x.device.type, enabled=False):
        weight = diffusion.noise_weight(noised.t, sigma_data)
        terms = {}
        if cfg.mse:
            atom_weights = diffusion.mse_weights(f)
            mse = diffusion.aligned_mse(x, noised.positions, resolved, atom_weights)
            terms["mse"] = (weight * mse).mean(-1)
        if cfg.bond:
            bond = diffusion.bond_loss(x, positions, resolved, f)
            terms["bond"] = (weight * bond).mean(-1)
        if cfg.smooth_lddt:
            nucleotide = diffusion.atom_flags(f, "is_dna", "is_rna")
            lddt = diffusion.smooth_lddt(x, positions, resolved, nucleotide, chunk)
            terms["smooth_lddt"] = lddt.mean(-1)
    return terms


def distogram_loss(f: Mapping[str, Any], logits: Tensor, aligned: Aligned) -> dict[str, Tensor]:
    """Return the term ``distogram`` [B] of logits [B, N, N, 64], the mean over aligned samples."""
    with torch.autocast(logits.device.type, enabled=False):
        loss = confidence.distogram_loss(f, logits, aligned.positions, aligned.resolved)
    return {"distogram": loss.mean(-1)}


def confidence_loss(
    f: Mapping[str, Any], logits: Mapping[str, Tensor], x: Tensor, aligned: Aligned
) -> dict[str, Tensor]:
    """Return the means over rollout samples of the four confidence terms, [B] each.

    logits as made by ``Model.confidence`` for the rollout x [B, S, A, 3].
    """
    with torch.autocast(x.device.type, enabled=False):
        structures = (x.detach().float(), aligned.positions, aligned.resolved)
        losses = {
            "plddt": confidence.plddt_loss(f, logits["plddt"], *structures),
            "pde": confidence.pde_loss(f, logits["pde"], *structures),
            "pae": confidence.pae_loss(f, logits["pae"], *structures),
            "resolved": confidence.resolved_loss(f, logits["resolved"], aligned.resolved),
        }
    return {name: loss.mean(-1) for name, loss in losses.items()}


def total(
    f: Mapping[str, Any],
    terms: Mapping[str, Tensor],
    cfg: LossConfig,
    valid: Tensor | None = None,
) -> Loss:
    """Combine terms [B] into one loss.

    Every term contributes the mean of weight times value over the batch entries with a weight
    above 0. A term without such an entry stays out of the graph, so that parameters which only
    it reaches keep ``grad = None``. ``valid`` is ``Aligned.valid``.
    """
    weights = sample_weights(f, cfg, valid)
    parts = []
    for name, value in terms.items():
        entries = (weights[name] > 0).nonzero().squeeze(-1)
        if entries.numel():
            parts.append((weights[name][entries] * value[entries]).mean())
    if not parts:
        parts.append(torch.zeros((), device=f["token_mask"].device, requires_grad=True))
    return Loss(torch.stack(parts).sum(), dict(terms), {name: weights[name] for name in terms})
