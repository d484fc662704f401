"""The training loop: devices, data, model, optimiser, resume, steps, validation, summary.

The story of a run is ``train``; a whole step is ``tpf.trainer.Trainer.train_step``.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tpf import checkpoint, dist
from tpf.budget import Budget
from tpf.config import Config, to_dict
from tpf.data.dataset import CropDataset
from tpf.data.records import Entries
from tpf.data.sampling import read_clusters
from tpf.errors import TpfError, UsageError, told
from tpf.kernels.describe import check_impl, describe_impl
from tpf.loop import Display, Loop
from tpf.metrics import schema
from tpf.precision import policy
from tpf.report.train import read_validations, write_train_report
from tpf.runfolder import RunFolder, refuse_existing, remove_unstarted
from tpf.signals import Stop
from tpf.trainer import Trainer
from tpf.watchdog import Watchdog
from tpf.weights.convert import start_from
from tpf.weights.files import Weights
from tpf.weights.files import read as read_weights


@dataclass(frozen=True)
class Options:
    """Where a run starts and writes, and what an experiment changes in it."""

    out: Path
    resume: bool = False
    init: Path | None = None
    validate: bool = True
    """Validate before the first step and after the last."""
    nan: Literal["stop", "skip"] = "stop"
    """After a step that is not finite: stop, or (one rank only) go on with the next sample."""
    prepare: Callable[[Trainer], None] | None = None
    """Called once before the first step with the state that it starts from, to add probes."""


def train(config: Config, options: Options, display: Display) -> dict[str, Any]:
    """Run the whole job on this rank and return the summary.

    Raises ``UsageError`` for wrong input, ``NonFinite`` for a step that is not finite, and
    ``Interrupted`` after a signal, with the state saved. Ranks started again by a launcher go on
    from the last checkpoint, or begin as before if there is none yet.
    """
    world = dist.prepare(config.train)
    options = _agreed(options, world, display)
    with world.together():
        trainer, dataset, targets, start = _prepare(config, options, world)
    run = RunFolder(options.out)
    with run.lock:
        _open(trainer, run, options, start, display)
        with _closing(run, display, world):
            with world.together():
                if world.is_main:
                    _tell(trainer, run, dataset.entries, display)
            _work(trainer, run, dataset, targets, options, display)
            summary = _summary(trainer, run)
            if world.is_main:
                display.end(summary)
            return summary


def _work(
    trainer: Trainer, run: RunFolder, dataset: CropDataset, targets: Entries, options: Options,
    display: Display,
) -> None:  # fmt: skip
    """Do the steps and validations of a run that is open."""
    world, limit = trainer.world, trainer.config.train.step_limit
    listening = Stop(patient=world.size > 1, silent=not world.is_main).listening()
    watching = Watchdog(limit, run.path / "stacks", world.rank).on_guard()
    with listening as stop, watching as watchdog:
        if options.prepare is not None:
            options.prepare(trainer)
        loop = Loop(trainer, run, targets, display, stop, watchdog, options.nan)
        if trainer.step == 0 and options.validate:
            loop.validate()
        loop.run_steps(dataset)
        if options.validate:
            loop.validate()


@contextlib.contextmanager
def _closing(run: RunFolder, display: Display, world: dist.World) -> Iterator[None]:
    """Close what the main rank holds after the block; ranks that end together wait for that.

    Launchers kill the other ranks when the first one has ended with an error.
    """
    together = True
    try:
        yield
    except BaseException as error:
        together = isinstance(error, TpfError) and error.shared
        raise
    finally:
        if world.is_main:
            if problem := run.saver.close():
                display.message(problem)
            _report(run, display)
            display.close()
            run.lock.release()
        if together:
            with contextlib.suppress(TpfError):  # would hide what ends the run
                world.barrier()


def _report(run: RunFolder, display: Display) -> None:
    """Write ``report.html``; a failure is said, and does not hide what ends the run."""
    try:
        write_train_report(run.path)
    except UsageError:  # a run without any step has none
        return
    except Exception as error:
        display.message(f"no report: {told(error)}; training and checkpoints are not affected")


def _agreed(options: Options, world: dist.World, display: Display) -> Options:
    """Return the options with the main rank's folder, resuming it if ranks have been started anew.

    Only the nodes of which a rank died count their restarts. What ranks left that died before the
    first checkpoint is removed, so that the run begins again at step 0.
    """
    shared = world.share((options.out, dist.restarts() > 0))
    out, anew = shared[0][0], any(again for _, again in shared)
    begun = False
    with world.together():
        if world.is_main and anew and not options.resume:
            remove_unstarted(out, display.message)
            begun = (out / "config.yaml").is_file()
    return dataclasses.replace(options, out=out, resume=options.resume or world.any(begun))


def _prepare(
    config: Config, options: Options, world: dist.World
) -> tuple[Trainer, CropDataset, Entries, Weights | None]:
    """Return the trainer, its data, the validation's entries, and weights to start from."""
    cfg = config.train
    if cfg.batch_size % world.size:
        raise UsageError(
            f"--batch-size {cfg.batch_size} does not divide over {world.size} ranks; "
            f"give a multiple of {world.size}"
        )
    if not options.resume and world.is_main:
        refuse_existing(options.out)
    start = read_weights(options.init) if options.init is not None and not options.resume else None
    check_impl(config.model.impl, world.device)
    entries = Entries(config.data)
    targets = entries
    if config.validate.path is not None:
        targets = Entries(dataclasses.replace(config.data, path=config.validate.path))
    clusters = read_clusters(Path(config.data.clusters)) if config.data.clusters else None
    dataset = CropDataset(entries, config.data, loss=config.loss, seed=cfg.seed, clusters=clusters)
    return Trainer.build(config, world), dataset, targets, start


