"""``tpf validate`` and ``tpf validate compare``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from tpf.cli.options import (
    Checkpoint,
    Impl,
    Nodes,
    Rendezvous,
    Samples,
    SamplingSteps,
    Seeds,
    dotted,
    line_without_machines,
    paths_and_overrides,
)
from tpf.cli.screen import console, say, table
from tpf.errors import TpfError, UsageError

if TYPE_CHECKING:
    from tpf.metrics.schema import Validation
    from tpf.report.html import Cell
    from tpf.validate import Request

ITSELF = "itself"
"""Name under which the group holds what ``tpf validate CHECKPOINT`` does; nobody types it."""


class _Validate(TyperGroup):
    """``tpf validate CHECKPOINT ...``, except where the first word is ``compare``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[:1] != ["compare"]:
            args = ["--help"] if "--help" in args else [ITSELF, *args]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return (None if name == ITSELF else name), command, rest

    def get_help(self, ctx: Any) -> str:
        return self.commands[ITSELF].get_help(ctx)


app = typer.Typer(
    cls=_Validate,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Sample structures from a checkpoint and score them; compare two validations.",
)

Data = Annotated[
    str | None,
    typer.Option(help="Folder, list file or prepared cache [default: that of the run]"),
]
Ids = Annotated[
    Path | None, typer.Option(help="File with one entry id a line; others are left out.")
]
Groups = Annotated[Path | None, typer.Option(help="File of lines ID GROUP, for means by group.")]
Extras = Annotated[
    bool,
    typer.Option("--extras", help="Also score ligand poses, pocket lDDT, DockQ, kinase DFG."),
]
SelectionWeights = Annotated[
    str | None, typer.Option(help="fine-tuning or initial (model selection).")
]
Out = Annotated[Path | None, typer.Option(help="Folder to write [default: validation in the run]")]


@app.command(ITSELF, hidden=True)
def validate(
    checkpoint: Checkpoint,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Configuration values.")
    ] = None,
    data: Data = None,
    targets: Ids = None,
    samples: Samples = None,
    seeds: Seeds = None,
    sampling_steps: SamplingSteps = None,
    max_tokens: Annotated[int | None, typer.Option(help="Skip larger targets.")] = None,
    impl: Impl = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs that share the targets.")] = None,
    nodes: Nodes = 1,
    rdzv: Rendezvous = None,
    extras: Extras = False,
    groups: Groups = None,
    selection_weights: SelectionWeights = None,
    out: Out = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print metrics.json.")] = False,
) -> None:
    """Sample structures from a checkpoint and score them.

    A validation that was interrupted goes on when the same command is given again. tpf validate
    compare A B compares two of them.
    """
    from tpf.validate import Request

    paths, words = paths_and_overrides([checkpoint, *(overrides or [])])
    if len(paths) != 1:
        what = f"got {len(paths)} paths ({', '.join(map(str, paths))})" if paths else "got no path"
        raise UsageError(f"validate {what}; give one run, checkpoint or weight file")
    options = {
        "data.path": data,
        "validate.samples": samples,
        "validate.seeds": seeds,
        "validate.sampling_steps": sampling_steps,
        "validate.max_tokens": max_tokens,
        "validate.selection_weights": selection_weights,
        "validate.extras": extras or None,
        "model.impl": impl,
    }
    request = Request(paths[0], dotted(options, words), targets, groups, out)
    folder = _validate(request, gpus, nodes, rdzv)
    if folder is not None:
        _show(folder, as_json)


def _validate(request: Request, gpus: int | None, nodes: int, rdzv: str | None) -> Path | None:
    """Validate in this process or start the ranks; return the folder on the main rank."""
    import torch

    from tpf.launch import launch, plan
    from tpf.validate import validate_rank

    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    chosen = plan(gpus, nodes, rdzv, available, line_without_machines("validate"))
    if chosen.kind == "launch":
        return min(launch(chosen, validate_rank, request, _progress).values())  # type: ignore[no-any-return]
    folder = validate_rank(request, _progress)
    return folder if int(os.environ.get("RANK", "0")) == 0 else None


def _show(folder: Path, as_json: bool) -> None:
    """Print a finished validation; raise ``TpfError`` if no target was scored."""
    from tpf.metrics.schema import read_json, to_dict

    result = read_json(folder)
    if as_json:
        typer.echo(json.dumps(to_dict(result)))
    else:
        _print(result, folder)
    if not result.targets:
        first = result.skipped[0] if result.skipped else None
        why = f", such as {first.id} ({first.reason})" if first else ""
        raise TpfError(
            f"no target was scored: {len(result.skipped)} skipped{why}; see {folder}/metrics.json"
        )


def _progress(target: str, done: int, total: int) -> None:
    """Tell of the main rank's share."""
    say(f"target {done + 1} of {total}: {target}")


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
    from tpf.report.targets import LIGAND_COLUMNS, group_rows, ligand_rows

    screen = console()
    rows: list[list[Cell]] = [
        [name, value.mean, value.sd, value.n] for name, value in result.dataset.items()
    ]
    title = f"{len(result.targets)} targets of {result.checkpoint}"
    if rows:
        screen.print(table(title, ("metric", "mean", "sd over seeds", "targets"), rows))
    shown = [name for name in SHOWN if name in result.dataset]
    if groups := group_rows(result, shown):
        screen.print(table("groups", ("group", "targets", *shown), groups))
    if ligands := ligand_rows(result):
        screen.print(table("ligands after a fit of the pocket", LIGAND_COLUMNS, ligands))
    chains = sum(target.chains for target in result.targets)
    interfaces = sum(target.interfaces for target in result.targets)
    screen.print(f"scored {chains} chains and {interfaces} interfaces")
    chosen = result.model_selection
    score = "–" if chosen.value is None else f"{chosen.value:.4f}"
    screen.print(f"model selection ({chosen.weights} weights): {score}")
    for item in result.skipped:
        screen.print(f"skipped {item.id}: {item.reason}")
    screen.print(f"written to {folder} (open report.html there)")
