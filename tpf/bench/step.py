"""Whole optimiser steps of a preset: Tables 4 and 13, Figure 3.

One model serves all backends; every round runs one step of each, in a new order and with the same
random draws (recycling, noise), on a made-up protein of exactly the crop's size.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from tpf import dist
from tpf.bench import profiling
from tpf.bench.cases import Settings
from tpf.bench.protein import make_sample
from tpf.bench.record import Record, Row
from tpf.bench.swap import Choice, Operators, open_choices
from tpf.bench.timing import Timing, forget, rounds
from tpf.config import Config, load
from tpf.flops import peak_flops
from tpf.phases import PHASES
from tpf.runfolder import RunFolder
from tpf.trainer import Trainer


class Sample(NamedTuple):
    """One step on this rank: wall time and the phases of it, ms, and its operations."""

    wall: float
    phases: dict[str, float]
    flops: float = 0.0


class Stepper:
    """A trainer on one sample that stays where it is."""

    def __init__(self, residues: int, config: Config, world: dist.World, folder: Path) -> None:
        self.device = world.device
        self.trainer = Trainer.build(config, world)
        sample = make_sample(residues, config, seed=world.rank)
        self.samples = [sample | {"position": [world.rank]}]
        self.run = RunFolder(folder)

    def step(self, operators: Operators, number: int) -> Sample:
        """Do optimiser step ``number``, whose draws depend on the number alone."""
        self.trainer.step, self.trainer.graphs = number, operators.graphs
        with operators.used():
            self._wait()
            start = time.perf_counter()
            done = self.trainer.train_step(self.samples, self.run)
            self._wait()
        wall = 1e3 * (time.perf_counter() - start)
        flops = sum(sample.flops for sample in done.samples)
        return Sample(wall, self.trainer.phases.finished(), flops)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def join(settings: Settings, config: Config) -> dist.World:
    """Join the job that a launcher started, or be alone, and set what the arithmetic depends on."""
    if settings.device.type == "cpu" and not torch.cuda.is_available():
        return dist.start(config.train.cpu_threads)
    if settings.device.type == "cpu":
        return dist.World(0, 1, settings.device)
    world = dist.start(config.train.cpu_threads)
    if config.train.deterministic:
        dist.make_deterministic()
    return world


def measure(
    choices: Mapping[str, Choice], settings: Settings, record: Record, dropped: int
) -> None:
    """Time ``settings.reps`` steps of every choice at every crop and record them.

    The first ``dropped`` steps (at most as many as are timed) are not counted.
    """
    config = load(settings.config)
    world = join(settings, config)
    found = open_choices("step", dict(choices), world.device, record)
    for n in dict.fromkeys(shape.n for shape in settings.shapes):
        settings.say(f"step, {config.name}, N = {n}")
        _measure_crop(n, _at_crop(config, n), world, found, settings, record, dropped)
        for operators in found.values():
            operators.forget()
        forget(world.device)
        record.save()


def timed(record: Record) -> list[Row]:
    """Return the rows of steps that were timed."""
    return [row for row in record.rows if "mean_ms" in row]


def _at_crop(config: Config, n: int) -> Config:
    return dataclasses.replace(config, data=dataclasses.replace(config.data, crop=n))


def _measure_crop(
    n: int, config: Config, world: dist.World, found: dict[str, Operators], settings: Settings,
    record: Record, dropped: int,
) -> None:  # fmt: skip
    stepper = Stepper(n, config, world, record.folder or Path())
    alive: dict[str, Operators] = {}
    memory: dict[str, Row] = {}
    for name, operators in found.items():
        with record.case(name, op="step", n=n) as case:
            stepper.step(operators, 0)
            memory[name] = peak(stepper, operators)
        forget(world.device)
        if case.failed:
            stepper.trainer.gradients.reset()
            stepper.trainer.phases.finished()
            continue
        alive[name] = operators
    names = list(alive)
    warm = min(dropped, settings.reps)
    samples: dict[str, list[Sample]] = defaultdict(list)
    complete = False
    try:
        for turn, k in enumerate(rounds(len(names), warm + settings.reps)):
            number = turn // len(names)
            sample = stepper.step(alive[names[k]], number)
            if number >= warm:
                samples[names[k]].append(sample)
        complete = True
    finally:  # an interrupted study has what it measured; ranks would wait for each other then
        if complete or world.size == 1:
            for name in filter(samples.__contains__, names):
                row = _summary(samples[name], world) | memory[name]
                record.add(op="step", impl=name, phase="step", n=n, config=config.name, **row)
    for name in names:
        if settings.profile and world.device.type == "cuda":
            work = profiling.kernels(partial(stepper.step, alive[name], 0), repeats=1)
            title = f"Kernels of a step, {name}, N = {n}"
            profiling.report(title, work, record, op="step", impl=name, n=n, config=config.name)


def peak(stepper: Stepper, operators: Operators) -> Row:
    """Return the peak of a warm step, beyond the trainer's state and with it, MiB.

    What graphs hold between steps counts.
    """
    if stepper.device.type != "cuda":
        return {}
    before = torch.cuda.memory_allocated(stepper.device)
    torch.cuda.reset_peak_memory_stats(stepper.device)
    stepper.step(operators, 0)
    most = torch.cuda.max_memory_allocated(stepper.device)
    held, free = operators.held_mib()
    return {"peak_mib": (most - before) / 2**20 + held, "total_mib": most / 2**20 + free}


def _summary(samples: list[Sample], world: dist.World) -> Row:
    """Return wall statistics and MFU of this rank, and every phase's mean on the slowest rank."""
    wall = Timing(tuple(s.wall for s in samples), "wall")
    means = [statistics.fmean(s.phases[phase] for s in samples) for phase in PHASES]
    table = torch.zeros(world.size, len(PHASES), dtype=torch.float64, device=world.device)
    table[world.rank] = table.new_tensor(means)
    rows = world.sum_(table).tolist()
    slowest = max(rows, key=sum)
    phases = {f"{phase}_ms": ms for phase, ms in zip(PHASES, slowest, strict=True)}
    row: Row = {}
    if (peak_rate := peak_flops(world.device)) is not None:
        row["mfu"] = 1e3 * sum(s.flops for s in samples) / (sum(wall.samples) * peak_rate)
    return row | {
        "mean_ms": wall.mean, **wall.fields(), "gpu_ms": sum(slowest), **phases,
        "ranks": world.size,
    }  # fmt: skip
