"""Work on many files in several processes: bounded memory, and a crash costs one file."""

from __future__ import annotations

import itertools
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Generic, TypeVar

T = TypeVar("T")
AHEAD = 4
"""Files handed out in advance for each process."""


def map_files(
    function: Callable[[str], T],
    files: Sequence[str],
    workers: int,
    crashed: Callable[[str], T],
    memory: float | None = None,
) -> Iterator[T]:
    """Yield ``function(file)`` in order, made in ``workers`` processes if more than one.

    ``crashed`` gives the result of a file at which a process dies. A process that needs more than
    ``memory`` GB gets a ``MemoryError`` (Linux); with a limit there is always a process of its own.
    """
    if memory is None and (workers < 2 or len(files) < 2):
        yield from map(function, files)
        return
    with _Pool(function, max(workers, 1), memory) as pool:
        source = iter(files)
        waiting: deque[tuple[str, Future[T]]] = deque()
        while True:
            room = AHEAD * max(workers, 1) - len(waiting)
            waiting.extend((file, pool.submit(file)) for file in itertools.islice(source, room))
            if not waiting:
                return
            try:
                result = waiting[0][1].result()
            except BrokenProcessPool:
                # one of these files ended a process; alone, each one shows if it does so again
                pool.restart()
                for file, _ in waiting:
                    try:
                        yield pool.submit(file).result()
                    except BrokenProcessPool:
                        yield crashed(file)
                        pool.restart()
                waiting.clear()
                continue
            waiting.popleft()
            yield result


class _Pool(Generic[T]):
    """Processes that run one function and can be replaced by new ones."""

    def __init__(self, function: Callable[[str], T], workers: int, memory: float | None) -> None:
        self._function = function
        self._workers = workers
        self._memory = memory
        self._executor = self._start()

    def _start(self) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(
            self._workers, mp_context=context, initializer=_limit_memory, initargs=(self._memory,)
        )

    def submit(self, file: str) -> Future[T]:
        """Hand out a file; if a process died just before, the result says so."""
        try:
            return self._executor.submit(self._function, file)
        except BrokenProcessPool as error:
            failed: Future[T] = Future()
            failed.set_exception(error)
            return failed

    def restart(self) -> None:
        self._executor.shutdown(cancel_futures=True)
        self._executor = self._start()

    def __enter__(self) -> _Pool[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown(cancel_futures=True)


def _limit_memory(gigabytes: float | None) -> None:
    if gigabytes is not None:
        import resource  # absent on Windows

        limit = int(gigabytes * 2**30)
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
