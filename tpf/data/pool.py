"""Work on many files in several processes: bounded memory and time, a crash costs one file."""

from __future__ import annotations

import math
import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Generic, TypeVar

T = TypeVar("T")
AHEAD = 256
"""Files for each process that may be done while an earlier one is not."""
START = 60.0
"""Seconds that a new process may take until it works."""


def map_files(
    function: Callable[[str], T],
    files: Sequence[str],
    workers: int,
    lost: Callable[[str, str], T],
    *,
    memory: float | None = None,
    seconds: float | None = None,
) -> Iterator[T]:
    """Yield ``function(file)`` in order, made in ``workers`` processes if more than one.

    ``lost(file, why)`` gives the result of a file at which a process dies or which takes longer
    than ``seconds``; the others go on. A process that needs more than ``memory`` GB gets a
    ``MemoryError`` (Linux). With a limit there is always a process of its own.
    """
    if memory is None and seconds is None and (workers < 2 or len(files) < 2):
        yield from map(function, files)
        return
    size = max(1, min(workers, len(files)))
    done: dict[int, T] = {}
    given = 0
    with _Crew(function, lost, size, memory, seconds) as crew:
        for number in range(len(files)):
            while number not in done:
                last = min(len(files), number + AHEAD * size)
                while given < last and crew.give(given, files[given]):
                    given += 1
                done |= crew.results()
            yield done.pop(number)


class _Crew(Generic[T]):
    """Processes that each work on one file at a time; one that is lost is replaced."""

    def __init__(
        self,
        function: Callable[[str], T],
        lost: Callable[[str, str], T],
        size: int,
        memory: float | None,
        seconds: float | None,
    ) -> None:
        self._lost = lost
        self._seconds = seconds
        self._work = (function, memory)
        self._workers = [_Worker(*self._work) for _ in range(size)]

    def give(self, number: int, file: str) -> bool:
        """Hand a file to a process that has none; return False if there is no such process."""
        for place, worker in enumerate(self._workers):
            if worker.task is None:
                if not worker.alive:
                    worker.end()
                    worker = self._workers[place] = _Worker(*self._work)
                worker.give(number, file, self._seconds)
                return True
        return False

    def results(self) -> dict[int, T]:
        """Wait until something is done or lost, and return it by the number of the file."""
        busy = [worker for worker in self._workers if worker.task is not None]
        left = min(worker.deadline for worker in busy) - time.monotonic()
        wait([worker.pipe for worker in busy], None if left == math.inf else max(left, 0))
        found: dict[int, T] = {}
        for place, worker in enumerate(self._workers):
            if worker.task is None:
                continue
            number, file = worker.task
            if worker.pipe.poll():
                answer = worker.take()
                if answer is not None:
                    found[number] = _result(*answer)
                    continue
                why = "the process that worked on it died"
            elif time.monotonic() >= worker.deadline:
                why = f"it takes longer than {self._seconds:g} seconds"
            else:
                continue
            worker.end()
            self._workers[place] = _Worker(*self._work)
            found[number] = self._lost(file, why)
        return found

    def __enter__(self) -> _Crew[T]:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.end()


class _Worker(Generic[T]):
    """A process that runs one function, and the file that it is at."""

    def __init__(self, function: Callable[[str], T], memory: float | None) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(function, memory, other), daemon=True)
        self._process.start()
        other.close()
        self._spare = START
        self.task: tuple[int, str] | None = None
        """Number and name of the file."""
        self.deadline = math.inf
        """``time.monotonic`` at which it is given up."""

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def give(self, number: int, file: str, seconds: float | None) -> None:
        self.task = (number, file)
        if seconds is not None:
            self.deadline = time.monotonic() + seconds + self._spare
        self._spare = 0.0
        with suppress(OSError):  # that it died shows when the result is read
            self.pipe.send(file)

    def take(self) -> tuple[T, Exception | None] | None:
        """Return the result and error of the file, None if the process died at it."""
        try:
            answer: tuple[T, Exception | None] = self.pipe.recv()
        except (EOFError, OSError):
            return None
        self.task, self.deadline = None, math.inf
        return answer

    def end(self) -> None:
        self.pipe.close()
        self._process.kill()
        self._process.join()


def _result(result: T, error: Exception | None) -> T:
    if error is not None:
        raise error
    return result


def _serve(function: Callable[[str], T], memory: float | None, pipe: Connection) -> None:
    """Answer files with results until the other end closes."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the other end will close
    _limit_memory(memory)
    with suppress(EOFError, OSError):
        while True:
            file = pipe.recv()
            try:
                answer: tuple[T | None, Exception | None] = function(file), None
            except Exception as error:
                error.add_note(f"In the process that worked on {file}:\n{traceback.format_exc()}")
                answer = None, error
            pipe.send(answer)


def _limit_memory(gigabytes: float | None) -> None:
    if gigabytes is not None:
        import resource  # absent on Windows

        limit = int(gigabytes * 2**30)
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
