"""Small assemblies made from component definitions, for tests of the stages after reading."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tpf.data.ccd import Dictionary
from tpf.data.chem import ATOMS, RESTYPE, UNKNOWN, center_atom, representative_atom
from tpf.data.tables import LIGAND, PROTEIN, Tables, Tokens

Chain = tuple[int, Sequence[str]]
"""Molecule type and component codes of the residues."""


def make_tables(
    chains: Sequence[Chain],
    *,
    seed: int = 0,
    spacing: float = 4.0,
    links: Sequence[tuple[tuple[int, int, str], tuple[int, int, str]]] = (),
    entry: str = "test",
    resolution: float | None = 2.0,
) -> Tables:
    """Return an assembly of straight chains, 12 Angstrom apart; residues ``spacing`` apart.

    ``links`` are bonds between (chain, residue, atom name) pairs, residues counted from 0.
    """
    rng = np.random.default_rng(seed)
    rows: dict[str, list] = {k: [] for k in ("name", "element", "charge", "pos", "residue")}
    residues: dict[str, list] = {k: [] for k in ("code", "id", "chain", "standard")}
    bonds: list[tuple[int, int, int]] = []
    place: dict[tuple[int, int, str], int] = {}
    entities: dict[tuple[int, tuple[str, ...]], int] = {}
    entity, sym = [], []
    for c, (kind, codes) in enumerate(chains):
        number = entities.setdefault((kind, tuple(codes)), len(entities) + 1)
        entity.append(number)
        sym.append(entity.count(number))
        for r, code in enumerate(codes):
            component = Dictionary().get(code)
            standard = kind != LIGAND and code in ATOMS
            first = len(rows["name"])
            residues["code"].append(code)
            residues["id"].append(r + 1)
            residues["chain"].append(c)
            residues["standard"].append(standard)
            keep = [
                i
                for i, name in enumerate(component.atom_names.tolist())
                if not (kind != LIGAND and name in ("OXT", "OP3"))
            ]
            for i in keep:
                place[c, r, str(component.atom_names[i])] = len(rows["name"])
                rows["name"].append(str(component.atom_names[i]))
                rows["element"].append(component.elements[i])
                rows["charge"].append(component.charges[i])
                rows["residue"].append(len(residues["code"]) - 1)
                rows["pos"].append((r * spacing, c * 12.0, 0) + rng.normal(size=3))
            new = {old: first + k for k, old in enumerate(keep)}
            for (i, j), order in zip(component.bonds, component.bond_orders, strict=True):
                if i in new and j in new:
                    bonds.append((new[i], new[j], order))
        ends = ("C", "N") if kind == PROTEIN else ("O3'", "P")
        if kind != LIGAND:
            for r in range(len(codes) - 1):
                bonds.append((place[c, r, ends[0]], place[c, r + 1, ends[1]], 1))
    bonds += [(*sorted((place[a], place[b])), 1) for a, b in links]
    table = np.array(sorted(bonds), np.int32).reshape(-1, 3)
    n, n_res = len(rows["name"]), len(residues["code"])
    names = [chr(ord("A") + c) if c < 26 else f"Z{c}" for c in range(len(chains))]
    return Tables(
        id=entry,
        method="X-RAY DIFFRACTION",
        resolution=resolution,
        release_date=None,
        atom_name=np.array(rows["name"]),
        element=np.array(rows["element"], np.int32),
        charge=np.array(rows["charge"], np.float32),
        ideal=np.full((n, 3), np.nan, np.float32),
        pos=np.array(rows["pos"], np.float32).reshape(n, 3),
        occupancy=np.ones(n, np.float32),
        b_factor=np.zeros(n, np.float32),
        atom_residue=np.array(rows["residue"], np.int32),
        res_name=np.array(residues["code"]),
        res_id=np.array(residues["id"], np.int32),
        auth_seq=np.array([str(i + 1) for i in range(n_res)]),
        res_chain=np.array(residues["chain"], np.int32),
        res_standard=np.array(residues["standard"], np.bool_),
        chain_id=np.array(names),
        auth_chain=np.array(names),
        chain_type=np.array([kind for kind, _ in chains], np.int32),
        chain_entity=np.array(entity, np.int32),
        chain_sym=np.array(sym, np.int32),
        bonds=np.ascontiguousarray(table[:, :2]),
        bond_order=np.ascontiguousarray(table[:, 2]),
    )


def make_tokens(tables: Tables, atomized: Sequence[int] = ()) -> Tokens:
    """Return one token per standard residue and one per atom of other or ``atomized`` residues."""
    start, count, residue, split, restype, centre, rep = [], [], [], [], [], [], []
    for r, code in enumerate(tables.res_name.tolist()):
        atoms = np.flatnonzero(tables.atom_residue == r)
        if tables.res_standard[r] and r not in atomized:
            names = tables.atom_name[atoms].tolist()
            start.append(atoms[0])
            count.append(len(atoms))
            residue.append(r)
            split.append(False)
            restype.append(RESTYPE[code])
            centre.append(atoms[names.index(center_atom(code))])
            rep.append(atoms[names.index(representative_atom(code))])
            continue
        for atom in atoms:
            start.append(atom)
            count.append(1)
            residue.append(r)
            split.append(True)
            restype.append(UNKNOWN)
            centre.append(atom)
            rep.append(atom)
    as_int = {
        "start_atom": start, "num_atoms": count, "residue": residue, "restype": restype,
        "center_atom": centre, "rep_atom": rep,
    }  # fmt: skip
    return Tokens(
        tables=tables,
        atomized=np.array(split, np.bool_),
        mol_type=tables.chain_type[tables.res_chain[np.array(residue)]].astype(np.int32),
        **{name: np.array(values, np.int32) for name, values in as_int.items()},
    )
