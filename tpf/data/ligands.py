"""Definitions of molecules that no dictionary knows, from SMILES or an SDF record.

``define_ligand(source, code)`` takes either and returns the component definition, with the pose of
an SDF record::

    define_ligand("CC(=O)Nc1ccc(O)cc1", "LIG").component
    define_ligand("poses.sdf#3", "DRG")              # the third record; a title works too

Atoms are named by element and number in the order of the source (of the canonical SMILES for a
SMILES, so that every way of writing it gives the same definition). RDKit (the ``chem`` extra)
reads SMILES, finds aromatic bonds and makes ideal coordinates; without it an SDF record still gives
a definition, whose aromatic bonds are those of alternating six-rings and which has no ideal
coordinates.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpf.data import chem
from tpf.data.ccd import Component
from tpf.data.conformers import drawn_molecule, embed_molecule, rdkit_molecule, use_rdkit
from tpf.data.identity import alternating_bonds
from tpf.data.molfile import ENDINGS, Molecule, read_molecule
from tpf.data.structure import counted
from tpf.errors import DataError, UsageError

MAX_CODE = 5
"""Letters and digits of a component code (wwPDB)."""
RESERVED = chem.STANDARD | chem.WATERS | {"MSE"}
"""Codes that the pipeline reads in a way of their own."""
IDEAL_SEED = 0
"""Seed of the ideal coordinates, so that a molecule always gets the same."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Ligand:
    """A molecule with its definition."""

    component: Component
    pose: NDArray[np.float64] | None
    """[n, 3] Angstrom, where the source places the atoms; None if it does not."""
    smiles: str = ""
    """Canonical SMILES, its atoms in the order of the component; "" for an SDF record."""
    notes: tuple[str, ...] = ()


def define_ligand(source: str, code: str = "LIG") -> Ligand:
    """Return the definition of a SMILES, or of a record of an SDF file (FILE or FILE#RECORD).

    Raises ``UsageError`` for a code that cannot be used, an absent file, or a SMILES without RDKit,
    and ``DataError`` (stage ligand) for a molecule that cannot be used.
    """
    check_code(code)
    if sdf := split_sdf(source):
        return _from_molecule(read_molecule(*sdf), code, source)
    if os.path.isfile(source):  # Path.is_file raises for a long SMILES
        raise UsageError(f"{source}: not an SDF file by its name ({', '.join(ENDINGS[:4])})")
    return _from_smiles(source, code)


def split_sdf(source: str) -> tuple[Path, str | None] | None:
    """Return the MDL file and the record that FILE or FILE#RECORD names; None for a SMILES."""
    if source.lower().endswith(ENDINGS):
        return Path(source), None
    path, _, record = source.rpartition("#")
    return (Path(path), record) if path.lower().endswith(ENDINGS) else None


def check_code(code: str) -> None:
    """Raise ``UsageError`` if a new molecule cannot have this code."""
    if not re.fullmatch(rf"[A-Za-z0-9]{{1,{MAX_CODE}}}", code):
        raise UsageError(f"name {code!r}: a ligand's name has 1 to {MAX_CODE} letters and digits")
    if code.upper() in RESERVED:
        raise UsageError(f"name {code}: this is no ligand's name; choose another, such as LIG")


def _from_smiles(smiles: str, code: str) -> Ligand:
    if not use_rdkit("auto"):
        raise UsageError("a SMILES needs RDKit: pip install 'tpf[chem]', or give an SDF file")
    from rdkit import Chem, rdBase

    with rdBase.BlockLogs():
        raw = Chem.MolFromSmiles(smiles, sanitize=False)
        if raw is None or not raw.GetNumAtoms():
            raise DataError(smiles, "ligand", "not a valid SMILES, and no such SDF file")
        if problems := Chem.DetectChemistryProblems(raw):
            raise DataError(smiles, "ligand", f"RDKit refuses it ({problems[0].Message()})")
        canonical = Chem.MolToSmiles(Chem.MolFromSmiles(smiles))
    mol = molecule_of_smiles(canonical)
    if any(atom.GetAtomicNum() == 0 for atom in mol.GetAtoms()):
        raise DataError(smiles, "ligand", "it has an atom '*', which is no element")
    return dataclasses.replace(_defined(smiles, mol, code, name=canonical), smiles=canonical)


