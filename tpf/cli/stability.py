"""``tpf stability``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpf.cli.folders import new_folder, resumed_folder
from tpf.cli.options import Overrides, Preset, TrainingData, dotted, listed, numbers
from tpf.cli.screen import console, say, table
from tpf.errors import TpfError, UsageError

if TYPE_CHECKING:
    from tpf.config import Config
    from tpf.stability.results import Results
    from tpf.stability.study import Settings, Study

CROPS, WARMUP_CROP, WARMUP_STEPS, STEPS, LR, EMA = (384, 640, 768), 640, 1000, 400, 1.8e-3, 0.999
"""The study of the paper."""
TINY_CROPS, TINY_WARMUP_CROP, TINY_STEPS = (32, 48, 64), 48, 20
TINY_LR = 8e-2
"""High, so that a fault shows within 20 updates."""
PER_ARM = {
    "data.crop": "--crops and --warmup-crop",
    "train.steps": "--warmup-steps and --steps",
    "train.warmup": "--warmup-steps",
    "model.impl": "--impls and --warmup-impl",
}
"""Configuration values that a study sets itself, and the options for them."""
TINY_FAULTS = ("noise:1e4", "nan:10")


def stability(
    overrides: Overrides = None,
    init: Annotated[
        Path | None, typer.Option(help="Weights from which the warm-up starts [default: random]")
    ] = None,
    config: Preset = None,
    data: TrainingData = None,
    impls: Annotated[
        str | None,
        typer.Option(help="Backends, as torch,cuda,trifast,torch@fp32 [default: all of tpf bench]"),
    ] = None,
    crops: Annotated[
        str | None, typer.Option(help="Crops of the arms [default: 384,640,768]")
    ] = None,
    warmup_steps: Annotated[int | None, typer.Option(help="[default: 1000]")] = None,
    warmup_crop: Annotated[int | None, typer.Option(help="[default: 640]")] = None,
    warmup_impl: Annotated[
        str | None, typer.Option(help="Backend of the shared warm-up [default: torch]")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Updates of each arm [default: 400]")] = None,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate [default: 1.8e-3; --tiny 0.08]")
    ] = None,
    nan: Annotated[
        str | None,
        typer.Option(help="After an update that is not finite: stop or skip [default: stop]"),
    ] = None,
    determinism: Annotated[
        bool, typer.Option("--determinism", help="Run every arm twice and compare the losses.")
    ] = False,
    tiny: Annotated[
        bool,
        typer.Option("--tiny", help="Minutes on a CPU: tiny preset, crops 32 to 64, faulty arms."),
    ] = False,
    faults: Annotated[
        str | None,
        typer.Option(help="Faulty arms that test the study, as noise:1000,nan:10 [default: none]"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write [default: runs/<date>-stability]")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="[DIR]", help="Go on with a study; may add arms, updates.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print study.json.")] = False,
) -> None:
    """Train every backend from one warmed-up state and compare: NaN, divergence, losses."""
    from tpf.stability.study import Study

    if nan not in (None, "stop", "skip"):
        raise UsageError(f"--nan {nan}: choose stop or skip")
    changes: dict[str, Any] = {
        "impls": listed(impls),
        "faults": listed(faults),
        "crops": numbers("--crops", crops),
        "steps": steps,
        "nan": nan,
        "determinism": determinism or None,
    }
    changes = {name: value for name, value in changes.items() if value is not None}
    fixed: dict[str, Any] = {
        "warmup_steps": warmup_steps,
        "warmup_crop": warmup_crop,
        "warmup_impl": warmup_impl,
        "init": None if init is None else str(init),
    }
    fixed = {name: value for name, value in fixed.items() if value is not None}
    given = dotted({"data.path": data, "train.lr": lr}, overrides)
    if resume is not None:
        _refuse_fixed(
            [*fixed, *given, *(["config"] if config else []), *(["tiny"] if tiny else [])]
        )
        study = Study.open(resumed_folder(resume, out, "study.json", "study"), changes, say)
    else:
        settings = _settings(tiny, changes | fixed)
        chosen = _configuration(config, given, settings)
        study = Study.create(out or new_folder("stability"), settings, chosen, say)
    _run(study, as_json)


def _run(study: Study, as_json: bool) -> None:
    from tpf.stability.report import write_results
    from tpf.stability.results import collect, document

    study.run(lambda found: write_results(found, collect(found)))
    results = collect(study)
    if as_json:
        typer.echo(json.dumps(document(study, results)))
    else:
        _show(study, results)
    if results.failures:
        raise TpfError("; ".join(results.failures))


def _settings(tiny: bool, given: dict[str, Any]) -> Settings:
    """Return the settings of a new study: those given, and defaults for the rest."""
    import torch

    from tpf.stability.study import Settings, default_impls

    gpu = torch.cuda.is_available() and not tiny
    standard: dict[str, Any] = {
        "impls": default_impls(gpu),
        "crops": TINY_CROPS if tiny else CROPS,
        "faults": TINY_FAULTS if tiny else (),
        "warmup_steps": TINY_STEPS if tiny else WARMUP_STEPS,
        "warmup_crop": TINY_WARMUP_CROP if tiny else WARMUP_CROP,
        "steps": TINY_STEPS if tiny else STEPS,
        "cpu": tiny,
    }
    return Settings(**(standard | given))


def _configuration(config: str | None, given: list[str], settings: Settings) -> Config:
    """Return the configuration that the arms share."""
    import torch

    from tpf.checkpoint import resolve
    from tpf.config import load

    if settings.cpu and config not in (None, "tiny"):
        raise UsageError(f"--config {config}: --tiny has the tiny preset; give one of them")
    for item in given:
        if (flag := PER_ARM.get(item.partition("=")[0])) is not None:
            raise UsageError(f"{item}: a study sets it for every arm; use {flag}")
    if settings.init is not None:
        resolve(settings.init)
    gpu = torch.cuda.is_available() and not settings.cpu
    rate = TINY_LR if settings.cpu else LR
    study = [
        f"train.lr={rate}", f"train.ema={EMA}", "train.batch_size=1", "train.checkpoint_every=50",
        "train.keep=1", "train.validate_every=0", "train.wandb=disabled",
    ]  # fmt: skip
    return load(config or ("compact" if gpu else "tiny"), [*study, *given])


def _refuse_fixed(names: list[str]) -> None:
    for name in names:
        flag = name if "=" in name else "--" + name.replace("_", "-")
        raise UsageError(
            f"--resume: {flag} is fixed by the study that goes on; leave it out, or start a new one"
        )


def _show(study: Study, results: Results) -> None:
    from tpf.stability.report import HEADER, RULES, verdict_table

    screen = console()
    screen.print(table("stability after the warm-up", HEADER, verdict_table(results), 3, RULES))
    for row in results.rows:
        title = f"crop {row['crop']}, {row['impl']}: {row['verdict']}"
        screen.print(f"{title}: {row['reason']}")
    for note in results.notes:
        screen.print(f"note: {note}")
    screen.print(f"written to {study.path} (open report.html there)")
