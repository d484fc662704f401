"""Parsed entries kept in memory, so that the next visit of an entry reads no file."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpf.config import DataConfig
from tpf.data import store
from tpf.data.msa import Alignment, AlignmentFolder
from tpf.data.tables import Tokens

CACHE_BYTES = 400_000_000
"""Memory for parsed entries in each process."""


@dataclass(frozen=True)
class Parsed:
    """An entry with its alignments by entity."""

    tokens: Tokens
    alignments: dict[int, Alignment]

    @property
    def nbytes(self) -> int:
        """Rough size in memory."""
        rows = sum(a.rows.nbytes + a.deletions.nbytes for a in self.alignments.values())
        return 120 * len(self.tokens.tables.atom_name) + rows


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
        tokens = store.load_tokens(path, self._ccd)
        parsed = Parsed(tokens, {} if self._msa is None else self._msa.find(tokens))
        self._held[path] = parsed
        self._bytes += parsed.nbytes
        while self._bytes > self._max_bytes and len(self._held) > 1:
            _, dropped = self._held.popitem(last=False)
            self._bytes -= dropped.nbytes
        return parsed

    def __getstate__(self) -> dict[str, Any]:
        """Leave the entries behind: another process reads what it needs."""
        return self.__dict__ | {"_held": OrderedDict(), "_bytes": 0}
