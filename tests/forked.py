"""``tpf`` commands in processes of their own, as users run and kill them.

They are forks of the test, so nothing is imported anew; ``test_cli`` starts the interpreter.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tpf.cli.app import main

RANK_VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK")


class Forked:
    """A running command in a process group of its own, which also holds what it starts."""

    def __init__(
        self,
        words: list[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        entry: Callable[[], None] = main,
    ) -> None:
        self._output, self._errors = (tempfile.TemporaryFile("w+") for _ in range(2))
        self._words, self._cwd, self._env, self._entry = words, cwd, env or {}, entry
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=self._run)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        while self.alive and os.getpgid(self.pid) != self.pid:
            time.sleep(0.001)

    def _run(self) -> None:
        os.setsid()
        for number, file in ((1, self._output), (2, self._errors)):
            os.dup2(file.fileno(), number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        os.chdir(self._cwd or Path.cwd())
        for name in RANK_VARIABLES:
            os.environ.pop(name, None)
        os.environ |= self._env
        sys.argv = ["tpf", *self._words]
        code: object = 0
        try:
            self._entry()
        except SystemExit as stop:
            code = stop.code
        sys.exit(code)  # type: ignore[arg-type]  # anew: what the command held is given back

    @property
    def alive(self) -> bool:
        return self._process.exitcode is None

    def kill(self) -> None:
        """End it as ``kill -9``; what it started goes on."""
        self._process.kill()

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> None:
        """Send a signal to the whole group, as a terminal and a scheduler do."""
        os.killpg(self.pid, number)

    def end(self, timeout: float = 120) -> tuple[int, str, str]:
        """Wait for the end; return exit code (negative: the signal), output and errors."""
        self._process.join(timeout)
        if self.alive:
            self.interrupt(signal.SIGKILL)
            self._process.join()
            raise AssertionError(f"the command hangs: {self._read()}")
        assert self._process.exitcode is not None
        return self._process.exitcode, *self._read()

    def _read(self) -> tuple[str, str]:
        found = []
        for file in (self._output, self._errors):
            file.seek(0)
            found.append(file.read())
        return found[0], found[1]

    def wait_for_lines(self, log: Path, lines: int) -> None:
        """Wait until a log of the command has some lines."""
        limit = time.monotonic() + 120
        while time.monotonic() < limit and self.alive:
            if log.is_file() and len(log.read_text().splitlines()) >= lines:
                return
            time.sleep(0.02)
        self.kill()
        raise AssertionError(f"{log} never had {lines} lines: {self.end()}")
