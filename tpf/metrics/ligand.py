"""Ligand pose after a fit of the pocket (metrics.md A4; AF3 and PoseBusters definition)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tpf.data.chem import CRYSTAL_AIDS
from tpf.data.tables import LIGAND, PROTEIN, Tables
from tpf.metrics.pairs import within
from tpf.metrics.structure import Bools, Floats, Ints, Sample, Scored, Structure
from tpf.metrics.superpose import superpose

POCKET = 10.0
"""Angstrom between heavy atoms of the ligand and of a pocket residue in the ground truth."""
MIN_POCKET = 3
"""Atoms below which a fit is not defined."""
SUCCESS = 2.0
"""Angstrom; a pose below counts as found."""
BACKBONE = ("N", "CA", "C", "O")
NUCLEOTIDE = {"C1'", "C4'", "O4'", "O5'"}
"""Atoms that a nucleotide has, besides phosphorus."""
PHOSPHORUS = 15


@dataclass(frozen=True)
class Pose:
    """Pocket-aligned RMSD of one ligand of the ground truth, Angstrom."""

    asym_id: int
    rmsd: float
    rmsd_backbone: float
    """Same, fitted on all backbone atoms of the pocket."""


def ligand_poses(structure: Structure, sample: Sample, scored: Scored) -> list[Pose]:
    """Return the pose of every scored ligand of two or more resolved atoms that has a pocket."""
    ligand_chains = np.unique(structure.chain[structure.kind == LIGAND])
    poses = []
    for c in ligand_chains:
        atoms = np.flatnonzero((structure.chain == c) & (structure.kind == LIGAND))
        if not scored.intra[c] or int(sample.resolved[atoms].sum()) < 2:
            continue
        pocket = _pocket(structure, sample, atoms)
        alpha = pocket & (structure.atom_name == "CA")
        if int(alpha.sum()) < MIN_POCKET:
            continue
        backbone = pocket & np.isin(structure.atom_name, BACKBONE)
        values = [_pose_rmsd(structure, sample, atoms, fit) for fit in (alpha, backbone)]
        poses.append(Pose(int(structure.asym_id[c]), values[0], values[1]))
    return poses


def ligand_metrics(structure: Structure, sample: Sample, scored: Scored) -> dict[str, float]:
    """Return mean pocket-aligned RMSD over ligands and the fraction below 2 Angstrom."""
    poses = ligand_poses(structure, sample, scored)
    if not poses:
        return {}
    values = np.array([(pose.rmsd, pose.rmsd_backbone) for pose in poses])
    return {
        "ligand_rmsd_pocket": float(values[:, 0].mean()),
        "ligand_rmsd_pocket_backbone": float(values[:, 1].mean()),
        "ligand_success": float((values[:, 0] < SUCCESS).mean()),
    }


def ligand_class(tables: Tables, chain: int) -> str:
    """Return what kind of ligand a chain of an entry is.

    One of covalent (bonded to a polymer), ion (one atom), crystal aid (AF3 SI Table 9), glycan
    (several residues), nucleotide, and small molecule.
    """
    residues = np.flatnonzero(tables.res_chain == chain)
    atoms = np.flatnonzero(np.isin(tables.atom_residue, residues))
    owner = tables.res_chain[tables.atom_residue[tables.bonds]]
    partners = owner[(owner == chain).any(axis=1)].ravel()
    if (tables.chain_type[partners] != LIGAND).any():
        return "covalent"
    if len(atoms) == 1:
        return "ion"
    if set(tables.res_name[residues].tolist()) <= CRYSTAL_AIDS:
        return "crystal aid"
    if len(residues) > 1:
        return "glycan"
    phosphorus = bool((tables.element[atoms] == PHOSPHORUS).any())
    if phosphorus and set(tables.atom_name[atoms].tolist()) >= NUCLEOTIDE:
        return "nucleotide"
    return "small molecule"


def _pocket(structure: Structure, sample: Sample, ligand: Ints) -> Bools:
    """Resolved atoms of pocket residues on the protein chain with the most near atoms [A]."""
    in_protein = structure.chain_type[structure.chain] == PROTEIN
    protein = np.flatnonzero(sample.resolved & in_protein & (structure.kind != LIGAND))
    placed = ligand[sample.resolved[ligand]]
    near = protein[within(sample.truth[protein], sample.truth[placed], POCKET)]
    if not len(near):
        return np.zeros(structure.n_atoms, dtype=bool)
    chain = int(np.bincount(structure.chain[near]).argmax())
    residues = np.unique(structure.residue[near[structure.chain[near] == chain]])
    return np.isin(structure.residue, residues) & sample.resolved


def _pose_rmsd(structure: Structure, sample: Sample, ligand: Ints, fit: Bools) -> float:
    """Least RMSD over equivalent atom orders and over predicted copies of the ligand."""
    moved = superpose(sample.predicted, sample.truth, fit)
    entity = structure.entity_id[structure.chain[ligand[0]]]
    best = np.inf
    for copy in np.flatnonzero(structure.entity_id == entity):
        atoms = np.flatnonzero((structure.chain == copy) & (structure.kind == LIGAND))
        if len(atoms) == len(ligand):
            best = min(best, _copy_rmsd(structure, sample, ligand, moved[atoms]))
    return float(best)


def _copy_rmsd(structure: Structure, sample: Sample, ligand: Ints, moved: Floats) -> float:
    """RMSD of ``moved`` to the ligand; each residue takes its own best order of atoms."""
    truth, resolved = sample.truth[ligand], sample.resolved[ligand]
    residue = structure.residue[ligand]
    total = 0.0
    for r in np.unique(residue):
        local = np.flatnonzero(residue == r)
        orders = structure.automorphisms.get(int(r))
        if orders is None or orders.shape[1] != len(local):
            orders = np.arange(len(local))[None]
        square = ((moved[local[orders]] - truth[local]) ** 2).sum(-1)
        total += float(square.sum(-1, where=resolved[local]).min())
    return float(np.sqrt(total / resolved.sum()))
