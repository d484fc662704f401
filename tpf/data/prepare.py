"""Prepare a data set: parse and tokenise every file once into a cache that training reads.

Several writers may share one output folder, each with its own shard of the files; a writer that
was stopped goes on where it was.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Generator
from pathlib import Path

from tpf.data import store
from tpf.data.alignment import AlignmentFolder
from tpf.data.cache import read
from tpf.data.ccd import Dictionary
from tpf.data.cif import entry_name
from tpf.data.pool import map_files
from tpf.data.records import Record, Skipped, data_files, failure_of, lost, record_of
from tpf.data.store import Parsed
from tpf.data.tables import Tokens
from tpf.errors import DataError, UsageError


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What came of one file."""

    source: str
    result: Record | Skipped
    n_bytes: int = 0
    """Size of the stored entry."""


def prepare(
    path: str | None,
    out: Path,
    *,
    ccd: str | None = None,
    msa: str | None = None,
    shard: tuple[int, int] = (1, 1),
    workers: int = 1,
    memory: float | None = None,
    seconds: float | None = None,
    retry: bool = False,
) -> Generator[Prepared, None, None]:
    """Yield the record of each file as it is stored in ``out``, or why it is not.

    The alignments in ``msa`` are stored with the entries. ``shard`` (i, n) takes every n-th file
    starting with the i-th, i from 1. Files that an earlier run has done are passed over if neither
    they nor their alignments changed since; with ``retry`` those that failed are tried again.
    ``memory`` GB and ``seconds`` bound the work on a file. Raises ``UsageError`` for a wrong
    shard, path or output folder.
    """
    number, count = shard
    if not 1 <= number <= count:
        raise UsageError(f"shard {number}/{count}: write I/N with I from 1 to N")
    files = [os.path.abspath(file) for file in data_files(path)][number - 1 :: count]
    alignments = None if msa is None else AlignmentFolder(Path(msa))
    Dictionary(ccd).get("LIG")  # a wrong dictionary is no fault of the files
    store.open_store(out, ccd, msa)
    convert = _Convert(out, ccd, alignments, "" if alignments is None else alignments.stamp())
    with store.locked(out, alone=False), store.open_index(out, shard) as index:
        known = store.newest_lines(out)
        tasks = [task for file in files if (task := convert.task(file, known.get(file), retry))]
        lines = map_files(
            convert, [json.dumps(t) for t in tasks], workers, _lost, memory=memory, seconds=seconds
        )
        for task, line in zip(tasks, lines, strict=True):
            store.append_index(index, line)
            if "failed" in line:
                yield Prepared(line["source"], Skipped(**line["failed"]))
            elif "record" not in task or task.get("own_msa") != line["own_msa"]:
                record = Record(**line["record"])
                yield Prepared(line["source"], record, (out / record.path).stat().st_size)


@dataclasses.dataclass(frozen=True)
class _Convert:
    """Stores files; a task is what is known of a file before, as far as it still holds."""

    out: Path
    ccd: str | None
    alignments: AlignmentFolder | None
    stamp: str
    """Of all alignments."""

    def task(self, source: str, line: store.Line | None, retry: bool) -> store.Line | None:
        """Return what is to be done for a file with a line in the index, None if it is done."""
        anew: store.Line = {"source": source, "mtime_ns": os.stat(source).st_mtime_ns}
        if line is None or line["mtime_ns"] != anew["mtime_ns"]:
            return anew
        same_alignments = line.get("msa", "") == self.stamp
        if "failed" in line:
            again = retry or (line["failed"]["stage"] == "msa" and not same_alignments)
            return anew if again else None
        if not (self.out / line["record"]["path"]).is_file():
            return anew
        return None if same_alignments else line

    def __call__(self, text: str) -> store.Line:
        """Store the file of a task and return its line of the index."""
        task: store.Line = json.loads(text)
        line = {name: task[name] for name in ("source", "mtime_ns")} | {"msa": self.stamp}
        try:
            line |= self._stored(task)
        except Exception as error:  # one odd file must not end a long preparation
            line["failed"] = dataclasses.asdict(failure_of(entry_name(Path(task["source"])), error))
        return line | {"written": time.time_ns()}

    def _stored(self, task: store.Line) -> store.Line:
        """Return the record of an entry, stored anew unless what is stored still holds."""
        tokens = self._tokens_before(task)
        anew = tokens is None
        if tokens is None:
            tokens = read(task["source"], self.ccd, None).tokens
        own = "" if self.alignments is None else self.alignments.stamp(tokens)
        if not anew and own == task.get("own_msa"):
            return {name: task[name] for name in ("record", "own_msa")}
        parsed = Parsed(tokens, {} if self.alignments is None else self.alignments.find(tokens))
        record = record_of(parsed, store.write_entry(self.out, parsed))
        return {"record": dataclasses.asdict(record), "own_msa": own}

    def _tokens_before(self, task: store.Line) -> Tokens | None:
        """Return what is stored of a file that did not change, None if there is nothing whole."""
        if "record" not in task:
            return None
        try:
            path = self.out / task["record"]["path"]
            return store.read_entry(path, alignments=False).tokens
        except DataError:
            return None


def _lost(text: str, why: str) -> store.Line:
    task: store.Line = json.loads(text)
    line = {name: task[name] for name in ("source", "mtime_ns")} | {"written": time.time_ns()}
    return line | {"failed": dataclasses.asdict(lost(task["source"], why))}
