"""lDDT of every atom class (metrics.md A1), from one pass over the close pairs.

All resolved pairs within the largest cut-off are tallied by (class, class, cut-off shell), once
for pairs inside a chain and once for pairs across chains; each named score is a ratio of tallies.
Pairs are unordered: counting both orders would not change a ratio.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from tpf.data.tables import DNA, LIGAND, PROTEIN, RNA
from tpf.metrics.pairs import close_pairs, distances, within
from tpf.metrics.structure import (
    ANTIBODY_ROLES,
    CLASSES,
    MODIFIED,
    Bools,
    Floats,
    Ints,
    Sample,
    Scored,
    Structure,
)

THRESHOLDS = (0.5, 1.0, 2.0, 4.0)
THRESHOLDS_UHA = (0.25, 0.5, 0.75, 1.0)
RADIUS = 15.0
RADIUS_NUCLEIC = 30.0
POCKET = 6.0
"""Angstrom between a ligand atom and any atom of a residue of its pocket."""

Record = tuple[str, int, int, bool]
"""Suffix of the metric, class, class, and whether the 30 A shell belongs to it."""

INTRA: tuple[Record, ...] = (
    ("protein", PROTEIN, PROTEIN, False),
    ("ligand", LIGAND, LIGAND, False),
    ("dna", DNA, DNA, True),
    ("rna", RNA, RNA, True),
    ("modified_residues", MODIFIED, MODIFIED, False),
)
INTER: tuple[Record, ...] = (
    ("protein_protein", PROTEIN, PROTEIN, False),
    ("ligand_ligand", LIGAND, LIGAND, False),
    ("dna_dna", DNA, DNA, True),
    ("rna_rna", RNA, RNA, True),
    ("protein_ligand", PROTEIN, LIGAND, False),
    ("protein_dna", PROTEIN, DNA, True),
    ("protein_rna", PROTEIN, RNA, True),
    ("ligand_dna", LIGAND, DNA, True),
    ("ligand_rna", LIGAND, RNA, True),
)


@dataclass(frozen=True)
class Tally:
    """Sums over pairs, [2 relations (intra, inter), L, L classes with a <= b, 2 shells]."""

    pairs: Floats
    score: Floats
    score_uha: Floats

    def ratio(self, relation: int, a: int, b: int, wide: bool, uha: bool = False) -> float | None:
        """Return the lDDT of one class pair, None without a scored pair."""
        where = (relation, min(a, b), max(a, b), slice(0, 2 if wide else 1))
        total = float(self.pairs[where].sum())
        score = self.score_uha if uha else self.score
        return float(score[where].sum()) / total if total else None

    def complex(self) -> float | None:
        """Return the lDDT over all classes inside chains within 15 Angstrom."""
        total = float(self.pairs[0, :, :, 0].sum())
        return float(self.score[0, :, :, 0].sum()) / total if total else None


def pair_score(error: Floats, thresholds: tuple[float, ...] = THRESHOLDS) -> Floats:
    """Return the share of thresholds that each absolute distance error stays (strictly) below."""
    hits = np.zeros(len(error))
    for threshold in thresholds:
        hits += error < threshold
    return hits / len(thresholds)


def lddt(
    predicted: ArrayLike,
    truth: ArrayLike,
    resolved: ArrayLike | None = None,
    radius: float = RADIUS,
    thresholds: tuple[float, ...] = THRESHOLDS,
) -> float | None:
    """Return the lDDT over all pairs of [A, 3] positions, None if no pair is in the radius."""
    x, y = np.asarray(predicted, dtype=np.float64), np.asarray(truth, dtype=np.float64)
    if resolved is not None:
        mask = np.asarray(resolved) > 0.5
        x, y = x[mask], y[mask]
    count, score = 0, 0.0
    for i, j, d in close_pairs(y, radius):
        count += len(d)
        score += float(pair_score(np.abs(distances(x, i, j) - d), thresholds).sum())
    return score / count if count else None


def tally(
    sample: Sample, labels: Ints, n_labels: int, chain: Ints, scored: Scored, radius: float
) -> Tally:
    """Tally the pairs of resolved atoms whose label [A] is not negative."""
    use = np.flatnonzero(sample.resolved & (labels >= 0))
    x, y, label, chain = sample.predicted[use], sample.truth[use], labels[use], chain[use]
    size = n_labels * n_labels * 2
    sums = np.zeros((3, 2, size))
    for i, j, d in close_pairs(y, radius):
        error = np.abs(distances(x, i, j) - d)
        li, lj, ci, cj = label[i], label[j], chain[i], chain[j]
        key = (np.minimum(li, lj) * n_labels + np.maximum(li, lj)) * 2 + (d >= RADIUS)
        same = ci == cj
        intra = same & scored.intra[ci]
        inter = scored.inter[ci, cj] & (~same | (li != lj))
        values = (pair_score(error), pair_score(error, THRESHOLDS_UHA))
        for relation, mask in enumerate((intra, inter)):
            bins = key[mask]
            sums[0, relation] += np.bincount(bins, minlength=size)
            for v, value in enumerate(values):
                sums[v + 1, relation] += np.bincount(bins, value[mask], minlength=size)
    return Tally(*sums.reshape(3, 2, n_labels, n_labels, 2))


def lddt_metrics(structure: Structure, sample: Sample, scored: Scored) -> dict[str, float]:
    """Return every lDDT of metrics.md A1 that the target has (missing ones are left out)."""
    nucleic = np.isin(structure.kind, (RNA, DNA)).any()
    reach = RADIUS_NUCLEIC if nucleic else RADIUS
    sums = tally(sample, structure.kind, len(CLASSES), structure.chain, scored, reach)
    found: dict[str, float | None] = {"lddt_intra_complex": sums.complex()}
    for relation, word, records in ((0, "intra", INTRA), (1, "inter", INTER)):
        for name, a, b, wide in records:
            key = f"lddt_{word}_{name}"
            found[key] = sums.ratio(relation, a, b, wide)
            if wide:
                found[f"{key}_15"] = sums.ratio(relation, a, b, False)
            if (a, b) == (LIGAND, LIGAND):
                found[f"{key}_uha"] = sums.ratio(relation, a, b, False, uha=True)
    if structure.role is not None:
        found |= _antibody(structure, sample, scored)
    return {key: value for key, value in found.items() if value is not None}


def _antibody(structure: Structure, sample: Sample, scored: Scored) -> dict[str, float | None]:
    assert structure.role is not None
    labels = structure.role[structure.chain]
    names = ANTIBODY_ROLES
    sums = tally(sample, labels, len(names), structure.chain, scored, RADIUS)
    found = {f"lddt_intra_{name}": sums.ratio(0, a, a, False) for a, name in enumerate(names)}
    for a in range(len(names)):
        for b in range(a, len(names)):
            found[f"lddt_inter_{names[a]}_{names[b]}"] = sums.ratio(1, a, b, False)
    return found


def pocket_residues(structure: Structure, sample: Sample, cutoff: float) -> Bools:
    """Return which protein residues [R] have a resolved atom closer than ``cutoff`` to a ligand."""
    protein = np.flatnonzero(sample.resolved & (structure.kind == PROTEIN))
    ligand = sample.resolved & (structure.kind == LIGAND)
    close = within(sample.truth[protein], sample.truth[ligand], cutoff)
    near = np.zeros(len(structure.res_name), dtype=bool)
    near[structure.residue[protein[close]]] = True
    return near


def lddt_pocket(structure: Structure, sample: Sample, scored: Scored) -> float | None:
    """Return the lDDT of pairs of a ligand atom and an atom of a pocket residue (an extra, A1)."""
    near = pocket_residues(structure, sample, POCKET)[structure.residue]
    labels = np.full(structure.n_atoms, -1, dtype=np.int64)
    labels[structure.kind == LIGAND] = 1
    labels[(structure.kind == PROTEIN) & near] = 0
    return tally(sample, labels, 2, structure.chain, scored, RADIUS).ratio(1, 0, 1, False)
