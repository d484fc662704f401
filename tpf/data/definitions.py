"""Definitions of the components of one structure: from the file, a dictionary, or its own atoms.

The file comes first, then the user's dictionary, then the known one. A code alone proves nothing:
a definition is taken if it fits the atoms at hand, and two molecules under one code stay two.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tpf.data import chem
from tpf.data.ccd import Component, Dictionary
from tpf.data.identity import agrees
from tpf.data.structure import Structure, counted, keep_residues

MIN_MATCH = 0.7
"""Share of observed atoms that a definition must know, else the code means something else."""
MAX_STRETCHED = 0.25
STRETCHED = 3.0
"""Angstrom; a definition of which more than a quarter of the bonds is longer does not fit."""
MAX_STRANGE = 0.25
"""Largest share of the bonds that distances show and a fitting definition lacks."""
CROWDED = 1.5
"""Bonds for each atom from which on distances show no bonds, as in a collapsed prediction."""
BOND_TOLERANCE = 0.4
"""Angstrom added to the sum of covalent radii when bonds are inferred."""
METAL_RADIUS = 1.5
"""Angstrom; stands for every element without a covalent radius in ``chem``."""


def resolve_definitions(
    structure: Structure, dictionary: Dictionary
) -> tuple[Structure, Dictionary]:
    """Return the structure and a dictionary that has a fitting definition of each component.

    A component that no source has, or whose definitions do not fit the observed atoms, is defined
    by the most complete residue that shows it. Ligands of a code that are another molecule than
    the most complete one get a code of their own. Unknown ligands (UNL) that the file does not
    define go.
    """
    structure = _drop_unknown(structure, dictionary)
    chosen: dict[str, Component] = {}
    waiting = list(dict.fromkeys(structure.res_name.tolist()))
    while waiting:
        code = waiting.pop(0)
        if code in chem.STANDARD:
            continue
        fullest = _fullest(structure, code)
        component, note = _choose(code, structure, fullest, dictionary)
        if component is not dictionary.get(code):
            chosen[code] = component
        if note:
            structure = structure.noted(note)
        others = _others(structure, code, component, fullest)
        if len(others):
            name = free_code(code, structure.res_name.tolist(), dictionary)
            names = structure.res_name.astype(np.promote_types(structure.res_name.dtype, "U8"))
            names[others] = name
            structure = replace(structure, res_name=names).noted(
                f"{counted(len(others), 'residue')} called {code} show another molecule than the "
                f"others; named {name}."
            )
            waiting.append(name)
    return structure, dictionary.with_own(chosen)


def _drop_unknown(structure: Structure, dictionary: Dictionary) -> Structure:
    unknown = structure.res_name == "UNL"
    if not unknown.any() or "UNL" in dictionary.own or "UNL" in dictionary.spare:
        return structure
    count = int(unknown.sum())
    return keep_residues(structure, ~unknown).noted(f"{counted(count, 'unknown ligand')} dropped.")


def _fullest(structure: Structure, code: str) -> NDArray[np.intp]:
    """Return the atoms of the residue of a code with the most resolved ones."""
    residues = np.flatnonzero(structure.res_name == code)
    seen = np.bincount(
        structure.atom_residue[structure.resolved], minlength=len(structure.res_name)
    )
    return _atoms(structure, int(residues[np.argmax(seen[residues])]))


def _atoms(structure: Structure, residue: int) -> NDArray[np.intp]:
    first, last = np.searchsorted(structure.atom_residue, (residue, residue + 1))
    return np.arange(first, last)


def _choose(
    code: str, structure: Structure, rows: NDArray[np.intp], dictionary: Dictionary
) -> tuple[Component, str]:
    """Return the definition of a component whose fullest residue has the atoms ``rows``, and what
    there is to say of the choice."""
    listed = list(dictionary.listed(code))
    for given in (dictionary.own.get(code), dictionary.spare.get(code)):
        if given is None or not covers(given, structure, rows):
            continue
        equal = next((part for part in listed if agrees(given, part)), None)
        if equal is not None:
            return (given if code in dictionary.own else equal), ""
        if listed:
            note = f"Component {code} is the file's own; {code} of the dictionary is another one."
            return given, note
        return given, f"Component {code} was taken from the file itself."
    for part in listed:
        if covers(part, structure, rows) and suits(part, structure, rows):
            return part, ""
    why = "does not match its definition" if listed else "is in no dictionary"
    note = f"Component {code} {why}; bonds were inferred from distances."
    return infer(code, structure, rows), note


def _others(
    structure: Structure, code: str, component: Component, fullest: NDArray[np.intp]
) -> NDArray[np.intp]:
    """Return the ligands of a code that the definition of the fullest residue does not fit."""
    allowed = _foreign(component, structure, fullest)
    polymer = np.array([chain.polymer for chain in structure.chains], dtype=bool)
    found = []
    ligands = (structure.res_name == code) & ~polymer[structure.res_chain]
    for residue in np.flatnonzero(ligands).tolist():
        rows = _atoms(structure, residue)
        if rows[0] != fullest[0] and _foreign(component, structure, rows) > allowed:
            found.append(residue)
    return np.array(found, dtype=np.intp)


def free_code(code: str, taken: Collection[str], dictionary: Dictionary) -> str:
    """Return the code with a number, in five letters, that nothing else has."""
    names = (f"{code[: 5 - len(str(k))]}{k}" for k in itertools.count(2))
    return next(name for name in names if name not in taken and dictionary.get(name) is None)


def _known(
    component: Component, structure: Structure, rows: NDArray[np.intp]
) -> Iterator[tuple[int, int]]:
    """Yield (atom of the definition, row) of the atoms in ``rows`` that it has."""
    for row in rows.tolist():
        i = component.index.get(str(structure.atom_name[row]))
        if i is not None and component.elements[i] == structure.element[row]:
            yield i, row


def _foreign(component: Component, structure: Structure, rows: NDArray[np.intp]) -> int:
    return len(rows) - sum(1 for _ in _known(component, structure, rows))


def covers(component: Component, structure: Structure, rows: NDArray[np.intp]) -> bool:
    """Return whether a definition has the atoms in ``rows``, by name and element."""
    return _foreign(component, structure, rows) <= (1 - MIN_MATCH) * len(rows)


def suits(component: Component, structure: Structure, rows: NDArray[np.intp]) -> bool:
    """Return whether the distances of the atoms in ``rows`` go with the bonds of a definition."""
    at = dict(_known(component, structure, rows))
    pairs = [(at[i], at[j]) for i, j in component.bonds.tolist() if i in at and j in at]
    if not pairs:
        return True
    left, right = np.array(pairs).T
    length = np.linalg.norm(structure.pos[left] - structure.pos[right], axis=1)
    if float((length > STRETCHED).mean()) > MAX_STRETCHED:
        return False
    shown = _close_pairs(structure.element[rows], structure.pos[rows])
    covalent = np.isin(structure.element[rows], list(chem.COVALENT_RADIUS))
    shown = shown[covalent[shown].all(axis=1)]
    if not 0 < len(shown) <= CROWDED * len(rows):
        return True
    drawn = {frozenset(pair) for pair in pairs}
    strange = sum(frozenset(pair) not in drawn for pair in rows[shown].tolist())
    return strange <= MAX_STRANGE * len(shown)


def _close_pairs(element: NDArray[np.int32], pos: NDArray[np.float64]) -> NDArray[np.int32]:
    """Return the pairs [m, 2] of atoms that are at bonding distance."""
    radius = np.array([chem.COVALENT_RADIUS.get(int(z), METAL_RADIUS) for z in element])
    distance = np.linalg.norm(pos[:, None] - pos[None], axis=-1)
    near = distance < radius[:, None] + radius[None] + BOND_TOLERANCE
    return np.argwhere(np.triu(near, k=1)).astype(np.int32)


def infer(code: str, structure: Structure, rows: NDArray[np.intp]) -> Component:
    """Return a definition made of observed atoms; bonds by distance, of unknown order."""
    element, pos = structure.element[rows], structure.pos[rows]
    bonds = _close_pairs(element, pos)
    n = len(rows)
    return Component(
        code=code,
        atom_names=structure.atom_name[rows],
        elements=element,
        charges=np.zeros(n, dtype=np.float32),
        ideal=np.full((n, 3), np.nan, dtype=np.float32),
        model=pos.astype(np.float32),
        leaving=np.zeros(n, dtype=bool),
        aromatic=np.zeros(n, dtype=bool),
        bonds=bonds,
        bond_orders=np.zeros(len(bonds), dtype=np.int32),
        bond_aromatic=np.zeros(len(bonds), dtype=bool),
    )
