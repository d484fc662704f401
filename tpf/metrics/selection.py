"""From samples to a table: top-1 and best, dataset means, model selection (metrics.md B1-B3)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tpf.errors import UsageError

Metrics = Mapping[str, float]

LOWER_IS_BETTER = ("rmsd", "drmsd", "clash", "has_clash", "gpde", "ligand_rmsd", "dfg_shift")
"""Prefixes of metrics whose best sample has the smallest value."""
ALL_SAMPLES = ("rasa",)
"""Metrics of a target that count only if every sample has them (metrics.md A6)."""

WEIGHTS: dict[str, dict[str, float]] = {
    "initial": {
        "lddt_intra_modified_residues": 10,
        "lddt_inter_ligand_rna": 5,
        "lddt_inter_ligand_dna": 5,
        "lddt_intra_protein": 20,
        "lddt_intra_ligand": 20,
        "lddt_intra_dna": 4,
        "lddt_intra_rna": 16,
        "lddt_inter_protein_protein": 20,
        "lddt_inter_protein_ligand": 10,
        "lddt_inter_protein_dna": 10,
        "lddt_inter_protein_rna": 10,
        "rasa": 10,
    },
    "fine-tuning": {
        "lddt_inter_ligand_rna": 2,
        "lddt_inter_ligand_dna": 5,
        "lddt_intra_protein": 20,
        "lddt_intra_ligand": 20,
        "lddt_intra_dna": 4,
        "lddt_intra_rna": 16,
        "lddt_inter_protein_protein": 20,
        "lddt_inter_protein_ligand": 10,
        "lddt_inter_protein_dna": 10,
        "lddt_inter_protein_rna": 2,
        "rasa": 10,
    },
}
"""Model selection weights by name of the set."""


@dataclass(frozen=True)
class Selected:
    """Metrics of one target over its samples."""

    top1: dict[str, float]
    """Of the sample with the smallest gPDE."""
    best: dict[str, float]
    """Best sample of every metric by itself."""
    reported: dict[str, float]
    """Mean of the two."""


@dataclass(frozen=True)
class ModelSelection:
    """Weighted mean of dataset values; ``missing`` lists metrics of the set without a value."""

    value: float | None
    weights: str
    missing: tuple[str, ...]


def lower_is_better(name: str) -> bool:
    """Return whether a smaller value of the metric is better."""
    return name.startswith(LOWER_IS_BETTER)


def select(samples: Sequence[Metrics]) -> Selected:
    """Return top-1, best and reported metrics of the samples of one target.

    A single sample is its own top-1. Raises ``UsageError`` if several samples have no gpde.
    """
    if not samples:
        raise UsageError("a target without samples has no metrics; give at least one sample")
    chosen: Metrics = samples[0]
    if len(samples) > 1:
        if any("gpde" not in sample for sample in samples):
            raise UsageError("gpde is missing in a sample; top-1 is the sample of smallest gpde")
        chosen = min(samples, key=lambda sample: sample["gpde"])
    partial = [n for n in ALL_SAMPLES if any(n not in sample for sample in samples)]
    samples = [{n: v for n, v in sample.items() if n not in partial} for sample in samples]
    chosen = {n: v for n, v in chosen.items() if n not in partial}
    best = {}
    for name in dict.fromkeys(name for sample in samples for name in sample):
        values = [sample[name] for sample in samples if name in sample]
        best[name] = min(values) if lower_is_better(name) else max(values)
    top1 = dict(chosen)
    reported = {name: 0.5 * (value + best[name]) for name, value in top1.items()}
    return Selected(top1=top1, best=best, reported=reported)


def dataset_means(targets: Iterable[Metrics]) -> dict[str, tuple[float, int]]:
    """Return (mean, number of targets) of each metric over the targets that have it."""
    values: dict[str, list[float]] = {}
    for target in targets:
        for name, value in target.items():
            if np.isfinite(value):
                values.setdefault(name, []).append(value)
    return {name: (float(np.mean(found)), len(found)) for name, found in values.items()}


def selection_weights(name: str) -> dict[str, float]:
    """Return a weight set; raise ``UsageError`` for an unknown name."""
    if name not in WEIGHTS:
        raise UsageError(f"selection weights {name!r} do not exist; choose {' or '.join(WEIGHTS)}")
    return WEIGHTS[name]


def model_selection(means: Metrics, weights: str = "fine-tuning") -> ModelSelection:
    """Return the weighted mean over the metrics of the set that have a finite dataset value."""
    table = selection_weights(weights)
    present = [name for name in table if np.isfinite(means.get(name, np.nan))]
    total = sum(table[name] for name in present)
    value = sum(table[name] * means[name] for name in present) / total if total else None
    missing = tuple(name for name in table if name not in present)
    return ModelSelection(value=value, weights=weights, missing=missing)
