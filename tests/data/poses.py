"""SDF texts for tests, written by hand from atoms and bonds, and analogs of ligands in entries."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from tpf.data import chem
from tpf.data.ccd import Component, Dictionary
from tpf.data.load import load_tables

EXAMPLES = Path(__file__).resolve().parents[2] / "data" / "examples"
SULPHUR = 16


def sdf(part: Component, pos: np.ndarray, title: str = "", v3000: bool = False) -> str:
    """Return one record of an SDF file; orders as drawn."""
    symbols = [chem.ELEMENTS[z].capitalize() for z in part.elements.tolist()]
    xyz, bonds = pos.tolist(), (part.bonds + 1).tolist()
    orders, charges = part.bond_orders.tolist(), part.charges.astype(int).tolist()
    if v3000:
        lines = ["  0  0  0     0  0            999 V3000", "M  V30 BEGIN CTAB"]
        lines += [f"M  V30 COUNTS {len(symbols)} {len(bonds)} 0 0 0", "M  V30 BEGIN ATOM"]
        for k, (symbol, place, charge) in enumerate(zip(symbols, xyz, charges, strict=True)):
            x, y, z = place
            lines.append(f"M  V30 {k + 1} {symbol} {x:.4f} {y:.4f} -")
            lines.append(f"M  V30 {z:.4f} 0" + (f" CHG={charge}" if charge else ""))
        lines += ["M  V30 END ATOM", "M  V30 BEGIN BOND"]
        for k, ((i, j), order) in enumerate(zip(bonds, orders, strict=True)):
            lines.append(f"M  V30 {k + 1} {order} {i} {j}")
        lines += ["M  V30 END BOND", "M  V30 END CTAB"]
    else:
        lines = [f"{len(symbols):3d}{len(bonds):3d}  0  0  0  0            999 V2000"]
        lines += [
            f"{x:10.4f}{y:10.4f}{z:10.4f} {symbol:<3} 0  0  0  0"
            for symbol, (x, y, z) in zip(symbols, xyz, strict=True)
        ]
        lines += [f"{i:3d}{j:3d}{o:3d}  0" for (i, j), o in zip(bonds, orders, strict=True)]
        lines += [f"M  CHG  1 {k + 1:3d} {q:3d}" for k, q in enumerate(charges) if q]
    return "\n".join([title, "  test", "", *lines, "M  END", "$$$$", ""])


def posed_ligand(path: Path, code: str) -> tuple[Component, np.ndarray]:
    """Return the definition and the resolved positions of the first ligand of a code."""
    tables = load_tables(path)
    residue = int(np.flatnonzero(tables.res_name == code)[0])
    atoms = np.flatnonzero(tables.atom_residue == residue)
    part = Dictionary().get(code)
    assert part is not None and np.isfinite(tables.pos[atoms]).all()
    assert part.atom_names.tolist() == tables.atom_name[atoms].tolist()
    return part, tables.pos[atoms].astype(float)


def without(part: Component, pos: np.ndarray, atom: int) -> tuple[Component, np.ndarray]:
    """Return a molecule without one of its end atoms."""
    keep = np.arange(len(part)) != atom
    inside = keep[part.bonds].all(axis=1)
    rows = {
        name: getattr(part, name)[keep]
        for name in ("atom_names", "elements", "charges", "ideal", "model", "leaving", "aromatic")
    }
    smaller = dataclasses.replace(
        part,
        **rows,
        bonds=(np.cumsum(keep) - 1)[part.bonds[inside]].astype(np.int32),
        bond_orders=part.bond_orders[inside],
        bond_aromatic=part.bond_aromatic[inside],
    )
    return smaller, pos[keep]


def ends(part: Component, element: int) -> list[int]:
    """Return the atoms of an element that have one single bond."""
    degree = np.bincount(part.bonds.ravel(), minlength=len(part))
    return [
        i
        for i in np.flatnonzero((part.elements == element) & (degree == 1)).tolist()
        if part.bond_orders[(part.bonds == i).any(axis=1)].tolist() == [1]
    ]


def analog(path: Path, code: str) -> tuple[Component, np.ndarray]:
    """Return a ligand of an entry without an end carbon, or else with N exchanged for C."""
    part, pos = posed_ligand(path, code)
    carbons = ends(part, 6)
    if carbons:
        return without(part, pos, carbons[0])
    elements = part.elements.copy()
    singles = part.bond_orders == 1
    single = [i for i in range(len(part)) if singles[(part.bonds == i).any(axis=1)].all()]
    swapped = next(i for i in single if elements[i] in (7, 8))
    elements[swapped] = SULPHUR if elements[swapped] == 8 else 6
    return dataclasses.replace(part, elements=elements, charges=part.charges * 0), pos
