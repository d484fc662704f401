"""Checkpoints written in the background: training goes on while they reach the disk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tpf import checkpoint
from tpf.config import Config
from tpf.errors import TpfError
from tpf.signals import leave_interrupts

State = dict[str, dict[str, Tensor]]


class Saver:
    """Writes the checkpoints of one run, one at a time, and deletes the oldest.

    ``copy`` brings a tensor to host memory and ``save`` lets a thread write the copies. On a GPU
    the copies too run beside the host, in the order of the stream. Their memory, pinned for GPUs,
    is kept for the next save. The thread ends before the process does, whatever happens to it.
    ``check`` raises ``TpfError`` when nothing may be written to the run folder any more.
    """

    def __init__(self, run: Path, check: Callable[[], None] = lambda: None) -> None:
        self._run, self._check = run, check
        self._host: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._on_gpu = False
        self._error: TpfError | None = None
        self._unsaid: TpfError | None = None

    def copy(self, key: str, tensor: Tensor) -> Tensor:
        """Return a copy for the next ``save``; waits first for the write before it."""
        self._join()
        host = self._host.get(key)
        if host is None or (host.shape, host.dtype) != (tensor.shape, tensor.dtype):
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._host[key] = host
        host.copy_(tensor.detach(), non_blocking=True)
        self._on_gpu |= tensor.is_cuda
        return host

    def save(self, step: int, config: Config, copied: State, extra: dict[str, Any]) -> None:
        """Begin to write tensors that ``copy`` gave, or views of them.

        A write that fails leaves earlier checkpoints; ``problem``, ``wait`` or ``close`` tell it.
        """
        self._join()
        event = None
        if self._on_gpu:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        arguments = step, config, copied, deepcopy(extra), event
        self._thread = threading.Thread(target=self._write, args=arguments, name="tpf-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the write in progress; raise ``TpfError`` if the newest state is not saved."""
        self._join()
        if self._error is not None:
            self._unsaid = None
            raise self._error

    def problem(self) -> str | None:
        """Return, once, why the last write failed; None if it has not."""
        error, self._unsaid = self._unsaid, None
        return None if error is None else str(error)

    def close(self) -> str | None:
        """Wait for the write in progress; return why it failed, unless that has been told."""
        self._join()
        return self.problem()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(
        self,
        step: int,
        config: Config,
        tensors: State,
        extra: dict[str, Any],
        event: torch.cuda.Event | None,
    ) -> None:
        leave_interrupts()
        try:
            if event is not None:
                event.synchronize()
            self._check()
            checkpoint.save(self._run, step, config, tensors, extra)
            checkpoint.prune(self._run, config.train.keep, step)
        except TpfError as error:
            self._error = self._unsaid = error
        except Exception as error:  # a thread has no caller: hand everything over
            self._error = self._unsaid = TpfError(f"checkpoint of step {step}: {error!r}")
        else:
            self._error = None
