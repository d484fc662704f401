"""From a cleaned ``Structure`` to ``Tables``: unresolved residues and atoms, bonds, entities."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tpf.data import chem
from tpf.data.ccd import Component, Dictionary
from tpf.data.structure import Chain, Structure, counted
from tpf.data.tables import DNA, PROTEIN, RNA, Tables
from tpf.errors import DataError

MAX_BOND_LENGTH = 2.4
"""Angstrom; a bond between resolved atoms that is longer is left out (step 12 of 1.1)."""
_BACKBONE = {PROTEIN: ("C", "N"), RNA: ("O3'", "P"), DNA: ("O3'", "P")}


@dataclass(frozen=True, eq=False)
class Template:
    """What a residue of some code contributes to the tables."""

    names: NDArray[np.str_]
    elements: NDArray[np.int32]
    charges: NDArray[np.float32]
    ideal: NDArray[np.float32]
    bonds: NDArray[np.int32]
    orders: NDArray[np.int32]
    index: dict[str, int]


@dataclass(frozen=True)
class _Row:
    """One residue of the tables: its code, place, and observed counterpart (or None)."""

    code: str
    res_id: int
    auth_seq: str
    chain: int
    observed: int | None
    template: Template


def make_template(
    code: str, polymer: bool, known: Dictionary, lost: frozenset[str] = frozenset()
) -> Template | None:
    """Return the atoms of a residue but those ``lost``, without terminal atoms if it is a standard
    one of a polymer (step 14 of spec 1.1); None if it has no definition or no atoms."""
    component = known.get(code)
    if component is None or not len(component):
        return None
    if polymer and code in chem.STANDARD:
        lost |= set(chem.TERMINAL_ATOMS)
    keep = ~np.isin(component.atom_names, list(lost))
    new = np.cumsum(keep) - 1
    inside = keep[component.bonds].all(axis=1)
    names = component.atom_names[keep]
    return Template(
        names=names,
        elements=component.elements[keep],
        charges=component.charges[keep],
        ideal=component.ideal[keep] if code in known.own else np.full((len(names), 3), np.nan),
        bonds=new[component.bonds[inside]].astype(np.int32).reshape(-1, 2),
        orders=np.where(component.bond_aromatic, 4, component.bond_orders)[inside].astype("i4"),
        index={name: i for i, name in enumerate(names.tolist())},
    )


def _rows_of(structure: Structure, known: Dictionary, notes: list[str]) -> list[_Row]:
    template = functools.lru_cache(maxsize=None)(lambda c, p: make_template(c, p, known))
    first = np.searchsorted(structure.res_chain, np.arange(len(structure.chains) + 1))
    rows: list[_Row] = []
    for c in sorted(range(len(structure.chains)), key=lambda c: structure.chains[c].id):
        chain = structure.chains[c]
        observed = range(first[c], first[c + 1])
        if not chain.polymer:
            for k, r in enumerate(observed):
                code = str(structure.res_name[r])
                found = template(code, False)
                if found is not None:
                    auth = str(structure.auth_seq[r])
                    rows.append(_Row(code, k + 1, auth, c, r, found))
            continue
        at = {int(structure.res_id[r]): r for r in observed}
        undefined = 0
        for site in chain.sequence:
            code, found = site.code, template(site.code, True)
            if found is None:
                undefined += 1
                code = chem.UNKNOWN_RESIDUE.get(chain.type, "UNK")
                found = template(code, True)
            if found is None:
                raise DataError(structure.id, "clean", f"component {code} has no definition")
            rows.append(_Row(code, site.res_id, site.auth_seq, c, at.get(site.res_id), found))
        if undefined:
            notes.append(
                f"{counted(undefined, 'undefined residue')} of chain {chain.id} became unknown."
            )
    return rows


def _without_leaving_atoms(rows: list[_Row], structure: Structure, known: Dictionary) -> list[_Row]:
    """Take from linked residues the unresolved atoms that the link took, as O1 from a glycan."""
    bonded: dict[int, set[str]] = {}
    for k, names in _neighbours(rows, structure):
        for end, name in zip((k, k + 1), names, strict=True):
            bonded.setdefault(end, set()).add(name)
    row_of = {row.observed: k for k, row in enumerate(rows) if row.observed is not None}
    for i in np.unique(structure.links).tolist():
        owner = row_of.get(int(structure.atom_residue[i]))
        if owner is not None:
            bonded.setdefault(owner, set()).add(str(structure.atom_name[i]))
    spans, result = structure.spans(), list(rows)
    for k, anchors in bonded.items():
        row, polymer = rows[k], structure.chains[rows[k].chain].polymer
        component = known.get(row.code)
        if component is None or (polymer and row.code in chem.STANDARD):
            continue  # standard residues have lost theirs already
        seen: set[str] = set()
        if row.observed is not None:
            atoms = slice(*spans[row.observed : row.observed + 2])
            seen = set(structure.atom_name[atoms][structure.resolved[atoms]].tolist())
        lost = _leaving(component, anchors) - seen
        smaller = make_template(row.code, polymer, known, lost) if lost else None
        if smaller is not None:
            result[k] = replace(row, template=smaller)
    return result


def _leaving(component: Component, anchors: set[str]) -> frozenset[str]:
    """Return the leaving atoms of a component that are bonded to ``anchors`` or to one another."""
    names = component.atom_names
    gone, edge = np.zeros(len(names), dtype=bool), np.isin(names, list(anchors))
    while edge.any():
        near = np.zeros(len(names), dtype=bool)
        for one, two in (component.bonds.T, component.bonds.T[::-1]):
            near[two[edge[one]]] = True
        edge = near & component.leaving & ~gone
        gone |= edge
    return frozenset(names[gone].tolist())


def _neighbours(rows: list[_Row], structure: Structure) -> Iterator[tuple[int, tuple[str, str]]]:
    """Yield the rows that a polymer bond joins to the next, and the names of its atoms."""
    for k, (a, b) in enumerate(itertools.pairwise(rows)):
        names = _BACKBONE.get(structure.chains[a.chain].type)
        if a.chain == b.chain and b.res_id == a.res_id + 1 and names is not None:
            yield k, names


def complete(structure: Structure, known: Dictionary) -> Tables:
    """Return the tables of a structure with everything unresolved inserted (steps 13 and 14).

    ``known`` must define every component. Chains are sorted by id and entities numbered in that
    order.
    """
    notes = list(structure.notes)
    rows = _without_leaving_atoms(_rows_of(structure, known, notes), structure, known)
    sizes = np.array([len(row.template.names) for row in rows])
    starts = np.cumsum(sizes) - sizes
    source = np.full(int(sizes.sum()), -1, dtype=np.int64)
    spans, names = structure.spans(), structure.atom_name.tolist()
    for row, start in zip(rows, starts, strict=True):
        if row.observed is not None:
            for i in range(spans[row.observed], spans[row.observed + 1]):
                place = row.template.index.get(names[i])
                if place is not None:
                    source[start + place] = i
    resolved = (source >= 0) & structure.resolved[source]
    pos = np.where(resolved[:, None], structure.pos[source], np.nan).astype(np.float32)
    order = list(dict.fromkeys(row.chain for row in rows))
    chains = [structure.chains[c] for c in order]
    chain_index = {c: i for i, c in enumerate(order)}
    entity, sym = _entities(chains, rows, order)
    bonds, bond_order = _bonds(structure, rows, starts, source, pos)
    n_missing = int((~resolved).sum())
    if n_missing:
        notes.append(f"{counted(n_missing, 'unresolved atom')} inserted.")
    return Tables(
        id=structure.id,
        method=structure.method,
        resolution=structure.resolution,
        release_date=structure.release_date,
        atom_name=np.concatenate([row.template.names for row in rows]),
        element=np.concatenate([row.template.elements for row in rows]),
        charge=np.concatenate([row.template.charges for row in rows]),
        ideal=np.concatenate([row.template.ideal for row in rows]).astype(np.float32),
        pos=pos,
        occupancy=np.where(resolved, structure.occupancy[source], 0).astype(np.float32),
        b_factor=np.where(resolved, structure.b_factor[source], 0).astype(np.float32),
        atom_residue=np.repeat(np.arange(len(rows)), sizes).astype(np.int32),
        res_name=np.array([row.code for row in rows], dtype=np.str_),
        res_id=np.array([row.res_id for row in rows], dtype=np.int32),
        auth_seq=np.array([row.auth_seq for row in rows], dtype=np.str_),
        res_chain=np.array([chain_index[row.chain] for row in rows], dtype=np.int32),
        res_standard=np.array(
            [structure.chains[row.chain].polymer and row.code in chem.STANDARD for row in rows]
        ),
        chain_id=np.array([chain.id for chain in chains], dtype=np.str_),
        auth_chain=np.array([chain.auth for chain in chains], dtype=np.str_),
        chain_type=np.array([chain.type for chain in chains], dtype=np.int32),
        chain_entity=entity,
        chain_sym=sym,
        bonds=bonds,
        bond_order=bond_order,
        notes=tuple(notes),
    )


def _entities(
    chains: list[Chain], rows: list[_Row], order: list[int]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Number chains by what they are made of; several-residue ligands also by the file's entity."""
    content: dict[int, list[tuple[int, str]]] = {c: [] for c in order}
    for row in rows:
        content[row.chain].append((row.res_id, row.code))
    numbers: dict[object, int] = {}
    copies: dict[int, int] = {}
    entity, sym = [], []
    for chain, c in zip(chains, order, strict=True):
        parts = tuple(content[c])
        branch = chain.entity if not chain.polymer and len(parts) > 1 else ""
        number = numbers.setdefault((chain.type, chain.polymer, parts, branch), len(numbers) + 1)
        copies[number] = copies.get(number, 0) + 1
        entity.append(number)
        sym.append(copies[number])
    return np.array(entity, dtype=np.int32), np.array(sym, dtype=np.int32)


