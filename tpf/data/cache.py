"""Parsed entries kept in memory, so that the next visit of an entry reads no file."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

from tpf.config import DataConfig
from tpf.data import store
from tpf.data.alignment import AlignmentFolder
from tpf.data.load import load_tables
from tpf.data.store import Parsed
from tpf.data.tokens import tokenize

CACHE_BYTES = 400_000_000
"""Memory for parsed entries in each process."""


def read(path: str, ccd: str | None, msa: AlignmentFolder | None) -> Parsed:
    """Return an entry from a structure file or a stored .npz with the alignments of ``msa``.

    Those stored with an entry take precedence. Raises ``DataError`` if the entry is bad.
    """
    if path.endswith(".npz"):
        parsed = store.read_entry(Path(path))
    else:
        parsed = Parsed(tokenize(load_tables(Path(path), ccd=ccd)), {})
    if msa is None:
        return parsed
    return Parsed(parsed.tokens, msa.find(parsed.tokens) | parsed.alignments)


class EntryCache:
    """Parsed entries, the least recently used dropped when they outgrow the memory given."""

    def __init__(self, config: DataConfig, max_bytes: int = CACHE_BYTES) -> None:
        self._ccd = config.ccd
        self._msa = None if config.msa is None else AlignmentFolder(Path(config.msa))
        self._max_bytes = max_bytes
        self._held: OrderedDict[str, Parsed] = OrderedDict()
        self._bytes = 0

    def get(self, path: str) -> Parsed:
        """Return an entry; raise ``DataError`` if it cannot be read."""
        if path in self._held:
            self._held.move_to_end(path)
            return self._held[path]
        parsed = read(path, self._ccd, self._msa)
        self._held[path] = parsed
        self._bytes += parsed.nbytes
        while self._bytes > self._max_bytes and len(self._held) > 1:
            _, dropped = self._held.popitem(last=False)
            self._bytes -= dropped.nbytes
        return parsed

    def __getstate__(self) -> dict[str, Any]:
        """Leave the entries behind: another process reads what it needs."""
        return self.__dict__ | {"_held": OrderedDict(), "_bytes": 0}
