"""Tokenised entries on disk: one .npz file per entry and an index of records.

A prepared cache is a folder with ``.npz`` files and one ``index*.jsonl`` per writer, a line
per finished entry. Writers never touch each other's files: several may run at once, and one that
was stopped goes on after the last line of its index.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from tpf.data.load import load_tables
from tpf.data.tables import Tables, Tokens
from tpf.data.tokens import tokenize
from tpf.errors import DataError, UsageError

_SCALARS = ("id", "method", "resolution", "release_date", "notes")


def load_tokens(path: str, ccd: str | None = None) -> Tokens:
    """Return an entry from a structure file or a stored .npz; raise ``DataError`` if it is bad."""
    if path.endswith(".npz"):
        return read_tokens(Path(path))
    return tokenize(load_tables(Path(path), ccd=ccd))


def write_tokens(path: Path, tokens: Tokens) -> None:
    """Store an entry; the file appears complete or not at all."""
    tables = tokens.tables
    released = tables.release_date
    facts = {
        "id": tables.id,
        "method": tables.method,
        "resolution": tables.resolution,
        "release_date": None if released is None else released.isoformat(),
        "notes": list(tables.notes),
    }
    arrays = {f"tables.{name}": getattr(tables, name) for name in _array_fields(Tables)}
    arrays |= {f"tokens.{name}": getattr(tokens, name) for name in _array_fields(Tokens)}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        np.savez_compressed(file, facts=np.array(json.dumps(facts)), **arrays)
    temporary.replace(path)


def read_tokens(path: Path) -> Tokens:
    """Read what ``write_tokens`` stored; raise ``DataError`` at stage "store" if it is damaged."""
    try:
        with np.load(path, allow_pickle=False) as file:
            facts = json.loads(str(file["facts"]))
            tables = {name: file[f"tables.{name}"] for name in _array_fields(Tables)}
            tokens = {name: file[f"tokens.{name}"] for name in _array_fields(Tokens)}
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(
            path.stem, "store", f"{path} is damaged ({error}); prepare it again"
        ) from error
    released = facts.pop("release_date")
    return Tokens(
        tables=Tables(
            **tables,
            **{name: facts[name] for name in ("id", "method", "resolution")},
            release_date=None if released is None else datetime.date.fromisoformat(released),
            notes=tuple(facts["notes"]),
        ),
        **tokens,
    )


def _array_fields(kind: type) -> list[str]:
    names = [field.name for field in dataclasses.fields(kind)]
    return [name for name in names if name not in (*_SCALARS, "tables")]


def is_store(path: Path) -> bool:
    """Tell whether a folder is a prepared cache."""
    return path.is_dir() and any(path.glob("index*.jsonl"))


def drop_unfinished_line(path: Path) -> None:
    """Remove the last line of an index file if its writer was interrupted in it."""
    if path.is_file():
        whole = path.read_bytes()
        path.write_bytes(whole[: whole.rfind(b"\n") + 1])


def append_index(path: Path, record: dict[str, Any]) -> None:
    """Add the line of one finished entry to an index file."""
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def read_index(folder: Path) -> list[dict[str, Any]]:
    """Return the fields of all records of a cache in order of paths, which are made absolute.

    A last line cut short by an interruption is left out. Raises ``UsageError`` for other lines.
    """
    found: dict[str, dict[str, Any]] = {}
    for index in sorted(folder.glob("index*.jsonl")):
        lines = index.read_text().splitlines()
        for number, line in enumerate(lines, start=1):
            try:
                fields = json.loads(line)
                fields["path"] = str(folder / fields["path"])
                found[fields["path"]] = {name: _tuples(value) for name, value in fields.items()}
            except (ValueError, KeyError, TypeError) as error:
                if number == len(lines):
                    continue
                raise UsageError(f"{index}: line {number} is damaged; prepare it again") from error
    return [found[key] for key in sorted(found)]


def _tuples(value: object) -> object:
    """Return JSON lists as tuples, also inside lists."""
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
