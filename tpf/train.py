"""The training loop: devices, data, model, optimiser, resume, steps, validation, summary.

The story of a run is ``train``; a whole step is ``Trainer.train_step``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from tpf import checkpoint, dist, guard
from tpf.checkpoint import write_text
from tpf.config import Config, from_dict, to_yaml
from tpf.data.batch import to_device
from tpf.data.dataset import CropDataset, Loader
from tpf.data.records import Entries
from tpf.data.sampling import read_clusters
from tpf.errors import Interrupted, TpfError, UsageError
from tpf.estimate import memory_gb
from tpf.kernels.describe import check_impl, describe_impl
from tpf.metrics.schema import to_dict
from tpf.model.model import Model
from tpf.optim import Ema, SampleGradients, build_optimizer, learning_rate
from tpf.report.train import read_validations, write_train_report
from tpf.runfolder import RunFolder, refuse_existing
from tpf.signals import Stop
from tpf.step import Draws, draws, locate, sample_loss
from tpf.validate import validate_model


class Display(Protocol):
    """Receives what a run tells its user; the command line draws it."""

    def start(self, facts: dict[str, Any]) -> None: ...
    def step(self, record: dict[str, Any], steps: int) -> None: ...
    def validation(self, step: int, result: dict[str, Any]) -> None: ...
    def message(self, text: str) -> None: ...
    def end(self, summary: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


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


@dataclass
class Trainer:
    """The state of a run: everything that a checkpoint restores, and what it is made with."""

    config: Config
    world: dist.World
    model: Model
    optimizer: torch.optim.Optimizer
    ema: Ema
    step: int = 0
    skipped: list[dict[str, str]] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    """What probes add to the record of the step in progress."""
    steps_left_out: int = 0
    """Steps that were not finite and did not stop the run, in this process."""

    @classmethod
    def build(cls, config: Config, world: dist.World) -> Trainer:
        """Make the model (weights drawn from the seed), optimiser and EMA."""
        torch.manual_seed(config.train.seed)
        model = Model(config.model).to(world.device)
        if config.train.compile:
            model.compile_blocks()
        return cls(
            config, world, model, build_optimizer(model, config.train), Ema(model, config.train.ema)
        )

    def save(self, run: RunFolder) -> Path:
        """Write the checkpoint of the present step and delete the oldest ones."""
        tensors = {
            "model": self.model.state_dict(),
            "ema": self.ema.state_dict(),
            "optimizer": _optimizer_tensors(self.model, self.optimizer),
        }
        extra = {"seed": self.config.train.seed, "skipped": self.skipped}
        path = checkpoint.save(run.path, self.step, self.config, tensors, extra)
        checkpoint.prune(run.path, self.config.train.keep)
        return path

    def restore(self, saved: checkpoint.Checkpoint) -> None:
        """Take over model, EMA, optimiser and step of a checkpoint."""
        checkpoint.load_weights(self.model, saved.model, str(saved.path))
        self.ema.load_state_dict(saved.ema)
        _load_optimizer(self.model, self.optimizer, saved.optimizer)
        self.step = saved.step
        self.skipped = list(saved.extra.get("skipped", []))

    def train_step(
        self, samples: list[dict[str, Any]], gradients: SampleGradients, run: RunFolder
    ) -> dict[str, Any]:
        """Do one optimiser step over this rank's samples and return its record.

        Each sample's gradient is clipped before the average (spec model.md section 7). Raises
        ``guard.NonFinite`` with the sample, module and tensor after writing a replay file.
        """
        cfg = self.config.train
        device = self.world.device
        self.model.train()
        rate = learning_rate(self.step + 1, cfg)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        terms: dict[str, float] = {}
        norms, ids, events = [], [], []
        for features in samples:
            draw = draws(cfg, self.step, features["position"][0])
            batch = to_device(features, device)
            ids += batch["id"]
            try:
                loss = sample_loss(self.model, batch, self.config, draw)
                if not math.isfinite(value := float(loss.total.detach())):
                    self._fail(run, features, draw, f"loss is {value}")
                loss.total.backward()  # type: ignore[no-untyped-call]
            except torch.OutOfMemoryError as error:
                tokens, atoms = batch["token_mask"].shape[1], batch["atom_mask"].shape[1]
                raise TpfError(
                    f"step {self.step + 1}, sample {', '.join(batch['id'])} ({tokens} tokens, "
                    f"{atoms} atoms): out of GPU memory; lower --crop, train.diffusion_samples or "
                    "train.diffusion_chunk, or set model.checkpoint=true"
                ) from error
            norm = gradients.add()
            if not math.isfinite(norm):
                self._fail(run, features, draw, f"gradient norm is {norm}")
            norms.append(norm)
            events += loss.events
            for name, term in {"loss": loss.total.detach(), **loss.terms}.items():
                terms[name] = terms.get(name, 0.0) + float(term)
        self.world.sum_(gradients.buffer)
        gradients.average()
        self.optimizer.step()
        gradients.reset()
        self.ema.update(self.model)
        self.step += 1
        means = {name: value / len(samples) for name, value in terms.items()}
        record = {"step": self.step, **means, "lr": rate, "grad_norm": max(norms), "samples": ids}
        return record | ({"events": events} if events else {})

    def leave_out(
        self, samples: list[dict[str, Any]], gradients: SampleGradients, reason: str
    ) -> dict[str, Any]:
        """Go past a step that was not finite with weights unchanged, and return its record."""
        gradients.reset()
        self.step += 1
        self.steps_left_out += 1
        ids = [name for features in samples for name in features["id"]]
        return {"step": self.step, "loss": None, "samples": ids, "nonfinite": reason}

    def _fail(self, run: RunFolder, features: dict[str, Any], draw: Draws, what: str) -> None:
        what = f"step {self.step + 1}, sample {', '.join(features['id'])}: {what}"
        if self.steps_left_out:  # the first one was explained in full
            raise guard.NonFinite(what)
        if self.world.is_main:
            self.save(run)
        path = run.path / f"replay-step-{self.step + 1:06d}-rank-{self.world.rank}.pt"
        micro = {"batch": features, "step": draw.step, "index": draw.index}
        guard.write_replay(path, self.config, self.model, micro)
        where = locate(self.model, features, self.config, draw, self.world.device)
        raise guard.NonFinite(
            f"{what}; first not finite: {where}. Run the step again with: tpf train --replay {path}"
        )


def _optimizer_tensors(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    return {
        f"{key}.{name}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def _load_optimizer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]
) -> None:
    parameters = dict(model.named_parameters())
    for entry, value in tensors.items():
        key, name = entry.split(".", 1)
        parameter = parameters[name]
        place = "cpu" if key == "step" else parameter.device
        optimizer.state[parameter][key] = value.to(place)


def replay(path: Path) -> str:
    """Run again the step of a replay file; return what was not finite first."""
    content = guard.read_replay(path)
    config = from_dict(content["config"])
    world = _start(config)
    device = world.device
    model = Model(config.model).to(device)
    checkpoint.load_weights(model, content["model"], str(path))
    model.train()
    draw = draws(config.train, content["step"], content["index"])
    where = locate(model, content["batch"], config, draw, device)
    return f"step {content['step'] + 1}, sample {', '.join(content['batch']['id'])}: {where}"


def train(config: Config, options: Options, display: Display) -> dict[str, Any]:
    """Run the whole job on this rank and return the summary.

    Raises ``UsageError`` for wrong input, ``guard.NonFinite`` for a step that is not finite, and
    ``Interrupted`` after a signal, with the state saved.
    """
    cfg = config.train
    world = _start(config)
    if cfg.batch_size % world.size:
        raise UsageError(
            f"--batch-size {cfg.batch_size} does not divide over {world.size} ranks; "
            f"give a multiple of {world.size}"
        )
    if not options.resume and world.is_main:
        refuse_existing(options.out)
    start = checkpoint.resolve(options.init) if options.init is not None else None
    check_impl(config.model.impl, world.device)
    entries = Entries(config.data)
    targets = entries
    if config.validate.path is not None:
        targets = Entries(dataclasses.replace(config.data, path=config.validate.path))
    clusters = read_clusters(Path(config.data.clusters)) if config.data.clusters else None
    dataset = CropDataset(entries, config.data, loss=config.loss, seed=cfg.seed, clusters=clusters)
    trainer = Trainer.build(config, world)
    run = _open(trainer, options, start, display)
    try:
        if world.is_main:
            display.start(_facts(trainer, run, entries))
            for bad in entries.skipped:
                display.message(f"not used: {bad.id}: {bad.stage}: {bad.reason}")
        with Stop().listening() as stop:
            if options.prepare is not None:
                options.prepare(trainer)
            if trainer.step == 0 and options.validate:
                _validate(trainer, run, targets, display, stop)
            _loop(trainer, run, dataset, targets, display, stop, options.nan)
            if options.validate:
                _validate(trainer, run, targets, display, stop)
        summary = _summary(trainer, run)
        if world.is_main:
            display.end(summary)
        return summary
    finally:
        if world.is_main:
            display.close()
            with contextlib.suppress(OSError, UsageError):  # a run without any step has no report
                write_train_report(run.path)


def _start(config: Config) -> dist.World:
    """Join the job and set what its arithmetic depends on."""
    world = dist.start(config.train.cpu_threads)
    if config.train.deterministic and world.device.type == "cuda":
        dist.make_deterministic()
    return world


def _open(trainer: Trainer, options: Options, start: Path | None, display: Display) -> RunFolder:
    """Open the run to resume, or make the folder of a new one that starts from ``start``."""
    world = trainer.world
    if options.resume:
        run = RunFolder.open(options.out)
        saved = checkpoint.load_last(run.path, display.message)
        trainer.restore(saved)
        if world.is_main:
            run.truncate_log(saved.step)
            write_text(run.path / "config.yaml", to_yaml(trainer.config))
            display.message(f"resuming {run.path} after step {saved.step}")
        return run
    if start is not None:
        saved = checkpoint.load(start)
        checkpoint.load_weights(trainer.model, saved.ema, str(saved.path))
        trainer.ema = Ema(trainer.model, trainer.config.train.ema)
    run = RunFolder.create(options.out, trainer.config) if world.is_main else RunFolder(options.out)
    if world.is_main:
        trainer.save(run)
    world.barrier()
    return run


def _loop(
    trainer: Trainer,
    run: RunFolder,
    dataset: CropDataset,
    targets: Entries,
    display: Display,
    stop: Stop,
    nan: Literal["stop", "skip"],
) -> None:
    cfg, world = trainer.config.train, trainer.world
    gradients = SampleGradients(trainer.model, cfg.clip)
    loader = Loader(
        dataset,
        batch_size=cfg.batch_size,
        rank=world.rank,
        world=world.size,
        start_step=trainer.step,
        stop_step=cfg.steps,
        workers=trainer.config.data.workers,
    )
    stream = iter(loader)
    while trainer.step < cfg.steps:
        begin = time.perf_counter()
        samples = next(stream)
        loaded = time.perf_counter()
        try:
            record = trainer.train_step(samples, gradients, run)
        except guard.NonFinite as error:
            if nan == "stop" or world.size > 1:
                raise
            record = trainer.leave_out(samples, gradients, str(error))
        done = time.perf_counter()
        trainer.skipped += [bad for sample in samples for bad in sample["skipped"][0]]
        tokens = sum(float(s["token_mask"].sum()) for s in samples) * world.size
        record |= {
            "step_ms": round(1e3 * (done - begin), 3),
            "data_ms": round(1e3 * (loaded - begin), 3),
            "tokens_per_s": round(tokens / (done - begin), 1),
            "skipped": len(trainer.skipped),
        }
        record |= trainer.notes
        trainer.notes = {}
        if world.device.type == "cuda":
            record["max_mem_gb"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
        if world.is_main:
            run.log(record)
            display.step(record, cfg.steps)
            if trainer.step % cfg.checkpoint_every == 0 or trainer.step == cfg.steps:
                trainer.save(run)
        if world.any(stop()):
            _interrupt(trainer, run)
        if cfg.validate_every and trainer.step % cfg.validate_every == 0:
            _validate(trainer, run, targets, display, stop)


def _interrupt(trainer: Trainer, run: RunFolder) -> None:
    if trainer.world.is_main:
        trainer.save(run)
    trainer.world.barrier()
    raise Interrupted(
        f"interrupted after step {trainer.step}; go on with: tpf train --resume {run.path}"
    )


def _validate(
    trainer: Trainer, run: RunFolder, targets: Entries, display: Display, stop: Stop
) -> None:
    """Validate the EMA weights on rank 0, unless this step has been, while the others wait."""
    folder = run.validation_dir(trainer.step)
    if trainer.world.is_main and not (folder / "metrics.json").is_file():
        with trainer.ema.applied_to(trainer.model):
            found = validate_model(
                trainer.model,
                targets,
                trainer.config,
                folder,
                origin=f"{run.path}, step {trainer.step}",
                should_stop=stop,
            )
        if found is not None:
            display.validation(trainer.step, to_dict(found))
            if not found.targets:
                reasons = sorted({skipped.reason for skipped in found.skipped})
                display.message(
                    f"nothing was validated: {len(found.skipped)} entries skipped, "
                    f"{'; '.join(reasons[:3])} (see validate.max_tokens)"
                )
    trainer.world.barrier()
    if trainer.world.any(stop()):
        _interrupt(trainer, run)


def _facts(trainer: Trainer, run: RunFolder, entries: Entries) -> dict[str, Any]:
    config = trainer.config
    parameters = sum(p.numel() for p in trainer.model.parameters())
    return {
        "run": str(run.path),
        "config": config.name,
        "parameters": parameters,
        "device": str(trainer.world.device),
        "ranks": trainer.world.size,
        "precision": config.train.precision,
        "entries": len(entries),
        "crop": config.data.crop,
        "steps": config.train.steps,
        "batch_size": config.train.batch_size,
        "triangle_operators": describe_impl(config.model.impl, trainer.world.device),
        "memory_gb": round(memory_gb(config, parameters), 2),
    }


def _summary(trainer: Trainer, run: RunFolder) -> dict[str, Any]:
    validations = read_validations(run.path)
    return {
        "run": str(run.path),
        "steps": trainer.step,
        "skipped": trainer.skipped,
        "validation": {step: to_dict(v)["dataset"] for step, v in sorted(validations.items())},
    }
