"""DockQ of pairs of polymer chains (metrics.md A8; Basu and Wallner 2016)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tpf.metrics.pairs import close_pairs
from tpf.metrics.structure import Bools, Floats, Ints, Sample, Scored, Structure
from tpf.metrics.superpose import rmsd, superpose

CONTACT = 5.0
"""Angstrom between heavy atoms of residues in contact."""
INTERFACE = 10.0
"""Angstrom between heavy atoms of interface residues."""
SCALE_LIGAND = 8.5
SCALE_INTERFACE = 1.5
BACKBONE = ("N", "CA", "C", "O", "P", "O5'", "C5'", "C4'", "C3'", "O3'")


@dataclass(frozen=True)
class DockQ:
    """Docking quality of one chain pair."""

    chains: tuple[int, int]
    """Asym ids."""
    fnat: float
    irmsd: float
    """Angstrom, backbone of the interface after its own fit."""
    lrmsd: float
    """Angstrom, backbone of the shorter chain after a fit on the longer."""
    contacts: int
    """Native residue contacts."""

    @property
    def score(self) -> float:
        return (
            self.fnat
            + 1.0 / (1.0 + (self.lrmsd / SCALE_LIGAND) ** 2)
            + 1.0 / (1.0 + (self.irmsd / SCALE_INTERFACE) ** 2)
        ) / 3.0


def dockq_pairs(structure: Structure, sample: Sample, scored: Scored) -> list[DockQ]:
    """Return the DockQ of every scored pair of polymer chains with native contacts."""
    use = np.flatnonzero(sample.resolved & structure.chain_polymer[structure.chain])
    native = _contacts(structure, sample.truth, use, CONTACT)
    model = _contacts(structure, sample.predicted, use, CONTACT)
    wide = _contacts(structure, sample.truth, use, INTERFACE)
    chain_of = structure.res_chain
    backbone = sample.resolved & np.isin(structure.atom_name, BACKBONE)
    found = []
    pair_code = chain_of[native[:, 0]] * structure.n_chains + chain_of[native[:, 1]]
    for code in np.unique(pair_code):
        a, b = divmod(int(code), structure.n_chains)
        if not scored.inter[a, b]:
            continue
        here = {(int(i), int(j)) for i, j in native[pair_code == code]}
        kept = here & {(int(i), int(j)) for i, j in model}
        chains = np.stack([chain_of[wide[:, 0]], chain_of[wide[:, 1]]], axis=-1)
        residues = np.unique(wide[(chains == (a, b)).all(-1)])
        found.append(
            DockQ(
                chains=(int(structure.asym_id[a]), int(structure.asym_id[b])),
                fnat=len(kept) / len(here),
                irmsd=_fitted_rmsd(sample, backbone & np.isin(structure.residue, residues)),
                lrmsd=_ligand_rmsd(structure, sample, backbone, (a, b)),
                contacts=len(here),
            )
        )
    return found


def dockq_metrics(structure: Structure, sample: Sample, scored: Scored) -> dict[str, float]:
    """Return dockq_uw (mean over pairs) and dockq_w (weighted by native contacts)."""
    pairs = dockq_pairs(structure, sample, scored)
    if not pairs:
        return {}
    score = np.array([pair.score for pair in pairs])
    weight = np.array([pair.contacts for pair in pairs], dtype=np.float64)
    return {
        "dockq_uw": float(score.mean()),
        "dockq_w": float((score * weight).sum() / weight.sum()),
    }


def _contacts(structure: Structure, x: Floats, use: Ints, cutoff: float) -> Ints:
    """Unique residue pairs [n, 2] of different chains, the lower chain first."""
    found: list[Ints] = [np.zeros((0, 2), dtype=np.int64)]
    for i, j, _ in close_pairs(x[use], cutoff):
        a, b = use[i], use[j]
        across = structure.chain[a] != structure.chain[b]
        a, b = a[across], b[across]
        swap = structure.chain[a] > structure.chain[b]
        low, high = np.where(swap, b, a), np.where(swap, a, b)
        pair = np.stack([structure.residue[low], structure.residue[high]], axis=-1)
        found.append(np.unique(pair, axis=0))
    return np.unique(np.concatenate(found), axis=0)


def _fitted_rmsd(sample: Sample, atoms: Bools) -> float:
    return rmsd(superpose(sample.predicted, sample.truth, atoms), sample.truth, atoms)


def _ligand_rmsd(
    structure: Structure, sample: Sample, backbone: Bools, chains: tuple[int, int]
) -> float:
    """RMSD of one backbone after a fit on that with more resolved residues (ties: the first)."""
    n_residues = [
        len(np.unique(structure.residue[backbone & (structure.chain == c)])) for c in chains
    ]
    receptor, ligand = chains if n_residues[0] >= n_residues[1] else chains[::-1]
    moved = superpose(sample.predicted, sample.truth, backbone & (structure.chain == receptor))
    return rmsd(moved, sample.truth, backbone & (structure.chain == ligand))
