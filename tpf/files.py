"""Files and folders: written whole or not at all, made or refused, lists with an item a line."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from tpf.errors import UsageError


def write_whole(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Write a file through a temporary sibling, so that no reader sees half of it.

    ``durable`` waits until it is on the disk. Raises ``OSError`` and leaves nothing behind.
    """
    unique = f"{os.getpid()}-{secrets.token_hex(4)}"  # process ids repeat over machines
    temporary = path.with_name(f".{path.name}.{unique}")
    try:
        with temporary.open("wb") as handle:
            handle.write(content)
            if durable:
                handle.flush()
                os.fsync(handle.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def make_folder(folder: Path) -> None:
    """Make a folder and those above it; raise ``UsageError`` if something else is in the way."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{folder}: cannot make the folder ({error.strerror}); choose another"
        ) from error


def read_list(what: str, path: Path) -> list[str]:
    """Return the lines of a list file without ``#`` comments and empty ones.

    Raises ``UsageError`` naming ``what`` (the flag or configuration key) if it cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UsageError(f"{what} {path}: cannot read the list ({reason})") from error
    return [text for line in lines if (text := line.split("#")[0].strip())]
