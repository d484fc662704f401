"""What is compared of whole optimiser steps, and the tables and figures of the paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from tpf.bench.cases import Settings
from tpf.bench.record import Record, Row, Table
from tpf.bench.step import measure, timed
from tpf.bench.swap import CHOICES, Choice, open_choices
from tpf.bench.timing import reduction_percent
from tpf.phases import PHASES
from tpf.report.html import Cell
from tpf.report.svg import Series, line_chart

WARM_UP = 3
DROPPED = 20
"""First steps that Table 4 and Figure 3 leave out."""
SAMPLE = (
    "One sample a rank: a made-up protein of the crop's size, alone in its alignment. Every round "
    "runs one step of each backend with the same draws."
)


def _chosen(settings: Settings) -> dict[str, Choice]:
    return {name: CHOICES[name] for name in settings.impls}


def _by_crop(rows: Sequence[Row]) -> dict[int, dict[str, Row]]:
    """Return the rows by crop, then by backend, the fastest first."""
    found: dict[int, dict[str, Row]] = {}
    for row in sorted(rows, key=lambda r: (r["n"], r["mean_ms"])):
        found.setdefault(row["n"], {})[row["impl"]] = row
    return found


def bench_step(settings: Settings, record: Record) -> None:
    """Time the steps of every backend."""
    _measured(_show_steps, _chosen(settings), settings, record, WARM_UP)


def _measured(
    show: Callable[[Settings, Record], None], choices: dict[str, Choice], settings: Settings,
    record: Record, dropped: int,
) -> None:  # fmt: skip
    """Measure the steps; ``show`` makes the table and the figure of them at the end."""
    record.views.append(partial(show, settings, record))
    measure(choices, settings, record, dropped)


def _show_steps(settings: Settings, record: Record) -> None:
    rows = timed(record)
    lines: list[tuple[Cell, ...]] = []
    for n, here in _by_crop(rows).items():
        for name, row in here.items():
            total = row.get("total_mib")
            lines.append(
                (
                    str(n), name, row["mean_ms"], row["p10_ms"], row["p90_ms"], row["gpu_ms"],
                    None if total is None else round(total),
                )
            )  # fmt: skip
    header = ("N", "backend", "mean", "p10", "p90", "phases", "peak, MiB")
    note = f"Wall time. Phases: forward to EMA, by events. {SAMPLE}"
    title = "Optimiser step, ms"
    record.tables.insert(0, Table(title, header, lines, text_columns=2, note=note))
    record.figures.append(_figure(rows, "mean_ms", "Optimiser step"))


def table_4(settings: Settings, record: Record) -> None:
    """Mean seconds a step, the first 20 left out."""
    _measured(_show_seconds, _chosen(settings), settings, record, DROPPED)


def _show_seconds(settings: Settings, record: Record) -> None:
    crops = _by_crop(timed(record))
    names = list(dict.fromkeys(name for here in crops.values() for name in here))
    lines: list[tuple[Cell, ...]] = [
        (name, *(here[name]["mean_ms"] / 1e3 if name in here else None for here in crops.values()))
        for name in names
    ]
    title = "Table 4: seconds a step"
    note = f"Mean wall time of {settings.reps} steps after those left out. {SAMPLE}"
    header = ("backend", *(f"N = {n}" for n in crops))
    record.tables.insert(0, Table(title, header, lines, note=note))


def table_13(settings: Settings, record: Record) -> None:
    """Replace attention, multiplication, both, and whole layers in each baseline."""
    ours = "cuda" if settings.device.type == "cuda" else "torch"
    choices: dict[str, Choice] = {}
    bases = tuple(open_choices("step", _chosen(settings), settings.device, record))
    for base in bases:
        before = CHOICES[base]
        choices |= {
            base: before,
            f"{base} + attention": Choice(ours, before.multiplication),
            f"{base} + multiplication": Choice(before.attention, ours),
        }
    choices |= {"both": Choice(ours, ours), "both, fused layers": Choice(ours, ours, fused=True)}
    _measured(partial(_show_reductions, bases), choices, settings, record, WARM_UP)


def _show_reductions(bases: tuple[str, ...], settings: Settings, record: Record) -> None:
    lines: list[tuple[Cell, ...]] = []
    for n, here in _by_crop(timed(record)).items():
        for base in bases:
            if base not in here:
                continue
            start = here[base]["mean_ms"]
            arms = (f"{base} + attention", f"{base} + multiplication", "both", "both, fused layers")
            times = (here[arm]["mean_ms"] if arm in here else None for arm in arms)
            cuts = (None if t is None else f"{reduction_percent(start, t):.2f}" for t in times)
            lines.append((str(n), base, start, *cuts))
    header = ("N", "baseline", "ms", "attention", "multiplication", "both", "fused layers")
    title = "Table 13: reduction of the step's time by replaced operators, %"
    note = f"100 (1 - t / t of the baseline), means of {settings.reps} steps. {SAMPLE}"
    record.tables.insert(0, Table(title, header, lines, text_columns=2, note=note))


def figure_3(settings: Settings, record: Record) -> None:
    """GPU time of the phases of a step, mean over steps of the slowest rank."""
    _measured(_show_phases, _chosen(settings), settings, record, DROPPED)


def _show_phases(settings: Settings, record: Record) -> None:
    rows = timed(record)
    lines: list[tuple[Cell, ...]] = [
        (str(n), name, row["gpu_ms"], *(row[f"{phase}_ms"] for phase in PHASES), row["ranks"])
        for n, here in _by_crop(rows).items()
        for name, row in here.items()
    ]
    header = ("N", "backend", "all", *PHASES, "ranks")
    note = (
        "Between GPU events, mean over the steps after those left out, of the slowest rank; "
        f"without data loading, copies to the device and EMA. {SAMPLE}"
    )
    title = "Figure 3: time of an optimiser step on the GPU, ms"
    record.tables.insert(0, Table(title, header, lines, text_columns=2, note=note))
    record.figures.append(_figure(rows, "gpu_ms", "Figure 3: optimiser step on the GPU"))


def _figure(rows: Sequence[Row], field: str, title: str) -> str:
    series = []
    for name in dict.fromkeys(row["impl"] for row in rows):
        points = sorted((row["n"], row[field]) for row in rows if row["impl"] == name)
        series.append(Series(name, [x for x, _ in points], [y for _, y in points]))
    return line_chart(series, title=title, x_label="tokens", y_label="ms")
