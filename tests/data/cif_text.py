"""Small mmCIF texts for tests: atoms in a compact notation, ideal peptides."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from tpf.data import chem
from tpf.data.ccd import Dictionary
from tpf.data.tables import Tables

COLUMNS = (
    "group_PDB", "id", "type_symbol", "label_atom_id", "label_alt_id", "label_comp_id",
    "label_asym_id", "label_entity_id", "label_seq_id", "Cartn_x", "Cartn_y", "Cartn_z",
    "occupancy", "B_iso_or_equiv", "auth_seq_id", "pdbx_PDB_ins_code", "auth_asym_id",
    "pdbx_PDB_model_num",
)  # fmt: skip

Row = dict[str, object]


def atom(name: str, comp: str, asym: str, seq: object, xyz: Iterable[float], **more: object) -> Row:
    """Return one row of ``_atom_site``; ``seq`` "." marks a ligand."""
    x, y, z = xyz
    row: Row = {
        "group_PDB": "HETATM" if seq == "." else "ATOM",
        "id": 1,
        "type_symbol": name[0],
        "label_atom_id": name,
        "label_alt_id": ".",
        "label_comp_id": comp,
        "label_asym_id": asym,
        "label_entity_id": asym,
        "label_seq_id": seq,
        "Cartn_x": f"{x:.3f}",
        "Cartn_y": f"{y:.3f}",
        "Cartn_z": f"{z:.3f}",
        "occupancy": 1.0,
        "B_iso_or_equiv": 20.0,
        "auth_seq_id": 1 if seq == "." else seq,
        "pdbx_PDB_ins_code": "?",
        "auth_asym_id": asym,
        "pdbx_PDB_model_num": 1,
    }
    return row | more


def residue(
    comp: str, asym: str, seq: object, origin: Iterable[float], **more: object
) -> list[Row]:
    """Return the heavy atoms of a component at its ideal coordinates, moved to ``origin``."""
    component = Dictionary().get(comp)
    assert component is not None
    shift = np.array(list(origin)) - component.ideal[0]
    return [
        atom(
            str(name),
            comp,
            asym,
            seq,
            component.ideal[i] + shift,
            **({"type_symbol": chem.ELEMENTS[component.elements[i]]} | more),
        )
        for i, name in enumerate(component.atom_names)
        if seq == "." or str(name) not in chem.TERMINAL_ATOMS
    ]


def peptide(asym: str, codes: Iterable[str], origin: Iterable[float] = (0, 0, 0)) -> list[Row]:
    """Return residues 3.8 Angstrom apart along x; neighbours are too far to be bonded properly."""
    start = np.array(list(origin), dtype=float)
    rows: list[Row] = []
    for i, code in enumerate(codes):
        rows += residue(code, asym, i + 1, start + [3.8 * i, 0, 0])
    return rows


def cif(rows: list[Row], extra: str = "", columns: Iterable[str] = COLUMNS) -> str:
    """Return a data block of these atoms and further text."""
    columns = list(columns)
    lines = ["data_test", "_entry.id TEST", extra, "loop_"]
    lines += [f"_atom_site.{column}" for column in columns]
    for i, row in enumerate(rows):
        values = row | {"id": i + 1}
        lines.append(" ".join(_quoted(str(values[column])) for column in columns))
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return f'"{text}"' if "'" in text or " " in text else text


def polymer(asym: str, codes: Iterable[str], kind: str = "polypeptide(L)") -> str:
    """Return the entity and sequence records of one polymer whose entity id is its chain id."""
    codes = list(codes)
    lines = [
        f"_entity.id {asym}\n_entity.type polymer",
        f"_entity_poly.entity_id {asym}\n_entity_poly.type {kind}",
        "loop_\n_entity_poly_seq.entity_id\n_entity_poly_seq.num\n_entity_poly_seq.mon_id",
    ]
    lines += [f"{asym} {i + 1} {code}" for i, code in enumerate(codes)]
    return "\n".join(lines)


def write(folder: Path, text: str, name: str = "test.cif") -> Path:
    """Store text as a file and return its path."""
    path = folder / name
    path.write_text(text)
    return path


SEQUENCE = ["ALA", "GLY", "SER", "CYS", "VAL"]
TEXT = cif(peptide("A", SEQUENCE), polymer("A", SEQUENCE))


def equal(a: Tables, b: Tables) -> bool:
    """Tell whether two tables have the same atoms, positions, numbers and bonds."""
    same = a.atom_name.tolist() == b.atom_name.tolist() and np.array_equal(
        a.pos, b.pos, equal_nan=True
    )
    return same and a.res_id.tolist() == b.res_id.tolist() and a.bonds.tolist() == b.bonds.tolist()
