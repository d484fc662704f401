"""Clash scores and the clash test of sample ranking (metrics.md A5)."""

from __future__ import annotations

import numpy as np

from tpf.data.tables import DNA, LIGAND, PROTEIN, RNA
from tpf.metrics.pairs import close_pairs
from tpf.metrics.structure import CLASSES, Floats, Sample, Scored, Structure

CUTOFF = 1.1
"""Angstrom; shorter than any bond of heavy atoms, so bonded pairs need no exclusion."""
MAX_CLASHES = 100
MAX_CLASH_SHARE = 0.5

SAME = (("protein", PROTEIN), ("ligand", LIGAND), ("dna", DNA), ("rna", RNA))
MIXED = (("ligand", LIGAND), ("dna", DNA), ("rna", RNA))


def clash_metrics(structure: Structure, sample: Sample, scored: Scored) -> dict[str, float]:
    """Return the mean of ``relu(1.1 - d) / 1.1`` over scored resolved pairs of each class.

    The mean runs over all pairs, but only close ones contribute: the pair counts come from the
    number of atoms of each class in each chain.
    """
    n_classes = len(CLASSES)
    use = np.flatnonzero(sample.resolved)
    kind, chain = structure.kind[use], structure.chain[use]
    atoms = np.zeros((structure.n_chains, n_classes))
    np.add.at(atoms, (chain, kind), 1.0)
    overlap = np.zeros((2, n_classes, n_classes))
    for i, j, d in close_pairs(sample.predicted[use], CUTOFF):
        low, high = np.minimum(kind[i], kind[j]), np.maximum(kind[i], kind[j])
        ci, cj, value = chain[i], chain[j], (CUTOFF - d) / CUTOFF
        same = ci == cj
        intra = same & scored.intra[ci]
        inter = scored.inter[ci, cj] & (~same | (low != high))
        for relation, mask in enumerate((intra, inter)):
            np.add.at(overlap[relation], (low[mask], high[mask]), value[mask])
    pairs: dict[str, tuple[float, float]] = {}
    for name, k in SAME:
        n = atoms[:, k]
        inside = float((n * (n - 1))[scored.intra].sum() / 2)
        across = float((n @ scored.inter @ n - (n * n) @ np.diag(scored.inter)) / 2)
        pairs[f"clash_intra_{name}"] = (float(overlap[0, k, k]), inside)
        pairs[f"clash_inter_{name}_{name}"] = (float(overlap[1, k, k]), across)
    for name, k in MIXED:
        count = float(atoms[:, PROTEIN] @ scored.inter @ atoms[:, k])
        pairs[f"clash_inter_protein_{name}"] = (float(overlap[1, PROTEIN, k]), count)
    return {key: total / count for key, (total, count) in pairs.items() if count > 0}


def has_clash(structure: Structure, predicted: Floats) -> bool:
    """Return whether two polymer chains of the prediction overlap (ranking penalty, AF3 SI 5.9.2).

    More than 100 atom pairs under 1.1 Angstrom, or more than half the atoms of the smaller chain.
    """
    use = np.flatnonzero(structure.chain_polymer[structure.chain])
    chain = structure.chain[use]
    size = np.bincount(chain, minlength=structure.n_chains)
    close = np.zeros((structure.n_chains, structure.n_chains), dtype=np.int64)
    for i, j, _ in close_pairs(predicted[use], CUTOFF):
        low, high = np.minimum(chain[i], chain[j]), np.maximum(chain[i], chain[j])
        np.add.at(close, (low, high), low != high)
    smaller = np.maximum(np.minimum(size[:, None], size[None, :]), 1)
    return bool(((close > MAX_CLASHES) | (close / smaller > MAX_CLASH_SHARE)).any())
