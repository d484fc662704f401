"""Data sets and the loader: a sample is a pure function of (seed, position).

``CropDataset[position]`` makes one training sample, ``ValidationDataset[i]`` one whole entry, and
``Loader`` yields the samples of each optimiser step, the same in any number of workers, ranks
(as a whole) and after resuming at ``start_step``.
"""

from __future__ import annotations

import functools
import itertools
import logging
import multiprocessing
import signal
import traceback
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from tpf.config import DataConfig, LossConfig
from tpf.data.batch import Batch, pack, to_torch, unpack
from tpf.data.ccd import Dictionary
from tpf.data.crop import crop
from tpf.data.features import Features, featurize
from tpf.data.interrupts import interrupts_held
from tpf.data.records import Entries, failure_of
from tpf.data.sampling import Unit, epoch_order, rank_positions
from tpf.data.tables import Tokens
from tpf.errors import DataError, TpfError, UsageError

EPOCH = 128_000
"""Samples of one epoch (AF3 SI 5.2)."""
MAX_DRAWS = 20
"""Entries tried for one sample before the data set is called broken."""

_LOST = {"timed out": "hangs", "exited unexpectedly": "died", "killed by signal": "was killed"}
"""What torch says of a loader process that gives no sample, and what that means."""

log = logging.getLogger(__name__)


class CropDataset(Dataset[Features]):
    """Training samples by position; there is no last position."""

    def __init__(
        self,
        entries: Entries,
        config: DataConfig,
        *,
        loss: LossConfig | None = None,
        seed: int = 0,
        epoch_length: int = EPOCH,
        clusters: dict[str, str] | None = None,
    ) -> None:
        """Prepare the sampling; ``clusters`` maps ENTRY_CHAIN to a cluster (default: sequence)."""
        self.entries = entries
        self.config = config
        self.loss = loss or LossConfig()
        self.seed = seed
        self.epoch_length = epoch_length
        self.units: list[Unit] = entries.units()
        self.weights = entries.weights(self.units, clusters)
        self._dictionary = Dictionary(config.ccd)
        self._cache = entries.cache
        self._order = functools.lru_cache(maxsize=2)(self._draw_order)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_order"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._order = functools.lru_cache(maxsize=2)(self._draw_order)

    def _draw_order(self, epoch: int) -> NDArray[np.intp]:
        return epoch_order(self.weights, self.epoch_length, self.seed, epoch)

    def __getitem__(self, position: int) -> Features:
        """Return the features of a sample, with ``skipped``: the entries that failed before it.

        A unit whose entry fails is replaced by the next draw of the same position. Raises
        ``DataError`` when ``MAX_DRAWS`` draws fail.
        """
        unit = self._unit(position)
        skipped: list[dict[str, str]] = []
        cause: Exception | None = None
        for attempt in range(MAX_DRAWS):
            rng = np.random.default_rng([self.seed, position, attempt])
            if attempt:
                share = self.weights / self.weights.sum()
                unit = self.units[rng.choice(len(self.units), p=share)]
            try:
                return self.sample(unit, rng) | {"position": position, "skipped": skipped}
            except Exception as error:  # a bug that one entry uncovers must not end a long run
                cause, failure = error, failure_of(self.entries.records[unit.entry].id, error)
                log.warning("%s: %s: %s (skipped)", failure.id, failure.stage, failure.reason)
                skipped.append(asdict(failure))
        last = skipped[-1]
        raise DataError(
            last["id"], last["stage"], f"{last['reason']} ({MAX_DRAWS} draws in a row failed)"
        ) from cause

    def _unit(self, position: int) -> Unit:
        epoch, place = divmod(position, self.epoch_length)
        unit: Unit = self.units[self._order(epoch)[place]]
        return unit

    def entry(self, position: int) -> str:
        """Return the id of the entry that is drawn first for a sample."""
        return self.entries.records[self._unit(position).entry].id

    def sample(self, unit: Unit, rng: np.random.Generator) -> Features:
        """Return the features of a crop around a chain or an interface."""
        parsed = self._cache.get(self.entries.records[unit.entry].path)
        config = self.config
        weights = (config.crop_contiguous, config.crop_spatial, config.crop_interface)
        index = crop(parsed.tokens, config.crop, rng, weights, unit.chains)
        return featurize(
            parsed.tokens,
            index,
            self._dictionary,
            rng,
            config=config,
            loss=self.loss,
            msa=parsed.alignments,
        )