def _bonds(
    structure: Structure,
    rows: list[_Row],
    starts: NDArray[np.int64],
    source: NDArray[np.int64],
    pos: NDArray[np.float32],
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return bonds inside residues, along polymers, and the links, sorted and unique."""
    pairs = [row.template.bonds + start for row, start in zip(rows, starts, strict=True)]
    orders = [row.template.orders for row in rows]
    chain_bonds: list[tuple[int, int]] = []
    for k, names in _neighbours(rows, structure):
        i, j = (rows[k + n].template.index.get(names[n]) for n in (0, 1))
        if i is not None and j is not None:
            chain_bonds.append((int(starts[k]) + i, int(starts[k + 1]) + j))
    place = np.full(len(structure.atom_name) + 1, -1, dtype=np.int64)
    place[source] = np.arange(len(source))  # the last entry collects the unresolved ones
    links = np.sort(place[structure.links], axis=1)
    links = links[(links >= 0).all(axis=1)]
    pairs += [np.array(chain_bonds, dtype=np.int64).reshape(-1, 2), links]
    orders += [np.ones(len(chain_bonds) + len(links), dtype=np.int32)]
    bonds, order = np.concatenate(pairs), np.concatenate(orders)
    length = np.linalg.norm(pos[bonds[:, 0]] - pos[bonds[:, 1]], axis=1)
    keep = ~(length > MAX_BOND_LENGTH)  # NaN, an unresolved end, is kept
    bonds, first = np.unique(bonds[keep], axis=0, return_index=True)
    return bonds.astype(np.int32), order[keep][first].astype(np.int32)
