"""The processes of one training job: rank, size, device, and the few collectives in use.

Gradients go over the device's own group (NCCL, or Gloo on the CPU). Everything else goes over a
second group on the CPU, so that it never waits for a GPU and may wait long for a validation.
"""

from __future__ import annotations

import datetime
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpf.config import TrainConfig
from tpf.errors import HardwareError, TpfError, rebuild, told

PATIENCE = datetime.timedelta(hours=2)
"""Longest wait of one rank for another: covers a validation and the first compilation."""
LINGER = 3.0
"""Seconds that a rank which lost another waits, so that the launcher sees first who died."""


@dataclass(frozen=True)
class World:
    """This process among the ``size`` processes of the job."""

    rank: int
    size: int
    device: torch.device
    side: dist.ProcessGroup | None = None
    """Group on the CPU; None in a job of one process."""

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes files and speaks."""
        return self.rank == 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """Add ``tensor`` over all ranks in place and return it."""
        if self.size > 1:
            with self._contact():
                dist.all_reduce(tensor)
        return tensor

    def sum_parts_(self, vector: Tensor) -> None:
        """Add equal parts of ``vector`` over all ranks, each on its own rank, in place."""
        if self.size == 1:
            return
        part = vector.chunk(self.size)[self.rank]
        with self._contact():
            _collective("reduce_scatter_single", "reduce_scatter_tensor")(part, vector)

    def join_parts_(self, vector: Tensor) -> None:
        """Give every rank the equal parts of ``vector`` that the others have, in place."""
        if self.size == 1:
            return
        part = vector.chunk(self.size)[self.rank]
        with self._contact():
            _collective("all_gather_single", "all_gather_into_tensor")(vector, part)

    def share(self, value: Any) -> list[Any]:
        """Return on every rank what each rank gave, by rank; over the CPU."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        with self._contact():
            dist.all_gather_object(found, value, group=self.side)
        return found

    def gather(self, value: Any) -> list[Any]:
        """Return on the main rank what each rank gave, by rank, elsewhere nothing; over the CPU."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size if self.is_main else []
        with self._contact():
            dist.gather_object(value, found if self.is_main else None, group=self.side)
        return found

    def any(self, flag: bool) -> bool:
        """Return on every rank whether ``flag`` is true on any rank."""
        return any(self.share(flag))

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        self.share(None)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let the block fail on all ranks if it failed on any, after it has ended on each.

        Only for blocks that hold no collective.
        """
        failure = None
        try:
            yield
        except Exception as error:
            if self.size == 1:
                raise
            failure = error
        self.agree(failure)

    def agree(self, failure: Exception | None) -> None:
        """Raise on every rank, naming the ranks that gave a failure, if any did."""
        found = self.share(None if failure is None else _words(failure))
        failed = {rank: words for rank, words in enumerate(found) if words is not None}
        if not failed:
            return
        first = min(failed)
        kind, _, trace = failed[first]
        texts = [text for _, text, _ in failed.values()]
        if len(failed) == self.size and len(set(texts)) == 1:
            sentence = texts[0]  # the same everywhere: a wrong path, a file that is absent
        else:
            named = (f"rank {rank} failed: {text}" for rank, (_, text, _) in failed.items())
            sentence = "; ".join(named)
        error = rebuild(kind, sentence)
        error.add_note(f"On rank {first}:\n{trace}")
        error.shared = True
        raise error from failure

    @contextmanager
    def _contact(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            time.sleep(LINGER)
            first = (str(error).splitlines() or [""])[0]
            raise TpfError(
                f"lost contact with another rank ({first}); go on from the last checkpoint "
                "with --resume"
            ) from error


def _collective(*names: str) -> Callable[[Tensor, Tensor], object]:
    """Return torch's function of the first name that it has: they changed with torch 2.13."""
    found: Callable[[Tensor, Tensor], object] = next(
        getattr(dist, name) for name in names if hasattr(dist, name)
    )
    return found


def _words(error: Exception) -> tuple[str, str, str]:
    """Return the kind of an error, its text, and its traceback, as other processes get them."""
    known = told(error)
    return type(known).__name__, str(known), "".join(traceback.format_exception(error))


def start(cpu_threads: int = 0) -> World:
    """Join the job that the environment describes (torchrun's variables), or be alone.

    ``cpu_threads`` sets torch's CPU threads (0 leaves its choice).

    A process that was started alone takes the first GPU, or the CPU when there is none. Raises
    ``HardwareError`` when a local rank has no GPU of its own on a machine that has GPUs.
    """
    if cpu_threads:
        torch.set_num_threads(cpu_threads)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus and local >= gpus:
        raise HardwareError(
            f"local rank {local} has no GPU: this machine has {gpus}; start {gpus} ranks per node"
        )
    device = torch.device("cuda", local) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    if size == 1:
        return World(rank, size, device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if gpus else "gloo", timeout=PATIENCE)
    return World(rank, size, device, dist.new_group(backend="gloo", timeout=PATIENCE))


def prepare(cfg: TrainConfig) -> World:
    """Join the job and set what the arithmetic of training depends on."""
    world = start(cfg.cpu_threads)
    torch.backends.cuda.matmul.allow_tf32 = cfg.tf32
    torch.backends.cudnn.allow_tf32 = cfg.tf32
    if cfg.deterministic and world.device.type == "cuda":
        make_deterministic()
    return world


def restarts() -> int:
    """Return how often the launcher has started the ranks of this job anew."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def make_deterministic() -> None:
    """Make torch's GPU operators repeat bit by bit; call before the first of them runs.

    One that cannot raises ``RuntimeError``, of which ``tpf.errors.told`` makes a sentence.
    """
    if os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):  # all that repeat
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def stop() -> None:
    """Leave the job."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
