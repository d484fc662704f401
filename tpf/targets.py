"""Which whole entries a validation scores: lists of ids, groups, limits, shares of ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tpf.config import Config
from tpf.data.batch import Batch, to_torch
from tpf.data.cif import entry_name
from tpf.data.dataset import ValidationDataset
from tpf.data.records import Entries, Record
from tpf.data.tables import Tables
from tpf.errors import UsageError
from tpf.files import read_list
from tpf.metrics.schema import Skipped


class Targets:
    """Whole entries to validate on: one data set for each evaluation seed."""

    def __init__(self, entries: Entries, config: Config, only: list[str] | None) -> None:
        """Choose the entries; raise ``UsageError`` if an id of ``only`` is not there."""
        self.config = config
        self._seeds = [
            ValidationDataset(
                entries, config.data, max_tokens=config.validate.max_tokens, seed=seed
            )
            for seed in range(config.validate.seeds)
        ]
        wanted = None if only is None else set(only)
        first = self._seeds[0]
        known = {r.id.lower() for r in entries.records} | {s.id.lower() for s in entries.skipped}
        if wanted is not None and (absent := sorted(wanted - known)):
            raise UsageError(
                f"--targets: {len(absent)} ids are not among the entries of --data, "
                f"such as {absent[0]}"
            )
        chosen: dict[str, int] = {}
        twice: list[Skipped] = []
        for i, record in enumerate(first.records):
            if record.id in chosen:
                other = first.records[chosen[record.id]].path
                twice.append(
                    Skipped(record.id, f"filter: {other} has the same id as {record.path}")
                )
            elif wanted is None or record.id.lower() in wanted:
                chosen[record.id] = i
        self.chosen = list(chosen.values())
        limit = config.validate.max_targets
        if limit is not None and len(self.chosen) > limit:
            places = np.linspace(0, len(self.chosen) - 1, limit).round().astype(int)
            self.chosen = [self.chosen[place] for place in places]
        unused = [
            Skipped(s.id, f"{s.stage}: {s.reason}")
            for s in entries.skipped
            if wanted is None or s.id.lower() in wanted
        ]
        self.skipped = [*twice, *self._too_large(wanted), *unused]

    def _too_large(self, wanted: set[str] | None) -> list[Skipped]:
        """Return the entries above the limit of tokens, each with the limit that admits all."""
        large = [r for r in self._seeds[0].too_large if wanted is None or r.id.lower() in wanted]
        most, limit = max((r.n_tokens for r in large), default=0), self.config.validate.max_tokens
        way_out = f"--max-tokens {most} admits all, in training validate.max_tokens={most}"
        return [
            Skipped(r.id, f"size: {r.n_tokens} tokens, more than {limit}; {way_out}") for r in large
        ]

    def ids(self) -> list[str]:
        """Return the ids of all targets."""
        return [self.record(index).id for index in self.chosen]

    def share(self, rank: int, size: int) -> list[int]:
        """Return the targets of one rank: dealt out by size, so that ranks end together."""
        return sorted(self.chosen, key=lambda i: -self.record(i).n_tokens)[rank::size]

    def record(self, index: int) -> Record:
        return self._seeds[0].records[index]

    def batch(self, index: int, seed: int) -> Batch:
        """Return the features of a target under a seed, as a batch of one."""
        return to_torch(self._seeds[seed][index])

    def tables(self, index: int) -> Tables:
        return self._seeds[0].tokens(index).tables


def read_ids(path: Path) -> list[str]:
    """Return the ids of a list; of a path, as lists for ``--data`` have them, its entry's."""
    ids = [entry_name(Path(line)).lower() for line in read_list("--targets", path)]
    if not ids:
        raise UsageError(f"--targets {path}: names no entry; write one id a line")
    return ids


def read_groups(path: Path) -> dict[str, str]:
    """Return the group of each entry id; raise ``UsageError`` for a line without one."""
    groups = {}
    for line in read_list("--groups", path):
        name, *group = line.split(maxsplit=1)
        if not group:
            raise UsageError(f"--groups {path}: {line!r} has no group; write ID GROUP")
        groups[name.lower()] = group[0]
    return groups
