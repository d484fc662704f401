"""Tokenisation of cleaned tables (AF3 SI 2.6): residues, or single atoms where atomised."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tpf.data import chem
from tpf.data.tables import LIGAND, Tables, Tokens
from tpf.errors import DataError


def atomized_residues(tables: Tables) -> NDArray[np.bool_]:
    """Return which residues get one token per atom, [R].

    All that are not standard, and standard ones with a bond to another residue that is neither
    a peptide nor a phosphodiester bond (glycosylation site, covalent inhibitor, staple).
    """
    atomized = ~tables.res_standard
    residues = tables.atom_residue[tables.bonds]
    for pair in tables.bonds[residues[:, 0] != residues[:, 1]]:
        first, second = tables.atom_residue[pair]
        if not _along_backbone(tables, int(first), int(second), tables.atom_name[pair].tolist()):
            atomized[[first, second]] = True
    return atomized


def _along_backbone(tables: Tables, first: int, second: int, names: list[str]) -> bool:
    """Return whether a bond joins neighbours of a chain by their main chain.

    Only the names of standard residues count: a chromophore may call its nitrogen N1.
    """
    if second != first + 1 or tables.res_chain[first] != tables.res_chain[second]:
        return False
    left = not tables.res_standard[first] or names[0] in ("C", "O3'")
    right = not tables.res_standard[second] or names[1] in ("N", "P")
    return left and right and bool(tables.chain_type[tables.res_chain[first]] != LIGAND)


def tokenize(tables: Tables) -> Tokens:
    """Return the tokens of cleaned tables.

    A standard residue keeps its type when it is atomised; everything else has the type UNK.
    Raises ``DataError`` (stage tokens) if a standard residue lacks its centre atom or has more
    atoms than a token may have.
    """
    atomized = atomized_residues(tables)
    n_residues = len(tables.res_name)
    first = np.searchsorted(tables.atom_residue, np.arange(n_residues + 1))
    sizes = np.diff(first)
    counts = np.where(atomized, sizes, 1)
    residue = np.repeat(np.arange(n_residues), counts)
    rank = np.arange(len(residue)) - np.repeat(np.cumsum(counts) - counts, counts)
    single = atomized[residue]
    start = first[residue] + np.where(single, rank, 0)
    num = np.where(single, 1, sizes[residue])
    if num.max(initial=0) > chem.MAX_TOKEN_ATOMS:
        worst = int(residue[np.argmax(num)])
        reason = f"residue {tables.res_name[worst]} has {int(num.max())} atoms, more than "
        raise DataError(tables.id, "tokens", f"{reason}{chem.MAX_TOKEN_ATOMS}")
    center, representative = start.copy(), start.copy()
    types = np.full(n_residues, chem.UNKNOWN)
    kinds = tables.chain_type[tables.res_chain]
    for r in np.flatnonzero(tables.res_standard):
        types[r] = chem.RESTYPE[str(tables.res_name[r])]
        kinds[r] = chem.molecule_type(str(tables.res_name[r]))
    for n in np.flatnonzero(~single):
        code = str(tables.res_name[residue[n]])
        own = tables.atom_name[start[n] : start[n] + num[n]].tolist()
        try:
            center[n] = start[n] + own.index(chem.center_atom(code))
            representative[n] = start[n] + own.index(chem.representative_atom(code))
        except ValueError as error:
            reason = f"residue {code} lacks its centre or representative atom"
            raise DataError(tables.id, "tokens", reason) from error
    return Tokens(
        tables=tables,
        start_atom=start.astype(np.int32),
        num_atoms=num.astype(np.int32),
        residue=residue.astype(np.int32),
        atomized=single,
        restype=types[residue].astype(np.int32),
        mol_type=kinds[residue].astype(np.int32),
        center_atom=center.astype(np.int32),
        rep_atom=representative.astype(np.int32),
    )
