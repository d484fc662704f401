"""The working record between a parsed file and ``Tables``: the atoms, residues and chains listed.

Atoms need not be in any order inside a residue. Unresolved residues are not present unless the file
lists their atoms; the sequence of a polymer, which knows them, lies in its ``Chain``.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import string
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


def counted(n: int, noun: str) -> str:
    """Return ``1 atom``, ``2 atoms``: a number with its noun, for notes."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def chain_names(taken: Collection[str]) -> Iterator[str]:
    """Yield A, B, ..., Z, AA, AB, ... without the names taken."""
    for size in itertools.count(1):
        for letters in itertools.product(string.ascii_uppercase, repeat=size):
            if (name := "".join(letters)) not in taken:
                yield name


@dataclass(frozen=True)
class Site:
    """One position of a polymer sequence."""

    res_id: int
    code: str
    auth_seq: str


@dataclass(frozen=True, kw_only=True)
class Chain:
    """One chain: a polymer, or a ligand, ion or glycan."""

    id: str
    auth: str
    entity: str
    """Entity id of the file, "" if it has none."""
    type: int
    """PROTEIN, RNA, DNA or LIGAND."""
    polymer: bool
    sequence: tuple[Site, ...] = ()
    """All positions of a polymer, also the unresolved ones; empty for other chains."""


@dataclass(frozen=True, kw_only=True)
class Structure:
    """Listed atoms of one model; index letters as in ``Tables``, L links."""

    id: str
    method: str
    resolution: float | None
    release_date: datetime.date | None

    atom_name: NDArray[np.str_]
    element: NDArray[np.int32]
    pos: NDArray[np.float64]
    """[A, 3] Angstrom; NaN where the file has none."""
    occupancy: NDArray[np.float32]
    """[A] 0..1; an atom of occupancy 0 is unresolved, whatever its position."""
    b_factor: NDArray[np.float32]
    atom_residue: NDArray[np.int32]
    """[A] non-decreasing."""

    res_name: NDArray[np.str_]
    res_id: NDArray[np.int32]
    auth_seq: NDArray[np.str_]
    res_chain: NDArray[np.int32]
    """[R] non-decreasing."""

    chains: tuple[Chain, ...]
    links: NDArray[np.int32]
    """[L, 2] atom indices i < j of bonds between residues that the file records."""
    dative: NDArray[np.bool_]
    """[L] coordination of a metal."""
    notes: tuple[str, ...] = ()

    @property
    def resolved(self) -> NDArray[np.bool_]:
        """[A] whether the atom was seen."""
        return (self.occupancy > 0) & np.isfinite(self.pos).all(axis=1)

    @property
    def atom_chain(self) -> NDArray[np.int32]:
        """[A] index into ``chains``."""
        return self.res_chain[self.atom_residue]

    @property
    def polymer_atom(self) -> NDArray[np.bool_]:
        """[A] whether the atom lies in a polymer chain."""
        polymer = np.array([chain.polymer for chain in self.chains], dtype=bool)
        return polymer[self.atom_chain]

    def noted(self, sentence: str) -> Structure:
        """Return the structure with one more note."""
        return dataclasses.replace(self, notes=(*self.notes, sentence))

    def spans(self) -> NDArray[np.int64]:
        """Return the first atom of each residue, and the number of atoms at the end, [R + 1]."""
        return np.searchsorted(self.atom_residue, np.arange(len(self.res_name) + 1))


def take(structure: Structure, order: NDArray[np.intp]) -> Structure:
    """Return the structure with the atoms of ``order``, in that order.

    The order must keep residues together and in their order. Residues and chains that lose all
    atoms go, and so do links that lose an end.
    """
    position = np.full(len(structure.atom_name), -1, dtype=np.int64)
    position[order] = np.arange(len(order))
    residues, atom_residue = np.unique(structure.atom_residue[order], return_inverse=True)
    chains, res_chain = np.unique(structure.res_chain[residues], return_inverse=True)
    links = position[structure.links]
    whole = (links >= 0).all(axis=1)
    return dataclasses.replace(
        structure,
        atom_name=structure.atom_name[order],
        element=structure.element[order],
        pos=structure.pos[order],
        occupancy=structure.occupancy[order],
        b_factor=structure.b_factor[order],
        atom_residue=atom_residue.astype(np.int32),
        res_name=structure.res_name[residues],
        res_id=structure.res_id[residues],
        auth_seq=structure.auth_seq[residues],
        res_chain=res_chain.astype(np.int32),
        chains=tuple(structure.chains[int(c)] for c in chains),
        links=np.sort(links[whole], axis=1).astype(np.int32),
        dative=structure.dative[whole],
    )


def keep_atoms(structure: Structure, mask: NDArray[np.bool_]) -> Structure:
    """Return the structure without the atoms where ``mask`` is false."""
    return structure if mask.all() else take(structure, np.flatnonzero(mask))


def keep_residues(structure: Structure, mask: NDArray[np.bool_]) -> Structure:
    """Return the structure without the residues where ``mask`` is false."""
    return keep_atoms(structure, mask[structure.atom_residue])


def keep_chains(structure: Structure, mask: NDArray[np.bool_]) -> Structure:
    """Return the structure without the chains where ``mask`` is false."""
    return keep_atoms(structure, mask[structure.atom_chain])


def close_pairs(
    pos: NDArray[np.float64], cutoff: float
) -> Iterator[tuple[NDArray[np.intp], NDArray[np.intp]]]:
    """Yield index arrays (i, j), i != j, that together hold every pair closer than ``cutoff``.

    Cells of the cutoff's size; each pair comes in both orders.
    """
    cell = np.floor((pos - pos.min(axis=0)) / cutoff).astype(np.int64) + 1
    span = cell.max(axis=0) + 2
    strides = np.array([span[1] * span[2], span[2], 1])
    key = cell @ strides
    order = np.argsort(key, kind="stable")
    ordered = key[order]
    for shift in np.ndindex(3, 3, 3):
        wanted = key + (np.array(shift) - 1) @ strides
        first = np.searchsorted(ordered, wanted, side="left")
        count = np.searchsorted(ordered, wanted, side="right") - first
        left = np.repeat(np.arange(len(pos)), count)
        rank = np.arange(len(left)) - np.repeat(np.cumsum(count) - count, count)
        right = order[np.repeat(first, count) + rank]
        near = (left != right) & (np.sum((pos[left] - pos[right]) ** 2, axis=1) < cutoff**2)
        yield left[near], right[near]
