"""A whole component dictionary as memory-mapped arrays, built once and shared by processes.

The index lies in ``$TPF_CACHE`` (else ``$XDG_CACHE_HOME/tpf``, else ``~/.cache/tpf``) in a folder
named after the dictionary file, its size and its time; where nothing can be written it is kept in
memory. Hydrogens are left out.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tpf.data import chem
from tpf.data.cif import (
    Block,
    Columns,
    binary_blocks,
    entry_name,
    is_binary_cif,
    read_bytes,
    text_blocks,
)
from tpf.errors import DataError

FORMAT = 1
_LOG = logging.getLogger(__name__)
_CODE = np.dtype(
    [("code", "U16"), ("type", "U48"), ("parent", "U8"), ("date", "U10"), ("name", "S120"),
     ("atoms", "i8"), ("bonds", "i8")]
)  # fmt: skip
_ATOM = np.dtype(
    [("name", "S6"), ("element", "u1"), ("charge", "i1"), ("ideal", "f4", 3), ("model", "f4", 3),
     ("leaving", "?"), ("aromatic", "?")]
)  # fmt: skip
_BOND = np.dtype([("i", "u2"), ("j", "u2"), ("order", "u1"), ("aromatic", "?")])
_ABOUT_COLUMNS = ("id", "type", "name", "mon_nstd_parent_comp_id", "pdbx_initial_date")
_ATOM_COLUMNS = (
    "comp_id", "atom_id", "type_symbol", "pdbx_leaving_atom_flag", "pdbx_aromatic_flag",
)  # fmt: skip
_BOND_COLUMNS = ("comp_id", "atom_id_1", "atom_id_2", "value_order", "pdbx_aromatic_flag")
_ORDER = {"SING": 1, "DOUB": 2, "TRIP": 3, "QUAD": 3, "AROM": 4, "DELO": 4}


@dataclass(frozen=True)
class Record:
    """The rows of one component."""

    name: str
    type: str
    parent: str
    date: str
    atoms: NDArray[np.void]
    bonds: NDArray[np.void]


@dataclass(frozen=True)
class CodeIndex:
    """Rows sorted by code; ``atoms`` and ``bonds`` of row k end where those of k + 1 begin."""

    codes: NDArray[np.void]
    atoms: NDArray[np.void]
    bonds: NDArray[np.void]

    def get(self, code: str) -> Record | None:
        """Return the rows of a component, None if the dictionary lacks it."""
        row = int(np.searchsorted(self.codes["code"], code))
        if row >= len(self.codes) or self.codes[row]["code"] != code:
            return None
        head = self.codes[row]
        end = self.codes[row + 1] if row + 1 < len(self.codes) else None
        last_atom = len(self.atoms) if end is None else int(end["atoms"])
        last_bond = len(self.bonds) if end is None else int(end["bonds"])
        return Record(
            name=bytes(head["name"]).decode("utf-8", "replace"),
            type=str(head["type"]),
            parent=str(head["parent"]),
            date=str(head["date"]),
            atoms=np.array(self.atoms[int(head["atoms"]) : last_atom]),
            bonds=np.array(self.bonds[int(head["bonds"]) : last_bond]),
        )


def cache_folder() -> Path:
    """Return the folder for files that can be made again."""
    if os.environ.get("TPF_CACHE"):
        return Path(os.environ["TPF_CACHE"])
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tpf"


def of_file(path: Path) -> CodeIndex:
    """Return the index of a dictionary file, building it on first use (seconds).

    Raises ``DataError`` if the file cannot be read as mmCIF or BinaryCIF.
    """
    stat = path.stat()
    key = f"{FORMAT}:{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    name = f"{entry_name(path)}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    folder = cache_folder() / "ccd" / name
    if folder.is_dir():
        return _open(folder)
    _LOG.info("indexing the component dictionary %s (once on this machine)", path)
    index = _build(path)
    try:
        _save(index, folder)
    except OSError:
        return index
    return _open(folder)


def _open(folder: Path) -> CodeIndex:
    parts = [np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("codes", "atoms", "bonds")]
    return CodeIndex(*parts)


def _save(index: CodeIndex, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
    try:
        np.save(staged / "codes.npy", index.codes)
        np.save(staged / "atoms.npy", index.atoms)
        np.save(staged / "bonds.npy", index.bonds)
        staged.chmod(0o755)
        staged.rename(folder)
    except OSError:
        shutil.rmtree(staged, ignore_errors=True)
        if not folder.is_dir():  # another process was not faster, so this is a real failure
            raise


def _build(path: Path) -> CodeIndex:
    data, notes = read_bytes(path)
    entry = entry_name(path)
    blocks: Iterator[Block]
    if is_binary_cif(data):
        blocks = iter(binary_blocks(entry, data))
    else:
        blocks = _single_blocks(entry, data, notes)
    parts = [part for block in blocks for part in _block_parts(block)]
    if not parts:
        raise DataError(entry, "parse", "it defines no component (_chem_comp_atom is absent)")
    parts.sort(key=lambda part: part[0][0])
    codes = np.array([part[0] for part in parts], dtype=_CODE)
    sizes = np.array([[len(part[1]), len(part[2])] for part in parts])
    starts = np.concatenate([np.zeros((1, 2), dtype=np.int64), np.cumsum(sizes, axis=0)[:-1]])
    codes["atoms"], codes["bonds"] = starts[:, 0], starts[:, 1]
    return CodeIndex(
        codes, np.concatenate([p[1] for p in parts]), np.concatenate([p[2] for p in parts])
    )


def _single_blocks(entry: str, data: bytes, notes: list[str]) -> Iterator[Block]:
    """Parse CIF text block by block, so that memory stays at the size of the text."""
    start = data.find(b"data_")
    while start >= 0:
        end = data.find(b"\ndata_", start)
        piece = data[start : end + 1 if end >= 0 else len(data)]
        yield from text_blocks(entry, piece, notes)
        start = end + 1 if end >= 0 else -1


def _runs(values: NDArray[np.str_]) -> list[tuple[str, int, int]]:
    """Return (value, start, end) of each run of equal neighbours."""
    if not len(values):
        return []
    edges = np.flatnonzero(values[1:] != values[:-1]) + 1
    starts = np.concatenate([[0], edges])
    ends = np.concatenate([edges, [len(values)]])
    return [(str(values[s]), int(s), int(e)) for s, e in zip(starts, ends, strict=True)]


_Part = tuple[tuple[str, str, str, str, bytes, int, int], NDArray[np.void], NDArray[np.void]]


def _block_parts(block: Block) -> Iterator[_Part]:
    atoms = block.columns("chem_comp_atom", _ATOM_COLUMNS)
    if not {"comp_id", "atom_id", "type_symbol"} <= atoms.keys():
        return
    about = block.columns("chem_comp", _ABOUT_COLUMNS)
    facts = {str(code): row for row, code in enumerate(about.get("id", ()))}
    rows = _atom_rows(block, atoms)
    bonds = block.columns("chem_comp_bond", _BOND_COLUMNS)
    bond_runs = {code: (s, e) for code, s, e in _runs(bonds["comp_id"])} if bonds else {}
    left = bonds["atom_id_1"].tolist() if bonds else []
    right = bonds["atom_id_2"].tolist() if bonds else []
    orders = bonds["value_order"].tolist() if bonds else []
    aromatic = (bonds["pdbx_aromatic_flag"] == "Y").tolist() if bonds else []
    names = atoms["atom_id"]
    for code, start, end in _runs(atoms["comp_id"]):
        own = rows[start:end]
        heavy = own["element"] != 1
        index = {name: i for i, name in enumerate(names[start:end][heavy].tolist())}
        found: dict[tuple[int, int], tuple[int, bool]] = {}
        for k in range(*bond_runs.get(code, (0, 0))):
            i, j = index.get(left[k]), index.get(right[k])
            if i is not None and j is not None:
                found[min(i, j), max(i, j)] = (_ORDER.get(orders[k].upper(), 0), aromatic[k])
        pairs = [(i, j, *found[i, j]) for i, j in sorted(found)]
        row = facts.get(code)

        def fact(name: str, row: int | None = row) -> str:
            return "" if row is None or name not in about else str(about[name][row])

        head = (
            code,
            fact("type").upper(),
            fact("mon_nstd_parent_comp_id"),
            fact("pdbx_initial_date"),
            fact("name").encode()[:120],
            0,
            0,
        )
        yield head, own[heavy], np.array(pairs, dtype=_BOND)


def _atom_rows(block: Block, atoms: Columns) -> NDArray[np.void]:
    rows = np.zeros(len(atoms["atom_id"]), dtype=_ATOM)
    rows["name"] = atoms["atom_id"].astype("S6")
    symbols, inverse = np.unique(atoms["type_symbol"], return_inverse=True)
    rows["element"] = np.array([chem.atomic_number(str(s)) for s in symbols])[inverse]
    charges = block.numbers("chem_comp_atom", "charge")
    rows["charge"] = 0 if charges is None else np.nan_to_num(charges)
    kinds = (("ideal", "pdbx_model_cartn", "_ideal"), ("model", "model_cartn", ""))
    for field, stem, tail in kinds:
        for axis, letter in enumerate("xyz"):
            values = block.numbers("chem_comp_atom", f"{stem}_{letter}{tail}")
            rows[field][:, axis] = np.nan if values is None else values
    for field in ("leaving", "aromatic"):
        column = "pdbx_leaving_atom_flag" if field == "leaving" else "pdbx_aromatic_flag"
        rows[field] = atoms[column] == "Y" if column in atoms else False
    return rows
