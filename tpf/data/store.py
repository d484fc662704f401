"""A prepared cache: tokenised entries on disk that training reads without parsing.

A folder with ``cache.json`` (what the files in it mean), one ``.npz`` file per entry named by its
own digest, and one ``index-*.jsonl`` per writer with a line for each file done. Writers never touch
each other's files: several may run at once, and one that was stopped goes on after its last line.
"""

from __future__ import annotations

import dataclasses
import datetime
import fcntl
import hashlib
import io
import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from tpf.data.alignment import Alignment
from tpf.data.tables import Tables, Tokens
from tpf.errors import DataError, UsageError
from tpf.files import make_folder, write_whole

SCHEMA = 2
"""Raised when the fields of the records or the meaning of a stored array change."""
HEADER = "cache.json"
LOCK = ".lock"
"""Held by all that write to a cache; never replaced, as ``HEADER`` may be by a second writer."""
DIGEST = 16
"""Hexadecimal digits of the SHA-256 of a file in its name."""
_SCALARS = ("id", "method", "resolution", "release_date", "notes")

Line = dict[str, Any]
"""``source`` (absolute path), its ``mtime_ns``, ``written`` (time of the line in ns), stamps of all
alignments and its own (``msa``, ``own_msa``), and one of ``record``, ``failed`` (their fields)."""


@dataclass(frozen=True)
class Parsed:
    """An entry with its alignments by entity."""

    tokens: Tokens
    alignments: dict[int, Alignment]

    @property
    def nbytes(self) -> int:
        """Rough size in memory."""
        atoms = len(self.tokens.tables.atom_name)
        return 120 * atoms + sum(a.nbytes for a in self.alignments.values())


def write_entry(folder: Path, parsed: Parsed) -> str:
    """Store an entry and return its path inside ``folder``; it appears complete or not at all.

    Alignments get files of their own, shared by the entries that have the same.
    """
    tokens = parsed.tokens
    tables = tokens.tables
    released = tables.release_date
    facts = {
        "id": tables.id,
        "method": tables.method,
        "resolution": tables.resolution,
        "release_date": None if released is None else released.isoformat(),
        "notes": list(tables.notes),
        "alignments": {e: _write_alignment(folder, a) for e, a in parsed.alignments.items()},
    }
    arrays = {f"tables.{name}": getattr(tables, name) for name in array_fields(Tables)}
    arrays |= {f"tokens.{name}": getattr(tokens, name) for name in array_fields(Tokens)}
    return _write_arrays(folder, tables.id, {"facts": np.array(json.dumps(facts)), **arrays})


def _write_alignment(folder: Path, alignment: Alignment) -> str:
    parts = {"": alignment} | ({"pairing.": alignment.pairing} if alignment.pairing else {})
    names = ("rows", "deletions", "species")
    arrays = {f"{key}{name}": getattr(a, name) for key, a in parts.items() for name in names}
    return _write_arrays(folder, "msa", arrays)


