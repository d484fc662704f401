"""The record of a step from what every rank did, and the alarms that watch the records."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

WINDOW = 100
"""Steps that an alarm compares with."""
AT_LEAST = 20
"""Steps before which it is silent."""
TIMES_MEDIAN = {"loss": 5.0, "grad_norm": 10.0}
DEVIATIONS = 8.0
"""An alarm needs both: so many times the median, and median absolute deviations above it. Single
samples of unlike entries reach 3 and 9 times the median in sound runs."""


@dataclass(frozen=True)
class Sample:
    """What one sample of a step gave."""

    position: int
    """Its number over the whole run."""
    id: str
    tokens: int
    norm: float
    """Of its gradient, before clipping."""
    terms: dict[str, float]
    """``loss`` and every term of it that the sample had."""
    events: list[str] = field(default_factory=list)
    flops: float = 0.0
    """Floating-point operations of its forward and backward (``tpf.flops``)."""


@dataclass(frozen=True)
class Part:
    """What one rank has to say of a step."""

    samples: list[Sample]
    milliseconds: dict[str, float]
    """Wall time ``step`` and ``data``, and the phases of the step."""
    skipped: list[dict[str, str]]
    max_mem_gb: float | None = None
    peak_flops: float | None = None
    """What the rank's device can do in a second; None if unknown."""


def merge(parts: Sequence[Part]) -> dict[str, Any]:
    """Return what the ranks did in one step as one record.

    Loss terms are means over the samples that have them, in the order of the samples, so that they
    do not depend on which rank had which. Times and memory are those of the slowest rank and the
    fullest one.
    """
    samples = sorted((s for part in parts for s in part.samples), key=lambda s: s.position)
    names = dict.fromkeys(name for sample in samples for name in sample.terms)
    record: dict[str, Any] = {
        name: statistics.fmean(s.terms[name] for s in samples if name in s.terms) for name in names
    }
    record["grad_norm"] = max(sample.norm for sample in samples)
    record["samples"] = [sample.id for sample in samples]
    if events := [f"{s.id}: {event}" for s in samples for event in s.events]:
        record["events"] = events
    return record | merge_times(parts)


def merge_times(parts: Sequence[Part]) -> dict[str, Any]:
    """Return the part of ``merge`` that holds for a step without samples too."""
    clocks = dict.fromkeys(name for part in parts for name in part.milliseconds)
    times = {name: max(part.milliseconds.get(name, 0.0) for part in parts) for name in clocks}
    record: dict[str, Any] = {f"{name}_ms": round(ms, 3) for name, ms in times.items()}
    tokens = sum(sample.tokens for part in parts for sample in part.samples)
    record["tokens_per_s"] = round(1e3 * tokens / times["step"], 1)
    peaks = [part.peak_flops for part in parts if part.peak_flops is not None]
    if peaks:
        flops = sum(sample.flops for part in parts for sample in part.samples)
        record["mfu"] = round(1e3 * flops / (times["step"] * sum(peaks)), 4)
    memory = [part.max_mem_gb for part in parts if part.max_mem_gb is not None]
    return record | ({"max_mem_gb": max(memory)} if memory else {})


class Alarms:
    """Tells of a loss or gradient norm far above those of the last ``WINDOW`` steps.

    Far is more than ``TIMES_MEDIAN`` times the median and more than ``DEVIATIONS`` median
    absolute deviations above it. Medians do not follow a few wild steps.
    """

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()) -> None:
        """Start with the records of the steps before."""
        self._past: dict[str, deque[float]] = {name: deque(maxlen=WINDOW) for name in TIMES_MEDIAN}
        for record in records:
            self.hear(record)

    def hear(self, record: Mapping[str, Any]) -> list[str]:
        """Take in the record of a step and return a sentence for each alarm."""
        said = []
        for name, past in self._past.items():
            value = record.get(name)
            if not isinstance(value, int | float) or not math.isfinite(value):
                continue
            if len(past) >= AT_LEAST:
                median = statistics.median(past)
                deviation = statistics.median(abs(x - median) for x in past)
                if value > max(TIMES_MEDIAN[name] * median, median + DEVIATIONS * deviation):
                    said.append(
                        f"{name} {value:.4g} is far above the median {median:.4g} "
                        f"of the last {len(past)} steps"
                    )
            past.append(value)
        return said
