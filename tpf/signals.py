"""Signals that end a run after the step in progress."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


def leave_interrupts() -> None:
    """Leave SIGINT to the other threads: to be called first in a thread that is not the main one.

    While RDKit works in the main thread, which holds SIGINT back then, its handler would swallow
    the one that another thread takes.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


@dataclass
class Stop:
    """Set by SIGINT, SIGTERM or SIGUSR1; the loop ends after the step in progress."""

    patient: bool = False
    """Let a second SIGINT wait too: a launcher passes on what the terminal sent to all."""
    silent: bool = False
    """Leave it to another process to say what happens."""
    unit: str = "step"
    """What is finished before the run ends."""
    signal: int | None = None

    def __call__(self) -> bool:
        return self.signal is not None

    @contextmanager
    def listening(self) -> Iterator[Stop]:
        """Catch the signals while the block runs; at most a second SIGINT acts at once.

        Schedulers send several signals in a row, so SIGTERM and SIGUSR1 always wait for the save.
        """
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        previous = {number: signal.getsignal(number) for number in signals}

        def handler(number: int, frame: FrameType | None) -> None:
            if self.signal is None and not self.silent:
                text = f"finishing the {self.unit}, then saving"
                again = "" if self.patient else "; Ctrl-C again stops at once without saving"
                print(f"tpf: {text}{again}", file=sys.stderr, flush=True)
            self.signal = number
            if number == signal.SIGINT and not self.patient:
                signal.signal(signal.SIGINT, signal.default_int_handler)

        for number in signals:
            signal.signal(number, handler)
        try:
            yield self
        finally:
            for number, action in previous.items():
                signal.signal(number, action)
