"""One process at a time in a run folder: a file that names its owner and outlives it for no one.

The file is made exclusively, which is atomic on local and network file systems. Whether its owner
lives is asked of this machine, if it ran here since the last boot, by process id and start time.
Elsewhere it is told by the time of the file, which the owner keeps moving.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from tpf.errors import UsageError
from tpf.signals import leave_interrupts

BEAT = 15.0
"""Seconds between two signs of life of the owner."""
SILENCE = 60.0
"""Seconds without one after which an owner on another machine counts as dead."""
POLL = 1.0


class Lock:
    """The file ``lock`` of a folder; as a context it gives back at the end what was taken in it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "lock"
        self._mine: str | None = None
        self._released = threading.Event()

    def __enter__(self) -> Lock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.release()

    def take(self, say: Callable[[str], None]) -> None:
        """Take the folder; ``say`` tells of waiting for an owner on another machine.

        Raises ``UsageError`` naming the owner if it lives, or if the folder cannot be written.
        """
        mine = json.dumps(_identity())
        while not self._create(mine):
            seen = self._read()
            if seen is None:
                continue
            if self._lives(seen, say):
                owner = _words(self._read() or seen)
                raise UsageError(
                    f"run {self.path.parent} is in use by {owner}; wait until it ends, or stop it; "
                    f"delete {self.path} only if no tpf runs there"
                )
            self._remove(seen)
        self._mine = mine
        threading.Thread(target=self._beat, name="tpf-lock", daemon=True).start()

    def release(self) -> None:
        """Give the folder back, if it was taken."""
        self._released.set()
        if self._mine is not None and self._read() == self._mine:
            with suppress(OSError):
                self.path.unlink()
        self._mine = None

    def _create(self, content: str) -> bool:
        """Make the file; return False if there is one."""
        try:
            descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            with os.fdopen(descriptor, "w") as handle:
                handle.write(content)
                handle.flush()
                os.fsync(descriptor)
        except OSError as error:
            self.path.unlink(missing_ok=True)
            raise self._unwritable(error) from error
        return True

    def _unwritable(self, error: OSError) -> UsageError:
        return UsageError(
            f"{self.path}: cannot be written ({error.strerror}); free space or make the run folder "
            "writable"
        )

    def _read(self) -> str | None:
        """Return the content of the file, None if there is none."""
        try:
            return self.path.read_text()
        except OSError:
            return None

    def _lives(self, seen: str, say: Callable[[str], None]) -> bool:
        """Return whether the owner that the file names is at work."""
        owner = _parse(seen)
        here = _identity()
        if all(owner.get(key) == here[key] for key in ("host", "boot", "namespace")):
            return bool(_started(int(owner["pid"])) == owner["started"])
        state, end = self._state(), time.monotonic() + SILENCE
        if state is None or state[0] != seen:  # given back, or taken just now
            return state is not None
        say(
            f"waiting {SILENCE:.0f} s for a sign of life of {_words(seen)}, which holds {self.path}"
        )
        while time.monotonic() < end and self._state() == state:
            time.sleep(POLL)
        return self._state() not in (state, None)

    def _state(self) -> tuple[str, int] | None:
        """Return the content and time of the file, opened so that network file systems look."""
        try:
            with self.path.open() as handle:
                return handle.read(), os.fstat(handle.fileno()).st_mtime_ns
        except OSError:
            return None

    def _remove(self, seen: str) -> None:
        """Delete the file of a dead owner, and no other that came in its place."""
        aside = self.path.with_name(f".lock.{socket.gethostname()}.{os.getpid()}")
        with suppress(FileNotFoundError):
            self.path.rename(aside)
            if aside.read_text() == seen:
                aside.unlink()
            else:
                aside.rename(self.path)

    def _beat(self) -> None:
        leave_interrupts()
        while not self._released.wait(BEAT):
            if self._read() == self._mine:
                with suppress(OSError):
                    os.utime(self.path)


def _identity() -> dict[str, Any]:
    """Return what tells this process from all others, now and after a boot."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    return {
        "host": socket.gethostname(),
        "boot": boot.read_text().strip() if boot.exists() else None,
        "namespace": namespace.stat().st_ino if namespace.exists() else None,
        "pid": os.getpid(),
        "started": _started(os.getpid()),
        "since": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def _started(pid: int) -> int | None:
    """Return when a process started (system's clock; -1: unknown), None if there is none."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return None if fields[0] in "ZX" else int(fields[19])


def _parse(content: str) -> dict[str, Any]:
    """Return what a file says of its owner: nothing if it is just being written."""
    try:
        owner = json.loads(content)
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _words(content: str) -> str:
    owner = _parse(content)
    if not owner:
        return "an unknown process"
    return f"process {owner['pid']} on {owner['host']} since {owner['since']}"
