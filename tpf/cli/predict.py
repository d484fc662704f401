"""``tpf predict``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tpf.cli.options import (
    Checkpoint,
    Impl,
    Samples,
    SamplingSteps,
    Seeds,
    dotted,
    paths_and_overrides,
)
from tpf.cli.screen import console, say, table
from tpf.errors import UsageError

Inputs = Annotated[
    list[str],
    typer.Argument(
        metavar="INPUT...",
        help="mmCIF (its sequences and ligands are predicted anew), FASTA (one complex), or a "
        "YAML or JSON job (docs/validation.md). KEY=VALUE among them sets the configuration.",
    ),
]


def predict(
    checkpoint: Checkpoint,
    inputs: Inputs,
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist.")],
    samples: Samples = None,
    seeds: Seeds = None,
    sampling_steps: SamplingSteps = None,
    msa: Annotated[
        str | None, typer.Option(help="Folder of A3M or Stockholm files, found by sequence.")
    ] = None,
    impl: Impl = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the confidences.")] = False,
) -> None:
    """Predict the structure of complexes and rank the samples by confidence."""
    paths, words = paths_and_overrides([checkpoint, *inputs])
    if len(paths) < 2:
        missing = "no INPUT; give an mmCIF, FASTA, YAML or JSON file after the checkpoint"
        raise UsageError(f"tpf predict got {missing}")
    if out.exists():
        raise UsageError(f"--out {out} exists; nothing is overwritten: choose another folder")
    from tpf.predict import predict_files

    options = {
        "validate.samples": samples,
        "validate.seeds": seeds,
        "validate.sampling_steps": sampling_steps,
        "data.msa": msa,
        "model.impl": impl,
    }
    weights, *files = paths
    done = predict_files(
        weights, files, dotted(options, words), out=out, progress=_progress, say=_say
    )
    if as_json:
        documents = [p.document or {"id": p.name, "error": p.error} for p in done]
        typer.echo(json.dumps(documents))
    else:
        _print([p.document for p in done if p.document], out)
    failed = [p for p in done if p.error]
    for prediction in failed:
        _say(f"not predicted: {prediction.name}: {prediction.error}")
    if failed:
        raise typer.Exit(1)


def _progress(name: str, done: int, total: int) -> None:
    say(f"complex {done + 1} of {total}: {name}")


def _say(sentence: str) -> None:
    say(f"tpf: {sentence}")


COLUMNS = {
    "ranking score": "ranking_score",
    "with pTM for ipTM": "ranking_score_si",
    "pTM": "ptm",
    "ipTM": "iptm",
    "pLDDT": "plddt_complex",
}
"""Of the table: the second is another score for single chains only, which have no ipTM."""


def _print(documents: list[dict[str, Any]], out: Path) -> None:
    rows = []
    for document in documents:
        best = document["samples"][0]
        absent = "ranking_score_si" if len(document["chains"]) > 1 else "iptm"
        values = ("–" if key == absent else f"{best[key]:.3f}" for key in COLUMNS.values())
        rows.append((document["id"], f"{document['folder']}/{best['file']}", *values))
    screen = console()
    header = ("complex", "file", *COLUMNS)
    screen.print(table("best sample of each complex", header, rows, text_columns=2))
    screen.print(f"written to {out} (open report.html there)")
