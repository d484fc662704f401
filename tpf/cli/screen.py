"""How commands print tables, and what they say beside them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tpf.report.html import Cell

WIDTH = 150
"""Columns of tables when standard output is no terminal."""


def console() -> Console:
    """Return a console that shows names as they are, and whole tables in files and pipes."""
    from rich.console import Console

    wide = None if sys.stdout.isatty() else WIDTH
    return Console(width=wide, markup=False, emoji=False, highlight=False)


def table(
    title: str,
    header: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    text_columns: int = 1,
    note: str = "",
) -> Table:
    """Return a table whose first ``text_columns`` columns are text, the others numbers."""
    from rich.table import Table

    from tpf.report.html import text

    result = Table(title=title, caption=note or None)
    for k, name in enumerate(header):
        result.add_column(name, justify="left" if k < text_columns else "right")
    for row in rows:
        result.add_row(*map(text, row))
    return result


def say(sentence: str) -> None:
    """Tell of progress on standard error, which keeps standard output for results."""
    typer.echo(sentence, err=True)
