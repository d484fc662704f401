"""Prepare a data set: parse and tokenise every file once into a cache that training reads.

Several writers may share one output folder, each with its own shard of the files; a writer that
was stopped goes on where it was.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator
from pathlib import Path

from tpf.data import store
from tpf.data.alignment import AlignmentFolder
from tpf.data.cache import read
from tpf.data.ccd import Dictionary
from tpf.data.cif import entry_name
from tpf.data.pool import map_files
from tpf.data.records import Record, Skipped, data_files, died, failure_of, record_of
from tpf.errors import UsageError


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
    retry: bool = False,
) -> Iterator[Prepared]:
    """Yield the record of each file as it is stored in ``out``, or why it is not.

    The alignments in ``msa`` are stored with the entries. ``shard`` (i, n) takes every n-th file
    starting with the i-th, i from 1. Files that an earlier run has done and that did not change
    since are passed over; with ``retry`` those that failed are tried again. ``memory`` GB bound
    each worker. Raises ``UsageError`` for a wrong shard, path or output folder.
    """
    number, count = shard
    if not 1 <= number <= count:
        raise UsageError(f"shard {number}/{count}: write I/N with I from 1 to N")
    files = [os.path.abspath(file) for file in data_files(path)][number - 1 :: count]
    folder = None if msa is None else AlignmentFolder(Path(msa))
    Dictionary(ccd).get("LIG")  # a wrong dictionary is no fault of the files
    store.open_store(out, ccd, msa)
    done = {
        line["source"]: line["mtime_ns"]
        for line in store.read_index(out)
        if not _again(line, retry)
    }
    todo = [file for file in files if done.get(file) != os.stat(file).st_mtime_ns]
    convert = functools.partial(_convert, out, ccd, folder)
    with store.open_index(out, shard) as index:
        for line in map_files(convert, todo, workers, _died, memory):
            store.append_index(index, line)
            if "failed" in line:
                yield Prepared(line["source"], Skipped(**line["failed"]))
            else:
                record = Record(**line["record"])
                yield Prepared(line["source"], record, (out / record.path).stat().st_size)


def _again(line: store.Line, retry: bool) -> bool:
    """Tell whether a file that has a line in the index is to be done again."""
    if "failed" in line:
        return retry
    return not Path(line["record"]["path"]).is_file()


def _convert(out: Path, ccd: str | None, msa: AlignmentFolder | None, source: str) -> store.Line:
    """Store one file and return its line of the index."""
    line: store.Line = {"source": source, "mtime_ns": os.stat(source).st_mtime_ns}
    try:
        parsed = read(source, ccd, msa)
        record = record_of(parsed, store.write_entry(out, parsed))
    except MemoryError:
        bad = Skipped(entry_name(Path(source)), "memory", "needs more memory than --memory allows")
        return line | {"failed": dataclasses.asdict(bad)}
    except Exception as error:  # one odd file must not end a long preparation
        bad = failure_of(entry_name(Path(source)), error)
        return line | {"failed": dataclasses.asdict(bad)}
    return line | {"record": dataclasses.asdict(record)}


def _died(source: str) -> store.Line:
    failed = dataclasses.asdict(died(source))
    return {"source": source, "mtime_ns": os.stat(source).st_mtime_ns, "failed": failed}
