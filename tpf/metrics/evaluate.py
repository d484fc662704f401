"""Every metric of one sample, for validation and for scoring files alike (metrics.md part A)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tpf.geometry import token_frames
from tpf.metrics.clash import clash_metrics, has_clash
from tpf.metrics.confidence import Confidence, confidence_metrics
from tpf.metrics.dockq import dockq_metrics
from tpf.metrics.kinase import kinase_metrics
from tpf.metrics.lddt import lddt_metrics, lddt_pocket
from tpf.metrics.ligand import ligand_metrics
from tpf.metrics.rasa import exposure, rasa
from tpf.metrics.structure import Sample, Scored, Structure, from_features, unbatch
from tpf.metrics.superpose import drmsd_metrics, superposed_metrics

FRAME_FEATURES = frozenset(
    {
        "token_mask", "atom_mask", "is_atomized", "is_protein", "is_rna", "is_dna", "asym_id",
        "ref_atom_name_chars", "atom_to_token_index", "center_atom_index",
    }
)  # fmt: skip
"""Features that the token frames need."""


def evaluate(
    structure: Structure,
    sample: Sample,
    *,
    scored: Scored | None = None,
    confidence: Confidence | None = None,
    extras: bool = False,
) -> dict[str, float]:
    """Return the metrics of one sample by name; those that the target lacks are left out.

    ``extras`` adds what OpenFold3 does not have: lddt_pocket, pocket-aligned ligand RMSD, DockQ,
    and of kinases where the phenylalanine of DFG lies.
    """
    scored = scored or Scored.everything(structure)
    found = lddt_metrics(structure, sample, scored)
    found |= superposed_metrics(sample)
    found |= drmsd_metrics(structure, sample)
    found |= clash_metrics(structure, sample, scored)
    exposed = exposure(structure, sample.predicted)
    hidden = rasa(structure, sample, exposed)
    if hidden is not None:
        found["rasa"] = hidden
    clash = has_clash(structure, sample.predicted)
    found |= {"disorder": exposed.disorder(), "has_clash": float(clash)}
    if confidence is not None:
        found |= confidence_metrics(structure, confidence, scored, (exposed.disorder(), clash))
    if extras:
        pocket = lddt_pocket(structure, sample, scored)
        found |= {} if pocket is None else {"lddt_pocket": pocket}
        found |= ligand_metrics(structure, sample, scored)
        found |= dockq_metrics(structure, sample, scored)
        found |= kinase_metrics(structure, sample, scored)
    return found


def sample_confidence(
    batch: Mapping[str, Any],
    x: Tensor,
    heads: Mapping[str, Tensor],
    distogram: Tensor,
    *,
    entry: int,
    index: int,
) -> Confidence:
    """Cut the head logits of one sample out of a batch, without padding.

    ``x`` [B, S, A, 3]; ``heads`` holds plddt [B, S, A, 50], pae and pde [B, S, N, N, 64];
    ``distogram`` [B, N, N, 64]. The frames are those of the prediction.
    """
    atoms = int(batch["atom_mask"][entry].sum())
    n = int(batch["token_mask"][entry].sum())
    one = {key: value[entry : entry + 1] for key, value in batch.items() if key in FRAME_FEATURES}
    present = one["atom_mask"][:, None]
    frames = token_frames(one, x[entry : entry + 1, index : index + 1].float(), present)
    return Confidence(
        plddt=heads["plddt"][entry, index, :atoms],
        pae=heads["pae"][entry, index, :n, :n],
        pde=heads["pde"][entry, index, :n, :n],
        distogram=distogram[entry, :n, :n],
        has_frame=frames.valid[0, 0, :n],
    )


def evaluate_samples(
    batch: Mapping[str, Any],
    x: Tensor,
    truth: tuple[Tensor, Tensor],
    heads: Mapping[str, Tensor] | None = None,
    distogram: Tensor | None = None,
    *,
    entry: int = 0,
    scored: Scored | None = None,
    extras: bool = False,
) -> list[dict[str, float]]:
    """Return the metrics of all samples of one batch entry.

    ``x`` [B, S, A, 3]; ``truth`` is (positions [B, S, A, 3], resolved [B, S, A]) in the order of
    each sample, as ``tpf.permutation.align`` gives it. With ``heads`` and ``distogram`` the
    confidence metrics are added.
    """
    structure = from_features(unbatch(batch, entry))
    results = []
    for s, sample in enumerate(make_samples(structure, x, truth, entry)):
        confidence = None
        if heads is not None and distogram is not None:
            confidence = sample_confidence(batch, x, heads, distogram, entry=entry, index=s)
        results.append(
            evaluate(structure, sample, scored=scored, confidence=confidence, extras=extras)
        )
    return results


def make_samples(
    structure: Structure, x: Tensor, truth: tuple[Tensor, Tensor], entry: int = 0
) -> list[Sample]:
    """Return the samples of one batch entry without padding; arguments as ``evaluate_samples``."""
    atoms = structure.n_atoms
    positions, resolved = truth
    return [
        Sample.make(
            x[entry, s, :atoms].detach().cpu(),
            positions[entry, s, :atoms].detach().cpu(),
            resolved[entry, s, :atoms].detach().cpu(),
        )
        for s in range(x.shape[1])
    ]
