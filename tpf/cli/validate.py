"""``tpf validate`` and ``tpf validate compare``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from tpf.metrics.schema import Validation


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
    checkpoint: Annotated[Path, typer.Argument(help="A run folder or one of its checkpoints.")],
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
    selection_weights: Annotated[
        str | None, typer.Option(help="fine-tuning or initial (model selection).")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write [default: validation in the run]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print metrics.json.")] = False,
) -> None:
    """Sample structures from a checkpoint and score them (the default command)."""
    from tpf.metrics.schema import to_dict
    from tpf.validate import validate_checkpoint

    flags = {
        "data.path": data,
        "validate.samples": samples,
        "validate.seeds": seeds,
        "validate.sampling_steps": sampling_steps,
        "validate.max_tokens": max_tokens,
        "validate.selection_weights": selection_weights,
        "model.impl": impl,
    }
    given = [f"{key}={json.dumps(v)}" for key, v in flags.items() if v is not None]
    result, folder = validate_checkpoint(
        checkpoint, given + (overrides or []), targets=targets, out=out, progress=_progress
    )
    if as_json:
        typer.echo(json.dumps(to_dict(result)))
    else:
        _print(result, folder)


def _progress(target: str, done: int, total: int) -> None:
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


def _print(result: Validation, folder: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=f"{len(result.targets)} targets of {result.checkpoint}")
    for name in ("metric", "mean", "sd over seeds", "targets"):
        table.add_column(name, justify="left" if name == "metric" else "right")
    for name, value in result.dataset.items():
        sd = "–" if value.sd is None else f"{value.sd:.4f}"
        table.add_row(name, f"{value.mean:.4f}", sd, str(value.n))
    console.print(table)
    chains = sum(target.chains for target in result.targets)
    interfaces = sum(target.interfaces for target in result.targets)
    console.print(f"scored {chains} chains and {interfaces} interfaces")
    chosen = result.model_selection
    score = "–" if chosen.value is None else f"{chosen.value:.4f}"
    console.print(f"model selection ({chosen.weights} weights): {score}")
    for item in result.skipped:
        console.print(f"skipped {item.id}: {item.reason}")
    console.print(f"written to {folder} (open report.html there)")
