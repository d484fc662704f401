"""Where the time of a training step goes: GPU events or the wall clock between phases."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import torch

PHASES = ("forward", "backward", "clipping", "reduce", "optimiser", "ema")
Moment = torch.cuda.Event | float


class Phases:
    """The running phase and the moments at which phases began; nothing waits for the GPU."""

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

    def finished(self) -> dict[str, float]:
        """Return the milliseconds of every phase that has ended, each once.

        What a GPU is still at counts in a later call: the end of a step in the next step's.
        """
        found: defaultdict[str, float] = defaultdict(float)
        done = 0
        for (phase, start), (_, end) in zip(self._moments, self._moments[1:], strict=False):
            if isinstance(end, torch.cuda.Event) and not end.query():  # type: ignore[no-untyped-call]
                break
            done += 1
            if phase is not None:
                found[phase] += _between(start, end)
        del self._moments[:done]
        return dict(found)


def _between(start: Moment, end: Moment) -> float:
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float) and isinstance(end, float)
        return 1e3 * (end - start)
    return float(start.elapsed_time(end))
