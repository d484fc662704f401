"""Where commands write when no ``--out`` is given."""

from __future__ import annotations

import datetime
from pathlib import Path

RUNS = Path("runs")


def new_folder(name: str) -> Path:
    """Return a folder of RUNS that does not exist, named after the time and ``name``."""
    from tpf.checkpoint import unused

    return unused(RUNS / f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{name}")
