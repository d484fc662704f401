"""Ends of a benchmark before its time: a case that hangs, and signals."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

AGAIN = 1.0
"""Seconds until a time-out that the block caught is raised once more."""
GRACE = 20.0
"""Seconds that the block has to end after its time-out, before it counts as stuck."""


class TimedOut(Exception):  # noqa: N818 - what happened, as in the row of the result file
    """A block took longer than it may."""


@contextmanager
def time_limit(seconds: float, stuck: Callable[[], None] | None = None) -> Iterator[None]:
    """Raise ``TimedOut`` inside the block after ``seconds``; 0, or another thread, has no limit.

    Python raises only between its own instructions. Where the block does not come back to them
    ``stuck`` is called ``GRACE`` seconds later, in another thread.
    """
    if not seconds or threading.current_thread() is not threading.main_thread():
        yield
        return

    def raise_it(number: int, frame: FrameType | None) -> None:
        raise TimedOut(f"timed out after {seconds:g} s")

    handler = signal.signal(signal.SIGALRM, raise_it)
    watch = threading.Timer(seconds + GRACE, stuck or (lambda: None))
    watch.daemon = True
    watch.start()
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        watch.cancel()
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)  # that of an outer limit starts again


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGUSR1, which schedulers send, end the block as Ctrl-C does."""

    def raise_it(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {
        number: signal.signal(number, raise_it) for number in (signal.SIGTERM, signal.SIGUSR1)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
