"""Read molecules from MDL files: V2000 and V3000 records of .mol and .sdf, compressed or not."""

from __future__ import annotations

import functools
import gzip
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tpf.data import chem
from tpf.data.cif import entry_name
from tpf.errors import DataError, UsageError

ENDINGS = (".sdf", ".sd", ".mol", ".sdf.gz", ".sd.gz", ".mol.gz")
"""Names of MDL files, compared in lower case."""
_CHARGE_CODES = {0: 0, 1: 3, 2: 2, 3: 1, 4: 0, 5: -1, 6: -2, 7: -3}
_BOND_ORDERS = {1: 1, 2: 2, 3: 3, 4: 4, 9: 1}
"""Bond types of the format to orders of ``Component``; 9 is a coordination bond."""
_FLAT = 0.01
"""Angstrom; a molecule of three or more atoms that is this thin in z is a drawing."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Molecule:
    """One record, with its hydrogens. Index letters: n atoms, m bonds."""

    title: str
    elements: NDArray[np.int32]
    """[n] atomic number."""
    charges: NDArray[np.float32]
    """[n] formal charge."""
    pos: NDArray[np.float64]
    """[n, 3] Angstrom."""
    bonds: NDArray[np.int32]
    """[m, 2]"""
    orders: NDArray[np.int32]
    """[m] 1, 2, 3, or 4 aromatic."""

    @property
    def flat(self) -> bool:
        """Whether this is a drawing in the plane and no pose."""
        return len(self.pos) > 2 and bool(np.ptp(self.pos[:, 2]) < _FLAT)


def read_molecule(path: Path, which: str | None = None) -> Molecule:
    """Return a record of a file: the only one, or the one that ``which`` names.

    ``which`` is a number from 1 or a title. Raises ``UsageError`` if there is no such file and
    ``DataError`` (stage ligand) if the record is absent, ambiguous or damaged.
    """
    if not path.is_file():
        raise UsageError(f"{path}: no such file; give an SDF file or a SMILES")
    stat = path.stat()
    records = _records(str(path), stat.st_mtime_ns, stat.st_size)
    name = entry_name(path)
    if which is None:
        if len(records) > 1:
            reason = f"{path.name} holds {len(records)} molecules; choose one as {path.name}#1"
            raise DataError(name, "ligand", reason)
        return parse_molecule(name, records[0])
    titles = [record.partition("\n")[0].strip() for record in records]
    if titles.count(which) > 1:
        reason = f"{titles.count(which)} molecules of {path.name} are called {which}; give a number"
        raise DataError(name, "ligand", reason)
    if which in titles:
        return parse_molecule(name, records[titles.index(which)])
    if which.isdecimal() and 1 <= int(which) <= len(records):
        return parse_molecule(name, records[int(which) - 1])
    reason = f"{path.name} has no molecule {which} (it holds {len(records)})"
    raise DataError(name, "ligand", reason)


@functools.lru_cache(maxsize=2)
def _records(path: str, mtime_ns: int, size: int) -> tuple[str, ...]:
    """Return the text of each record; time and size tell changed files apart."""
    name = entry_name(Path(path))
    try:
        data = Path(path).read_bytes()
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(name, "ligand", f"{path} is not text") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(name, "ligand", f"{path} cannot be read ({error})") from error
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    records = ("\n" + lines).split("\n$$$$")
    found = [record.partition("\n")[2] for record in records if record.strip()]
    if not found:
        raise DataError(name, "ligand", f"{path} holds no molecule")
    return tuple(found)


def parse_molecule(name: str, text: str) -> Molecule:
    """Return the molecule of one record; raise ``DataError`` (stage ligand) if it is damaged."""
    lines = text.split("\n")
    try:
        if len(lines) < 4:
            raise ValueError("it ends too early")
        version = lines[3][33:39].strip().upper()
        if version == "V3000":
            atoms, bonds = _v3000(lines)
        elif version in ("V2000", ""):
            atoms, bonds = _v2000(lines)
        else:
            raise ValueError(f"its counts line says {version}, not V2000 or V3000")
        return _molecule(lines[0].strip(), atoms, bonds)
    except (ValueError, StopIteration) as error:
        reason = str(error) or "it ends too early"
        raise DataError(name, "ligand", f"not a valid MDL record ({reason})") from error


_Atom = tuple[str, float, float, float, int]
_Bond = tuple[int, int, int]


def _molecule(title: str, atoms: Sequence[_Atom], bonds: Sequence[_Bond]) -> Molecule:
    """Return the record of atoms (symbol, x, y, z, charge) and bonds (atom, atom, type) from 1."""
    if not atoms:
        raise ValueError("it has no atoms")
    elements = [chem.atomic_number({"T": "H"}.get(symbol, symbol)) for symbol, *_ in atoms]
    if 0 in elements:
        place = elements.index(0)
        raise ValueError(f"atom {place + 1} is {atoms[place][0]!r}, which is no element")
    for i, j, kind in bonds:
        if not (1 <= i <= len(atoms) and 1 <= j <= len(atoms) and i != j):
            raise ValueError(f"bond {i}-{j} joins no two of its {len(atoms)} atoms")
        if kind not in _BOND_ORDERS:
            raise ValueError(f"bond {i}-{j} has type {kind}; it must be 1, 2, 3 or 4 (aromatic)")
    pos = np.array([atom[1:4] for atom in atoms], dtype=np.float64)
    if not np.isfinite(pos).all():
        raise ValueError("a coordinate is not finite")
    return Molecule(
        title=title,
        elements=np.array(elements, dtype=np.int32),
        charges=np.array([atom[4] for atom in atoms], dtype=np.float32),
        pos=pos,
        bonds=np.array([(i - 1, j - 1) for i, j, _ in bonds], dtype=np.int32).reshape(-1, 2),
        orders=np.array([_BOND_ORDERS[kind] for *_, kind in bonds], dtype=np.int32),
    )


def _v2000(lines: list[str]) -> tuple[list[_Atom], list[_Bond]]:
    n_atoms, n_bonds = int(lines[3][:3]), int(lines[3][3:6])
    rows = lines[4 : 4 + n_atoms + n_bonds]
    if len(rows) < n_atoms + n_bonds:
        raise ValueError(f"it has fewer lines than its {n_atoms} atoms and {n_bonds} bonds")
    charges: dict[int, int] = {}
    for line in lines[4 + n_atoms + n_bonds :]:
        if line.startswith("M  END"):
            break
        if line.startswith("M  CHG"):
            numbers = [int(word) for word in line[9:].split()]
            charges |= dict(zip(numbers[::2], numbers[1::2], strict=True))
    atoms: list[_Atom] = []
    for k, row in enumerate(rows[:n_atoms], start=1):
        x, y, z = (float(row[start : start + 10]) for start in (0, 10, 20))
        code = int(row[36:39].strip() or 0)
        charge = charges.get(k, 0) if charges else _CHARGE_CODES.get(code, 0)
        atoms.append((row[31:34].strip(), x, y, z, charge))
    bonds = [(int(row[:3]), int(row[3:6]), int(row[6:9])) for row in rows[n_atoms:]]
    return atoms, bonds


def _v3000(lines: list[str]) -> tuple[list[_Atom], list[_Bond]]:
    rows = _joined(lines)
    atoms: list[_Atom] = []
    bonds: list[_Bond] = []
    number: dict[str, int] = {}
    while not (row := next(rows)).startswith("BEGIN ATOM"):
        pass
    while not (row := next(rows)).startswith("END ATOM"):
        index, symbol, x, y, z, _, *options = _words(row, 6)
        charge = next((int(word[4:]) for word in options if word.startswith("CHG=")), 0)
        number[index] = len(atoms) + 1
        atoms.append((symbol, float(x), float(y), float(z), charge))
    for row in rows:
        if row.startswith("END CTAB"):
            return atoms, bonds
        if row.startswith("BEGIN BOND"):
            while not (row := next(rows)).startswith("END BOND"):
                _, kind, i, j, *_ = _words(row, 4)
                bonds.append((number.get(i, 0), number.get(j, 0), int(kind)))
    raise ValueError("it has no END CTAB")


def _words(row: str, least: int) -> list[str]:
    words = row.split()
    if len(words) < least:
        raise ValueError(f"the line {row!r} is too short")
    return words


def _joined(lines: list[str]) -> Iterator[str]:
    """Yield the V30 lines without their prefix, continued ones in one piece."""
    pending = ""
    for line in lines:
        if not line.startswith("M  V30 "):
            continue
        pending += line[7:].rstrip()
        if pending.endswith("-"):
            pending = pending[:-1]
            continue
        yield pending
        pending = ""
