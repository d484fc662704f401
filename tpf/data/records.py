"""Light records of the entries of a data set: what filters and sampling need to know.

``Entries`` finds the files of ``DataConfig.path``, reads each once and keeps its record. A prepared
cache (``store``) holds the records, and nothing is read.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib
import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tpf.config import DataConfig
from tpf.data import store
from tpf.data.cache import EntryCache
from tpf.data.cif import entry_name
from tpf.data.identity import graph_digest
from tpf.data.kinase import has_kinase
from tpf.data.load import find_files
from tpf.data.pool import map_files
from tpf.data.proximity import close_groups
from tpf.data.sampling import Unit, cluster_weights
from tpf.data.store import Parsed
from tpf.data.tables import LIGAND, Tokens
from tpf.errors import DataError, UsageError
from tpf.files import read_list

REASONS = 5
"""Reasons for skipping that a summary names."""
_OF_PARTS = ("msa", "ligand", "pose")
"""Stages whose errors are those of an alignment or molecule, not of the entry by its name."""
NO_ALIGNMENT = "{} of {} polymer chains have no alignment: the query row alone"
MANY_FILES = 200
"""Files from which on ``DataConfig.workers`` processes read them."""
INTERFACE_CONTACT = 5.0
"""Angstrom between heavy atoms of the two chains of an interface."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """What is known of an entry without reading it again."""

    id: str
    path: str
    n_tokens: int
    method: str
    resolution: float | None
    release_date: str | None
    """YYYY-MM-DD."""
    chains: tuple[str, ...]
    """Chain ids of the assembly."""
    chain_types: tuple[int, ...]
    chain_keys: tuple[str, ...]
    """Digest of type, residues and ligand atoms: equal for equal sequence or ligand."""
    resolved: tuple[int, ...]
    """Chains with a resolved token centre."""
    interfaces: tuple[tuple[int, int], ...]
    """Pairs of chains with heavy atoms nearer than 5 Angstrom."""
    msa_rows: tuple[int, ...]
    """Rows of the alignment of each chain; 0 without one."""
    kinase: bool
    """Has a protein kinase."""

    @property
    def n_polymers(self) -> int:
        """Number of polymer chains."""
        return sum(kind != LIGAND for kind in self.chain_types)


@dataclass(frozen=True)
class Skipped:
    """An entry that is not used, and why."""

    id: str
    stage: str
    reason: str


def failure_of(entry: str, error: Exception) -> Skipped:
    """Return an error as a skipped entry; one that nobody foresaw names its origin."""
    if isinstance(error, DataError):
        named = error.stage not in _OF_PARTS or error.entry == entry or error.entry in error.reason
        return Skipped(
            entry, error.stage, error.reason if named else f"{error.entry}: {error.reason}"
        )
    if isinstance(error, UsageError):
        return Skipped(entry, "configuration", str(error))
    if isinstance(error, MemoryError):
        return Skipped(entry, "memory", "needs more memory than its process may take")
    where = traceback.extract_tb(error.__traceback__)[-1]
    reason = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
    return Skipped(entry, "unexpected", reason)


def record_of(parsed: Parsed, path: str) -> Record:
    """Return the record of an entry that lies at ``path``."""
    tokens = parsed.tokens
    tables = tokens.tables
    rows = {entity: len(a.rows) for entity, a in parsed.alignments.items()}
    token_chain = tables.res_chain[tokens.residue]
    centre = tokens.center_atom
    seen = np.isfinite(tables.pos[centre]).all(axis=1) & (tables.occupancy[centre] > 0)
    resolved = np.unique(token_chain[seen])
    atom_chain = tables.res_chain[tables.atom_residue]
    atoms = (tables.occupancy > 0) & np.isin(atom_chain, resolved)
    return Record(
        id=tables.id,
        path=path,
        n_tokens=len(tokens),
        method=tables.method,
        resolution=tables.resolution,
        release_date=None if tables.release_date is None else tables.release_date.isoformat(),
        chains=tuple(tables.chain_id.tolist()),
        chain_types=tuple(tables.chain_type.tolist()),
        chain_keys=tuple(_chain_keys(tokens)),
        resolved=tuple(resolved.tolist()),
        interfaces=tuple(close_groups(tables.pos[atoms], atom_chain[atoms], INTERFACE_CONTACT)),
        msa_rows=tuple(rows.get(entity, 0) for entity in tables.chain_entity.tolist()),
        kinase=has_kinase(tables),
    )


def _chain_keys(tokens: Tokens) -> list[str]:
    tables = tokens.tables
    keys = []
    for chain, kind in enumerate(tables.chain_type.tolist()):
        text = f"{kind}:" + "-".join(tables.res_name[tables.res_chain == chain].tolist())
        if kind == LIGAND:  # many molecules may be called LIG
            atoms = np.flatnonzero(tables.res_chain[tables.atom_residue] == chain)
            inside = np.isin(tables.bonds, atoms).all(axis=1)
            text += ":" + graph_digest(tables.element[atoms], tables.bonds[inside] - atoms[0])
        keys.append(hashlib.sha256(text.encode()).hexdigest()[:16])
    return keys


def data_files(path: str | None) -> list[Path]:
    """Return the structure files of ``DataConfig.path``; None means the built-in examples."""
    if path is None:
        package = importlib.import_module("tpf.examples")
        return find_files(Path(package.__path__[0]) / "examples")
    return find_files(path)


def without_alignment(records: Iterable[Record]) -> tuple[int, int]:
    """Return how many polymer chains have no alignment, and how many chains there are."""
    rows = [
        n
        for record in records
        for n, kind in zip(record.msa_rows, record.chain_types, strict=True)
        if kind != LIGAND
    ]
    return rows.count(0), len(rows)


class Entries:
    """The usable entries of a data set, and those that are not with the reason."""

    def __init__(self, config: DataConfig) -> None:
        """Read the records and apply the filters; raise ``UsageError`` if nothing is left."""
        chosen = _Filter.of(config)
        self._msa = config.msa is not None
        self.cache = EntryCache(config)
        """Entries in memory, the last ones read among them."""
        self.skipped: list[Skipped] = []
        """Entries that cannot be read or that a filter drops."""
        self.records: list[Record] = []
        n_found = 0
        for record in self._read(config):
            n_found += 1
            if isinstance(record, Skipped):
                self.skipped.append(record)
                continue
            reason = chosen.reason(record)
            if reason is None:
                self.records.append(record)
            else:
                self.skipped.append(Skipped(record.id, "filter", reason))
        if not self.records:
            where = config.path or "the built-in examples"
            raise UsageError(
                f"data.path {where}: none of {n_found} entries is usable ({self.summary()})"
            )

    def __len__(self) -> int:
        return len(self.records)

    def summary(self) -> str:
        """Return the number of skipped entries for each of the most frequent reasons."""
        counts = Counter(f"{s.stage}: {s.reason}" for s in self.skipped)
        parts = [f"{n} {reason}" for reason, n in counts.most_common(REASONS)]
        others = counts.total() - sum(n for _, n in counts.most_common(REASONS))
        return "; ".join(parts + [f"{others} others"] * bool(others)) or "nothing skipped"

    def alignment_notice(self) -> str:
        """Return how many polymer chains have no alignment, "" if none was given at all."""
        missing, chains = without_alignment(self.records)
        return "" if missing == chains and not self._msa else NO_ALIGNMENT.format(missing, chains)

    def units(self) -> list[Unit]:
        """Return every chain and interface that a sample can be drawn for."""
        return [
            Unit(entry, chains)
            for entry, record in enumerate(self.records)
            for chains in [*((c,) for c in record.resolved), *record.interfaces]
        ]

    def weights(
        self, units: list[Unit], clusters: dict[str, str] | None = None
    ) -> NDArray[np.float64]:
        """Return the sampling weight of each unit; ``clusters`` maps ENTRY_CHAIN to a cluster."""
        given = clusters or {}
        types, names = [], []
        for unit in units:
            record = self.records[unit.entry]
            types.append([record.chain_types[c] for c in unit.chains])
            names.append(
                [
                    given.get(f"{record.id}_{record.chains[c]}", record.chain_keys[c])
                    for c in unit.chains
                ]
            )
        return cluster_weights(types, names)

    def _read(self, config: DataConfig) -> list[Record | Skipped]:
        if config.path is not None and store.is_store(Path(config.path)):
            return stored_records(Path(config.path))
        paths = [str(path) for path in data_files(config.path)]
        workers = config.workers if len(paths) >= MANY_FILES else 1
        read = functools.partial(_read_record, self.cache)
        return list(map_files(read, paths, workers, lost))


def stored_records(folder: Path) -> list[Record | Skipped]:
    """Return the records of a prepared cache, each stored entry once, and what failed in it."""
    found: dict[str, Record | Skipped] = {}
    for line in store.read_index(folder):
        if "failed" in line:
            found[line["source"]] = Skipped(**line["failed"])
        else:
            record = Record(**line["record"])
            found.setdefault(record.path, record)
    return list(found.values())


def lost(path: str, why: str) -> Skipped:
    """Return the outcome of a file at which the process that read it was lost."""
    return Skipped(entry_name(Path(path)), "read", why)


def _read_record(cache: EntryCache, path: str) -> Record | Skipped:
    try:
        return record_of(cache.get(path), path)
    except Exception as error:  # one odd file must not keep a run from starting
        return failure_of(entry_name(Path(path)), error)


@dataclass(frozen=True)
class _Filter:
    """What entries must be to be used."""

    config: DataConfig
    after: str | None
    until: str | None
    only: frozenset[str] | None
    without: frozenset[str]

    @classmethod
    def of(cls, config: DataConfig) -> _Filter:
        """Read the lists and dates; raise ``UsageError`` if one cannot be read."""
        return cls(
            config,
            _day("released_after", config.released_after),
            _day("release_cutoff", config.release_cutoff),
            None if config.only is None else _ids("only", config.only),
            frozenset() if config.without is None else _ids("without", config.without),
        )

    def reason(self, record: Record) -> str | None:
        """Return why a record is dropped, None if it is kept."""
        released, config = record.release_date, self.config
        if self.only is not None and record.id not in self.only:
            return f"not in {config.only}"
        if record.id in self.without:
            return f"in {config.without}"
        if self.until is not None and released is not None and released > self.until:
            return f"released after {self.until}"
        if self.after is not None and (released is None or released <= self.after):
            return f"not released after {self.after}"
        if record.resolution is not None and record.resolution > config.max_resolution:
            return f"resolution worse than {config.max_resolution:g} A"
        if record.n_polymers > config.max_chains:
            return f"more than {config.max_chains} polymer chains"
        if config.kinases and not record.kinase:
            return "no protein kinase"
        if not record.resolved:
            return "no token has a resolved centre atom"
        return None


def _day(name: str, text: str | None) -> str | None:
    """Return a date of the configuration as YYYY-MM-DD."""
    try:
        return None if text is None else datetime.date.fromisoformat(text).isoformat()
    except ValueError:
        raise UsageError(f"data.{name} is {text!r}; write YYYY-MM-DD") from None


def _ids(name: str, path: str) -> frozenset[str]:
    items = read_list(f"data.{name}", Path(path))
    return frozenset(entry_name(Path(item)).lower() for item in items)
