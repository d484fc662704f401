"""Finished targets of a validation on disk, one file each, so that a killed one can go on.

The folder ``.parts`` lies in the folder of the validation until ``metrics.json`` is written. Ranks
share it: each writes its own targets, and every rank reads all of them at the end.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tpf.files import make_folder, write_whole
from tpf.metrics.calibration import Table
from tpf.metrics.picture import Trace
from tpf.metrics.schema import TargetResult, target_from_dict

FOLDER = ".parts"
KEY = "key"


@dataclass(frozen=True)
class Part:
    """One target: its metrics, or why there are none, and what the report shows of it."""

    id: str
    result: TargetResult | None = None
    reason: str = ""
    picture: list[Trace] = field(default_factory=list)
    """Top-1 of the first seed on the experiment."""
    calibration: Table = field(default_factory=list)
    """Summed over samples and seeds."""


class Parts:
    """The finished targets in one folder; results of other weights or settings do not count."""

    def __init__(self, folder: Path, key: str) -> None:
        """``key`` names everything that a result depends on."""
        self._folder = folder / FOLDER
        self._key = key

    def open(self) -> None:
        """Make the folder ready: keep results of this key, drop all others.

        Raises ``UsageError`` if it cannot be made.
        """
        if not self.fits():
            self.remove()
            make_folder(self._folder.parent)
            self._folder.mkdir()
            write_whole(self._folder / KEY, self._key.encode())

    def fits(self) -> bool:
        """Return whether the folder holds results of this key."""
        try:
            return (self._folder / KEY).read_text() == self._key
        except OSError:
            return False

    def exist(self) -> bool:
        """Return whether an unfinished validation lies here, of whatever key."""
        return self._folder.is_dir()

    def write(self, part: Part) -> None:
        """Store a target by rename."""
        content = json.dumps(asdict(part), allow_nan=False)
        write_whole(self._folder / f"{part.id}.json", content.encode())

    def read(self, name: str) -> Part | None:
        """Return a finished target, None if there is none."""
        try:
            found = json.loads((self._folder / f"{name}.json").read_text())
        except (OSError, ValueError):
            return None
        result = found["result"]
        return Part(
            id=found["id"],
            result=None if result is None else target_from_dict(result),
            reason=found["reason"],
            picture=[Trace(**trace) for trace in found["picture"]],
            calibration=found["calibration"],
        )

    def all(self, names: Iterable[str]) -> list[Part]:
        """Return the finished ones of the named targets, in their order."""
        return [part for name in names if (part := self.read(name)) is not None]

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)
