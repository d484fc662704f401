"""Bonds between residues that a file records (``_struct_conn``)."""

from __future__ import annotations

from collections.abc import Mapping

from tpf.data.atom_site import Group
from tpf.data.cif import Block, Columns

BOND_TYPES = ("covale", "disulf", "metalc", "modres")
"""Leading letters of the connection types that are bonds; hydrogen bonds and others are not."""

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


def read_links(block: Block, groups: list[Group]) -> list[tuple[int, str, int, str]]:
    """Return (group, atom name, group, atom name) of each bond inside the deposited unit.

    A bond to a crystallographic copy is left out: its partner is not in the file.
    """
    columns: Columns = block.columns("struct_conn", ("conn_type_id", *_COLUMNS))
    if "conn_type_id" not in columns:
        return []
    finder = GroupFinder(groups)
    links: list[tuple[int, str, int, str]] = []
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
            (
                left,
                record.get("ptnr1_label_atom_id", ""),
                right,
                record.get("ptnr2_label_atom_id", ""),
            )
        )
    return links
