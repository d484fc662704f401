"""Work on many files in several processes: bounded memory and time, a crash costs one file."""

from __future__ import annotations

import math
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Generic, TypeVar

from tpf.data.interrupts import interrupts_held
from tpf.errors import TpfError

T = TypeVar("T")
AHEAD = 256
"""Files for each process that may be done while an earlier one is not."""
START = 60.0
"""Further seconds for the first file of a process, which loads modules and dictionaries too."""
STARTS = 3
"""Processes in a row that may end before they begin to work."""
STOPPED = 5.0
"""Seconds too late from which on this process was stopped, and the others with it (Ctrl-Z)."""
DIED = "the process that worked on it died"


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
    ``MemoryError`` (Linux). With a limit there is always a process of its own. Raises ``TpfError``
    if processes end before they begin to work, which is no fault of a file.
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
        self._work = (function, memory, seconds)
        self._workers = [_Worker(*self._work) for _ in range(size)]
        self._failed_starts = 0
        """In a row."""

    def give(self, number: int, file: str) -> bool:
        """Hand a file to a process that has none; return False if there is no such process."""
        for place, worker in enumerate(self._workers):
            if worker.task is None:
                if not worker.alive:
                    worker.end()
                    worker = self._workers[place] = _Worker(*self._work)
                worker.give(number, file)
                return True
        return False

    def results(self) -> dict[int, T]:
        """Wait until something is done or lost, and return it by the number of the file."""
        busy = [worker for worker in self._workers if worker.task is not None]
        first = min(worker.deadline for worker in busy)
        left = None if first == math.inf else max(first - time.monotonic(), 0)
        wait([worker.pipe for worker in busy], left)
        if time.monotonic() > first + STOPPED:
            for worker in busy:
                worker.count_time()
        found: dict[int, T] = {}
        for worker in self._workers:
            if worker.task is None:
                continue
            number, file = worker.task
            answer = worker.take()
            if isinstance(answer, tuple):
                self._failed_starts = 0
                found[number] = _result(*answer)
            elif answer is not None:
                worker.end()
                if worker.ready:
                    found[number] = self._lost(file, answer)
                else:
                    self._start_failed()
                    self.give(number, file)
        return found

    def _start_failed(self) -> None:
        self._failed_starts += 1
        if self._failed_starts == STARTS:
            raise TpfError(
                f"{STARTS} processes in a row ended before they began to work; give them more "
                "memory, and a script of your own the line if __name__ == '__main__'"
            )

    def __enter__(self) -> _Crew[T]:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.end()


class _Worker(Generic[T]):
    """A process that runs one function, and the file that it is at."""

    def __init__(
        self, function: Callable[[str], T], memory: float | None, seconds: float | None
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(function, memory, other), daemon=True)
        resource_tracker.ensure_running()  # its own start would let interrupts through
        with interrupts_held():
            self._process.start()
        other.close()
        self._seconds = math.inf if seconds is None else seconds
        self.ready = False
        """It has begun to work: what ends it from now on is a file."""
        self.task: tuple[int, str] | None = None
        """Number and name of the file."""
        self.deadline = math.inf
        """``time.monotonic`` at which the file is given up."""

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def give(self, number: int, file: str) -> None:
        self.task = (number, file)
        self.count_time()
        with suppress(OSError):  # that it died shows when the result is read
            self.pipe.send(file)

    def count_time(self) -> None:
        """Give the file all its seconds from now on, if the process has begun to work."""
        if self.ready:
            self.deadline = time.monotonic() + self._seconds

    def take(self) -> tuple[T, Exception | None] | str | None:
        """Return the result and error of the file, why it is lost, or None if it is in work."""
        if not self.pipe.poll():
            late = time.monotonic() >= self.deadline
            return f"it takes longer than {self._seconds:g} seconds" if late else None
        try:
            answer: tuple[T, Exception | None] | None = self.pipe.recv()
        except (EOFError, OSError):
            return DIED
        if answer is None:  # it begins to work
            self.ready, self.deadline = True, time.monotonic() + self._seconds + START
        else:
            self.task, self.deadline = None, math.inf
        return answer

    def end(self) -> None:
        self.task = None
        self.pipe.close()
        self._process.kill()
        self._process.join()


def _result(result: T, error: Exception | None) -> T:
    if error is not None:
        raise error
    return result


def _serve(function: Callable[[str], T], memory: float | None, pipe: Connection) -> None:
    """Say None, then answer files with results until the other end closes."""
    _limit_memory(memory)
    with suppress(EOFError, OSError):
        pipe.send(None)
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
