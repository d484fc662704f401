"""Where the DFG motif of a kinase lies: a prediction of the wrong state moves its phenylalanine."""

from __future__ import annotations

import numpy as np

from tpf.data.chem import one_letters
from tpf.data.kinase import dfg_motif
from tpf.data.tables import PROTEIN
from tpf.metrics.structure import Bools, Ints, Sample, Scored, Structure
from tpf.metrics.superpose import superpose

MAIN_CHAIN = ("N", "CA", "C", "O")
MIN_FIT = 50
"""Resolved CA atoms below which a chain is not fitted."""


def kinase_metrics(structure: Structure, sample: Sample, scored: Scored) -> dict[str, float]:
    """Return dfg_shift, the mean over kinase chains ({} without one whose motif is resolved).

    The shift of a chain is the distance in Angstrom between predicted and true centre of the side
    chain of the DFG phenylalanine after a fit of all resolved CA atoms of the chain.
    """
    shifts = []
    for c in np.flatnonzero((structure.chain_type == PROTEIN) & scored.intra):
        side = _phenylalanine(structure, int(c)) & sample.resolved
        alpha = (structure.chain == c) & (structure.atom_name == "CA") & sample.resolved
        if side.any() and int(alpha.sum()) >= MIN_FIT:
            moved = superpose(sample.predicted, sample.truth, alpha)
            shifts.append(np.linalg.norm((moved[side] - sample.truth[side]).mean(axis=0)))
    return {"dfg_shift": float(np.mean(shifts))} if shifts else {}


def _phenylalanine(structure: Structure, chain: int) -> Bools:
    """Return the side chain atoms [A] of the second residue of DFG, none without a kinase."""
    residues: Ints = np.unique(structure.residue[structure.chain == chain])
    place = dfg_motif(one_letters(structure.res_name[residues].tolist()))
    if place is None:
        return np.zeros(structure.n_atoms, dtype=bool)
    own = structure.residue == residues[place + 1]
    return np.asarray(own & ~np.isin(structure.atom_name, MAIN_CHAIN))
