"""Pairing of chains, residues and atoms of two files."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tpf.data.tables import LIGAND, PROTEIN, Tables
from tpf.metrics.matching import match_tables

PEPTIDE = ("ALA", "GLY", "SER", "THR", "VAL", "LEU", "ILE", "PRO", "PHE", "TYR")


def tables(
    *chains: tuple[str, int, Sequence[str]],
    first: int = 1,
    atoms: Sequence[str] = ("N", "CA"),
    missing: Sequence[int] = (),
) -> Tables:
    """Chains of (id, entity, residue names); a lower-case id makes a ligand."""
    names = [name for _, _, residues in chains for name in residues]
    n_atoms = len(names) * len(atoms)
    pos = np.zeros((n_atoms, 3), np.float32)
    pos[list(missing)] = np.nan
    return Tables(
        id="test",
        method="",
        resolution=None,
        release_date=None,
        atom_name=np.array(list(atoms) * len(names)),
        element=np.full(n_atoms, 6, np.int32),
        charge=np.zeros(n_atoms, np.float32),
        ideal=np.full((n_atoms, 3), np.nan, np.float32),
        pos=pos,
        occupancy=np.ones(n_atoms, np.float32),
        b_factor=np.zeros(n_atoms, np.float32),
        atom_residue=np.repeat(np.arange(len(names), dtype=np.int32), len(atoms)),
        res_name=np.array(names),
        res_id=np.concatenate([np.arange(len(r)) + first for _, _, r in chains]).astype(np.int32),
        auth_seq=np.array([""] * len(names)),
        res_chain=np.repeat(np.arange(len(chains)), [len(r) for _, _, r in chains]).astype(
            np.int32
        ),
        res_standard=np.ones(len(names), np.bool_),
        chain_id=np.array([name for name, _, _ in chains]),
        auth_chain=np.array([name for name, _, _ in chains]),
        chain_type=np.array(
            [LIGAND if name.islower() else PROTEIN for name, _, _ in chains], np.int32
        ),
        chain_entity=np.array([entity for _, entity, _ in chains], np.int32),
        chain_sym=np.ones(len(chains), np.int32),
        bonds=np.zeros((0, 2), np.int32),
        bond_order=np.zeros(0, np.int32),
    )


def residues_of(source: np.ndarray) -> list[int]:
    """Predicted residue of each reference residue (two atoms each), -1 without one."""
    return [int(s) // 2 if s >= 0 else -1 for s in source[::2]]


def test_equal_sequences_pair_in_order_whatever_the_chain_names() -> None:
    match = match_tables(
        tables(("X", 1, PEPTIDE), ("Y", 2, PEPTIDE[::-1])),
        tables(("A", 1, PEPTIDE[::-1]), ("B", 2, PEPTIDE)),
    )
    assert match.chains == (("X", "B"), ("Y", "A"))
    assert residues_of(match.source) == [*range(10, 20), *range(10)]
    assert match.notes == ()


def test_atoms_are_found_by_name_and_need_a_position() -> None:
    match = match_tables(
        tables(("A", 1, PEPTIDE[:3]), atoms=("CA", "N"), missing=[2]),
        tables(("A", 1, PEPTIDE[:3])),
    )
    assert match.source.tolist() == [1, 0, 3, -1, 5, 4]
    assert match.notes == ("1 of 6 resolved reference atoms have no prediction",)


def test_a_fragment_is_placed_by_number_or_by_alignment() -> None:
    reference = tables(("A", 1, PEPTIDE))
    for first in (4, 101):
        match = match_tables(tables(("A", 1, PEPTIDE[3:9]), first=first), reference)
        assert residues_of(match.source) == [-1, -1, -1, 0, 1, 2, 3, 4, 5, -1]


def test_a_mutated_residue_is_left_out() -> None:
    mutant = (*PEPTIDE[:4], "TRP", *PEPTIDE[5:])
    match = match_tables(tables(("A", 1, mutant)), tables(("A", 1, PEPTIDE)))
    assert residues_of(match.source) == [0, 1, 2, 3, -1, 5, 6, 7, 8, 9]


def test_chance_similarity_does_not_pair_chains() -> None:
    scrambled = [name for name in PEPTIDE for _ in range(3)]
    match = match_tables(tables(("A", 1, PEPTIDE[:4]), first=50), tables(("A", 1, scrambled)))
    assert match.chains == () and (match.source < 0).all()


def test_ligands_pair_by_component_and_extra_ones_are_named() -> None:
    match = match_tables(
        tables(("A", 1, PEPTIDE), ("b", 2, ["ATP"]), ("c", 2, ["ATP"])),
        tables(("A", 1, PEPTIDE), ("b", 2, ["STI"]), ("c", 3, ["ATP"])),
    )
    assert match.chains == (("A", "A"), ("b", "c"))
    assert match.notes[0].endswith("not scored: c (ATP)")
    assert match.notes[1].endswith("not scored: b (STI)")
