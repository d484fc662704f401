"""A limit on the time of a step: a rank that hangs writes its stacks and ends."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from tpf.errors import TpfError
from tpf.signals import leave_interrupts

GRACE = 5.0
"""Seconds between the stacks and the end, in which the other ranks write theirs."""


class Watchdog:
    """Waits for signs of life; without one for ``limit`` seconds it ends the process, code 1.

    Python's stacks of all threads go to ``folder/rank-N.txt``, also when the interpreter hangs.
    """

    def __init__(self, limit: float, folder: Path, rank: int) -> None:
        """Make a watchdog that sleeps until the first ``beat``; a limit of 0 never barks."""
        self.path = folder / f"rank-{rank}.txt"
        self._limit = limit
        self._doing = ""
        self._deadline: float | None = None
        self._closed = threading.Event()

    @contextmanager
    def on_guard(self) -> Iterator[Watchdog]:
        """Watch while the block runs."""
        if not self._limit:
            yield self
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as self._file:  # after the stacks of a rank started anew
            thread = threading.Thread(target=self._watch, name="tpf-watchdog", daemon=True)
            thread.start()
            try:
                yield self
            finally:
                self.pause()
                self._closed.set()
                thread.join()
                with suppress(OSError):  # the last rank to end removes the folder if all is well
                    if not self.path.stat().st_size:
                        self.path.unlink()
                        self.path.parent.rmdir()

    def beat(self, doing: str) -> None:
        """Start the clock anew; ``doing`` says what the process does from here."""
        if self._limit:
            self._doing = doing
            self._deadline = time.monotonic() + self._limit
            faulthandler.dump_traceback_later(self._limit, file=self._file)

    def pause(self) -> None:
        """Stop the clock until the next ``beat``."""
        self._deadline = None
        if self._limit:
            faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        leave_interrupts()
        while not self._closed.wait(min(1.0, self._limit / 4)):
            deadline = self._deadline
            if deadline is not None and time.monotonic() > deadline + GRACE:
                self._end()

    def _end(self) -> None:
        text = (
            f"{self._doing} did not end within {self._limit:g} s (train.step_limit); the stacks "
            f"of all ranks are in {self.path.parent}; go on from the last checkpoint with --resume"
        )
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            get_error_handler().record_exception(TpfError(text))
        else:
            print(f"tpf: {text}", file=sys.stderr, flush=True)
        os._exit(TpfError.exit_code)
