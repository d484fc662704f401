"""``tpf score``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tpf.errors import UsageError


def score(
    predicted: Annotated[Path, typer.Argument(help="Predicted structure (mmCIF).")],
    reference: Annotated[Path, typer.Argument(help="Experimental structure (mmCIF).")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Score a predicted structure against a reference with the metrics of tpf validate."""
    for path in (predicted, reference):
        if not path.is_file():
            raise UsageError(f"{path}: no such file")
    from tpf.score import score_files

    result = score_files(predicted, reference)
    if as_json:
        typer.echo(json.dumps(result))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=f"{predicted.name} against {reference.name}")
    table.add_column("metric")
    table.add_column("value", justify="right")
    for name, value in result["metrics"].items():
        table.add_row(name, f"{value:.4f}")
    console.print(table)
    for note in result["notes"]:
        console.print(note)
