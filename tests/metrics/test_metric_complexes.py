"""Ligand poses and DockQ on small constructed complexes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from metric_structures import build_structure

from tpf.data.tables import LIGAND, PROTEIN
from tpf.metrics.dockq import dockq_metrics, dockq_pairs
from tpf.metrics.ligand import ligand_metrics, ligand_poses
from tpf.metrics.structure import Floats, Sample, Scored, Structure

POCKET = np.array([[0, 0, 0], [6, 0, 0], [0, 6, 0], [0, 0, 6]], dtype=float)
RING = np.array([[2, 2, 2], [3, 2, 2], [2, 3, 2]], dtype=float)


def complex_of(ligands: int = 1) -> Structure:
    """Four protein residues of one CA each and copies of a ligand of three atoms."""
    chains = [0] * 4 + [1 + k for k in range(ligands) for _ in range(3)]
    residues = [0, 1, 2, 3] + [4 + k for k in range(ligands) for _ in range(3)]
    return build_structure(
        [PROTEIN] * 4 + [LIGAND] * (3 * ligands),
        chains,
        residues=residues,
        names=["CA"] * 4 + ["C1", "C2", "C3"] * ligands,
        entities=[1] + [2] * ligands,
    )


def poses(structure: Structure, predicted: Floats, truth: Floats) -> dict[str, float]:
    sample = Sample.make(predicted, truth, np.ones(len(truth)))
    return ligand_metrics(structure, sample, Scored.everything(structure))


def test_ligand_shift_is_measured_in_the_frame_of_the_pocket() -> None:
    truth = np.concatenate([POCKET, RING])
    turn = np.array([[0, -1, 0], [1, 0, 0], [0, 0, 1]], dtype=float)
    predicted = np.concatenate([POCKET, RING + [0, 0, 1.5]]) @ turn.T + 10
    found = poses(complex_of(), predicted, truth)
    assert found["ligand_rmsd_pocket"] == pytest.approx(1.5)
    assert found["ligand_rmsd_pocket_backbone"] == pytest.approx(1.5)
    assert found["ligand_success"] == 1.0
    predicted = np.concatenate([POCKET, RING + [0, 0, 2.5]])
    assert poses(complex_of(), predicted, truth)["ligand_success"] == 0.0


def test_equivalent_atoms_and_copies_are_matched_at_their_best() -> None:
    truth = np.concatenate([POCKET, RING])
    swapped = np.concatenate([POCKET, RING[[0, 2, 1]]])
    structure = complex_of()
    assert poses(structure, swapped, truth)["ligand_rmsd_pocket"] > 0.5
    orders = {4: np.array([[0, 1, 2], [0, 2, 1]])}
    symmetric = replace(structure, automorphisms=orders)
    assert poses(symmetric, swapped, truth)["ligand_rmsd_pocket"] == pytest.approx(0, abs=1e-9)
    two = np.concatenate([POCKET, RING, RING + 3])
    crossed = np.concatenate([POCKET, RING + 3, RING])
    assert poses(complex_of(2), crossed, two)["ligand_rmsd_pocket"] == pytest.approx(0, abs=1e-9)


def test_ligands_without_pocket_or_pose_are_missing() -> None:
    far = np.concatenate([POCKET, RING + 50])
    assert poses(complex_of(), far, far) == {}
    truth = np.concatenate([POCKET, RING])
    one_atom = Sample.make(truth, truth, [1, 1, 1, 1, 1, 0, 0])
    structure = complex_of()
    assert ligand_poses(structure, one_atom, Scored.everything(structure)) == []
    sample = Sample.make(truth, truth, np.ones(7))
    assert ligand_poses(structure, sample, Scored.listed(structure, {1}, set())) == []


def dimer() -> tuple[Structure, Floats]:
    """Two strands of eight CA atoms, 4.5 Angstrom apart, the second one residue shorter."""
    structure = build_structure([PROTEIN] * 15, [0] * 8 + [1] * 7)
    strand = np.arange(8)[:, None] * np.array([[3.8, 0, 0]])
    strand = strand + np.sin(np.arange(8))[:, None] * np.array([[0, 0.5, 0]])
    return structure, np.concatenate([strand, strand[:7] + [0, 0, 4.5]])


def test_dockq_of_the_native_complex_is_one() -> None:
    structure, x = dimer()
    sample = Sample.make(x, x, np.ones(15))
    (pair,) = dockq_pairs(structure, sample, Scored.everything(structure))
    assert (pair.chains, pair.fnat, pair.contacts) == ((1, 2), 1.0, 7)
    assert pair.score == pytest.approx(1.0)


def test_dockq_of_a_shifted_chain_by_hand() -> None:
    structure, truth = dimer()
    predicted = truth.copy()
    predicted[8:] += [0, 0, 4.0]
    sample = Sample.make(predicted, truth, np.ones(15))
    (pair,) = dockq_pairs(structure, sample, Scored.everything(structure))
    assert pair.fnat == 0.0
    assert pair.lrmsd == pytest.approx(4.0)  # the longer chain is fitted, the other measured
    assert pair.irmsd < 4.0
    expected = (1 / (1 + (4 / 8.5) ** 2) + 1 / (1 + (pair.irmsd / 1.5) ** 2)) / 3
    assert pair.score == pytest.approx(expected)


def test_dockq_leaves_distant_and_unscored_pairs_out() -> None:
    structure, x = dimer()
    far = x.copy()
    far[8:] += [0, 0, 30]
    everything = Scored.everything(structure)
    assert dockq_metrics(structure, Sample.make(x, far, np.ones(15)), everything) == {}
    sample = Sample.make(x, x, np.ones(15))
    assert dockq_metrics(structure, sample, Scored.listed(structure, {1, 2}, set())) == {}
    assert dockq_metrics(structure, sample, everything) == pytest.approx(
        {"dockq_uw": 1.0, "dockq_w": 1.0}
    )
