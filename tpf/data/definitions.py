"""Definitions of the components of one structure: from a dictionary, or from its own atoms."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tpf.data import chem
from tpf.data.ccd import Component, Dictionary
from tpf.data.structure import Structure, counted, keep_residues

MIN_MATCH = 0.7
"""Share of observed atoms that a definition must know, else the code means something else."""
MAX_STRETCHED = 0.25
STRETCHED = 3.0
"""Angstrom; a definition of which more than a quarter of the bonds is longer does not fit."""
BOND_TOLERANCE = 0.4
"""Angstrom added to the sum of covalent radii when bonds are inferred."""
METAL_RADIUS = 1.5
"""Angstrom; stands for every element without a covalent radius in ``chem``."""


def resolve_definitions(
    structure: Structure, dictionary: Dictionary
) -> tuple[Structure, Dictionary]:
    """Return the structure and a dictionary that has a fitting definition of each component.

    A component that no source has, or whose definition does not fit the observed atoms, is
    defined by the most complete residue that shows it. Unknown ligands (UNL) go.
    """
    unknown = structure.res_name == "UNL"
    if unknown.any():
        count = int(unknown.sum())
        structure = keep_residues(structure, ~unknown).noted(
            f"{counted(count, 'unknown ligand')} dropped."
        )
    spans = structure.spans()
    seen = np.add.reduceat(structure.resolved.astype(int), spans[:-1]) if len(spans) > 1 else spans
    inferred: dict[str, Component] = {}
    for code in dict.fromkeys(structure.res_name.tolist()):
        if code in chem.STANDARD:
            continue
        residues = np.flatnonzero(structure.res_name == code)
        fullest = int(residues[np.argmax(seen[residues])])
        rows = np.arange(spans[fullest], spans[fullest + 1])
        component = dictionary.get(code)
        if component is not None and fits(component, structure, rows):
            continue
        spare = dictionary.spare.get(code)
        if spare is not None and fits(spare, structure, rows):
            inferred[code] = spare
            structure = structure.noted(f"Component {code} was taken from the file itself.")
            continue
        inferred[code] = infer(code, structure, rows)
        why = "is in no dictionary" if component is None else "does not match its definition"
        structure = structure.noted(f"Component {code} {why}; bonds were inferred from distances.")
    return structure, dictionary.with_own(inferred)


def fits(component: Component, structure: Structure, rows: NDArray[np.intp]) -> bool:
    """Return whether a definition describes the atoms in ``rows``: names, elements, distances."""
    at: dict[int, int] = {}
    for row in rows.tolist():
        i = component.index.get(str(structure.atom_name[row]))
        if i is not None and component.elements[i] == structure.element[row]:
            at[i] = row
    if len(at) < MIN_MATCH * len(rows):
        return False
    pairs = [(at[i], at[j]) for i, j in component.bonds.tolist() if i in at and j in at]
    if not pairs:
        return True
    left, right = np.array(pairs).T
    length = np.linalg.norm(structure.pos[left] - structure.pos[right], axis=1)
    return float((length > STRETCHED).mean()) <= MAX_STRETCHED


def infer(code: str, structure: Structure, rows: NDArray[np.intp]) -> Component:
    """Return a definition made of observed atoms; bonds by distance, of unknown order."""
    element, pos = structure.element[rows], structure.pos[rows]
    radius = np.array([chem.COVALENT_RADIUS.get(int(z), METAL_RADIUS) for z in element])
    distance = np.linalg.norm(pos[:, None] - pos[None], axis=-1)
    near = distance < radius[:, None] + radius[None] + BOND_TOLERANCE
    bonds = np.argwhere(np.triu(near, k=1)).astype(np.int32)
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
