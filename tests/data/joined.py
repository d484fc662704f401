"""Complexes of proteins and own ligands, made in the folder of a test."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from poses import EXAMPLES

from tpf.data.assemble import Assembled, Order, assemble
from tpf.data.ccd import Component
from tpf.data.tables import Tables

KINASE = EXAMPLES / "1y57.cif.gz"
SMALL = EXAMPLES / "4cup.cif.gz"
FLUORINE = 9


def put(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def make(
    folder: Path, protein: Path, *ligands: str, out: str = "x.cif", **more: object
) -> Assembled:
    order = Order(protein=protein, ligands=ligands, out=folder / out, **more)  # type: ignore[arg-type]
    return assemble(order)


def residue_of(tables: Tables, code: str) -> np.ndarray:
    (found,) = np.flatnonzero(tables.res_name == code)
    return np.flatnonzero(tables.atom_residue == found)


def symmetries(part: Component) -> np.ndarray:
    """Return the orders of atoms that keep elements and bonds, by RDKit's graph matching."""
    chem = pytest.importorskip("rdkit.Chem")
    plain = chem.RWMol()
    for z in part.elements.tolist():
        plain.AddAtom(chem.Atom(int(z)))
    for (i, j), aromatic in zip(part.bonds.tolist(), part.bond_aromatic.tolist(), strict=True):
        plain.AddBond(i, j, chem.BondType.AROMATIC if aromatic else chem.BondType.SINGLE)
    return np.array(plain.GetSubstructMatches(plain, uniquify=False, maxMatches=10_000))
