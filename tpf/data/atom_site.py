"""The coordinate table of a file: columns to arrays, and rows to residue groups."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tpf.data import chem
from tpf.data.cif import Block, Columns, to_numbers
from tpf.data.structure import counted
from tpf.errors import DataError

_TEXT = (
    "group_pdb", "type_symbol", "label_atom_id", "auth_atom_id", "label_alt_id", "label_comp_id",
    "auth_comp_id", "label_asym_id", "auth_asym_id", "label_entity_id", "label_seq_id",
    "auth_seq_id", "pdbx_pdb_ins_code", "pdbx_pdb_model_num", "cartn_x", "cartn_y", "cartn_z",
    "occupancy", "b_iso_or_equiv",
)  # fmt: skip
FAR = 1e4
"""Angstrom; coordinates beyond this lose their third decimal in FP32 and are moved."""
MAX_EXTENT = 1e5
"""Angstrom; no structure is larger."""
MAX_NUMBER = 1_000_000
"""Largest residue number that is believed."""


@dataclass(frozen=True, kw_only=True)
class AtomSite:
    """Rows of the first model; text columns are "" where the file has nothing."""

    group: NDArray[np.str_]
    name: NDArray[np.str_]
    element: NDArray[np.int32]
    alt: NDArray[np.str_]
    comp: NDArray[np.str_]
    asym: NDArray[np.str_]
    auth_asym: NDArray[np.str_]
    entity: NDArray[np.str_]
    seq: NDArray[np.str_]
    auth_seq: NDArray[np.str_]
    pos: NDArray[np.float64]
    """[A, 3] Angstrom, NaN where absent."""
    occupancy: NDArray[np.float64]
    b_factor: NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Group:
    """The rows of one residue, ligand, ion or water."""

    asym: str
    auth_asym: str
    entity: str
    seq: int | None
    auth_seq: str
    comp: str
    hetero: bool
    """Marked HETATM."""
    rows: NDArray[np.intp]


def _required(columns: Columns, entry: str, *names: str) -> NDArray[np.str_]:
    for name in names:
        if name in columns and (columns[name] != "").any():
            return columns[name]
    raise DataError(entry, "parse", f"_atom_site has no {' or '.join(names)}")


def _optional(columns: Columns, *names: str) -> NDArray[np.str_]:
    for name in names:
        if name in columns and (columns[name] != "").any():
            return columns[name]
    some = next(iter(columns.values()))
    return np.full(len(some), "", dtype="U1")


def guess_element(name: str, comp: str) -> int:
    """Return the atomic number that an atom name suggests, 0 if none.

    An atom named like its component is an ion; otherwise the first letter decides, which is right
    for the atoms of polymers and nearly all of ligands.
    """
    letters = "".join(c for c in name if c.isalpha()).upper()
    if letters == comp.upper() or letters in ("CL", "BR", "SE", "FE", "MG", "ZN", "MN"):
        return chem.atomic_number(letters)
    return chem.atomic_number(letters[:1])


def _elements(
    columns: Columns, name: NDArray[np.str_], comp: NDArray[np.str_]
) -> NDArray[np.int32]:
    symbol = _optional(columns, "type_symbol")
    symbols, inverse = np.unique(symbol, return_inverse=True)
    element = np.array([chem.atomic_number(str(s)) for s in symbols], dtype=np.int32)[inverse]
    for i in np.flatnonzero(symbol == ""):
        element[i] = guess_element(str(name[i]), str(comp[i]))
    return element


def _first_model(columns: Columns, notes: list[str]) -> Columns:
    model = columns.get("pdbx_pdb_model_num")
    if model is None or not len(model) or (model == model[0]).all():
        return columns
    notes.append(f"The first of {len(set(model.tolist()))} models was taken.")
    return {name: values[model == model[0]] for name, values in columns.items()}


def read_atom_site(entry: str, block: Block, notes: list[str]) -> AtomSite:
    """Return the rows of the first model; those without coordinates have occupancy 0.

    Raises ``DataError`` (stage parse) if there are none or a needed column is absent.
    """
    columns = _first_model(block.columns("atom_site", _TEXT), notes)
    if not columns or not len(next(iter(columns.values()))):
        raise DataError(entry, "parse", "no coordinates (_atom_site is absent or empty)")
    axes = [to_numbers(_required(columns, entry, f"cartn_{axis}")) for axis in "xyz"]
    pos = np.stack(axes, axis=1)
    known = np.isfinite(pos).all(axis=1)
    if not known.all():
        notes.append(
            f"{counted(int((~known).sum()), 'atom')} without coordinates taken as unresolved."
        )
        pos[~known] = np.nan
    if not known.any():
        raise DataError(entry, "parse", "no atom has coordinates")
    if np.nanmax(np.abs(pos)) > FAR:
        pos = pos - np.nanmean(pos, axis=0)
        notes.append("Coordinates far from the origin were moved to it.")
    if np.nanmax(np.abs(pos)) > MAX_EXTENT:
        raise DataError(entry, "parse", f"coordinates span more than {MAX_EXTENT:g} Angstrom")
    name = _required(columns, entry, "label_atom_id", "auth_atom_id")
    comp = _required(columns, entry, "label_comp_id", "auth_comp_id")
    label_asym = _optional(columns, "label_asym_id", "auth_asym_id")
    auth_asym = _optional(columns, "auth_asym_id", "label_asym_id")
    auth_seq = _optional(columns, "auth_seq_id", "label_seq_id")
    return AtomSite(
        group=_optional(columns, "group_pdb"),
        name=name,
        element=_elements(columns, name, comp),
        alt=_optional(columns, "label_alt_id"),
        comp=comp,
        asym=np.where(label_asym == "", auth_asym, label_asym),
        auth_asym=auth_asym,
        entity=_optional(columns, "label_entity_id"),
        seq=_optional(columns, "label_seq_id"),
        auth_seq=np.char.add(auth_seq, _optional(columns, "pdbx_pdb_ins_code")),
        pos=pos,
        occupancy=np.where(known, _occupancy(columns, len(pos), notes), 0.0),
        b_factor=np.nan_to_num(to_numbers(_optional(columns, "b_iso_or_equiv"))).clip(-1e6, 1e6),
    )


def _occupancy(columns: Columns, n: int, notes: list[str]) -> NDArray[np.float64]:
    values = np.nan_to_num(to_numbers(_optional(columns, "occupancy")), nan=1.0).clip(0, 1)
    if "occupancy" in columns and (values <= 0).all():
        notes.append("Every occupancy is 0; they were taken as 1.")
        return np.ones(n)
    return values


def residue_groups(site: AtomSite, notes: list[str]) -> list[Group]:
    """Return the rows of each residue, in the order of first appearance.

    Rows of one residue may be scattered (alternative residues are interleaved). A repeated atom
    is dropped; without residue numbers it starts the next copy of the component instead.
    """
    columns = (site.asym, site.seq, site.auth_seq, site.comp)
    change = np.zeros(len(site.name), dtype=bool)
    change[0] = True
    for column in columns:
        change[1:] |= column[1:] != column[:-1]
    starts = np.flatnonzero(change)
    ends = np.append(starts[1:], len(site.name))
    runs: dict[tuple[str, ...], list[NDArray[np.intp]]] = {}
    for start, end in zip(starts, ends, strict=True):
        key = tuple(str(column[start]) for column in columns)
        runs.setdefault(key, []).append(np.arange(start, end))
    groups: list[Group] = []
    repeated = 0
    for (asym, seq, auth_seq, comp), pieces in runs.items():
        rows = np.concatenate(pieces)
        copies = _copies(site, rows)
        if seq or auth_seq:
            repeated += sum(len(copy) for copy in copies[1:])
            copies = copies[:1]
        for copy in copies:
            groups.append(
                Group(
                    asym=asym,
                    auth_asym=str(site.auth_asym[copy[0]]) or asym,
                    entity=str(site.entity[copy[0]]),
                    seq=residue_number(seq),
                    auth_seq=auth_seq,
                    comp=comp,
                    hetero=str(site.group[copy[0]]).upper() == "HETATM",
                    rows=copy,
                )
            )
    if repeated:
        notes.append(f"{counted(repeated, 'repeated atom')} dropped.")
    return groups


def _copies(site: AtomSite, rows: NDArray[np.intp]) -> list[NDArray[np.intp]]:
    """Split rows where an atom name (with the same conformer) comes again."""
    names, alts = site.name[rows].tolist(), site.alt[rows].tolist()
    if len(set(zip(names, alts, strict=True))) == len(rows):
        return [rows]
    copy_of: list[int] = []
    count: dict[tuple[str, str], int] = {}
    for key in zip(names, alts, strict=True):
        copy_of.append(count.get(key, 0))
        count[key] = copy_of[-1] + 1
    index = np.array(copy_of)
    return [rows[index == k] for k in range(index.max() + 1)]


def residue_number(text: str) -> int | None:
    """Return the integer that a text means (also ``12.`` or ``12.0``), None if it is none."""
    try:
        value = float(text)
    except ValueError:
        return None
    return int(value) if abs(value) <= MAX_NUMBER and value.is_integer() else None
