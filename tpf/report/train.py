"""The report of a training run: curves of every step, and its validations side by side."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpf.errors import UsageError
from tpf.metrics.schema import Validation, read_json
from tpf.metrics.stats import trailing_mean
from tpf.report.html import Cell, cards, grid, page, preformatted, section, table, write
from tpf.report.svg import N_COLOURS, Series, line_chart
from tpf.report.validate import HEADLINE

WINDOW = 25
"""Steps of the trailing mean."""
STEP_FIELDS = ("lr", "grad_norm", "step_ms", "tokens_per_s", "mfu", "max_mem_gb", "skipped")
"""Fields of a step record that are not loss terms, in the order in which they are drawn."""
UNITS = {
    "lr": "learning rate",
    "grad_norm": "largest gradient norm of a sample, before clipping",
    "step_ms": "ms per step",
    "tokens_per_s": "tokens per second",
    "mfu": "share of the peak of BF16 products (MFU)",
    "max_mem_gb": "peak memory, GB",
    "skipped": "samples skipped so far",
}
PHASE = "_ms"
"""Ending of the fields that are times within a step (all but ``step_ms``)."""
LOGARITHMIC = frozenset({"grad_norm"})
Record = Mapping[str, Any]


def write_train_report(run: Path) -> Path:
    """Write ``report.html`` into a run folder and return its path."""
    path = run / "report.html"
    write(path, train_report(run))
    return path


def train_report(run: Path) -> str:
    """Return the HTML document of a run folder (train.jsonl, validation/*/metrics.json).

    Raises ``UsageError`` if the folder has neither.
    """
    records = read_records(run / "train.jsonl")
    validations = read_validations(run)
    if not records and not validations:
        raise UsageError(f"{run}: no train.jsonl and no validation; give the folder of a run")
    body = [cards(_summary(records, validations))]
    if records:
        body.append(section("Loss", *_loss_figures(records)))
        body.append(section("Optimisation and speed", grid(_step_figures(records))))
        body += _phase_parts(records)
    if validations:
        body.append(section("Validation", *_validation_parts(validations)))
    if events := _events(records):
        body.append(section("Events", table(("step", "what happened"), events, text_columns=2)))
    body += _configuration(run)
    return page("Training run", str(run), body)


def read_records(path: Path) -> list[Record]:
    """Return the step records of a log; a line that a killed process left half is ignored."""
    records: list[Record] = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "step" in record:
            records.append(record)
    return records


def read_validations(run: Path) -> dict[int, Validation]:
    """Return the validations of a run by step; folders without a readable result are left out."""
    found: dict[int, Validation] = {}
    for path in sorted((run / "validation").glob("step-*/metrics.json")):
        number = path.parent.name.removeprefix("step-")
        if not number.isdigit():
            continue
        try:
            found[int(number)] = read_json(path)
        except UsageError:
            continue
    return dict(sorted(found.items()))


def _numbers(records: list[Record], name: str) -> list[float]:
    values = [record.get(name) for record in records]
    return [float(v) if isinstance(v, int | float) else math.nan for v in values]


def _terms(records: list[Record]) -> list[str]:
    """Names of the loss terms: numeric fields that are none of the known others."""
    known = {"step", "loss", *STEP_FIELDS}
    names = dict.fromkeys(k for r in records for k, v in r.items() if isinstance(v, int | float))
    return [name for name in names if name not in known and not name.endswith(PHASE)]


def _events(records: list[Record]) -> list[tuple[int, str]]:
    """Return alarms, failed alignments and steps that were left out, in order."""
    found = []
    for record in records:
        step = int(record["step"])
        found += [(step, str(event)) for event in record.get("events", ())]
        if "nonfinite" in record:
            found.append((step, f"left out: {record['nonfinite']}"))
    return found


def _phase_parts(records: list[Record]) -> list[str]:
    """Return the section on the phases of a step: a figure over the steps and the medians."""
    names = dict.fromkeys(k for r in records for k in r if k.endswith(PHASE))
    names.pop("step_ms", None)
    whole = _median(records, "step_ms")
    if not names or not whole:
        return []
    medians = {name: _median(records, name) or 0.0 for name in names}
    lines = []
    for name in sorted(medians, key=lambda name: -medians[name])[:N_COLOURS]:
        points = _points(records, name)
        mean = trailing_mean([v for _, v in points], WINDOW).tolist()
        lines.append(Series(name.removesuffix(PHASE), [s for s, _ in points], mean))
    rows = [(name.removesuffix(PHASE), ms) for name, ms in medians.items()]
    rows += [("other", max(whole - sum(medians.values()), 0.0)), ("step", whole)]
    cells = [(name, round(ms, 2), f"{100 * ms / whole:.1f} %") for name, ms in rows]
    title = f"ms per step, mean of the last {WINDOW}"
    figure = line_chart(lines, title=title, x_label="step")
    split = table(("phase", "median ms", "share"), cells)
    return [section("Where the time goes", grid([figure]), split)]


def _points(records: list[Record], name: str) -> list[tuple[float, float]]:
    """Return (step, value) where the value is finite."""
    steps, values = _numbers(records, "step"), _numbers(records, name)
    return [(s, v) for s, v in zip(steps, values, strict=True) if math.isfinite(v)]


def _median(records: list[Record], name: str) -> float | None:
    values = [v for _, v in _points(records, name)]
    return statistics.median(values) if values else None


def _curve(records: list[Record], name: str, label: str, log: bool = False) -> str:
    steps, values = _numbers(records, "step"), _numbers(records, name)
    series = [Series("every step", steps, values, faint=True, colour=0)]
    if finite := _points(records, name):
        mean = trailing_mean([v for _, v in finite], WINDOW).tolist()
        smooth = Series(f"mean of the last {WINDOW}", [s for s, _ in finite], mean, colour=0)
        series.append(smooth)
    return line_chart(series, title=label, x_label="step", log_y=log)


def _loss_figures(records: list[Record]) -> list[str]:
    figures = [_curve(records, "loss", "loss (weighted sum)")]
    figures += [_curve(records, name, name) for name in _terms(records)]
    return [grid(figures)]


def _step_figures(records: list[Record]) -> list[str]:
    steps = _numbers(records, "step")
    figures = []
    for name in STEP_FIELDS:
        values = _numbers(records, name)
        if not any(math.isfinite(v) for v in values):
            continue
        if name in ("lr", "skipped"):
            line = Series(name, steps, values)
            figures.append(line_chart([line], title=UNITS[name], x_label="step"))
        else:
            figures.append(_curve(records, name, UNITS[name], log=name in LOGARITHMIC))
    return figures


def _summary(records: list[Record], validations: Mapping[int, Validation]) -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    if records:
        loss = [v for v in _numbers(records, "loss") if math.isfinite(v)]
        cells["steps"] = int(records[-1]["step"])
        if loss:
            cells["loss, first step"] = loss[0]
            cells[f"loss, mean of last {min(WINDOW, len(loss))}"] = float(trailing_mean(loss)[-1])
        if ms := _median(records, "step_ms"):
            cells["ms per step, median"] = round(ms, 1)
        if mfu := _median(records, "mfu"):
            cells["MFU, median"] = f"{100 * mfu:.1f} %"
        cells["samples skipped"] = int(records[-1].get("skipped", 0))
        if events := _events(records):
            cells["alarms and events"] = len(events)
    if validations:
        cells["model selection, last"] = list(validations.values())[-1].model_selection.value
    return cells


def _validation_parts(validations: Mapping[int, Validation]) -> list[str]:
    steps = list(validations)
    names = dict.fromkeys(name for v in validations.values() for name in v.dataset)
    order = [n for n in HEADLINE if n in names] + [n for n in names if n not in HEADLINE]
    first, last = validations[steps[0]], validations[steps[-1]]
    rows: list[tuple[Cell, ...]] = [
        (
            "model selection",
            first.model_selection.value,
            last.model_selection.value,
            _change(first.model_selection.value, last.model_selection.value),
            len(last.targets),
        )
    ]
    for name in order:
        a, b = _mean(first, name), _mean(last, name)
        n = last.dataset[name].n if name in last.dataset else None
        rows.append((name, a, b, _change(a, b), n))
    header = ("metric", f"step {steps[0]}", f"step {steps[-1]}", "change", "targets")
    figures = []
    if len(steps) > 1:
        chosen = [v.model_selection.value for v in validations.values()]
        figures.append(_over_steps(steps, chosen, "model selection"))
        for name in [n for n in HEADLINE if n in names]:
            means = [_mean(v, name) for v in validations.values()]
            figures.append(_over_steps(steps, means, name))
    weights = last.model_selection.weights
    note = f"<p class='note'>Selection weights: {weights}. Values are dataset means.</p>"
    return [note, grid(figures), table(header, rows)]


def _mean(validation: Validation, name: str) -> float | None:
    value = validation.dataset.get(name)
    return value.mean if value else None


def _over_steps(steps: list[int], values: list[float | None], title: str) -> str:
    y = [math.nan if v is None else v for v in values]
    return line_chart([Series(title, steps, y)], title=title, x_label="step")


def _change(before: float | None, after: float | None) -> str | None:
    return None if before is None or after is None else f"{after - before:+.4f}"


def _configuration(run: Path) -> list[str]:
    parts = []
    path = run / "environment.json"
    if path.is_file():
        try:
            values = json.loads(path.read_text())
        except ValueError:
            values = {}
        rows = [(str(k), str(v)) for k, v in values.items()]
        parts.append(section("Environment", table(("", "value"), rows, text_columns=2)))
    config = run / "config.yaml"
    if config.is_file():
        parts.append(section("Configuration", preformatted(config.read_text())))
    return parts
