"""The report of a study: verdicts, the figure of trailing means, gradient norms, magnitudes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from tpf.report.html import Cell, cards, grid, page, preformatted, section, table, write
from tpf.report.svg import Series, line_chart
from tpf.stability.results import Curve, Results, document, write_json_and_csv
from tpf.stability.study import Study
from tpf.stability.verdict import END_RATIO, PEAK_RATIO, WINDOW

HEADER = (
    "crop", "arm", "verdict", "updates", f"first mean of {WINDOW}", "last mean", "largest loss",
    "at update", "largest gradient norm", "first loss off, %", "same batches and start", "repeats",
)  # fmt: skip
RULES = (
    f"nan: an update was not finite. diverged: the last trailing mean is more than {END_RATIO:g} "
    f"times the reference arm's, or the largest raw loss more than {PEAK_RATIO:g} times the first "
    f"trailing mean (over the first {WINDOW} updates). stable: neither."
)


def write_results(study: Study, results: Results) -> None:
    """Write ``study.json``, ``curves.csv`` and ``report.html`` into the folder of the study."""
    write_json_and_csv(study, results)
    write(study.path / "report.html", report(study, results))


def verdict_table(results: Results) -> list[tuple[Cell, ...]]:
    """Return the lines of the verdict table under ``HEADER``."""
    return [_line(row) for row in results.rows]


def _line(row: dict[str, Any]) -> tuple[Cell, ...]:
    off, equal = row.get("first_loss_difference"), None
    if "batches_equal" in row:
        equal = "yes" if row["batches_equal"] and row["weights_equal"] else "no"
    repeats = row.get("repeats")
    return (
        row["crop"],
        row["impl"] + (", again" if row["run"] == 2 else ""),
        row["verdict"],
        row["updates"],
        row.get("first_mean"),
        row.get("end_mean"),
        row.get("max_loss"),
        row.get("max_loss_update"),
        row.get("max_grad_norm"),
        None if off is None else f"{100 * off:.3f}",
        equal,
        "yes" if repeats is True else repeats,
    )


def report(study: Study, results: Results) -> str:
    """Return the HTML document."""
    settings = study.settings
    count = {row["verdict"]: 0 for row in results.rows}
    for row in results.rows:
        count[row["verdict"]] += 1
    reasons = [(row["crop"], row["impl"], row["reason"]) for row in results.rows]
    body = [
        cards({"warm-up steps": results.warmup["steps"], "updates": settings.steps, **count}),
        section("Verdicts", table(HEADER, verdict_table(results), 3), note=RULES),
        section("Why", table(("crop", "arm", "reason"), reasons, 3)),
    ]
    if results.failures:
        body.append(section("Not comparable", table(("",), [(f,) for f in results.failures])))
    if results.notes:
        body.append(section("Notes", table(("",), [(note,) for note in results.notes])))
    losses = f"Loss after the warm-up, mean of the last {WINDOW} updates"
    note = (
        "An arm that met a value that is not finite is drawn by its raw losses before it. Second "
        "runs are left out. The axis is logarithmic."
    )
    body.append(section(losses, _charts(results, _loss_series, "loss"), note=note))
    body.append(section("Gradient norm before clipping", _charts(results, _norm_series, "norm")))
    for name, title in (("q", "|q|"), ("k", "|k|"), ("bias", "|bias|")):
        chart = _charts(results, functools.partial(_magnitude_series, name), f"max {title}")
        remark = "Largest over the blocks of the Pairformer, on the reference path, no dropout."
        body.append(section(f"Largest {title} of triangle attention", chart, note=remark))
    facts = document(study, results)
    rows = [(k, str(v)) for part in ("environment", "settings") for k, v in facts[part].items()]
    body.append(section("Conditions", table(("", "value"), rows, text_columns=2)))
    configuration = (study.path / "config.yaml").read_text()
    body.append(section("Configuration", preformatted(configuration)))
    return page("Stability after the warm-up", facts["command"], body)


def _charts(results: Results, series_of: Callable[[Curve], Series], label: str) -> str:
    """Return one chart for each crop; arms keep their colour over the crops."""
    names = list(dict.fromkeys(curve.arm.name for curve in results.curves))
    charts = []
    for crop in dict.fromkeys(curve.arm.crop for curve in results.curves):
        shown = [c for c in results.curves if c.arm.crop == crop and not c.arm.again and c.records]
        lines, marks = [], []
        for curve in shown:
            line = series_of(curve)
            colour = names.index(curve.arm.name)
            lines.append(Series(line.name, line.x, line.y, colour=colour))
            if (update := curve.losses.nonfinite) is not None:
                marks.append((float(update), f"{curve.arm.name}: not finite"))
        title = f"crop {crop}"
        chart = line_chart(
            lines, title=title, x_label="update", y_label=label, log_y=True, marks=marks
        )
        charts.append(chart)
    return grid(charts)


def _loss_series(curve: Curve) -> Series:
    losses = curve.losses
    updates = [float(k) for k, _ in losses.finite]
    if losses.nonfinite is None:
        return Series(curve.arm.name, updates, losses.means)
    before = [(float(k), loss) for k, loss in losses.finite if k < losses.nonfinite]
    return Series(f"{curve.arm.name} (raw)", [k for k, _ in before], [loss for _, loss in before])


def _norm_series(curve: Curve) -> Series:
    return _series(curve, curve.column("grad_norm"))


def _magnitude_series(name: str, curve: Curve) -> Series:
    found = [
        (float(k), max((v for v in of[name] if v is not None), default=math.nan))
        for k, of in enumerate(curve.column("magnitudes"), 1)
        if of is not None
    ]
    return Series(curve.arm.name, [k for k, _ in found], [v for _, v in found])


def _series(curve: Curve, values: Sequence[Any]) -> Series:
    numbers = [float(v) if isinstance(v, int | float) else math.nan for v in values]
    return Series(curve.arm.name, [float(k) for k in range(1, len(numbers) + 1)], numbers)