def molecule_of_smiles(canonical: str) -> Any:  # noqa: ANN401 - an RDKit Mol
    """Return the molecule of ``Ligand.smiles`` with hydrogens, heavy atoms first.

    Stereo that the SMILES does not specify stays open.
    """
    from rdkit import Chem

    mol = Chem.MolFromSmiles(canonical)
    heavy = [atom.GetIdx() for atom in mol.GetAtoms() if atom.GetAtomicNum() != 1]
    rest = [atom.GetIdx() for atom in mol.GetAtoms() if atom.GetAtomicNum() == 1]
    return Chem.AddHs(Chem.RenumberAtoms(mol, heavy + rest))


def posed(ligand: Ligand, pose: NDArray[np.float64]) -> Ligand:
    """Return a ligand in a pose [n, 3] that also settles the stereo left open so far."""
    component = ligand.component
    bare = dataclasses.replace(
        component, ideal=np.full_like(component.ideal, np.nan), model=pose.astype(np.float32)
    )
    mol = rdkit_molecule(bare)
    if mol is None:
        return dataclasses.replace(ligand, pose=pose)
    settled = _defined(component.name, mol, component.code, pose, component.name)
    return dataclasses.replace(ligand, component=settled.component, pose=pose)


def _from_molecule(molecule: Molecule, code: str, source: str) -> Ligand:
    """Return the ligand of an MDL record; hydrogens go."""
    heavy = np.flatnonzero(molecule.elements != 1)
    if not len(heavy):
        raise DataError(source, "ligand", "it has no heavy atoms")
    if molecule.flat:
        raise DataError(source, "ligand", "it is a drawing (z is 0); give a pose, or its SMILES")
    place = np.full(len(molecule.elements), -1)
    place[heavy] = np.arange(len(heavy))
    kept = (place[molecule.bonds] >= 0).all(axis=1)
    bonds = np.sort(place[molecule.bonds[kept]], axis=1).astype(np.int32)
    bonds, first = np.unique(bonds, axis=0, return_index=True)
    orders = molecule.orders[kept][first]
    component = _component(
        code, molecule.elements[heavy], molecule.charges[heavy], bonds, orders, orders == 4
    )
    pose = molecule.pos[heavy]
    component = dataclasses.replace(component, name=molecule.title, model=pose.astype(np.float32))
    if use_rdkit("auto"):
        mol = rdkit_molecule(component)
        if mol is None:
            raise DataError(source, "ligand", f"RDKit refuses it ({_problem(component)})")
        return _defined(source, mol, code, pose, molecule.title)
    _check_connected(source, component)
    resonant = component.bond_aromatic | alternating_bonds(component)
    component = dataclasses.replace(
        component, bond_aromatic=resonant, aromatic=_members(component, resonant)
    )
    note = "It has no ideal coordinates: they need RDKit (pip install 'tpf[chem]')."
    return Ligand(component=component, pose=pose, notes=(note,))


def _component(
    code: str,
    elements: NDArray[np.int32],
    charges: NDArray[np.float32],
    bonds: NDArray[np.int32],
    orders: NDArray[np.int32],
    bond_aromatic: NDArray[np.bool_],
) -> Component:
    """Return a definition of these atoms and bonds without coordinates."""
    n = len(elements)
    component = Component(
        code=code,
        type="NON-POLYMER",
        atom_names=atom_names(elements),
        elements=elements,
        charges=charges,
        ideal=np.full((n, 3), np.nan, dtype=np.float32),
        model=np.full((n, 3), np.nan, dtype=np.float32),
        leaving=np.zeros(n, dtype=bool),
        aromatic=np.zeros(n, dtype=bool),
        bonds=bonds,
        bond_orders=orders,
        bond_aromatic=bond_aromatic,
    )
    return dataclasses.replace(component, aromatic=_members(component, bond_aromatic))


