"""Table 10: GPU, wall and host time and memory of the triangle multiplicative update."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tpf.bench import profiling, trimul_accuracy
from tpf.bench.cases import Settings, Shape
from tpf.bench.record import Record, Row, Table
from tpf.bench.timing import WARM_UP, Call, Clock, forget, rounds, speed_up
from tpf.bench.trimul_backends import MULTIPLIERS
from tpf.bench.trimul_cases import DIRECTIONS, Multiplier, TriMulInputs, fields, make_trimul
from tpf.kernels.ops import Direction
from tpf.report.html import Cell
from tpf.report.svg import Series, line_chart

BASELINES = ("cuequivariance", "eager")
"""What the ratio refers to: the first that ran."""
NOTE = (
    "Medians over interleaved repetitions. GPU time by graph replay where timer says graph; wall: "
    "an eager call on an idle GPU, its work included. MiB beyond the inputs. Ratio: GPU time of "
    "forward + backward of {baseline} over that of the line. The L2 cache is not flushed. Compare "
    "within one run."
)


class Arm(NamedTuple):
    """One call that is timed."""

    impl: str
    direction: Direction
    phase: str
    call: Call


def table_10(settings: Settings, record: Record) -> None:
    """Time every backend at every shape in both directions."""
    record.views.append(partial(_show, record))
    found = record.open_all("trimul", MULTIPLIERS, settings.impls, settings.device)
    for shape in settings.shapes:
        settings.say(f"trimul, N = {shape.n}, C = {shape.dim}")
        _time_shape(shape, found, settings, record)
        forget(settings.device)
        record.save()
    if settings.errors:
        trimul_accuracy.errors(found, settings, record)


def _show(record: Record) -> None:
    timed = [row for row in record.rows if row["op"] == "trimul" and "median_ms" in row]
    if timed:
        record.tables.insert(0, _table(timed))
    for dim in dict.fromkeys(row["dim"] for row in timed):
        record.figures.append(_figure(timed, dim))


def calls_of(
    multiplier: Multiplier, inputs: TriMulInputs, direction: Direction
) -> tuple[Call, Call]:
    """Run an implementation until it is warm; return its forward and its forward + backward.

    The forward keeps what a backward would need.
    """
    parameters = [x.detach().clone().requires_grad_() for x in multiplier.pack(inputs.weights)]
    z = inputs.z.detach().requires_grad_()

    def forward() -> Tensor:
        return multiplier.update(z, inputs.mask, parameters, direction)

    def both() -> object:
        return torch.autograd.grad(forward(), [z, *parameters], inputs.dout)

    for _ in range(WARM_UP):
        both()
    return forward, both


def _time_shape(
    shape: Shape, found: dict[str, Multiplier], settings: Settings, record: Record
) -> None:
    inputs = make_trimul(shape, 0, settings.device)
    rows: list[Row] = []
    arms: list[Arm] = []
    with Clock(settings.device) as clock:
        for name, multiplier in found.items():
            with record.case(name, op="trimul", **fields(shape)) as case:
                new = [
                    Arm(name, direction, phase, call)
                    for direction in DIRECTIONS
                    for phase, call in zip(
                        ("fwd", "fwd_bwd"), calls_of(multiplier, inputs, direction), strict=True
                    )
                ]
                facts = [
                    {"host_us": clock.host_us(a.call), "peak_mib": clock.peak_mib(a.call)}
                    for a in new
                ]
            if case.failed:
                continue
            rows += facts
            arms += new
        if settings.profile and clock.gpu:
            _profile(shape, arms, record)
        walls = clock.walls([a.call for a in arms], rounds(len(arms), settings.reps))
        ready = [clock.prepare(a.call) for a in arms]
        timings = clock.measure(ready, rounds(len(arms), settings.reps, seed=1))
    for arm, row, timing, wall in zip(arms, rows, timings, walls, strict=True):
        record.add(
            op="trimul", impl=arm.impl, phase=arm.phase, direction=arm.direction, **fields(shape),
            dtype="bfloat16", mask=False, **timing.fields(), wall_ms=wall.median, **row,
            **clock.conditions,
        )  # fmt: skip


def _profile(shape: Shape, arms: list[Arm], record: Record) -> None:
    for arm in arms:
        if arm.phase == "fwd_bwd" and arm.direction == DIRECTIONS[0]:
            title = f"Kernels of {arm.impl}, N = {shape.n}, C = {shape.dim}, {arm.direction}"
            profiling.report(
                title, profiling.kernels(arm.call), record, op="trimul", impl=arm.impl,
                phase=arm.phase, direction=arm.direction, **fields(shape),
            )  # fmt: skip


def _table(rows: list[Row]) -> Table:
    found = {(r["n"], r["dim"], r["direction"], r["impl"], r["phase"]): r for r in rows}
    names = {r["impl"] for r in rows}
    baseline = next((name for name in BASELINES if name in names), None)
    lines: list[tuple[Cell, ...]] = []
    for n, dim, direction in dict.fromkeys((r["n"], r["dim"], r["direction"]) for r in rows):
        here = {name: found.get((n, dim, direction, name, "fwd_bwd")) for name in names}
        ordered = sorted((r for r in here.values() if r), key=lambda r: float(r["median_ms"]))
        base = here[baseline] if baseline else None
        for both in ordered:
            forward = found[n, dim, direction, both["impl"], "fwd"]
            peak = both.get("peak_mib")
            lines.append(
                (
                    f"{n} x {dim}", direction, both["impl"], forward["median_ms"],
                    both["median_ms"], None if base is None else
                    f"{speed_up(base['median_ms'], both['median_ms']):.2f}",
                    forward["wall_ms"], both["wall_ms"], round(forward["host_us"]),
                    round(both["host_us"]), None if peak is None else round(peak), both["timer"],
                )
            )  # fmt: skip
    header = (
        "N x C", "direction", "backend", "fwd", "both", "ratio", "wall fwd", "wall both",
        "host fwd, µs", "host both, µs", "MiB", "timer",
    )  # fmt: skip
    title = "Table 10: triangle multiplicative update, ms"
    note = NOTE.format(baseline=baseline or "nothing")
    return Table(title, header, lines, text_columns=3, note=note)


def _figure(rows: list[Row], dim: int) -> str:
    series = []
    for name in dict.fromkeys(row["impl"] for row in rows):
        points = sorted(
            (row["n"], row["median_ms"])
            for row in rows
            if (row["impl"], row["phase"], row["dim"], row["direction"])
            == (name, "fwd_bwd", dim, "outgoing")
        )
        if points:
            series.append(Series(name, [x for x, _ in points], [y for _, y in points]))
    title = f"Multiplicative update, forward + backward, C = {dim}"
    return line_chart(series, title=title, x_label="tokens", y_label="ms", log_y=True)
