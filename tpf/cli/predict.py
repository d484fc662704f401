"""``tpf predict``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tpf.errors import UsageError


def predict(
    checkpoint: Annotated[Path, typer.Argument(help="A run, a checkpoint, or a weight file.")],
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...",
            help="mmCIF (its sequences and ligands are predicted anew), FASTA (one complex), or a "
            "YAML or JSON job (docs/validation.md). KEY=VALUE among them sets the configuration.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist.")],
    samples: Annotated[int | None, typer.Option(help="Structures per complex and seed.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Seeds.")] = None,
    sampling_steps: Annotated[int | None, typer.Option(help="Diffusion steps.")] = None,
    msa: Annotated[
        str | None, typer.Option(help="Folder of A3M or Stockholm files, found by sequence.")
    ] = None,
    impl: Annotated[
        str | None, typer.Option(help="Triangle operators: auto, cuda, flex, torch.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the confidences.")] = False,
) -> None:
    """Predict the structure of complexes and rank the samples by confidence."""
    files = [Path(word) for word in inputs if "=" not in word or Path(word).is_file()]
    overrides = [word for word in inputs if "=" in word and not Path(word).is_file()]
    if not files:
        raise UsageError("tpf predict got no INPUT; give an mmCIF, FASTA, YAML or JSON file")
    if out.exists():
        raise UsageError(f"--out {out} exists; nothing is overwritten: choose another folder")
    from tpf.predict import predict_files

    flags = {
        "validate.samples": samples,
        "validate.seeds": seeds,
        "validate.sampling_steps": sampling_steps,
        "data.msa": msa,
        "model.impl": impl,
    }
    given = [f"{key}={json.dumps(v)}" for key, v in flags.items() if v is not None]
    done = predict_files(checkpoint, files, given + overrides, out=out, progress=_progress)
    if as_json:
        documents = [p.document or {"id": p.name, "error": p.error} for p in done]
        typer.echo(json.dumps(documents))
    else:
        _print([p.document for p in done if p.document], out)
    failed = [p for p in done if p.error]
    for prediction in failed:
        typer.echo(f"tpf: not predicted: {prediction.name}: {prediction.error}", err=True)
    if failed:
        raise typer.Exit(1)


def _progress(name: str, done: int, total: int) -> None:
    typer.echo(f"complex {done + 1} of {total}: {name}", err=True)


def _print(documents: list[dict[str, object]], out: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title="best sample of each complex")
    for name in ("complex", "file", "ranking score", "pTM", "ipTM", "pLDDT"):
        table.add_column(name, justify="left" if name in ("complex", "file") else "right")
    for document in documents:
        samples = document["samples"]
        assert isinstance(samples, list)
        best = samples[0]
        values = (best[n] for n in ("ranking_score", "ptm", "iptm", "plddt_complex"))
        table.add_row(str(document["id"]), best["file"], *(f"{v:.3f}" for v in values))
    console.print(table)
    console.print(f"written to {out} (open report.html there)")
