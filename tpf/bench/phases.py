"""The phases of an optimiser step, timed inside the trainer's own step.

``Phases.watched`` hooks into what ``Trainer.train_step`` calls: the loss of a sample, the clipped
sums, the collective. What lies between them (copies to the device, logging, EMA) is left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tpf import dist, train
from tpf.bench.swap import replaced
from tpf.config import Config
from tpf.model.model import Model
from tpf.optim import SampleGradients
from tpf.step import Draws, SampleLoss, sample_loss

PHASES = ("forward", "backward", "clipping", "all-reduce", "optimiser")
Moment = torch.cuda.Event | float


class Phases:
    """The running phase and the moments at which phases began: GPU events, or the wall clock."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._moments: list[tuple[str | None, Moment]] = []

    def enter(self, phase: str | None) -> None:
        """End the running phase and begin another; None leaves the time until the next out."""
        self._moments.append((phase, self._now()))

    def _now(self) -> Moment:
        if not self._gpu:
            return time.perf_counter()
        new: Any = torch.cuda.Event
        event: torch.cuda.Event = new(enable_timing=True)
        event.record()
        return event

    def totals(self) -> dict[str, float]:
        """Return the milliseconds of every phase since the last call; waits for the GPU."""
        if self._gpu:
            torch.cuda.synchronize()
        found = dict.fromkeys(PHASES, 0.0)
        for (phase, start), (_, end) in zip(self._moments, self._moments[1:], strict=False):
            if phase is not None:
                found[phase] += _between(start, end)
        self._moments.clear()
        return found

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Time the forward and the backward of the trainer inside the block."""

        def timed(model: Model, batch: dict[str, Any], config: Config, draw: Draws) -> SampleLoss:
            self.enter("forward")
            loss = sample_loss(model, batch, config, draw)
            self.enter("backward")
            return loss

        with replaced(train, sample_loss=timed):
            yield


def _between(start: Moment, end: Moment) -> float:
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float) and isinstance(end, float)
        return 1e3 * (end - start)
    return float(start.elapsed_time(end))


class TimedGradients(SampleGradients):
    """Clipped sums that time the clipping and, from the average to the reset, the optimiser."""

    def __init__(self, model: nn.Module, clip: float, phases: Phases) -> None:
        super().__init__(model, clip)
        self._phases = phases

    def add(self) -> float:
        self._phases.enter("clipping")
        norm = super().add()
        self._phases.enter(None)
        return norm

    def average(self) -> None:
        self._phases.enter("optimiser")
        super().average()

    def reset(self) -> None:
        self._phases.enter(None)
        super().reset()


@dataclass(frozen=True)
class TimedWorld(dist.World):
    """Processes whose sums over ranks are timed."""

    phases: Phases

    def sum_(self, tensor: Tensor) -> Tensor:
        self.phases.enter("all-reduce")
        result = super().sum_(tensor)
        self.phases.enter(None)
        return result
