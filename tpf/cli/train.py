"""``tpf train``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tpf.cli.folders import RUNS, new_folder
from tpf.errors import UsageError

if TYPE_CHECKING:
    from tpf.config import Config

NEWEST = "newest"
"""Value of a ``--resume`` without a run: ``--out`` if given, else the newest run in ``runs``."""


def train(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Any configuration value, as train.clip=5."),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(help="tiny, compact, full or a YAML file [default: tiny; compact on a GPU]"),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Folder of mmCIF files or a list file [default: built-in examples]"),
    ] = None,
    crop: Annotated[int | None, typer.Option(help="Tokens per training crop.")] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs over all nodes.")] = None,
    nodes: Annotated[int, typer.Option(help="Machines that run this same command.")] = 1,
    rdzv: Annotated[str | None, typer.Option(help="HOST:PORT of the first machine.")] = None,
    restarts: Annotated[
        int, typer.Option(min=0, help="Start the ranks anew so often when one dies.")
    ] = 0,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    warmup: Annotated[int | None, typer.Option(help="Warm-up steps.")] = None,
    ema: Annotated[float | None, typer.Option(help="Decay of the averaged weights.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples per step, all ranks.")] = None,
    accumulate: Annotated[
        int | None, typer.Option(help="Samples per rank and step (instead of --batch-size).")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of every random draw.")] = None,
    init: Annotated[
        Path | None,
        typer.Option(help="Start from the weights of a run, a weight file or OpenFold3's."),
    ] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="[RUN]", help="Go on exactly where a run stopped.")
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(help="Run the one step of a replay file again.")
    ] = None,
    impl: Annotated[
        str | None, typer.Option(help="Triangle operators: auto, cuda, flex, torch.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder [default: runs/<date>-<config>]")
    ] = None,
    validate_every: Annotated[int | None, typer.Option(help="Steps between validations.")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Steps between checkpoints.")] = None,
    keep: Annotated[int | None, typer.Option(help="Checkpoints kept.")] = None,
    profile: Annotated[
        int | None, typer.Option(metavar="STEPS", help="Write a Chrome trace of a few steps.")
    ] = None,
    wandb: Annotated[str | None, typer.Option(help="auto, disabled, offline or online.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines on standard output.")] = False,
) -> None:
    """Train a model on a folder of structures; validate before and after."""
    from tpf.launch import launch, plan

    if replay is not None:
        _replay(replay)
        return
    import torch

    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    chosen = plan(gpus, nodes, rdzv, available)
    ranks = chosen.processes * chosen.nodes if chosen.kind == "launch" else _joined_ranks()
    if accumulate is not None and batch_size is not None:
        raise UsageError("--accumulate and --batch-size both set the batch; give one of them")
    flags = {
        "data.path": data,
        "data.crop": crop,
        "train.steps": steps,
        "train.lr": lr,
        "train.warmup": warmup,
        "train.ema": ema,
        "train.batch_size": ranks * accumulate if accumulate is not None else batch_size,
        "train.seed": seed,
        "model.impl": impl,
        "train.validate_every": validate_every,
        "train.checkpoint_every": checkpoint_every,
        "train.keep": keep,
        "train.profile": profile,
        "train.wandb": wandb,
    }
    given = [f"{key}={json.dumps(v)}" for key, v in flags.items() if v is not None]
    given += overrides or []
    run = _resumed_run(resume, out)
    if run is not None:
        given.insert(0, "train.profile=0")  # its trace has been written
    if run is None and batch_size is None and accumulate is None and ranks > 1:
        given.insert(0, f"train.batch_size={ranks}")
    default = "compact" if available else "tiny"
    settings = _settings(config, given, run, default)
    if chosen.kind == "join" and run is None and out is None:
        _refuse_restarts()
    from tpf.tracker import ready, wanted

    if wanted(settings.train.wandb):
        ready(settings.train.wandb)  # before there is a run folder
    folder = run or out or new_folder(settings.name)
    from tpf.cli.rank import run_rank

    if chosen.kind == "launch":
        launch(
            chosen, run_rank, settings, folder, run is not None, init, as_json, restarts=restarts
        )
    else:
        run_rank(settings, folder, run is not None, init, as_json)


def _joined_ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _refuse_restarts() -> None:
    """Refuse a launcher that starts ranks anew, which would begin another run each time."""
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
        raise UsageError(
            "--max-restarts of torchrun needs --out, the run folder that ranks started anew go on "
            "with"
        )


FIXED = (
    "data.path", "data.crop", "data.msa", "data.conformers", "train.batch_size", "train.seed",
    "train.diffusion_samples", "train.rollout_steps", "train.max_recycles", "train.precision",
)  # fmt: skip
"""What an exact continuation must share with the run that it continues."""


def _settings(config: str | None, given: list[str], run: Path | None, default: str) -> Config:
    from tpf.config import load

    if run is None:
        return load(config or default, given)
    stored = load(str(run / "config.yaml"))
    if config is not None and load(config).name != stored.name:
        raise UsageError(
            f"--config {config}: run {run} was trained with {stored.name}; "
            "leave --config out to resume it, or start a new run"
        )
    settings = load(str(run / "config.yaml"), given)
    for name in FIXED:
        group, key = name.split(".")
        before, now = (getattr(getattr(c, group), key) for c in (stored, settings))
        if before != now:
            raise UsageError(
                f"--resume {run}: {name} was {before} and would be {now}; leave it as it was, "
                f"or start a new run with --init {run}"
            )
    return settings


def _resumed_run(resume: str | None, out: Path | None) -> Path | None:
    if resume is None:
        return None
    if resume != NEWEST:
        run = Path(resume)
    elif out is not None:
        run = out
    else:
        runs = sorted(RUNS.glob("*/config.yaml"), key=lambda p: p.stat().st_mtime)
        if not runs:
            raise UsageError(f"--resume: no run in {RUNS}/; name the run folder")
        run = runs[-1].parent
    if not (run / "config.yaml").is_file():
        raise UsageError(f"--resume {run}: not a run folder (it has no config.yaml)")
    return run


def _replay(path: Path) -> None:
    from tpf.replay import replay

    typer.echo(f"first not finite in {replay(path)}")
