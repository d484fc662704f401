"""Assemble the rows of a table: in parallel, resumable; a bad or endless row costs only itself.

The table is a CSV file with the columns ``protein`` and ``ligand`` (SMILES, SDF or FILE#RECORD)
and, if wanted, ``id`` (name of the output), ``chain``, ``name`` and ``template``; several values in
a cell are separated by ``;``. Paths are relative to the table.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import json
import os
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpf.data.assemble import Order, assemble
from tpf.data.ccd import Dictionary
from tpf.data.cif import entry_name
from tpf.data.ligands import split_sdf
from tpf.data.pool import map_files
from tpf.data.records import failure_of
from tpf.data.store import append_index, index_lines, is_store, open_index
from tpf.errors import UsageError
from tpf.files import make_folder

REQUIRED = ("protein", "ligand")
COLUMNS = (*REQUIRED, "id", "chain", "name", "template")


@dataclass(frozen=True, kw_only=True)
class Row:
    """The outcome of one row of a table."""

    row: int
    """From 1, without the header."""
    id: str
    file: str
    """Written file inside the output folder, "" if the row failed."""
    ligands: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    stage: str = ""
    reason: str = ""


def assemble_table(
    table: Path,
    out: Path,
    *,
    ccd: str | None = None,
    workers: int = 1,
    memory: float | None = None,
    seconds: float | None = None,
) -> Iterator[Row | None]:
    """Yield the outcome of each row of a table as its file in ``out`` is written.

    Rows that an earlier run wrote, and whose cells and input files have not changed since, are
    passed over: None. Rows that failed are tried again. A row may take ``memory`` GB and
    ``seconds``. Raises ``UsageError`` for a table without the needed columns and for an output
    folder that another process writes.
    """
    orders = _read(table)
    Dictionary(ccd).get("LIG")  # a wrong dictionary is no fault of the rows
    if is_store(out):
        raise UsageError(f"{out} is a prepared cache; choose another folder for the table")
    make_folder(out)
    with open_index(out, (1, 1)) as index:
        done = _done(out)
        todo = [order for order in orders if done.get(order["id"]) != _key(order)]
        yield from [None] * (len(orders) - len(todo))
        convert = functools.partial(_convert, str(out), ccd)
        texts = [json.dumps(order) for order in todo]
        results = map_files(convert, texts, workers, _lost, memory=memory, seconds=seconds)
        for order, result in zip(todo, results, strict=True):
            line = {name: getattr(result, name) for name in ("id", "file", "stage", "reason")}
            append_index(index, line | {"key": _key(order)})
            yield result


def files_of_no_row(table: Path, out: Path) -> list[str]:
    """Return the files in ``out`` that earlier rows made which the table has no longer."""
    ids = {row["id"] for row in _read(table)}
    return [f"{name}.cif.gz" for name in sorted(_done(out)) if name not in ids]


def _read(table: Path) -> list[dict[str, str]]:
    """Return the cells of each row with its number, an id, and paths made absolute."""
    if not table.is_file():
        raise UsageError(
            f"{table}: no such table; give a CSV file with the columns protein and ligand"
        )
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            columns = [name.strip().lower() for name in reader.fieldnames or ()]
            reader.fieldnames = columns
            if absent := [name for name in REQUIRED if name not in columns]:
                have = f"its header is {','.join(columns)[:80]!r}"
                known = f"name columns {', '.join(COLUMNS)}, separated by commas"
                raise UsageError(f"{table}: no column {absent[0]}; {have}: {known}")
            rows = [_cells(row) for row in reader]
    except (OSError, UnicodeError, csv.Error) as error:
        raise UsageError(f"{table}: cannot be read ({error})") from error
    if not rows:
        raise UsageError(f"{table}: it has no rows under its header")
    seen: set[str] = set()
    for number, row in enumerate(rows, start=1):
        stem = entry_name(Path(row["protein"] or "row"))
        row["id"] = row["id"] or f"{stem}-{number:06d}"
        row["row"] = str(number)
        row["fault"] = row["fault"] or _fault(row, seen)
        seen.add(row["id"].lower())
        row["protein"] = str(table.parent / row["protein"]) if row["protein"] else ""
        ligands = [_located(table.parent, text) for text in _several(row["ligand"])]
        row["ligand"] = ";".join(ligands)
    return rows


def _cells(row: dict[str | Any, Any]) -> dict[str, str]:
    """Return the cells of a row by column, and under "fault" what is wrong with their number."""
    cells = {name: (row.get(name) or "").strip() for name in COLUMNS}
    more = None in row
    fault = "it has more cells than the header; put one that has a comma in quotes" if more else ""
    return cells | {"fault": fault}


def _fault(row: dict[str, str], seen: Container[str]) -> str:
    """Return why a row cannot be used whatever its files hold, "" if it can."""
    if row["id"].lower() in seen:
        return f"id {row['id']} is that of an earlier row"
    if not row["protein"] or not row["ligand"]:
        return "it has no protein" if row["ligand"] else "it has no ligand"
    return "" if Path(row["id"]).name == row["id"] else f"id {row['id']!r} is no file name"


def _several(cell: str) -> list[str]:
    return [part.strip() for part in cell.split(";") if part.strip()]


def _located(folder: Path, ligand: str) -> str:
    """Return a ligand with the path of an SDF file made relative to the table."""
    return str(folder / ligand) if split_sdf(ligand) else ligand


def _key(order: dict[str, str]) -> str:
    """Return a digest of the cells of a row and of the state of the files that they name."""
    parts = [f"{name}={order[name]}" for name in (*COLUMNS, "fault")]
    sdf = [split_sdf(source) for source in _several(order["ligand"])]
    for path in (Path(order["protein"]), *(found[0] for found in sdf if found)):
        if os.path.isfile(path):  # Path.is_file raises for a name that is too long
            stat = path.stat()
            parts.append(f"{stat.st_mtime_ns}:{stat.st_size}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _done(out: Path) -> dict[str, str]:
    """Return the key of each row that an index says was written and whose file is there."""
    found: dict[str, str] = {}
    for line in index_lines(out):
        if line.get("file"):
            found[line["id"]] = line["key"]
    return {name: key for name, key in found.items() if (out / f"{name}.cif.gz").is_file()}


def _convert(out: str, ccd: str | None, text: str) -> Row:
    """Assemble one row; any failure is its outcome."""
    row = json.loads(text)
    number, name = int(row["row"]), row["id"]
    try:
        if row["fault"]:
            raise UsageError(row["fault"])
        order = Order(
            protein=Path(row["protein"]),
            ligands=tuple(_several(row["ligand"])),
            out=Path(out) / f"{name}.cif.gz",
            chains=tuple(_several(row["chain"])),
            names=tuple(_several(row["name"])),
            templates=tuple(_several(row["template"])),
        )
        order.out.unlink(missing_ok=True)  # that of an earlier version of the row
        result = assemble(order, ccd=ccd)
    except Exception as error:  # a bad row must not stop the others
        if isinstance(error, UsageError):
            return Row(row=number, id=name, file="", stage="row", reason=str(error))
        failed = failure_of(name, error)
        return Row(row=number, id=name, file="", stage=failed.stage, reason=failed.reason)
    return Row(
        row=number,
        id=name,
        file=order.out.name,
        ligands=result.ligands,
        replaced=result.replaced,
        notes=result.notes,
    )


def _lost(text: str, why: str) -> Row:
    row = json.loads(text)
    return Row(row=int(row["row"]), id=row["id"], file="", stage="limit", reason=why)
