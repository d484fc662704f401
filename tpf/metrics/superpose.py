"""Scores after one superposition of the whole complex (metrics.md A2) and dRMSD (A3)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike

from tpf.data.tables import DNA, LIGAND, PROTEIN, RNA
from tpf.geometry import kabsch
from tpf.metrics.pairs import EPS
from tpf.metrics.structure import Bools, Floats, Sample, Structure

GDT_TS = (1.0, 2.0, 4.0, 8.0)
GDT_HA = (0.5, 1.0, 2.0, 4.0)
DRMSD_CLASSES = (("protein", PROTEIN), ("ligand", LIGAND), ("dna", DNA), ("rna", RNA))
TILE_ROWS = 128


def superpose(mobile: ArrayLike, target: ArrayLike, use: ArrayLike | None = None) -> Floats:
    """Return ``mobile`` [A, 3] moved by the Kabsch fit of the atoms in ``use`` onto ``target``."""
    x, y = np.asarray(mobile, dtype=np.float64), np.asarray(target, dtype=np.float64)
    chosen = np.ones(len(x), dtype=bool) if use is None else np.asarray(use) > 0.5
    moved, fixed = torch.from_numpy(x[chosen]), torch.from_numpy(y[chosen])
    rotation, shift = kabsch(moved, fixed, torch.ones(len(moved), dtype=moved.dtype))
    return np.asarray(x @ rotation.numpy().T + shift.numpy())


def rmsd(predicted: ArrayLike, truth: ArrayLike, resolved: ArrayLike | None = None) -> float:
    """Return the root mean square distance of [A, 3] positions as they lie, without a fit."""
    square = ((np.asarray(predicted, np.float64) - np.asarray(truth, np.float64)) ** 2).sum(-1)
    if resolved is not None:
        square = square[np.asarray(resolved) > 0.5]
    return float(np.sqrt(square.mean()))


def gdt(distance: Floats, thresholds: tuple[float, ...]) -> float:
    """Return the mean share of atoms within (<=) the thresholds; one fit, so below LGA's value."""
    return float(np.mean([(distance <= threshold).mean() for threshold in thresholds]))


def superposed_metrics(sample: Sample) -> dict[str, float]:
    """Return rmsd, gdt_ts and gdt_ha of all resolved atoms after one fit ({} without any)."""
    mask = sample.resolved
    if not mask.any():
        return {}
    x, y = sample.predicted[mask], sample.truth[mask]
    distance = np.sqrt(((superpose(x, y) - y) ** 2).sum(-1))
    return {
        "rmsd": float(np.sqrt((distance**2).mean())),
        "gdt_ts": gdt(distance, GDT_TS),
        "gdt_ha": gdt(distance, GDT_HA),
    }


def drmsd_metrics(structure: Structure, sample: Sample) -> dict[str, float]:
    """Return drmsd_intra_X over all resolved pairs of class X inside chains (no cut-off)."""
    found: dict[str, float] = {}
    for name, kind in DRMSD_CLASSES:
        use = sample.resolved & (structure.kind == kind)
        total, pairs = 0.0, 0
        for chain in np.unique(structure.chain[use]):
            atoms = use & (structure.chain == chain)
            total += _square_errors(sample, atoms)
            pairs += int(atoms.sum()) * (int(atoms.sum()) - 1)
        if pairs:
            found[f"drmsd_intra_{name}"] = float(np.sqrt(total / pairs))
    return found


def _square_errors(sample: Sample, atoms: Bools) -> float:
    """Sum of squared distance errors over ordered pairs of the chosen atoms, row tile by tile."""
    x, y = sample.predicted[atoms].T.copy(), sample.truth[atoms].T.copy()
    total = 0.0
    for start in range(0, x.shape[1], TILE_ROWS):
        rows = slice(start, start + TILE_ROWS)
        error = _tile(x, rows, start) - _tile(y, rows, start)
        error = np.triu(error)
        total += 2.0 * float(np.einsum("ij,ij->", error, error))
    return total


def _tile(x: Floats, rows: slice, start: int) -> Floats:
    square = np.full((x[0, rows].size, x.shape[1] - start), EPS)
    for c in range(3):
        delta = x[c, rows, None] - x[c, None, start:]
        delta *= delta
        square += delta
    return np.asarray(np.sqrt(square))
