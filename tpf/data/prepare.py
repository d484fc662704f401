"""Prepare a data set: parse and tokenise every file once into a cache that training reads.

Several writers may share one output folder, each with its own shard of the files; a writer that
was stopped goes on where it was.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

from tpf.data import store
from tpf.data.records import Record, Skipped, data_files, map_files, record_of
from tpf.errors import DataError, UsageError


def prepare(
    path: str | None,
    out: Path,
    *,
    ccd: str | None = None,
    shard: tuple[int, int] = (1, 1),
    workers: int = 1,
) -> Iterator[Record | Skipped]:
    """Yield the record of each file as it is stored in ``out``, or why it is not.

    ``shard`` (i, n) takes every n-th file starting with the i-th, i from 1. Files that an earlier
    run stored are passed over. Raises ``UsageError`` for a wrong shard or path.
    """
    number, count = shard
    if not 1 <= number <= count:
        raise UsageError(f"shard {number}/{count}: write I/N with I from 1 to N")
    files = [str(file) for file in data_files(path)][number - 1 :: count]
    out.mkdir(parents=True, exist_ok=True)
    index = out / f"index-{number}-of-{count}.jsonl"
    store.drop_unfinished_line(index)
    done = {fields["source"] for fields in store.read_index(out)}
    convert = functools.partial(_convert, out, ccd)
    todo = [file for file in files if file not in done]
    for result in map_files(convert, todo, workers):
        if isinstance(result, Record):
            store.append_index(index, dataclasses.asdict(result))
        yield result


def _convert(out: Path, ccd: str | None, source: str) -> Record | Skipped:
    """Store one file; its name has a digest of the source, as ids may repeat."""
    try:
        tokens = store.load_tokens(source, ccd)
    except DataError as error:
        return Skipped(error.entry, error.stage, error.reason)
    digest = hashlib.sha256(source.encode()).hexdigest()[:8]
    name = f"{tokens.tables.id}-{digest}.npz"
    store.write_tokens(out / name, tokens)
    return dataclasses.replace(record_of(tokens, name), source=source)
