"""What a study found: rows for the result file, tables and figures for people."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from tpf.bench import backends
from tpf.bench.backends import Backend, Operator
from tpf.bench.cases import Attend
from tpf.bench.limits import time_limit
from tpf.checkpoint import write_text
from tpf.errors import TpfError, UsageError
from tpf.kernels import jit
from tpf.report.html import Cell, grid, page, preformatted, section, table, write
from tpf.runfolder import environment

Row = dict[str, Any]
RESULT = "bench.json"


@dataclass(frozen=True)
class Table:
    """A table for people; the first ``text_columns`` columns are text, the others numbers."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[Cell, ...]]
    text_columns: int = 1
    note: str = ""


@functools.cache
def conditions() -> dict[str, Any]:
    """Return what the results depend on: GPU, driver, versions, commit, hash of the kernels."""
    known = environment()
    return {
        "gpu": known["gpu"],
        "driver": known["driver"],
        "torch": torch.__version__,
        "cuda": known["cuda"],
        "commit": known["commit"],
        "kernel_sources": _source_hash(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "python": known["python"],
        "versions": backends.versions(),
    }


def _valid(value: Any) -> Any:
    """Return a value that JSON can hold: what is not finite as text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _source_hash() -> str:
    """Return a hash of the CUDA sources and their host code, for copies without git."""
    digest = hashlib.sha256()
    folders = (jit.source_folder().glob("*.cu*"), Path(jit.__file__).parent.glob("*.py"))
    for path in sorted(path for folder in folders for path in folder):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


@dataclass
class Case:
    """One backend on one shape."""

    failed: bool = False


@dataclass
class Record:
    """The growing result of one study."""

    command: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    limit: float = 0.0
    """Seconds that a backend has to be imported, or for a case; 0 sets no limit."""
    rows: list[Row] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Claims that did not hold; the command then ends with exit code 1."""
    folder: Path | None = None
    """Where ``save`` writes."""
    views: list[Callable[[], None]] = field(default_factory=list)
    """What makes tables and figures of the rows when the study ends, however it ends."""

    def open(self, folder: Path) -> None:
        """Make the folder of the results; raise ``UsageError`` if it exists or cannot be made."""
        if folder.exists():
            raise UsageError(
                f"--out {folder} exists; results are never overwritten: choose another folder"
            )
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise UsageError(f"--out {folder}: cannot be made ({error.strerror})") from error
        self.folder = folder

    def add(self, **fields: Any) -> None:
        """Add a row of the result file; fields that are None do not apply and are left out."""
        self.rows.append({k: _valid(v) for k, v in fields.items() if v is not None})

    def open_backends(self, names: tuple[str, ...], device: torch.device) -> dict[str, Attend]:
        """Return the backends of attention that can run; see ``open_all``."""
        return self.open_all("attention", backends.BACKENDS, names, device)

    def open_all(
        self,
        op: str,
        known: Mapping[str, Backend[Operator]],
        names: tuple[str, ...],
        device: torch.device,
    ) -> dict[str, Operator]:
        """Return the named backends that can run; the others get a row with the reason.

        Raises ``TpfError`` if none can.
        """
        found = {}
        for name in names:
            try:
                found[name] = backends.open_backend(known[name], device, self.limit)
            except backends.UnavailableError as reason:
                self.unavailable(op, name, reason)
        if not found:
            raise TpfError(f"no backend can run here: {'; '.join(self.notes)}")
        return found

    def unavailable(self, op: str, impl: str, reason: backends.UnavailableError) -> None:
        """Record why a backend is not compared."""
        self.add(op=op, impl=impl, error=str(reason))
        if (note := f"{impl}: {reason}") not in self.notes:
            self.notes.append(note)

    @contextmanager
    def case(self, impl: str, **fields: Any) -> Iterator[Case]:
        """Let a backend run one case: its failure becomes a row, and so does a time-out.

        One that does not even come back to Python ends the process with what has been measured.
        """

        def stuck() -> None:
            reason = f"timed out after {self.limit:g} s and did not come back"
            self.add(**{"op": "attention", "impl": impl, **fields, "error": reason})
            self.notes.append(f"{impl}: {reason}; the study ended there, leave it out of --impls")
            print(f"tpf: {self.notes[-1]}", file=sys.stderr, flush=True)
            self.finish()
            os._exit(1)

        found = Case()
        try:
            with time_limit(self.limit, stuck):
                yield found
        except Exception as error:
            found.failed = True
            self.failed(impl, error, **fields)

    def failed(self, impl: str, error: BaseException, **fields: Any) -> None:
        """Record that a backend failed while it ran; ``op`` is attention unless given."""
        reason = backends.one_line(error)
        self.add(**{"op": "attention", "impl": impl, **fields, "error": reason})
        where = ", ".join(f"{name} {value}" for name, value in fields.items())
        self.notes.append(f"{impl} failed ({where}): {reason}")

    def document(self) -> dict[str, Any]:
        """Return the content of the result file."""
        return {
            "environment": conditions(),
            "command": self.command,
            "settings": dict(self.settings),
            "rows": self.rows,
            "notes": self.notes,
        }

    def save(self) -> None:
        """Write the rows so far to the folder, whole or not at all."""
        if self.folder is not None:
            write_text(self.folder / RESULT, json.dumps(self.document(), indent=1) + "\n")

    def discard(self) -> None:
        """Remove the folder, for a study that was refused before it began."""
        if self.folder is not None:
            shutil.rmtree(self.folder)
            self.folder = None

    def finish(self) -> None:
        """Write the rows, make tables and figures of them, and write report.html."""
        self.save()
        for view in self.views:
            view()
        self.views.clear()
        self.tables = [table for table in self.tables if table.rows]
        if self.folder is not None:
            title = f"Benchmark: {self.settings.get('study', '')}"
            write(self.folder / "report.html", _report(self, title))


def _report(record: Record, title: str) -> str:
    known = conditions()
    parts = [
        section(t.title, table(t.header, t.rows, t.text_columns), note=t.note)
        for t in record.tables
    ]
    if record.figures:
        parts.append(section("Figures", grid(record.figures)))
    if record.notes:
        rows: list[tuple[Cell, ...]] = [(note,) for note in record.notes]
        parts.append(section("Notes", table(("note",), rows)))
    parts.append(section("Conditions", preformatted(json.dumps(known, indent=1))))
    where = f"{known['gpu'] or 'CPU'}, torch {known['torch']}; {record.command}"
    return page(title, where, parts)
