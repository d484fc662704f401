"""What ran on the GPU: launches and busy time of a call, kernel by kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch._C._autograd import DeviceType

from tpf.bench.record import Record, Table
from tpf.bench.timing import Call
from tpf.report.html import Cell

SHOWN = 25
"""Longest kernels of a table."""
NAME = 80
"""Characters of a kernel's name that are shown."""


class Work(NamedTuple):
    """Kernels, copies and fills of one call."""

    launches: float
    ms: float


def kernels(call: Call, repeats: int = 3) -> dict[str, Work]:
    """Return the mean work of a warm call by the name of the kernel; the longest come first."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    found: dict[str, Work] = {}
    for event in profile.events() or ():
        if event.device_type != DeviceType.CUDA or getattr(event, "is_user_annotation", False):
            continue
        launches, ms = found.get(event.name, Work(0, 0.0))
        found[event.name] = Work(launches + 1, ms + event.time_range.elapsed_us() / 1e3)
    mean = {name: Work(count / repeats, ms / repeats) for name, (count, ms) in found.items()}
    return dict(sorted(mean.items(), key=lambda item: -item[1].ms))


def total(work: dict[str, Work]) -> Work:
    """Return the sum over all kernels."""
    return Work(sum(w.launches for w in work.values()), sum(w.ms for w in work.values()))


def report(title: str, work: dict[str, Work], record: Record, **fields: object) -> None:
    """Add rows and a table of the longest kernels; ``fields`` say of which call."""
    busy = total(work).ms
    lines: list[tuple[Cell, ...]] = []
    for name, (launches, ms) in list(work.items())[:SHOWN]:
        record.add(**fields, metric="kernel", kernel=name[:NAME], launches=launches, busy_ms=ms)
        share = f"{100 * ms / busy:.1f} %"
        lines.append((name[:NAME], f"{launches:g}", round(1e3 * ms, 1), share))
    header = ("kernel", "launches", "µs", "share")
    note = f"The longest of {len(work)} kernels, {busy:.3f} ms in all."
    record.tables.append(Table(title, header, lines, note=note))