def _open(
    trainer: Trainer, run: RunFolder, options: Options, start: Weights | None, display: Display
) -> None:
    """Open the run to resume, or make the folder of a new one that starts from ``start``."""
    world = trainer.world
    with world.together():
        if start is not None:
            taken = start_from(trainer.model, start)
            trainer.ema.restart()
            if world.is_main:
                display.message(taken)
        if options.resume:
            RunFolder.open(run.path)
        elif world.is_main:
            RunFolder.create(run.path, trainer.config)
        if world.is_main:
            run.lock.take(display.message)
    if options.resume:
        _resume(trainer, run, display)
        return
    trainer.save(run)
    with world.together():
        if world.is_main:
            run.saver.wait()


def _resume(trainer: Trainer, run: RunFolder, display: Display) -> None:
    """Restore the newest whole checkpoint that the main rank sees; other nodes may see others."""
    world = trainer.world
    with world.together():
        saved = checkpoint.load_last(run.path, display.message) if world.is_main else None
    newest = world.share(None if saved is None else saved.path)[0]
    with world.together():
        saved = saved or checkpoint.load(newest)
        if saved.step > trainer.config.train.steps:
            raise UsageError(
                f"--steps {trainer.config.train.steps}: run {run.path} is after step {saved.step} "
                "already; give as many or more"
            )
        trainer.restore(saved)
        if world.is_main:
            _go_on(trainer, run, saved, display)


def _go_on(
    trainer: Trainer, run: RunFolder, saved: checkpoint.Checkpoint, display: Display
) -> None:
    """Make the folder that of a run at the step of a checkpoint, and say what changes there."""
    run.rewind(saved.step, trainer.config)
    display.message(f"resuming {run.path} after step {saved.step}")
    for change in _changes(to_dict(saved.config), to_dict(trainer.config)):
        display.message(change)
    now = trainer.world.size
    before = saved.extra.get("ranks", now)
    if before != now:
        display.message(
            f"{before} ranks before, {now} now: the same up to the order in which gradients are "
            "added, not bit by bit"
        )


def _changes(before: dict[str, Any], after: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yield a sentence for every value that differs between two configurations."""
    for key, value in after.items():
        if isinstance(value, dict):
            yield from _changes(before[key], value, f"{path}{key}.")
        elif before[key] != value:
            yield f"{path}{key} is {value} from here on; it was {before[key]}"


def _tell(trainer: Trainer, run: RunFolder, entries: Entries, display: Display) -> None:
    """Say what starts, and what of the wish it does not fulfil."""
    budget = Budget.of_model(
        trainer.config, trainer.model, trainer.world.device, trainer.world.size
    )
    display.start(_facts(trainer, run, entries, budget))
    if warning := budget.warning():
        display.message(warning)
    for bad in entries.skipped:
        display.message(f"not used: {bad.id}: {bad.stage}: {bad.reason}")
    if notice := entries.alignment_notice():
        display.message(notice)


def _facts(trainer: Trainer, run: RunFolder, entries: Entries, budget: Budget) -> dict[str, Any]:
    config = trainer.config
    return {
        "run": str(run.path),
        "config": config.name,
        "parameters": budget.parameters,
        "device": str(trainer.world.device),
        "ranks": trainer.world.size,
        "precision": policy(config.train),
        "entries": len(entries),
        "crop": config.data.crop,
        "steps": config.train.steps,
        "batch_size": config.train.batch_size,
        "triangle_operators": describe_impl(config.model.impl, trainer.world.device),
        "memory_gb": round(budget.expected().gib, 2),
    }


def _summary(trainer: Trainer, run: RunFolder) -> dict[str, Any]:
    validations = sorted(read_validations(run.path).items())
    return {
        "run": str(run.path),
        "steps": trainer.step,
        "skipped": trainer.skipped,
        "validation": {step: schema.to_dict(result)["dataset"] for step, result in validations},
    }
