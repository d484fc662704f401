"""Signals that end a run after the step in progress."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class Stop:
    """Set by SIGINT, SIGTERM or SIGUSR1; the loop ends after the step in progress."""

    signal: int | None = None

    def __call__(self) -> bool:
        return self.signal is not None

    @contextmanager
    def listening(self) -> Iterator[Stop]:
        """Catch the signals while the block runs; a second one acts at once."""
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        previous = {number: signal.getsignal(number) for number in signals}

        def handler(number: int, frame: FrameType | None) -> None:
            self.signal = number
            for known, action in previous.items():
                signal.signal(known, action)

        for number in signals:
            signal.signal(number, handler)
        try:
            yield self
        finally:
            for number, action in previous.items():
                signal.signal(number, action)
