"""Chemical components: what atoms and bonds a residue or ligand has.

``Dictionary.get(code)`` looks in this order: definitions that came inside the structure file, a
dictionary named by the user, the subset that ships with tpf, and the whole CCD that biotite carries
when it is installed. Which of them means the molecule at hand, ``definitions`` finds out. A
component is read alone; the whole dictionary is indexed once per machine (``ccd_index``).
"""

from __future__ import annotations

import functools
import gzip
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tpf.data import ccd_index, chem
from tpf.data.ccd_index import CodeIndex
from tpf.data.cif import Block, Columns, TextBlock, read_blocks
from tpf.data.tables import Tables
from tpf.errors import DataError, UsageError

_ORDERS = {
    "SING": 1, "DOUB": 2, "TRIP": 3, "QUAD": 3, "AROM": 4, "DELO": 4, "POLY": 1, "PI": 1,
    "SINGLE": 1, "DOUBLE": 2, "TRIPLE": 3, "AROMATIC": 4, "DELOC": 4, "METAL": 1,
}  # fmt: skip
_COORDINATES = (
    ("pdbx_model_cartn_x_ideal", "pdbx_model_cartn_y_ideal", "pdbx_model_cartn_z_ideal"),
    ("model_cartn_x", "model_cartn_y", "model_cartn_z"),
    ("x", "y", "z"),
)
LARGE_DICTIONARY = 8_000_000
"""Bytes above which a user's dictionary is indexed on disk and not parsed in every process."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Component:
    """A chemical component without its hydrogens, atoms in dictionary order.

    Index letters: n atoms, m bonds.
    """

    code: str
    name: str = ""
    type: str = ""
    """``_chem_comp.type`` in upper case, "" if unknown."""
    parent: str = ""
    """Code of the standard residue that this one is a modification of, "" if none."""
    atom_names: NDArray[np.str_]
    """[n]"""
    elements: NDArray[np.int32]
    """[n] atomic number, 0 if unknown."""
    charges: NDArray[np.float32]
    """[n] formal charge."""
    ideal: NDArray[np.float32]
    """[n, 3] Angstrom, NaN where the dictionary has none."""
    model: NDArray[np.float32]
    """[n, 3] Angstrom, coordinates of some PDB entry; NaN where the dictionary has none."""
    leaving: NDArray[np.bool_]
    """[n] lost when the component is linked to another."""
    aromatic: NDArray[np.bool_]
    """[n]"""
    bonds: NDArray[np.int32]
    """[m, 2] atom indices i < j, sorted."""
    bond_orders: NDArray[np.int32]
    """[m] 1, 2, 3 as drawn (Kekule); 4 if only known to be aromatic; 0 unknown."""
    bond_aromatic: NDArray[np.bool_]
    """[m]"""
    date: str = ""
    """Day of definition, YYYY-MM-DD: the model coordinates are not older than this; "" unknown."""

    def __len__(self) -> int:
        return len(self.atom_names)

    @functools.cached_property
    def index(self) -> dict[str, int]:
        """Atom name to position."""
        return {str(name): i for i, name in enumerate(self.atom_names)}


def _triples(columns: Columns, names: tuple[str, str, str], n: int) -> NDArray[np.float32] | None:
    if not all(name in columns for name in names):
        return None
    xyz = np.full((n, 3), np.nan, dtype=np.float32)
    for axis, name in enumerate(names):
        for row, text in enumerate(columns[name]):
            try:
                xyz[row, axis] = float(text)
            except ValueError:
                continue
    return xyz


def _flags(columns: Columns, name: str, n: int) -> NDArray[np.bool_]:
    if name not in columns:
        return np.zeros(n, dtype=bool)
    return np.isin(np.char.upper(columns[name]), ("Y", "YES"))


def _select(columns: Columns, rows: NDArray[np.intp] | NDArray[np.bool_]) -> Columns:
    return {name: values[rows] for name, values in columns.items()}


def _bonds_of(
    columns: Columns, index: dict[str, int]
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.bool_]]:
    found: dict[tuple[int, int], tuple[int, bool]] = {}
    if "atom_id_1" in columns and "atom_id_2" in columns:
        n = len(columns["atom_id_1"])
        order_column = columns.get("value_order", columns.get("type", np.full(n, "")))
        aromatic = _flags(columns, "pdbx_aromatic_flag", n)
        for k in range(n):
            i = index.get(str(columns["atom_id_1"][k]))
            j = index.get(str(columns["atom_id_2"][k]))
            if i is None or j is None or i == j:
                continue
            order = _ORDERS.get(str(order_column[k]).upper(), 0)
            found[min(i, j), max(i, j)] = (order, bool(aromatic[k]) or order == 4)
    pairs = sorted(found)
    return (
        np.array(pairs, dtype=np.int32).reshape(-1, 2),
        np.array([found[p][0] for p in pairs], dtype=np.int32),
        np.array([found[p][1] for p in pairs], dtype=bool),
    )


def _component(code: str, about: Mapping[str, str], atoms: Columns, bonds: Columns) -> Component:
    element = np.array([chem.atomic_number(str(s)) for s in atoms["type_symbol"]], dtype=np.int32)
    heavy = np.flatnonzero(element != 1)
    atoms, element = _select(atoms, heavy), element[heavy]
    n = len(heavy)
    charge = np.zeros(n, dtype=np.float32)
    for row, text in enumerate(atoms.get("charge", ())):
        try:
            charge[row] = float(text)
        except ValueError:
            continue
    missing = np.full((n, 3), np.nan, dtype=np.float32)
    xyz = [_triples(atoms, names, n) for names in _COORDINATES]
    ideal, model = (x for x in (xyz[0] if xyz[0] is not None else xyz[2], xyz[1]))
    names = atoms["atom_id"]
    pairs, orders, aromatic = _bonds_of(bonds, {str(name): i for i, name in enumerate(names)})
    return Component(
        code=code,
        name=about.get("name", ""),
        type=about.get("type", about.get("group", "")).upper(),
        parent=about.get("mon_nstd_parent_comp_id", ""),
        atom_names=names,
        elements=element,
        charges=charge,
        ideal=missing if ideal is None else ideal,
        model=missing if model is None else model,
        leaving=_flags(atoms, "pdbx_leaving_atom_flag", n),
        aromatic=_flags(atoms, "pdbx_aromatic_flag", n),
        bonds=pairs,
        bond_orders=orders,
        bond_aromatic=aromatic,
        date=about.get("pdbx_initial_date", ""),
    )


def read_components(block: Block) -> dict[str, Component]:
    """Return the components that one data block defines (``_chem_comp_atom`` and ``_bond``)."""
    atoms = block.columns("chem_comp_atom")
    if not {"comp_id", "atom_id", "type_symbol"} <= atoms.keys():
        return {}
    bonds = block.columns("chem_comp_bond")
    about = block.columns("chem_comp")
    rows = {str(code): i for i, code in enumerate(about.get("id", ()))}
    result: dict[str, Component] = {}
    for code in dict.fromkeys(atoms["comp_id"].tolist()):
        row = rows.get(code)
        facts = {} if row is None else {name: str(v[row]) for name, v in about.items()}
        own = _select(bonds, bonds["comp_id"] == code) if "comp_id" in bonds else {}
        result[code] = _component(code, facts, _select(atoms, atoms["comp_id"] == code), own)
    return result


def component_from(
    code: str, names: NDArray[np.str_], elements: NDArray[np.int32], bonds: Columns
) -> Component:
    """Return a component of known atoms whose bonds are the rows of ``chem_comp_bond`` for it."""
    symbols = np.array([chem.ELEMENTS[z] for z in elements.tolist()])
    atoms = {"atom_id": names, "type_symbol": symbols}
    return _component(code, {}, atoms, _select(bonds, bonds["comp_id"] == code))


def component_of(tables: Tables, residue: int) -> Component:
    """Return the component that a residue of ``tables`` shows: its atoms, bonds and coordinates.

    For components that no dictionary has. Coordinates of the residue become ``model``; ``ideal``
    is what the file gave.
    """
    atoms = np.flatnonzero(tables.atom_residue == residue)
    first, last = atoms[0], atoms[-1]
    inside = ((tables.bonds >= first) & (tables.bonds <= last)).all(axis=1)
    orders = tables.bond_order[inside]
    bonds = (tables.bonds[inside] - first).astype(np.int32)
    aromatic = np.zeros(len(atoms), dtype=bool)
    aromatic[bonds[orders == 4].reshape(-1)] = True
    return Component(
        code=str(tables.res_name[residue]),
        atom_names=tables.atom_name[atoms],
        elements=tables.element[atoms],
        charges=tables.charge[atoms],
        ideal=tables.ideal[atoms],
        model=tables.pos[atoms],
        leaving=np.zeros(len(atoms), dtype=bool),
        aromatic=aromatic,
        bonds=bonds,
        bond_orders=orders,
        bond_aromatic=orders == 4,
    )


@functools.lru_cache(maxsize=1)
def _subset_blocks() -> dict[str, TextBlock]:
    from gemmi import cif

    path = Path(__file__).with_name("ccd_subset.cif.gz")
    document = cif.read_string(gzip.decompress(path.read_bytes()))
    return {block.name: TextBlock(block.name, block) for block in document}


@functools.lru_cache(maxsize=4)
def _user_source(path: str) -> CodeIndex | dict[str, Component]:
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"data.ccd is {path}; no such file")
    if file.stat().st_size > LARGE_DICTIONARY:
        return ccd_index.of_file(file)
    try:
        blocks, _ = read_blocks(file)
    except DataError as error:
        raise UsageError(f"data.ccd is {path}; {error.reason}") from error
    found = {code: part for block in blocks for code, part in read_components(block).items()}
    if not found:
        raise UsageError(f"data.ccd is {path}; it defines no component (_chem_comp_atom is absent)")
    return found


@functools.lru_cache(maxsize=1)
def _installed_source() -> CodeIndex | None:
    if importlib.util.find_spec("biotite") is None:
        return None
    spec = importlib.util.find_spec("biotite.structure.info")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).with_name("components.bcif")
    return ccd_index.of_file(file) if file.is_file() else None


def _from_index(source: CodeIndex, code: str) -> Component | None:
    record = source.get(code)
    if record is None:
        return None
    atoms, bonds = record.atoms, record.bonds
    return Component(
        code=code,
        name=record.name,
        type=record.type,
        parent=record.parent,
        atom_names=atoms["name"].astype(np.str_),
        elements=atoms["element"].astype(np.int32),
        charges=atoms["charge"].astype(np.float32),
        ideal=np.array(atoms["ideal"]),
        model=np.array(atoms["model"]),
        leaving=np.array(atoms["leaving"]),
        aromatic=np.array(atoms["aromatic"]),
        bonds=np.stack([bonds["i"], bonds["j"]], axis=1).astype(np.int32),
        bond_orders=bonds["order"].astype(np.int32),
        bond_aromatic=np.array(bonds["aromatic"]),
        date=record.date,
    )


@functools.lru_cache(maxsize=4096)
def _lookup(user: str | None, code: str) -> Component | None:
    if user is not None:
        source = _user_source(user)
        found = source.get(code) if isinstance(source, dict) else _from_index(source, code)
        if found is not None:
            return found
    block = _subset_blocks().get(code)
    if block is not None:
        return read_components(block).get(code)
    installed = _installed_source()
    return None if installed is None else _from_index(installed, code)


@dataclass(frozen=True)
class Dictionary:
    """Component definitions in their order of precedence; cheap to create, copy and pickle."""

    user: str | None = None
    """Path of the user's dictionary (``DataConfig.ccd``): mmCIF, cif.gz or BinaryCIF."""
    own: Mapping[str, Component] = field(default_factory=dict)
    """Definitions that take precedence over all dictionaries."""
    spare: Mapping[str, Component] = field(default_factory=dict)
    """Definitions from a structure file without coordinates, which say less than a dictionary."""

    def get(self, code: str) -> Component | None:
        """Return the definition of a component, None if no source has it.

        Raises ``UsageError`` if the user's dictionary cannot be read.
        """
        own = self.own.get(code)
        return _lookup(self.user, code) if own is None else own

    def listed(self, code: str) -> Iterator[Component]:
        """Yield the definitions of the dictionaries alone: the user's, then the known one.

        Raises ``UsageError`` if the user's dictionary cannot be read.
        """
        found = dict.fromkeys(_lookup(user, code) for user in dict.fromkeys((self.user, None)))
        yield from (component for component in found if component is not None)

    def with_own(self, components: Mapping[str, Component]) -> Dictionary:
        """Return a dictionary in which these components take precedence."""
        return Dictionary(self.user, {**self.own, **components}, self.spare)

    def with_spare(self, components: Mapping[str, Component]) -> Dictionary:
        """Return a dictionary that also offers these components as ``spare``."""
        return Dictionary(self.user, self.own, {**self.spare, **components})
