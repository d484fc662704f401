"""The records that the stages of the data pipeline hand to each other.

``Tables`` is a cleaned assembly (gemmi objects stop before it), ``Tokens`` its tokenisation.
Both hold numpy arrays only, so that they pickle, cache and test without gemmi or torch.
Index letters: A atoms, R residues (a ligand or ion instance is one residue), C chains, N tokens.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PROTEIN, RNA, DNA, LIGAND = 0, 1, 2, 3
"""Molecule types (spec model.md 1.2)."""
TYPE_NAMES = ("protein", "RNA", "DNA", "ligand")


@dataclass(frozen=True, kw_only=True)
class Tables:
    """A cleaned assembly: atoms in order chain, residue, CCD atom order.

    Unresolved atoms are present with occupancy 0 and NaN coordinates. Chains are sorted by id.
    """

    id: str
    """Entry id in lower case, or the file stem."""
    method: str
    """Experimental method in upper case as in ``_exptl.method``, "" if unknown."""
    resolution: float | None
    """Angstrom; None for NMR or unknown."""
    release_date: datetime.date | None

    atom_name: NDArray[np.str_]
    """[A] CCD atom name."""
    element: NDArray[np.int32]
    """[A] atomic number, 0 for an unknown element."""
    charge: NDArray[np.float32]
    """[A] formal charge of the component definition."""
    ideal: NDArray[np.float32]
    """[A, 3] Angstrom, ideal coordinates of components that the file itself defines; NaN for all
    others, which a dictionary has."""
    pos: NDArray[np.float32]
    """[A, 3] Angstrom; NaN where unresolved."""
    occupancy: NDArray[np.float32]
    """[A] 0..1; 0 where unresolved."""
    b_factor: NDArray[np.float32]
    """[A] Angstrom squared; 0 where unresolved."""
    atom_residue: NDArray[np.int32]
    """[A] index into the residue arrays, non-decreasing."""

    res_name: NDArray[np.str_]
    """[R] component code."""
    res_id: NDArray[np.int32]
    """[R] 1-based label sequence number of polymers; 1-based running number otherwise."""
    auth_seq: NDArray[np.str_]
    """[R] author number with insertion code, "" if unknown."""
    res_chain: NDArray[np.int32]
    """[R] index into the chain arrays, non-decreasing."""
    res_standard: NDArray[np.bool_]
    """[R] standard amino acid or nucleotide (or UNK, N, DN) inside a polymer chain."""

    chain_id: NDArray[np.str_]
    """[C] label asym id (with a copy suffix for symmetry mates of the assembly)."""
    auth_chain: NDArray[np.str_]
    """[C] author chain name."""
    chain_type: NDArray[np.int32]
    """[C] PROTEIN, RNA, DNA or LIGAND."""
    chain_entity: NDArray[np.int32]
    """[C] 1-based entity number; equal for equal sequence or molecule."""
    chain_sym: NDArray[np.int32]
    """[C] 1-based copy number inside the entity."""

    bonds: NDArray[np.int32]
    """[n, 2] atom index pairs i < j, sorted, unique: bonds within residues, along polymers, and
    the retained links between residues or chains."""
    bond_order: NDArray[np.int32]
    """[n] 1, 2, 3; 4 aromatic; 0 unknown."""
    notes: tuple[str, ...] = ()
    """What was inferred or removed while reading, one sentence each."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Tokenisation of a ``Tables`` (AF3 SI 2.6), in atom order; every token's atoms are
    contiguous: ``start_atom[n] : start_atom[n] + num_atoms[n]``."""

    tables: Tables
    start_atom: NDArray[np.int32]
    """[N] index into the atoms of ``tables``."""
    num_atoms: NDArray[np.int32]
    """[N] 1..23."""
    residue: NDArray[np.int32]
    """[N] index into the residues of ``tables``."""
    atomized: NDArray[np.bool_]
    """[N] one token per atom."""
    restype: NDArray[np.int32]
    """[N] index into the residue alphabet of 32."""
    mol_type: NDArray[np.int32]
    """[N] PROTEIN, RNA, DNA or LIGAND (a modified amino acid is PROTEIN and atomized)."""
    center_atom: NDArray[np.int32]
    """[N] atom index of CA, C1' or the atom itself."""
    rep_atom: NDArray[np.int32]
    """[N] atom index of CB (CA for GLY), C4, C2 or the atom itself."""

    def __len__(self) -> int:
        return len(self.start_atom)
