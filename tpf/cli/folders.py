"""Where commands write when no ``--out`` is given, and what ``--resume`` goes on with."""

from __future__ import annotations

import datetime
from pathlib import Path

from tpf.cli.options import NEWEST
from tpf.errors import UsageError

RUNS = Path("runs")


def new_folder(name: str) -> Path:
    """Return a folder of RUNS that does not exist, named after the time and ``name``."""
    from tpf.checkpoint import unused

    return unused(RUNS / f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{name}")


def resumed_folder(resume: str, out: Path | None, mark: str, what: str) -> Path:
    """Return the folder that ``--resume`` means: the one named, ``out``, or the newest in RUNS.

    A folder of this kind holds the file ``mark``. Raises ``UsageError`` if there is none, or if
    ``--out`` names another one.
    """
    if resume != NEWEST:
        folder = Path(resume)
        if out is not None and out.resolve() != folder.resolve():
            raise UsageError(f"--resume {folder} goes on in that folder; leave out --out {out}")
    elif out is not None:
        folder = out
    else:
        found = sorted(RUNS.glob(f"*/{mark}"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise UsageError(f"--resume: no {what} in {RUNS}/; name the {what} folder")
        folder = found[-1].parent
    if not (folder / mark).is_file():
        raise UsageError(
            f"--resume {folder}: not a {what} folder (it has no {mark}); name one that tpf wrote"
        )
    return folder