def _write_arrays(folder: Path, stem: str, arrays: dict[str, Any]) -> str:
    """Write ``xx/STEM-DIGEST.npz`` in ``folder`` and return that path."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    content = buffer.getvalue()
    digest = hashlib.sha256(content).hexdigest()[:DIGEST]
    path = folder / digest[:2] / f"{stem}-{digest}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content)
    return str(path.relative_to(folder))


def read_entry(path: Path, *, alignments: bool = True) -> Parsed:
    """Read what ``write_entry`` stored; raise ``DataError`` at stage "store" if it is damaged."""
    arrays = _read_arrays(path)
    try:
        facts = json.loads(str(arrays["facts"]))
        released = facts["release_date"]
        whole: dict[str, Any] = {name: arrays[f"tables.{name}"] for name in array_fields(Tables)}
        tables = Tables(
            **whole,
            **{name: facts[name] for name in ("id", "method", "resolution")},
            release_date=None if released is None else datetime.date.fromisoformat(released),
            notes=tuple(facts["notes"]),
        )
        own = {name: arrays[f"tokens.{name}"] for name in array_fields(Tokens)}
        folder = path.parent.parent
        files = facts["alignments"] if alignments else {}
        found = {int(entity): _read_alignment(folder / file) for entity, file in files.items()}
    except (KeyError, ValueError) as error:
        raise _damaged(path, error) from error
    return Parsed(Tokens(tables=tables, **own), found)


def alignment_files(path: Path) -> list[str]:
    """Return the paths, inside the cache, of the alignments that a stored entry names."""
    try:
        return list(json.loads(str(_read_arrays(path)["facts"]))["alignments"].values())
    except (KeyError, ValueError) as error:
        raise _damaged(path, error) from error


def _read_alignment(path: Path) -> Alignment:
    arrays = _read_arrays(path)
    parts: dict[str, dict[str, Any]] = {"": {}, "pairing": {}}
    for key, values in arrays.items():
        part, _, name = key.rpartition(".")
        parts[part][name] = values
    pairing = Alignment(**parts["pairing"]) if parts["pairing"] else None
    return Alignment(**parts[""], pairing=pairing)


def _read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    try:
        content = path.read_bytes()
        if not path.stem.endswith(f"-{hashlib.sha256(content).hexdigest()[:DIGEST]}"):
            raise ValueError("its content does not match the checksum in its name")
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            return dict(file)
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> DataError:
    entry = path.stem.rpartition("-")[0]
    return DataError(entry, "store", f"{path} is damaged ({error}); prepare it again")


def array_fields(kind: type) -> list[str]:
    """Return the names of the fields of ``Tables`` or ``Tokens`` that are arrays."""
    names = [field.name for field in dataclasses.fields(kind)]
    return [name for name in names if name not in (*_SCALARS, "tables")]


def is_store(path: Path) -> bool:
    """Tell whether a folder is a prepared cache."""
    return (path / HEADER).is_file()


def open_store(folder: Path, ccd: str | None = None, msa: str | None = None) -> None:
    """Make a folder a cache, or check that it is one of the same schema, ``ccd`` and ``msa``.

    Raises ``UsageError`` for a folder that holds something else.
    """
    dictionary = None if ccd is None else hashlib.sha256(Path(ccd).read_bytes()).hexdigest()
    header = {"schema": SCHEMA, "ccd": dictionary, "msa": msa is not None}
    if not is_store(folder):
        make_folder(folder)
        strange = any(not path.name.startswith(f".{HEADER}.") for path in folder.iterdir())
        if not strange:
            write_whole(folder / HEADER, (json.dumps(header) + "\n").encode())
        elif not is_store(folder):  # nor did another shard make it one just now
            raise UsageError(f"{folder} is no prepared cache and not empty; give a new folder")
    _check_schema(folder)
    if json.loads((folder / HEADER).read_text()) != header:
        raise UsageError(f"{folder} was prepared with other --ccd or --msa; give a new folder")


def _check_schema(folder: Path) -> None:
    try:
        schema = json.loads((folder / HEADER).read_text())["schema"]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{folder / HEADER} is damaged; prepare the data again") from error
    if schema != SCHEMA:
        raise UsageError(
            f"{folder} has schema {schema}, this version of tpf reads {SCHEMA}; prepare it again"
        )


@contextmanager
def locked(folder: Path, *, alone: bool) -> Iterator[bool]:
    """Hold a cache while writing to it, as several may, or alone.

    Who holds it alone is waited for; ``alone`` yields False if another process holds it.
    """
    with (folder / LOCK).open("a") as file:
        yield _locked(file, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)


def _locked(file: IO[str], how: int) -> bool:
    """Lock an open file; return False if another process has it."""
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        return False
    except OSError as error:
        reason = f"cannot be locked ({error.strerror}); choose a folder on another file system"
        raise UsageError(f"{file.name}: {reason}") from error
    return True


@contextmanager
def open_index(folder: Path, shard: tuple[int, int]) -> Iterator[IO[str]]:
    """Open a shard's index for ``append_index``, without the end of a line that was cut short.

    Raises ``UsageError`` if another process has it open.
    """
    path = folder / f"index-{shard[0]}-of-{shard[1]}.jsonl"
    with path.open("a+") as file:
        if not _locked(file, fcntl.LOCK_EX | fcntl.LOCK_NB):
            raise UsageError(f"{path} is being written by another process; wait for it")
        whole = path.read_bytes()
        file.truncate(whole.rfind(b"\n") + 1)
        yield file


def append_index(index: IO[str], line: Line) -> None:
    """Add the line of one finished file to an index."""
    index.write(json.dumps(line) + "\n")
    index.flush()


def newest_lines(folder: Path) -> dict[str, Line]:
    """Return the newest line of each source as it is written, in the order of sources.

    A last line cut short is left out; raises ``UsageError`` for other damage and for a cache of
    another schema.
    """
    _check_schema(folder)
    found: dict[str, Line] = {}
    for line in index_lines(folder):
        older = found.get(line["source"], {})
        if older.get("written", 0) <= line.get("written", 0):
            found[line["source"]] = line
    return {source: found[source] for source in sorted(found, key=Path)}


def read_index(folder: Path) -> list[Line]:
    """Return ``newest_lines`` with the paths of records made absolute."""
    ordered = list(newest_lines(folder).values())
    for line in ordered:
        if "record" in line:
            record = {name: _tuples(value) for name, value in line["record"].items()}
            line["record"] = record | {"path": str(folder / record["path"])}
    return ordered


def index_lines(folder: Path) -> Iterator[Line]:
    """Yield the lines of all indices, but for a last one cut short.

    Raises ``UsageError`` for other damage.
    """
    for index in sorted(folder.glob("index-*.jsonl")):
        yield from lines_of(index)


def lines_of(index: Path) -> Iterator[Line]:
    """Yield the lines of one index as ``index_lines`` does."""
    lines = index.read_text().splitlines()
    for number, text in enumerate(lines, start=1):
        try:
            line = json.loads(text)
            if not isinstance(line, dict):
                raise ValueError
        except ValueError as error:
            if number == len(lines):
                continue
            raise UsageError(f"{index}: line {number} is damaged; delete that line") from error
        yield line


def _tuples(value: Any) -> Any:
    """Return JSON lists as tuples, also inside lists."""
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
