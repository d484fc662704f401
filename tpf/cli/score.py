"""``tpf score``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tpf.cli.screen import console, table


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
    screen = console()
    title = f"{predicted.name} against {reference.name}"
    screen.print(table(title, ("metric", "value"), result["metrics"].items()))
    for note in result["notes"]:
        screen.print(note)
