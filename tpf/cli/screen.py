"""Where commands print their tables."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 150
"""Columns of tables when standard output is no terminal."""


def console() -> Console:
    """Return a console that shows names as they are, and whole tables in files and pipes."""
    from rich.console import Console

    wide = None if sys.stdout.isatty() else WIDTH
    return Console(width=wide, markup=False, emoji=False, highlight=False)
