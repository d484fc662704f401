"""Bonds between residues that a file records (``_struct_conn``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tpf.data import chem
from tpf.data.atom_site import Group
from tpf.data.cif import Block, Columns
from tpf.data.structure import Structure, close_pairs

BOND_TYPES = ("covale", "disulf", "metalc", "modres")
"""Leading letters of the connection types that are bonds; hydrogen bonds and others are not."""

LINK_TOLERANCE = 0.25
"""Angstrom added to the sum of covalent radii when links are inferred."""
SHORTEST = 1.1
"""Angstrom; atoms that are closer overlap and are not bonded."""

_COLUMNS = tuple(
    f"{prefix}ptnr{side}_{name}"
    for side in (1, 2)
    for prefix, name in (
        ("", "label_asym_id"), ("", "label_comp_id"), ("", "label_seq_id"), ("", "label_atom_id"),
        ("", "auth_asym_id"), ("", "auth_seq_id"), ("pdbx_", "pdb_ins_code"), ("", "symmetry"),
    )
)  # fmt: skip


class GroupFinder:
    """Finds the group that a connection record means, by author or by label numbers."""

    def __init__(self, groups: list[Group]) -> None:
        self._by_author: dict[tuple[str, str, str, str], int] = {}
        self._by_label: dict[tuple[str, str, str], int] = {}
        for i, group in enumerate(groups):
            author = (group.asym, group.auth_asym, group.auth_seq, group.comp)
            self._by_author.setdefault(author, i)
            seq = "" if group.seq is None else str(group.seq)
            self._by_label.setdefault((group.asym, seq, group.comp), i)

    def find(self, record: Mapping[str, str], side: int) -> int | None:
        """Return the index of the group at one side (1 or 2) of a record, None if absent."""
        asym = record.get(f"ptnr{side}_label_asym_id", "")
        auth_asym = record.get(f"ptnr{side}_auth_asym_id", "")
        comp = record.get(f"ptnr{side}_label_comp_id", "")
        insertion = record.get(f"pdbx_ptnr{side}_pdb_ins_code", "")
        number = record.get(f"ptnr{side}_auth_seq_id", "") + insertion
        found = self._by_author.get((asym or auth_asym, auth_asym or asym, number, comp))
        if found is None:
            label = record.get(f"ptnr{side}_label_seq_id", "")
            found = self._by_label.get((asym or auth_asym, label, comp))
        return found


@dataclass(frozen=True)
class Link:
    """A recorded bond: group index and atom name of both ends."""

    left: int
    left_atom: str
    right: int
    right_atom: str
    dative: bool


def read_links(block: Block, groups: list[Group]) -> list[Link]:
    """Return each recorded bond inside the deposited unit.

    A bond to a crystallographic copy is left out: its partner is not in the file.
    """
    columns: Columns = block.columns("struct_conn", ("conn_type_id", *_COLUMNS))
    if "conn_type_id" not in columns:
        return []
    finder = GroupFinder(groups)
    links: list[Link] = []
    for row, kind in enumerate(columns["conn_type_id"].tolist()):
        if not kind.lower().startswith(BOND_TYPES):
            continue
        record = {name: str(values[row]) for name, values in columns.items()}
        if record.get("ptnr1_symmetry", "") != record.get("ptnr2_symmetry", ""):
            continue
        left, right = finder.find(record, 1), finder.find(record, 2)
        if left is None or right is None:
            continue
        links.append(
            Link(
                left,
                record.get("ptnr1_label_atom_id", ""),
                right,
                record.get("ptnr2_label_atom_id", ""),
                kind.lower().startswith("metalc"),
            )
        )
    return links


def infer_links(structure: Structure) -> NDArray[np.int32]:
    """Return covalent bonds that distances show between residues, at least one of them outside a
    polymer, [L, 2]; for files without connection records."""
    bonded = np.array([z in chem.COVALENT_RADIUS for z in range(len(chem.ELEMENTS))])
    usable = bonded[structure.element] & structure.resolved
    usable &= ~np.isin(structure.res_name, list(chem.WATERS))[structure.atom_residue]
    atoms = np.flatnonzero(usable)
    if not len(atoms):
        return np.zeros((0, 2), dtype=np.int32)
    radius = np.array([chem.COVALENT_RADIUS[int(z)] for z in structure.element[atoms]])
    residue = structure.atom_residue[atoms]
    ligand = ~structure.polymer_atom[atoms]
    found: set[tuple[int, int]] = set()
    longest = 2 * float(radius.max()) + LINK_TOLERANCE
    for left, right in close_pairs(structure.pos[atoms], longest):
        length = np.linalg.norm(structure.pos[atoms[left]] - structure.pos[atoms[right]], axis=1)
        bond = (left < right) & (residue[left] != residue[right]) & (ligand[left] | ligand[right])
        bond &= (length < radius[left] + radius[right] + LINK_TOLERANCE) & (length > SHORTEST)
        found |= set(zip(atoms[left[bond]].tolist(), atoms[right[bond]].tolist(), strict=True))
    return np.array(sorted(found), dtype=np.int32).reshape(-1, 2)
