"""The processes of one training job: rank, size, device, and the few collectives in use."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tpf.errors import HardwareError

COLLECTIVE_TIMEOUT = datetime.timedelta(hours=2)
"""Longest wait in a collective; covers a validation that only rank 0 runs."""


@dataclass(frozen=True)
class World:
    """This process among the ``size`` processes of the job."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes files and speaks."""
        return self.rank == 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """Add ``tensor`` over all ranks in place and return it."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, flag: bool) -> bool:
        """Return on every rank whether ``flag`` is true on any rank."""
        if self.size == 1:
            return flag
        return bool(self.sum_(torch.tensor(float(flag), device=self.device)) > 0)

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        if self.size > 1:
            dist.barrier()


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
    if size > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if gpus else "gloo", timeout=COLLECTIVE_TIMEOUT)
    return World(rank, size, device)


def make_deterministic() -> None:
    """Make torch's GPU operators repeat bit by bit; call before the first of them runs."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def stop() -> None:
    """Leave the job."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
