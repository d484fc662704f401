"""Memory of triangle attention beyond its inputs: after the forward, and at the peak."""

from __future__ import annotations

import torch

from tpf.bench.attention import calls_of
from tpf.bench.cases import Attend, Inputs, Settings, make_inputs
from tpf.bench.record import Record, Table
from tpf.bench.timing import Call, Clock, forget
from tpf.report.html import Cell


def memory(settings: Settings, record: Record) -> None:
    """Measure every backend at every shape."""
    attends = record.open_backends(settings.impls, settings.device)
    lines: list[tuple[Cell, ...]] = []
    for shape in settings.shapes:
        settings.say(f"memory, N = {shape.n}, D = {shape.dim}")
        inputs = make_inputs(shape, 0, settings.device, layout=settings.layout)
        results = sum(2 * x.numel() for x in (*inputs.leaves, inputs.q)) / 2**20
        lines.append((f"{shape.n} x {shape.dim}", "output and gradients alone", None, results))
        for name, attend in attends.items():
            try:
                held, peak = _measure(attend, inputs, settings.device)
            except Exception as error:
                record.failed(name, error, **shape.fields())
                continue
            finally:
                forget(settings.device)
            common = {"op": "attention", "impl": name, **shape.fields(), "layout": settings.layout}
            record.add(**common, phase="fwd", peak_mib=held)
            record.add(**common, phase="fwd_bwd", peak_mib=peak)
            lines.append((f"{shape.n} x {shape.dim}", name, held, peak))
        record.save()
    header = ("N x D", "backend", "after forward", "peak of forward + backward")
    record.tables.append(
        Table(
            "Memory beyond the inputs, MiB",
            header,
            lines,
            text_columns=2,
            note="What PyTorch's allocator holds; the backward's gradients are part of the peak.",
        )
    )


def _measure(attend: Attend, inputs: Inputs, device: torch.device) -> tuple[float, float]:
    """Return MiB held after a forward whose backward is to come, and the peak of both."""
    both: Call = calls_of(attend, inputs)["fwd_bwd"]
    clock = Clock(device)
    peak = clock.peak_mib(both)
    before = torch.cuda.memory_allocated(device)
    out = attend(*inputs.leaves, inputs.mask)
    clock.wait()
    held = (torch.cuda.memory_allocated(device) - before) / 2**20
    assert peak is not None and out is not None
    return held, peak
