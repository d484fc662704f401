"""``tpf score``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tpf.cli.screen import console


def score(
    predicted: Annotated[Path, typer.Argument(help="Predicted structure (mmCIF).")],
    reference: Annotated[Path, typer.Argument(help="Experimental structure (mmCIF).")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Score a predicted structure against a reference with the metrics of tpf validate."""
    from tpf.score import score_files

    result = score_files(predicted, reference)
    if as_json:
        typer.echo(json.dumps(result))
        return
    from rich.table import Table

    table = Table(title=f"{predicted.name} against {reference.name}")
    table.add_column("metric")
    table.add_column("value", justify="right")
    for name, value in result["metrics"].items():
        table.add_row(name, f"{value:.4f}")
    screen = console()
    screen.print(table)
    for note in result["notes"]:
        screen.print(note)
