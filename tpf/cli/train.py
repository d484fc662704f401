"""``tpf train``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tpf.cli.folders import new_folder, resumed_folder
from tpf.cli.options import (
    Impl,
    Nodes,
    Overrides,
    Preset,
    Rendezvous,
    TrainingData,
    dotted,
    line_without_machines,
)
from tpf.errors import UsageError

if TYPE_CHECKING:
    from tpf.config import Config
    from tpf.launch import Plan

Restarts = Annotated[int, typer.Option(min=0, help="Start the ranks anew so often when one dies.")]
Accumulate = Annotated[
    int | None, typer.Option(min=1, help="Samples per rank and step (instead of --batch-size).")
]
Init = Annotated[
    Path | None, typer.Option(help="Start from the weights of a run, a weight file or OpenFold3's.")
]
Resume = Annotated[
    str | None, typer.Option(metavar="[RUN]", help="Go on exactly where a run stopped.")
]
Replay = Annotated[Path | None, typer.Option(help="Run the one step of a replay file again.")]
Out = Annotated[Path | None, typer.Option(help="Run folder [default: runs/<date>-<config>]")]
Profile = Annotated[
    int | None, typer.Option(metavar="STEPS", help="Write a Chrome trace of a few steps.")
]


def train(
    overrides: Overrides = None,
    config: Preset = None,
    data: TrainingData = None,
    crop: Annotated[int | None, typer.Option(help="Tokens per training crop.")] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs over all nodes.")] = None,
    nodes: Nodes = 1,
    rdzv: Rendezvous = None,
    restarts: Restarts = 0,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    warmup: Annotated[int | None, typer.Option(help="Warm-up steps.")] = None,
    ema: Annotated[float | None, typer.Option(help="Decay of the averaged weights.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples per step, all ranks.")] = None,
    accumulate: Accumulate = None,
    seed: Annotated[int | None, typer.Option(help="Seed of every random draw.")] = None,
    init: Init = None,
    resume: Resume = None,
    replay: Replay = None,
    impl: Impl = None,
    out: Out = None,
    validate_every: Annotated[int | None, typer.Option(help="Steps between validations.")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Steps between checkpoints.")] = None,
    keep: Annotated[int | None, typer.Option(help="Checkpoints kept.")] = None,
    profile: Profile = None,
    wandb: Annotated[str | None, typer.Option(help="auto, disabled, offline or online.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines on standard output.")] = False,
) -> None:
    """Train a model on a folder of structures; validate before and after."""
    if replay is not None:
        return _replay(replay, as_json)
    _refuse_both({"--accumulate": accumulate, "--batch-size": batch_size}, "set the batch")
    _refuse_both({"--init": init, "--resume": resume}, "say where the weights come from")
    chosen, available = _plan(gpus, nodes, rdzv)
    options = {
        "data.path": data,
        "data.crop": crop,
        "train.steps": steps,
        "train.lr": lr,
        "train.warmup": warmup,
        "train.ema": ema,
        "train.batch_size": _batch_size(chosen, batch_size, accumulate, new=resume is None),
        "train.seed": seed,
        "model.impl": impl,
        "train.validate_every": validate_every,
        "train.checkpoint_every": checkpoint_every,
        "train.keep": keep,
        "train.profile": profile,
        "train.wandb": wandb,
    }
    given = dotted(options, overrides)
    run = None if resume is None else resumed_folder(resume, out, "config.yaml", "run")
    if run is not None:
        given.insert(0, "train.profile=0")  # its trace has been written
    settings = _settings(config, given, run, default="compact" if available else "tiny")
    _refuse_restarts(chosen, run or out)
    folder = run or out or new_folder(settings.name)
    _start(chosen, settings, folder, run is not None, init, as_json, restarts)


def _plan(gpus: int | None, nodes: int, rdzv: str | None) -> tuple[Plan, int]:
    """Return how this process takes part in the job, and how many GPUs this machine has."""
    import torch

    from tpf.launch import plan

    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return plan(gpus, nodes, rdzv, available, line_without_machines("train")), available


def _start(
    chosen: Plan,
    settings: Config,
    folder: Path,
    resume: bool,
    init: Path | None,
    as_json: bool,
    restarts: int,
) -> None:
    """Train in this process or start the ranks."""
    from tpf.cli.rank import run_rank
    from tpf.launch import launch
    from tpf.runfolder import refuse_existing
    from tpf.tracker import ready, wanted

    if wanted(settings.train.wandb):
        ready(settings.train.wandb)  # before there is a run folder
    arguments = (settings, folder, resume, init, as_json)
    if chosen.kind == "launch":
        if chosen.nodes == 1 and not resume:
            refuse_existing(folder)  # ranks started anew would go on in it
        launch(chosen, run_rank, *arguments, restarts=restarts)
    else:
        run_rank(*arguments)


def _batch_size(
    chosen: Plan, batch_size: int | None, accumulate: int | None, *, new: bool
) -> int | None:
    """Return the samples of a step over all ranks, None for the configuration's; at least one each.

    A run that is resumed keeps its own.
    """
    joined = int(os.environ.get("WORLD_SIZE", "1"))
    ranks = chosen.processes * chosen.nodes if chosen.kind == "launch" else joined
    if accumulate is not None:
        return ranks * accumulate
    return ranks if new and batch_size is None and ranks > 1 else batch_size


def _refuse_both(options: dict[str, object], why: str) -> None:
    """Refuse two options that say the same."""
    if None not in options.values():
        raise UsageError(f"{' and '.join(options)} both {why}; give one of them")


def _refuse_restarts(chosen: Plan, folder: Path | None) -> None:
    """Refuse a launcher that starts ranks anew, which would begin another run each time."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if chosen.kind == "join" and folder is None and restarts:
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


def _replay(path: Path, as_json: bool) -> None:
    from tpf.replay import replay

    found = replay(path)
    typer.echo(json.dumps({"first_not_finite": found}) if as_json else f"first not finite: {found}")
