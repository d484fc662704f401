"""Confidence of a prediction from head logits, and the ranking of samples (metrics.md A7)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tpf.metrics.structure import CLASSES, Scored, Structure

PLDDT_RANGE = (0.0, 1.0)
ERROR_RANGE = (0.0, 32.0)
"""PAE and PDE, Angstrom."""
DISTOGRAM_RANGE = (2.0, 22.0)
CONTACT = 8.0
"""Angstrom; bins of the distogram up to here weigh the gPDE."""
MIN_TM_LENGTH = 19
ROWS = 64
"""Token rows of a pair head taken at a time."""


@dataclass(frozen=True, kw_only=True)
class Confidence:
    """Logits of one sample; the distogram is that of the trunk and shared by all samples."""

    plddt: Tensor
    """[A, 50]"""
    pae: Tensor
    """[N, N, 64] error of token j in the frame of token i."""
    pde: Tensor
    """[N, N, 64]"""
    distogram: Tensor
    """[N, N, 64]"""
    has_frame: Tensor
    """[N] bool, the predicted token has a valid frame."""


def bin_centers(n: int, limits: tuple[float, float], like: Tensor) -> Tensor:
    """Return the centres [n] of equal bins between the limits."""
    low, high = limits
    width = (high - low) / n
    return low + (torch.arange(n, device=like.device, dtype=torch.float32) + 0.5) * width


def softmax_mean(logits: Tensor, values: Tensor) -> Tensor:
    """Return the mean [*] of ``values`` [bins] over the softmax of logits [*, bins] in FP32.

    Works on slices of the first axis, so that no second copy of the logits is held.
    """
    parts = torch.split(logits, ROWS)
    return torch.cat([part.float().softmax(-1) @ values for part in parts])


def expected(logits: Tensor, limits: tuple[float, float]) -> Tensor:
    """Return the expectation [*] over the bins of logits [*, bins] between the limits."""
    return softmax_mean(logits, bin_centers(logits.shape[-1], limits, logits))


def expected_plddt(logits: Tensor) -> Tensor:
    """Return the expected pLDDT [A], 0 to 1, of logits [A, 50]."""
    return expected(logits, PLDDT_RANGE)


def contact_probability(distogram: Tensor) -> Tensor:
    """Return the probability [*] mass of distogram bins whose upper edge is at most 8 Angstrom."""
    n = distogram.shape[-1]
    low, high = DISTOGRAM_RANGE
    edges = low + torch.arange(1, n + 1, device=distogram.device) * (high - low) / n
    return softmax_mean(distogram, (edges <= CONTACT + 1e-4).float())


def gpde(contact: Tensor, pde: Tensor) -> float:
    """Return the PDE [N, N] averaged with contact probabilities [N, N] as weights, Angstrom."""
    return float((contact * pde).sum() / (contact.sum() + 1e-8))


def tm_scale(n: int) -> float:
    """Return d0 of the TM-score in Angstrom for ``n`` tokens; below 19 that of 19."""
    return 1.24 * math.cbrt(max(n, MIN_TM_LENGTH) - 15) - 1.8


def predicted_tm(pae: Tensor, has_frame: Tensor, chain: Tensor) -> tuple[float, float]:
    """Return (pTM, ipTM) of PAE logits [N, N, bins] (AF3 SI 5.9.1).

    ``has_frame`` [N] bool; ``chain`` [N] numbers the chains. ipTM averages over the tokens of
    other chains only and is 0 for a single chain; both are 0 without a frame.
    """
    n = pae.shape[0]
    centers = bin_centers(pae.shape[-1], ERROR_RANGE, pae)
    term = softmax_mean(pae, 1.0 / (1.0 + (centers / tm_scale(n)) ** 2))
    other = chain[:, None] != chain[None, :]
    return (
        _best_row_mean(term, torch.ones_like(other), has_frame),
        _best_row_mean(term, other, has_frame),
    )


def _best_row_mean(term: Tensor, pairs: Tensor, rows: Tensor) -> float:
    count = pairs.sum(-1)
    usable = rows & (count > 0)
    mean = (term * pairs).sum(-1) / count.clamp(min=1)
    return float(mean[usable].max()) if bool(usable.any()) else 0.0


def ranking_score(iptm: float, ptm: float, disorder: float, has_clash: bool) -> float:
    """Return 0.8 ipTM + 0.2 pTM + 0.5 disorder - 100 has_clash (AF3 SI 5.9.3)."""
    return 0.8 * iptm + 0.2 * ptm + 0.5 * disorder - 100.0 * has_clash


def confidence_metrics(
    structure: Structure, confidence: Confidence, scored: Scored, ranking: tuple[float, bool]
) -> dict[str, float]:
    """Return gpde, ptm, iptm, ranking scores and mean pLDDT (x 100) of each class.

    ``ranking`` is (disorder, has_clash). ``sample_ranking_score_si`` takes pTM in the place of
    ipTM for a single chain, as the AF3 SI does.
    """
    chain = torch.from_numpy(structure.chain[structure.token_start]).to(confidence.pae.device)
    contact = contact_probability(confidence.distogram)
    ptm, iptm = predicted_tm(confidence.pae, confidence.has_frame, chain)
    disorder, clash = ranking
    found = {
        "gpde": gpde(contact, expected(confidence.pde, ERROR_RANGE)),
        "ptm": ptm,
        "iptm": iptm,
        "sample_ranking_score": ranking_score(iptm, ptm, disorder, clash),
        "sample_ranking_score_si": ranking_score(
            iptm if structure.n_chains > 1 else ptm, ptm, disorder, clash
        ),
    }
    plddt = 100.0 * expected_plddt(confidence.plddt).cpu().numpy()
    use = scored.intra[structure.chain]
    if use.any():
        found["plddt_complex"] = float(plddt[use].mean())
    for code, name in enumerate(CLASSES):
        chosen = use & (structure.kind == code)
        if chosen.any():
            found[f"plddt_{name}"] = float(plddt[chosen].mean())
    return found
