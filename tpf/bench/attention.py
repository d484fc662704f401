"""Table 8: time, host time and memory of triangle attention, all backends side by side."""

from __future__ import annotations

from functools import partial

import torch

from tpf.bench.cases import Attend, Inputs, Settings, Shape, make_inputs
from tpf.bench.record import Record, Row, Table
from tpf.bench.timing import WARM_UP, Arm, Call, Clock, forget, rounds
from tpf.report.html import Cell
from tpf.report.svg import Series, line_chart

PHASES = ("fwd", "bwd", "fwd_bwd")
PHASE_NAMES = {"fwd": "forward", "bwd": "backward", "fwd_bwd": "both"}
BASELINES = ("cuequivariance", "flex")
"""What the change refers to: the first that ran."""
NOTE = (
    "Median over interleaved repetitions. The forward saves what its backward needs. Scaling, "
    "masks and copies that a public interface forces count; the L2 cache is not flushed. Compare "
    "ratios within one run."
)


def table_8(settings: Settings, record: Record) -> None:
    """Time every backend at every shape."""
    record.views.append(partial(_show, record))
    attends = record.open_backends(settings.impls, settings.device)
    for shape in settings.shapes:
        settings.say(f"attention, N = {shape.n}, D = {shape.dim}")
        _time_shape(shape, attends, settings, record)
        forget(settings.device)
        record.save()


def _show(record: Record) -> None:
    timed = [row for row in record.rows if "median_ms" in row]
    record.tables.append(_table(timed))
    for phase in PHASES:
        for dim in sorted({row["dim"] for row in timed}):
            record.figures.append(_figure(timed, phase, dim))


def calls_of(attend: Attend, inputs: Inputs) -> dict[str, Call]:
    """Run a backend until it is warm and return its call of every phase."""

    def forward() -> torch.Tensor:
        return attend(*inputs.leaves, inputs.mask)

    def both() -> object:
        return torch.autograd.grad(forward(), inputs.leaves, inputs.dout)

    for _ in range(WARM_UP):
        both()
    out = forward()

    def backward() -> object:
        return torch.autograd.grad(out, inputs.leaves, inputs.dout, retain_graph=True)

    for _ in range(WARM_UP):
        backward()
    return {"fwd": forward, "bwd": backward, "fwd_bwd": both}


def _time_shape(
    shape: Shape, attends: dict[str, Attend], settings: Settings, record: Record
) -> None:
    inputs = make_inputs(shape, 0, settings.device, layout=settings.layout)
    rows: list[Row] = []
    arms: list[Arm] = []
    with Clock(settings.device) as clock:
        for name, attend in attends.items():
            with record.case(name, **shape.fields()) as case:
                calls = calls_of(attend, inputs)
                facts = [(clock.host_us(c), clock.peak_mib(c)) for c in calls.values()]
                ready = [clock.prepare(call) for call in calls.values()]
            if case.failed:
                continue
            for phase, (host_us, peak_mib) in zip(calls, facts, strict=True):
                rows.append({"impl": name, "phase": phase, "host_us": host_us})
                if peak_mib is not None:
                    rows[-1]["peak_mib"] = peak_mib
            arms += ready
        timings = clock.measure(arms, rounds(len(arms), settings.reps))
    for row, timing in zip(rows, timings, strict=True):
        record.add(
            op="attention", **row, **shape.fields(), dtype="bfloat16", layout=settings.layout,
            mask=False, **timing.fields(), **clock.conditions,
        )  # fmt: skip


def _table(rows: list[Row]) -> Table:
    names = list(dict.fromkeys(row["impl"] for row in rows))
    baseline = next((name for name in BASELINES if name in names), None)
    lines: list[tuple[Cell, ...]] = []
    for n, dim in dict.fromkeys((row["n"], row["dim"]) for row in rows):
        here = {(r["impl"], r["phase"]): r for r in rows if (r["n"], r["dim"]) == (n, dim)}
        base = here.get((baseline or "", "fwd_bwd"))
        present = [name for name in names if (name, "fwd_bwd") in here]
        for name in sorted(present, key=lambda x: float(here[x, "fwd_bwd"]["median_ms"])):
            whole = here[name, "fwd_bwd"]
            change = None if base is None else 100 * (whole["median_ms"] / base["median_ms"] - 1)
            lines.append(
                (
                    f"{n} x {dim}",
                    name,
                    *(here[name, phase]["median_ms"] for phase in PHASES),
                    None if change is None else f"{change:+.1f} %",
                    round(whole["host_us"]),
                    None if "peak_mib" not in whole else round(whole["peak_mib"]),
                    whole["timer"],
                )
            )
    versus = f"vs {baseline}" if baseline else "change"
    header = (
        "N x D", "backend", *PHASE_NAMES.values(), versus, "host µs", "peak MiB", "timer",
    )  # fmt: skip
    return Table("Table 8: triangle attention, ms", header, lines, text_columns=2, note=NOTE)


def _figure(rows: list[Row], phase: str, dim: int) -> str:
    series = []
    for name in dict.fromkeys(row["impl"] for row in rows):
        points = sorted(
            (row["n"], row["median_ms"])
            for row in rows
            if (row["impl"], row["phase"], row["dim"]) == (name, phase, dim)
        )
        if points:
            series.append(Series(name, [x for x, _ in points], [y for _, y in points]))
    title = f"{PHASE_NAMES[phase]}, D = {dim}"
    return line_chart(series, title=title, x_label="tokens", y_label="ms", log_y=True)