class ValidationDataset(Dataset[Features]):
    """Whole entries, in the order of the data set."""

    def __init__(
        self,
        entries: Entries,
        config: DataConfig,
        *,
        max_tokens: int | None = None,
        seed: int = 0,
    ) -> None:
        """Take the entries of at most ``max_tokens`` tokens; the others go to ``too_large``."""
        self.config = config
        self.seed = seed
        limit = max_tokens or max(record.n_tokens for record in entries.records)
        self.records = [r for r in entries.records if r.n_tokens <= limit]
        self.too_large = [r for r in entries.records if r.n_tokens > limit]
        self._dictionary = Dictionary(config.ccd)
        self._cache = entries.cache

    def __len__(self) -> int:
        return len(self.records)

    def tokens(self, index: int) -> Tokens:
        """Return the tokenised entry; raise ``DataError`` if it cannot be read."""
        return self._cache.get(self.records[index].path).tokens

    def __getitem__(self, index: int) -> Features:
        """Return the features of an entry; raise ``DataError`` if it cannot be used."""
        record = self.records[index]
        parsed = self._cache.get(record.path)
        return featurize(
            parsed.tokens,
            np.arange(len(parsed.tokens)),
            self._dictionary,
            np.random.default_rng([self.seed, zlib.crc32(record.id.encode())]),
            config=self.config,
            msa=parsed.alignments,
            training=False,
        )


@dataclass(frozen=True)
class _Failed:
    """An error on its way from a worker; ``error`` keeps its type and entry."""

    error: DataError
    stack: str
    """Its traceback, which does not travel by itself."""


class _Packed(Dataset[Any]):
    """Samples as they travel from a worker."""

    def __init__(self, dataset: CropDataset) -> None:
        self._dataset = dataset

    def __getitem__(self, position: int) -> dict[str, Any] | _Failed:
        try:
            return pack(self._dataset[position])
        except DataError as error:
            return _Failed(error, traceback.format_exc())


def _leave_signals_to_the_trainer(worker: int) -> None:
    """Ignore the signals that end a run: the trainer ends its workers after saving."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # RDKit stops at it all the same


def _same(item: Any) -> Any:  # noqa: ANN401 - any sample
    return item


class _Positions:
    """The positions of one rank, step by step."""

    def __init__(
        self, start: int, stop: int | None, batch_size: int, rank: int, world: int
    ) -> None:
        self._steps = (start, stop)
        self._share = (batch_size, rank, world)

    def __iter__(self) -> Iterator[int]:
        start, stop = self._steps
        batch_size, rank, world = self._share
        for step in itertools.count(start) if stop is None else range(start, stop):
            yield from rank_positions(step * batch_size, (step + 1) * batch_size, rank, world)


class Loader:
    """Iterate over optimiser steps: each gives this rank's samples as batches of one.

    Sample i of step n on rank r is position ``n * batch_size + i * world + r`` of the data set.
    """

    def __init__(
        self,
        dataset: CropDataset,
        *,
        batch_size: int = 1,
        rank: int = 0,
        world: int = 1,
        start_step: int = 0,
        stop_step: int | None = None,
        workers: int = 0,
        limit: float = 0.0,
    ) -> None:
        """``batch_size`` counts the samples of a step over all ranks.

        ``limit`` is the number of seconds to wait for a worker (0: without end).
        Raises ``UsageError`` if the ranks cannot share it evenly.
        """
        if batch_size % world:
            raise UsageError(f"batch size {batch_size} is not a multiple of {world} processes")
        self._per_step = batch_size // world
        self._dataset = dataset
        self._positions = _Positions(start_step, stop_step, batch_size, rank, world)
        self._loader = DataLoader(
            _Packed(dataset),
            batch_size=None,
            sampler=self._positions,
            num_workers=workers,
            collate_fn=_same,
            prefetch_factor=4 if workers else None,
            worker_init_fn=_leave_signals_to_the_trainer,
            timeout=limit if workers else 0,
        )

    def __iter__(self) -> Iterator[list[Batch]]:
        """Yield the batches of each step.

        Raises ``DataError`` naming the entry that failed, ``TpfError`` if a loader process died.
        """
        samples: list[Batch] = []
        for item in self._items():
            features = unpack(item)
            samples.append(to_torch(features))
            if len(samples) == self._per_step:
                yield samples
                samples = []

    def _items(self) -> Iterator[dict[str, Any]]:
        others = set(multiprocessing.active_children())
        source = iter(self._loader)
        workers = set(multiprocessing.active_children()) - others
        for position in self._positions:
            try:
                with interrupts_held():
                    item = next(source)
            except Exception as error:
                for worker in workers:  # one that hangs would keep this process from ending
                    with suppress(RuntimeError):  # so torch tells of its death
                        worker.kill()
                        worker.join()
                where = f"sample {position}, entry {self._dataset.entry(position)}"
                how = next((how for sign, how in _LOST.items() if sign in str(error)), None)
                if how is None:
                    error.add_note(f"In {where}")
                    raise
                raise TpfError(
                    f"{where}: a loader process {how} ({error}); look at the entry with "
                    "tpf data show, or lower data.workers"
                ) from error
            if isinstance(item, _Failed):
                del source  # ends the workers now; in the garbage collector it takes seconds
                item.error.add_note(f"In the loader process:\n{item.stack}")
                raise item.error
            yield item
