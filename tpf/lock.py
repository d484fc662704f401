"""One process at a time in a run folder: a file that names its owner and outlives it for no one.

The file is made exclusively, which is atomic on local and network file systems. Whether its owner
lives is asked of this machine, if it ran here since the last boot, by process id and start time.
Elsewhere it is told by the time of the file, which the owner keeps moving. An owner that was
suspended for too long finds another in its place, and must stop.
"""

from __future__ import annotations

import datetime
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from tpf.errors import TpfError, UsageError
from tpf.signals import leave_interrupts

BEAT = 15.0
"""Seconds between two signs of life of the owner."""
SILENCE = 60.0
"""Seconds without one after which an owner on another machine counts as dead."""
POLL = 1.0
UNKNOWN = -1
"""Start of a process of which the system does not tell it."""


class Lock:
    """The file ``lock`` of a folder; as a context it gives back at the end what was taken in it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "lock"
        self._mine = ""
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="tpf-lock", daemon=True)

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
        try:
            while not self._create(mine):
                seen = self._look()
                if seen is not None and self._lives(seen, say):
                    owner = _words((self._look() or seen)[0])
                    raise UsageError(
                        f"run {self.path.parent} is in use by {owner}; wait until it ends, or stop "
                        f"it; delete {self.path} only if no tpf runs there"
                    )
                if seen is not None:
                    self._remove(seen[0])
        except OSError as error:
            raise UsageError(
                f"{self.path}: cannot be read or written ({error.strerror}); free space or make "
                "the run folder writable"
            ) from error
        self._mine = mine
        self._thread.start()

    def check(self) -> None:
        """Raise ``TpfError`` if the folder was taken and another process has it now."""
        if not self._mine:
            return
        try:
            seen = self._look()
        except OSError:  # of a network: the next look will tell
            return
        if seen is not None and seen[0] not in (self._mine, ""):
            raise TpfError(
                f"run {self.path.parent} was taken over by {_words(seen[0])}, as this process gave "
                f"no sign of life for {SILENCE:.0f} s; it stops without saving"
            )

    def release(self) -> None:
        """Give the folder back, if it was taken."""
        if not self._mine:
            return
        self._released.set()
        self._thread.join()
        with suppress(OSError):
            seen = self._look()
            if seen is not None and seen[0] == self._mine:
                self.path.unlink()
        self._mine = ""

    def _create(self, content: str) -> bool:
        """Make the file; return False if there is one."""
        try:
            descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        try:
            with os.fdopen(descriptor, "w") as handle:
                handle.write(content)
                handle.flush()
                os.fsync(descriptor)
        except OSError:
            self.path.unlink(missing_ok=True)
            raise
        return True

    def _look(self) -> tuple[str, int] | None:
        """Return the content and time of the file, None if there is none.

        It is opened, so that network file systems look anew.
        """
        try:
            with self.path.open() as handle:
                return handle.read(), os.fstat(handle.fileno()).st_mtime_ns
        except FileNotFoundError:
            return None

    def _lives(self, seen: tuple[str, int], say: Callable[[str], None]) -> bool:
        """Return whether the owner that the file names is at work."""
        owner, here = _parse(seen[0]), _identity()
        if all(owner.get(key) == here[key] for key in ("host", "boot", "namespace")):
            started = _started(int(owner["pid"]))
            if started != UNKNOWN:
                return bool(started == owner["started"])
        end = time.monotonic() + SILENCE
        say(
            f"waiting {SILENCE:.0f} s for a sign of life of {_words(seen[0])}, which holds "
            f"{self.path}"
        )
        while time.monotonic() < end and self._look() == seen:
            time.sleep(POLL)
        return self._look() not in (seen, None)

    def _remove(self, seen: str) -> None:
        """Delete the file of a dead owner; that of one which came in its place is made again."""
        aside = self.path.with_name(f".lock.{secrets.token_hex(8)}")
        with suppress(FileNotFoundError):
            self.path.rename(aside)
            found = aside.read_text()
            aside.unlink()
            if found != seen:
                self._create(found)

    def _beat(self) -> None:
        leave_interrupts()
        while not self._released.wait(BEAT):
            with suppress(OSError):
                seen = self._look()
                if seen is None:  # deleted by a person, or by a process that died in ``_remove``
                    self._create(self._mine)
                elif seen[0] == self._mine:
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
    """Return when a process started (system's clock, or UNKNOWN), None if there is none."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return UNKNOWN
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
