"""The steps of a run after its start: data, optimiser steps, records, checkpoints, validation."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from tpf.data.batch import Batch
from tpf.data.dataset import CropDataset, Loader
from tpf.data.records import Entries
from tpf.errors import Interrupted, NonFinite
from tpf.flops import peak_flops
from tpf.journal import WINDOW, Alarms, Part, merge, merge_times
from tpf.metrics.schema import to_dict
from tpf.report.train import read_records
from tpf.runfolder import RunFolder
from tpf.signals import Stop
from tpf.trace import recording
from tpf.trainer import Trainer
from tpf.validate import validate_model
from tpf.watchdog import Watchdog


class Display(Protocol):
    """Receives what a run tells its user; the command line draws it."""

    def start(self, facts: dict[str, Any]) -> None: ...
    def step(self, record: dict[str, Any], steps: int) -> None: ...
    def validation(self, step: int, result: dict[str, Any]) -> None: ...
    def message(self, text: str) -> None: ...
    def end(self, summary: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


@dataclass
class Loop:
    """A run that has been opened, on this rank."""

    trainer: Trainer
    run: RunFolder
    targets: Entries
    display: Display
    stop: Stop
    watchdog: Watchdog
    nan: Literal["stop", "skip"]
    alarms: Alarms = field(init=False)
    failure: Exception | None = None
    """Why this rank cannot go on after a step; the next one tells the others."""

    def __post_init__(self) -> None:
        records = read_records(self.run.log_path) if self.trainer.world.is_main else []
        self.alarms = Alarms(records[-WINDOW:])

    def run_steps(self, dataset: CropDataset) -> None:
        """Train to the last step, or raise ``Interrupted`` or what a rank failed with."""
        trainer, cfg, world = self.trainer, self.trainer.config.train, self.trainer.world
        loader = Loader(
            dataset,
            batch_size=cfg.batch_size,
            rank=world.rank,
            world=world.size,
            start_step=trainer.step,
            stop_step=cfg.steps,
            workers=trainer.config.data.workers,
            limit=trainer.config.data.loader_limit,
        )
        stream = iter(loader)
        path = self.run.path / "profile" / f"rank-{world.rank}.json"
        with recording(path, cfg.profile, world.device, self.display.message) as stepped:
            while trainer.step < cfg.steps:
                self._step_and_after(stream)
                stepped()
        self._settle()

    def _step_and_after(self, stream: Iterator[list[Batch]]) -> None:
        """Do one step and what is due after it: a checkpoint, a validation, the end."""
        trainer, cfg, world = self.trainer, self.trainer.config.train, self.trainer.world
        asked = self._one_step(stream)
        if trainer.step % cfg.checkpoint_every == 0 or trainer.step == cfg.steps:
            trainer.save(self.run)
        if world.is_main and not self.failure and (problem := self.run.saver.problem()):
            again = "training goes on and tries again at the next one"
            self.display.message(f"{problem} ({again})")
        if asked:
            self._interrupt()
        if cfg.validate_every and trainer.step % cfg.validate_every == 0:
            self.validate()

    def _one_step(self, stream: Iterator[list[Batch]]) -> bool:
        """Do one step and record it; return whether the run was asked to stop."""
        trainer, world = self.trainer, self.trainer.world
        begin = time.perf_counter()
        self.watchdog.beat(f"rank {world.rank}: the data of step {trainer.step + 1}")
        samples, failure = ([], self.failure) if self.failure else _fetch(stream)
        loaded = time.perf_counter()
        self.watchdog.beat(f"rank {world.rank}: step {trainer.step + 1}")
        asked, left_out = False, None
        try:
            step = trainer.train_step(samples, self.run, stop=self.stop(), failure=failure)
            done, asked, rate = step.samples, step.stop, {"lr": step.lr}
        except NonFinite as error:
            if self.nan == "stop" or world.size > 1:
                raise
            left_out = trainer.leave_out(samples, str(error))
            done, rate = [], {}
        times = {
            "step": 1e3 * (time.perf_counter() - begin),
            "data": 1e3 * (loaded - begin),
            **trainer.phases.finished(),
        }
        skipped = [bad for sample in samples for bad in sample["skipped"][0]]
        peak = peak_flops(world.device)
        parts = world.gather(Part(done, times, skipped, _max_memory(world.device), peak))
        if world.is_main:
            record = (left_out | merge_times(parts)) if left_out else merge(parts)
            try:
                self.run.lock.check()
                self._record({"step": trainer.step, **record, **rate}, parts)
            except Exception as error:
                if world.size == 1:
                    raise
                self.failure = error
        trainer.notes = {}
        return asked or (world.size == 1 and self.stop())

    def _record(self, record: dict[str, Any], parts: list[Part]) -> None:
        self.trainer.skipped += [bad for part in parts for bad in part.skipped]
        record |= {"skipped": len(self.trainer.skipped), **self.trainer.notes}
        alarms = self.alarms.hear(record)
        if alarms:
            record["events"] = [*record.get("events", []), *alarms]
        for alarm in alarms:
            self.display.message(f"step {record['step']} ({', '.join(record['samples'])}): {alarm}")
        self.run.log(record)
        self.display.step(record, self.trainer.config.train.steps)

    def _interrupt(self) -> None:
        """Save and raise ``Interrupted`` on all ranks."""
        self.trainer.save(self.run)
        self._settle()
        raise Interrupted(
            f"interrupted after step {self.trainer.step}; "
            f"go on with: tpf train --resume {self.run.path}"
        )

    def _settle(self) -> None:
        """Wait until the last state is on the disk; raise on all ranks if one cannot go on."""
        self.watchdog.pause()
        with self.trainer.world.together():
            if self.trainer.world.is_main:
                self.run.saver.wait()
            if self.failure is not None:
                raise self.failure

    def validate(self) -> None:
        """Validate the EMA weights on all ranks, unless this step has been validated."""
        trainer, world = self.trainer, self.trainer.world
        self.watchdog.pause()
        folder = self.run.validation_dir(trainer.step)
        if not world.any(world.is_main and (folder / "metrics.json").is_file()):
            with trainer.ema.applied(trainer.gradients.sums):
                found = validate_model(
                    trainer.model,
                    self.targets,
                    trainer.config,
                    folder,
                    origin=f"{self.run.path}, step {trainer.step}",
                    world=world,
                    should_stop=self.stop,
                )
            if found is not None and world.is_main:
                self.display.validation(trainer.step, to_dict(found))
                if not found.targets:
                    reasons = sorted({skipped.reason for skipped in found.skipped})
                    self.display.message(
                        f"nothing was validated: {len(found.skipped)} entries skipped, "
                        f"{'; '.join(reasons[:3])}"
                    )
        if world.any(self.stop()):
            self._interrupt()


def _fetch(stream: Iterator[list[Batch]]) -> tuple[list[Batch], Exception | None]:
    """Return this rank's samples of a step, or why there are none."""
    try:
        return next(stream), None
    except Exception as error:
        return [], error


def _max_memory(device: torch.device) -> float:
    """Return the most memory in GiB that this process had on the GPU, or, without one, at all."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated() / 2**30, 3)
    unit = 1 if sys.platform == "darwin" else 2**10
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30, 3)
