"""Remove from a prepared cache what its sources no longer stand for."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tpf.data import store
from tpf.errors import DataError
from tpf.files import write_whole

_FOLDERS = "[0-9a-f][0-9a-f]"


@dataclass(frozen=True)
class Pruned:
    """What was removed."""

    sources: tuple[str, ...]
    """Files that are gone and whose lines went."""
    n_files: int
    """Stored entries and alignments, and parts of such that a killed process left."""
    n_bytes: int


def gone_sources(lines: Mapping[str, store.Line]) -> tuple[str, ...]:
    """Return the sources of an index that do not exist any more."""
    return tuple(source for source in lines if _gone(source))


def _gone(source: str) -> bool:
    """Tell whether a file is absent; one that cannot be looked at is not."""
    try:
        os.stat(source)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def prune(folder: Path) -> Pruned | None:
    """Drop the entries of files that are gone, older lines, and every stored file that none needs.

    Returns None and changes nothing while another process prepares entries there. Raises
    ``UsageError`` for a folder that is no cache of this version.
    """
    with store.locked(folder, alone=True) as held:
        if not held:
            return None
        lines = store.newest_lines(folder)
        gone = gone_sources(lines)
        kept = {source: line for source, line in lines.items() if source not in set(gone)}
        _rewrite(folder, kept)
        needed = _needed(folder, kept)
        spare = [
            path
            for path in folder.glob(f"{_FOLDERS}/*.npz*")
            if str(path.relative_to(folder)) not in needed
        ]
        size = sum(path.stat().st_size for path in spare)
        for path in spare:
            path.unlink()
    return Pruned(gone, len(spare), size)


def _rewrite(folder: Path, kept: Mapping[str, store.Line]) -> None:
    """Leave only the newest line of each kept source, in the index that has it."""
    for index in sorted(folder.glob("index-*.jsonl")):
        lines = [line for line in store.lines_of(index) if kept.get(line["source"]) == line]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        write_whole(index, text.encode())


def _needed(folder: Path, kept: Mapping[str, store.Line]) -> set[str]:
    """Return the paths, inside the cache, of the stored files that lines stand for."""
    needed: set[str] = set()
    for path in (line["record"]["path"] for line in kept.values() if "record" in line):
        needed.add(path)
        with suppress(DataError):  # damaged; nothing can be read with it
            needed.update(store.alignment_files(folder / path))
    return needed