def _members(component: Component, bonds: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return [n] whether an atom is in one of the chosen bonds."""
    return np.isin(np.arange(len(component)), component.bonds[bonds])


def atom_names(elements: NDArray[np.int32]) -> NDArray[np.str_]:
    """Return C1, C2, N1, ...: the element with its running number."""
    counts: Counter[int] = Counter()
    names = []
    for z in elements.tolist():
        counts[z] += 1
        names.append(f"{chem.ELEMENTS[z]}{counts[z]}")
    return np.array(names, dtype=np.str_)


def _defined(
    source: str,
    mol: Any,  # noqa: ANN401 - an RDKit Mol
    code: str,
    pose: NDArray[np.float64] | None = None,
    name: str = "",
) -> Ligand:
    """Return the ligand of a sanitised molecule, heavy atoms first; bonds as drawn (Kekule)."""
    from rdkit import Chem

    atoms = [atom for atom in mol.GetAtoms() if atom.GetAtomicNum() != 1]
    if not atoms:
        raise DataError(source, "ligand", "it has no heavy atoms")
    n = len(atoms)
    drawn = Chem.Mol(mol)
    Chem.Kekulize(drawn)
    kinds = {Chem.BondType.DOUBLE: 2, Chem.BondType.TRIPLE: 3}
    rows = []
    for bond, plain in zip(mol.GetBonds(), drawn.GetBonds(), strict=True):
        ends = bond.GetBeginAtomIdx(), bond.GetEndAtomIdx()
        if max(ends) < n:
            order = kinds.get(plain.GetBondType(), 1)
            rows.append((*sorted(ends), order, bond.GetIsAromatic()))
    rows.sort()
    component = _component(
        code,
        np.array([atom.GetAtomicNum() for atom in atoms], dtype=np.int32),
        np.array([atom.GetFormalCharge() for atom in atoms], dtype=np.float32),
        np.array([row[:2] for row in rows], dtype=np.int32).reshape(-1, 2),
        np.array([row[2] for row in rows], dtype=np.int32),
        np.array([row[3] for row in rows], dtype=bool),
    )
    _check_connected(source, component)
    attempts = (embed_molecule(mol, IDEAL_SEED, method) for method in range(3))
    ideal = next((pos[:n] for pos in attempts if pos is not None), component.ideal)
    model = component.model if pose is None else pose.astype(np.float32)
    component = dataclasses.replace(component, name=name, ideal=ideal, model=model)
    return Ligand(component=component, pose=pose, notes=tuple(_doubts(mol, ideal)))


def _doubts(
    mol: Any,  # noqa: ANN401 - an RDKit Mol
    ideal: NDArray[np.float32],
) -> Iterator[str]:
    """Yield what the source leaves open."""
    from rdkit import Chem

    elements = Chem.FindPotentialStereo(mol)
    unknown = sum(e.specified == Chem.StereoSpecified.Unspecified for e in elements)
    if unknown:
        yield f"{counted(unknown, 'stereo element')} not specified; the conformer chose."
    if not np.isfinite(ideal).all():
        yield "It has no ideal coordinates: RDKit could not embed it."


def _problem(component: Component) -> str:
    from rdkit import Chem, rdBase

    with rdBase.BlockLogs():
        problems = Chem.DetectChemistryProblems(drawn_molecule(component))
    return str(problems[0].Message()) if problems else "its chemistry is not understood"


def _check_connected(source: str, component: Component) -> None:
    """Raise ``DataError`` if the molecule has several parts, such as a salt."""
    root = list(range(len(component)))
    for i, j in component.bonds.tolist():
        old, new = root[i], root[j]
        root = [new if r == old else r for r in root]
    parts = len(set(root))
    if parts > 1:
        raise DataError(source, "ligand", f"it has {parts} parts; give one molecule at a time")
