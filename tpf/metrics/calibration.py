"""Is a pLDDT of 80 an lDDT of 0.8? Atoms by predicted confidence (AF3 SI 4.3.1)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tpf.data.tables import DNA, PROTEIN, RNA
from tpf.metrics.lddt import RADIUS, RADIUS_NUCLEIC, pair_score
from tpf.metrics.structure import Bools, Floats, Ints, Sample, Structure

BINS = 20
"""Equal bins of pLDDT between 0 and 100."""
ROWS = 512
"""Atoms whose distances are held at a time."""

Table = list[list[float]]
"""BINS rows: number of atoms, sum of pLDDT, sum of lDDT x 100."""


def atom_lddt(structure: Structure, sample: Sample) -> tuple[Floats, Bools]:
    """Return the lDDT of each atom [A] to the centres around it, and whether it has any [A].

    Centres are resolved CA and C1' of standard residues within 15 (C1': 30) Angstrom.
    """
    kind, name = structure.kind, structure.atom_name
    nucleic = np.isin(kind, (DNA, RNA)) & (name == "C1'")
    centre = np.flatnonzero(sample.resolved & (((kind == PROTEIN) & (name == "CA")) | nucleic))
    radius = np.where(nucleic[centre], RADIUS_NUCLEIC, RADIUS)
    score, known = np.zeros(structure.n_atoms), np.zeros(structure.n_atoms, dtype=bool)
    resolved = np.flatnonzero(sample.resolved)
    for start in range(0, len(resolved), ROWS):
        atoms = resolved[start : start + ROWS]
        d_gt = _distances(sample.truth, atoms, centre)
        pair = (d_gt < radius) & (atoms[:, None] != centre)
        error = np.abs(_distances(sample.predicted, atoms, centre) - d_gt)
        value = pair_score(error.ravel()).reshape(error.shape)
        count = pair.sum(axis=1)
        score[atoms] = (value * pair).sum(axis=1) / np.maximum(count, 1)
        known[atoms] = count > 0
    return score, known


def _distances(x: Floats, rows: Ints, columns: Ints) -> Floats:
    return np.asarray(np.sqrt(((x[rows, None] - x[None, columns]) ** 2).sum(axis=-1)))


def calibration(structure: Structure, sample: Sample, plddt: Floats) -> Table:
    """Return the table of one sample; ``plddt`` [A], 0 to 100."""
    score, known = atom_lddt(structure, sample)
    predicted = np.asarray(plddt, dtype=np.float64)[known]
    place = np.clip((predicted * BINS / 100).astype(int), 0, BINS - 1)
    columns = (np.ones(len(place)), predicted, 100 * score[known])
    sums = [np.bincount(place, column, minlength=BINS) for column in columns]
    return [[float(value) for value in row] for row in np.stack(sums, axis=1)]


def add(tables: Iterable[Table]) -> Table:
    """Return the sum of tables; no table gives zeros."""
    total = np.zeros((BINS, 3))
    for table in tables:
        total += np.asarray(table)
    return [[float(value) for value in row] for row in total]


def calibration_error(table: Table) -> float | None:
    """Return the mean over atoms of |mean pLDDT - mean lDDT x 100| of their bin, None for none."""
    count, predicted, true = np.asarray(table).T
    return float(np.abs(predicted - true).sum() / count.sum()) if count.sum() else None
