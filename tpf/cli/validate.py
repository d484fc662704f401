"""``tpf validate`` and ``tpf validate compare``."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from rich.table import Table

    from tpf.metrics.schema import Validation
    from tpf.report.html import Cell


class _CheckpointOrCommand(TyperGroup):
    """A group whose first word may be a checkpoint: then it means ``run``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_CheckpointOrCommand,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Sample structures from a checkpoint and score them: tpf validate CHECKPOINT|RUN "
    "(options: tpf validate run --help).",
)


@app.command("run")
def run(
    checkpoint: Annotated[Path, typer.Argument(help="A run, a checkpoint, or a weight file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Configuration values.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Folder or list file [default: that of the run]")
    ] = None,
    targets: Annotated[
        Path | None, typer.Option(help="File with one entry id a line; others are left out.")
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Structures per target and seed.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Evaluation seeds.")] = None,
    sampling_steps: Annotated[int | None, typer.Option(help="Diffusion steps.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Skip larger targets.")] = None,
    impl: Annotated[
        str | None, typer.Option(help="Triangle operators: auto, cuda, flex, torch.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs that share the targets.")] = None,
    nodes: Annotated[int, typer.Option(help="Machines that run this same command.")] = 1,
    rdzv: Annotated[str | None, typer.Option(help="HOST:PORT of the first machine.")] = None,
    extras: Annotated[
        bool,
        typer.Option("--extras", help="Also score ligand poses, pocket lDDT, DockQ, kinase DFG."),
    ] = False,
    groups: Annotated[
        Path | None, typer.Option(help="File of lines ID GROUP, for means by group.")
    ] = None,
    selection_weights: Annotated[
        str | None, typer.Option(help="fine-tuning or initial (model selection).")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write [default: validation in the run]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print metrics.json.")] = False,
) -> None:
    """Sample structures from a checkpoint and score them (the default command).

    A validation that was interrupted goes on when the same command is given again.
    """
    import torch

    from tpf.launch import launch, plan
    from tpf.metrics.schema import read_json, to_dict
    from tpf.validate import Request, validate_rank

    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    chosen = plan(gpus, nodes, rdzv, available, "tpf validate")
    flags = {
        "data.path": data,
        "validate.samples": samples,
        "validate.seeds": seeds,
        "validate.sampling_steps": sampling_steps,
        "validate.max_tokens": max_tokens,
        "validate.selection_weights": selection_weights,
        "validate.extras": extras or None,
        "model.impl": impl,
    }
    given = [f"{key}={json.dumps(v)}" for key, v in flags.items() if v is not None]
    request = Request(checkpoint, given + (overrides or []), targets, groups, out)
    if chosen.kind == "launch":
        folder = min(launch(chosen, validate_rank, request, _progress).values())
    else:
        folder = validate_rank(request, _progress)
    if int(os.environ.get("RANK", "0")) > 0:
        return
    result = read_json(folder)
    if as_json:
        typer.echo(json.dumps(to_dict(result)))
    else:
        _print(result, folder)


def _progress(target: str, done: int, total: int) -> None:
    """Tell of the main rank's share."""
    typer.echo(f"target {done + 1} of {total}: {target}", err=True)


@app.command("compare")
def compare(
    first: Annotated[Path, typer.Argument(help="metrics.json of a validation, or its folder.")],
    second: Annotated[Path, typer.Argument(help="The one to compare with.")],
    resamples: Annotated[int, typer.Option(min=1, help="Bootstrap resamples.")] = 10_000,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare two validations of the same targets by paired bootstrap (first minus second)."""
    from tpf.validate import compare_files

    result = compare_files(first, second, resamples)
    if as_json:
        typer.echo(json.dumps(result))
        return
    low, high = result["interval"]
    typer.echo(
        f"model selection ({result['selection_weights']} weights), first - second: "
        f"{result['difference']:+.4f}  95 % interval [{low:+.4f}, {high:+.4f}]  "
        f"({result['targets']} targets, {resamples} resamples)"
    )


SHOWN = (
    "lddt_intra_protein",
    "lddt_inter_protein_ligand",
    "rmsd",
    "ligand_rmsd_pocket",
    "dfg_shift",
)
"""Metrics of the table of groups, where present."""


def _print(result: Validation, folder: Path) -> None:
    from rich.console import Console

    from tpf.report.targets import LIGAND_COLUMNS, group_rows, ligand_rows

    console = Console()
    rows: list[list[Cell]] = [
        [name, value.mean, value.sd, value.n] for name, value in result.dataset.items()
    ]
    title = f"{len(result.targets)} targets of {result.checkpoint}"
    console.print(_table(title, ("metric", "mean", "sd over seeds", "targets"), rows))
    shown = [name for name in SHOWN if name in result.dataset]
    if groups := group_rows(result, shown):
        console.print(_table("groups", ("group", "targets", *shown), groups))
    if ligands := ligand_rows(result):
        console.print(_table("ligands after a fit of the pocket", LIGAND_COLUMNS, ligands))
    chains = sum(target.chains for target in result.targets)
    interfaces = sum(target.interfaces for target in result.targets)
    console.print(f"scored {chains} chains and {interfaces} interfaces")
    chosen = result.model_selection
    score = "–" if chosen.value is None else f"{chosen.value:.4f}"
    console.print(f"model selection ({chosen.weights} weights): {score}")
    for item in result.skipped:
        console.print(f"skipped {item.id}: {item.reason}")
    console.print(f"written to {folder} (open report.html there)")


def _table(title: str, header: Sequence[str], rows: list[list[Cell]]) -> Table:
    from rich.table import Table

    from tpf.report.html import text

    table = Table(title=title)
    for k, name in enumerate(header):
        table.add_column(name, justify="right" if k else "left")
    for row in rows:
        table.add_row(*(text(cell) for cell in row))
    return table
