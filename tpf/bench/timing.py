"""Time of calls, measured side by side: all arms in turn in every round, in a new order.

On a GPU a call is captured as a CUDA graph where it can be, so that the time of the host does not
count, and the time between two events around its replay is taken; else the events enclose the
eager call. The L2 cache is not flushed. Without a GPU the wall clock is read.
"""

from __future__ import annotations

import gc
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Call = Callable[[], object]
Timer = Literal["graph", "events", "clock", "wall"]
WARM_UP = 3
HOST_SECONDS, HOST_CALLS = 0.3, 20
"""Limits of the measurement of host time."""


@dataclass(frozen=True)
class Arm:
    """A call that is ready to be timed."""

    call: Call
    timer: Timer
    keeps: object = None
    """What a graph reads beside its own memory: it must live as long as the graph."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds of a call over its repetitions."""

    samples: tuple[float, ...]
    timer: Timer

    @property
    def median(self) -> float:
        """Median."""
        return statistics.median(self.samples)

    @property
    def mean(self) -> float:
        """Mean."""
        return statistics.fmean(self.samples)

    def fields(self) -> dict[str, float | int | str]:
        """Return the statistics under the names of the result file."""
        tenths = (
            statistics.quantiles(self.samples, n=10, method="inclusive")
            if len(self.samples) > 1
            else self.samples * 9
        )
        return {
            "median_ms": self.median,
            "p10_ms": tenths[0],
            "p90_ms": tenths[8],
            "reps": len(self.samples),
            "timer": self.timer,
        }


class Clock:
    """Prepares and times calls on one device; use as a context, which sets the stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.gpu = device.type == "cuda"
        self.conditions: dict[str, float] = {}
        """SM clock (MHz) and power (W) during the last measurement, if known."""

    def __enter__(self) -> Clock:
        if self.gpu:
            torch.cuda.synchronize(self.device)
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self._context = torch.cuda.stream(self._stream)
            self._context.__enter__()  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()
        return self

    def __exit__(self, *error: object) -> None:
        if self.gpu:
            torch.cuda.synchronize(self.device)
            self._context.__exit__(*error)

    def wait(self) -> None:
        """Wait for the GPU."""
        if self.gpu:
            torch.cuda.synchronize(self.device)

    def prepare(self, call: Call) -> Arm:
        """Capture a call, which must have run before, as a graph; take it as it is if that fails.

        All graphs share one pool of memory: their results are never read. The arm keeps the call,
        and with it the tensors outside the pool that the graph reads.
        """
        if not self.gpu:
            return Arm(call, "clock")
        self.wait()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                call()
        except Exception:
            self.wait()
            self._pool = torch.cuda.graph_pool_handle()
            return Arm(call, "events")
        return Arm(graph.replay, "graph", call)

    def peak_mib(self, call: Call) -> float | None:
        """Return the memory that a call needs beyond what is allocated before it, in MiB."""
        if not self.gpu:
            return None
        self.wait()
        gc.collect()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        call()
        self.wait()
        return (torch.cuda.max_memory_allocated(self.device) - before) / 2**20

    def host_us(self, call: Call) -> float:
        """Return the median time that an eager call keeps the host busy."""
        spent: list[float] = []
        begin = time.perf_counter()
        while len(spent) < HOST_CALLS and time.perf_counter() - begin < HOST_SECONDS:
            self.wait()
            start = time.perf_counter()
            call()
            spent.append(1e6 * (time.perf_counter() - start))
        self.wait()
        return statistics.median(spent)

    def walls(self, calls: Sequence[Call], schedule: Sequence[int]) -> list[Timing]:
        """Call ``calls[k]`` for each k of the schedule and return wall times, GPU work included.

        Each call starts on an idle GPU and ends when its work is done: what a user waits for.
        """
        taken: list[list[float]] = [[] for _ in calls]
        for k in schedule:
            self.wait()
            start = time.perf_counter()
            calls[k]()
            self.wait()
            taken[k].append(1e3 * (time.perf_counter() - start))
        return [Timing(tuple(t), "wall") for t in taken]

    def measure(self, arms: Sequence[Arm], schedule: Sequence[int]) -> list[Timing]:
        """Call ``arms[k]`` for each k of the schedule in turn and return the times of every arm.

        Nothing waits for the GPU in between, so that the host runs ahead of it.
        """
        taken: list[list[float]] = [[] for _ in arms]
        spans: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in arms]
        for arm in arms:
            arm.call()
        probe = _probe(self.device) if self.gpu else None
        for k in schedule:
            if self.gpu:
                spans[k].append(_between_events(arms[k].call))
            else:
                start = time.perf_counter()
                arms[k].call()
                taken[k].append(1e3 * (time.perf_counter() - start))
        self.wait()
        self.conditions = _read(probe)
        for k, pairs in enumerate(spans):
            taken[k] += [start.elapsed_time(end) for start, end in pairs]
        return [Timing(tuple(t), arm.timer) for t, arm in zip(taken, arms, strict=True)]


def rounds(arms: int, reps: int, seed: int = 0) -> list[int]:
    """Return a schedule of ``reps`` rounds over all arms, each round in a new random order."""
    generator = random.Random(seed)
    order = list(range(arms))
    schedule: list[int] = []
    for _ in range(reps):
        generator.shuffle(order)
        schedule += order
    return schedule


def blocks(arms: int, count: int, calls: int) -> list[int]:
    """Return a schedule of blocks in which each arm has its calls in a row; the order rotates."""
    return [(block + k) % arms for block in range(count) for k in range(arms) for _ in range(calls)]


def _between_events(call: Call) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    new: Callable[..., torch.cuda.Event] = torch.cuda.Event
    start, end = (new(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    return start, end


def _probe(device: torch.device) -> subprocess.Popen[str] | None:
    """Ask nvidia-smi for the SM clock and the power while the queued work runs."""
    which = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    chosen = [f"--id=GPU-{which.removeprefix('GPU-')}"] if which else []
    words = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
    try:
        return subprocess.Popen(
            [*words, *chosen], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:
        return None


def _read(probe: subprocess.Popen[str] | None) -> dict[str, float]:
    if probe is None:
        return {}
    try:
        clock, power = probe.communicate(timeout=10)[0].splitlines()[0].split(",")
        return {"sm_mhz": float(clock), "power_w": float(power)}
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        probe.kill()
        return {}


def forget(device: torch.device) -> None:
    """Return memory of past arms to the GPU."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def reduction_percent(base: float, new: float) -> float:
    """Return by how many percent the time ``new`` undercuts the time ``base``."""
    return 100 * (1 - new / base)


def speed_up(base: float, new: float) -> float:
    """Return how many times as fast ``new`` is as ``base``, both times."""
    return base / new
