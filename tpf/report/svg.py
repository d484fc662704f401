"""Charts as inline SVG: lines, bars and histograms, without any library.

Colours come from the CSS variables of ``tpf.report.html`` (``--c0`` .. ``--c7``), so that a chart
follows the light or dark theme of the page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 62, 22, 12, 40
N_COLOURS = 8
MAX_POINTS = 800
"""Points drawn per line; longer series keep the extremes of each bucket."""


@dataclass(frozen=True)
class Series:
    """One line: x and y of equal length; a y that is not finite leaves a gap."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    faint: bool = False
    """Draw thin and pale, as background of a smoothed line."""
    colour: int | None = None


@dataclass(frozen=True)
class Axis:
    """A data range mapped to pixels."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return self.start + (self.stop - self.start) * (value - low) / (high - low)

    def ticks(self) -> list[float]:
        if self.log:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            if last > first:
                every = max(1, (last - first + 1) // 6)
                return [10.0**k for k in range(first, last + 1, every)]
        return nice_ticks(self.low, self.high)


SMALLEST = 1e-290
"""Numbers below it are drawn as 0: arithmetic on them loses all digits."""


def nice_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Return round numbers (1, 2, 5 times a power of ten) inside [low, high]."""
    raw = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def label(value: float) -> str:
    """Return a short text of a number for axes and tables."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    if abs(value) >= 1e5 or abs(value) < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:.4g}"


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str = "",
    y_label: str = "",
    log_y: bool = False,
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """Return an SVG of lines; ``marks`` are vertical lines (x, text). Empty series give a note.

    A logarithmic axis is used only if all finite values are positive.
    """
    points = [
        (x, y)
        for s in series
        for x, y in zip(s.x, s.y, strict=True)
        if math.isfinite(x) and math.isfinite(y)
    ]
    if not points:
        return empty(title)
    log_y = log_y and min(y for _, y in points) > SMALLEST
    x_axis = Axis(*_span([x for x, _ in points], pad=0.0), LEFT, WIDTH - RIGHT)
    y_axis = Axis(*_span([y for _, y in points], log=log_y), HEIGHT - BOTTOM, TOP, log=log_y)
    body = [_frame(x_axis, y_axis, x_label, y_label)]
    for position, text in marks:
        if x_axis.low <= position <= x_axis.high:
            body.append(_mark(x_axis(position), text))
    for k, s in enumerate(series):
        colour = f"var(--c{(k if s.colour is None else s.colour) % N_COLOURS})"
        style = "stroke-width='1' opacity='.35'" if s.faint else "stroke-width='1.8'"
        shape = _path(s, x_axis, y_axis)
        body.append(f"<path d='{shape}' fill='none' stroke='{colour}' {style}/>")
        body += _dots(s, x_axis, y_axis, colour)
    named = [(s.name, k if s.colour is None else s.colour, s.faint) for k, s in enumerate(series)]
    return _figure(title, "".join(body), named if len(series) > 1 else [])


def bar_chart(
    names: Sequence[str], values: Sequence[float], *, title: str, y_label: str = "",
    errors: Sequence[float | None] | None = None,
) -> str:  # fmt: skip
    """Return an SVG of vertical bars from zero, with optional error bars (half lengths)."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return empty(title)
    spread = errors or [None] * len(values)
    tops = [v + (e or 0.0) for v, e in zip(values, spread, strict=True) if math.isfinite(v)]
    y_axis = Axis(*_span([0.0, *tops, *finite]), HEIGHT - BOTTOM, TOP)
    x_axis = Axis(0.0, float(len(values)), LEFT, WIDTH - RIGHT)
    body = [_frame(None, y_axis, "", y_label)]
    for k, (name, value, error) in enumerate(zip(names, values, spread, strict=True)):
        centre = x_axis(k + 0.5)
        if math.isfinite(value):
            body.append(_bar(x_axis(k + 0.15), x_axis(k + 0.85), y_axis, value, name))
        if error:
            low, high = y_axis(value - error), y_axis(value + error)
            body.append(f"<path d='M{centre:.1f} {low:.1f}V{high:.1f}' class='error'/>")
        text = escape(name if len(name) < 15 else name[:13] + "…")
        body.append(f"<text x='{centre:.1f}' y='{HEIGHT - BOTTOM + 16}' class='mid'>{text}</text>")
    return _figure(title, "".join(body), [])


def histogram(
    values: Sequence[float], *, title: str, x_label: str = "", bins: int = 20,
    limits: tuple[float, float] | None = None,
) -> str:  # fmt: skip
    """Return an SVG histogram of the finite values; values outside ``limits`` go to the ends."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return empty(title)
    low, high = limits or _span(finite)
    width = (high - low) / bins
    counts = [0] * bins
    for value in finite:
        counts[min(bins - 1, max(0, int((value - low) / width)))] += 1
    x_axis = Axis(low, high, LEFT, WIDTH - RIGHT)
    y_axis = Axis(0.0, max(counts) * 1.05, HEIGHT - BOTTOM, TOP)
    body = [_frame(x_axis, y_axis, x_label, "targets")]
    for k, count in enumerate(counts):
        if count:
            left, right = low + k * width, low + (k + 1) * width
            name = f"{label(left)} to {label(right)}"
            body.append(_bar(x_axis(left) + 0.5, x_axis(right) - 0.5, y_axis, count, name))
    return _figure(title, "".join(body), [])


def empty(title: str) -> str:
    """Return a figure that says there is nothing to draw."""
    note = f"<text x='{WIDTH / 2}' y='{HEIGHT / 2}' class='mid'>no finite values</text>"
    return _figure(title, note, [])


def _span(values: Sequence[float], pad: float = 0.04, log: bool = False) -> tuple[float, float]:
    low, high = min(values), max(values)
    if log:
        return (low / 1.2, high * 1.2)
    if high - low <= 1e-12 * max(1.0, abs(low), abs(high)):
        room = 0.5 * abs(low) if abs(low) > SMALLEST else 0.5
        return low - room, high + room
    return low - pad * (high - low), high + pad * (high - low)


def _frame(x_axis: Axis | None, y_axis: Axis, x_label: str, y_label: str) -> str:
    parts = []
    for tick in y_axis.ticks():
        y = y_axis(tick)
        parts.append(f"<path d='M{LEFT} {y:.1f}H{WIDTH - RIGHT}' class='grid'/>")
        parts.append(f"<text x='{LEFT - 6}' y='{y + 4:.1f}' class='end'>{label(tick)}</text>")
    for tick in x_axis.ticks() if x_axis else []:
        x = x_axis(tick) if x_axis else 0.0
        parts.append(f"<path d='M{x:.1f} {HEIGHT - BOTTOM}v4' class='axis'/>")
        parts.append(
            f"<text x='{x:.1f}' y='{HEIGHT - BOTTOM + 16}' class='mid'>{label(tick)}</text>"
        )
    parts.append(f"<path d='M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}' class='axis'/>")
    middle_x, middle_y = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    if x_label:
        parts.append(f"<text x='{middle_x}' y='{HEIGHT - 6}' class='mid'>{escape(x_label)}</text>")
    if y_label:
        turn = f"transform='translate(13 {middle_y}) rotate(-90)'"
        parts.append(f"<text {turn} class='mid'>{escape(y_label)}</text>")
    return "".join(parts)


def _path(series: Series, x_axis: Axis, y_axis: Axis) -> str:
    pieces, pen_down = [], False
    for x, y in _thinned(series):
        if not (math.isfinite(x) and math.isfinite(y)):
            pen_down = False
            continue
        pieces.append(f"{'L' if pen_down else 'M'}{x_axis(x):.1f} {y_axis(y):.1f}")
        pen_down = True
    return "".join(pieces)


def _thinned(series: Series) -> list[tuple[float, float]]:
    """Keep the lowest and highest point of each bucket, and every gap."""
    points = list(zip(series.x, series.y, strict=True))
    if len(points) <= MAX_POINTS:
        return points
    size = math.ceil(2 * len(points) / MAX_POINTS)
    kept = []
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        finite = [p for p in bucket if math.isfinite(p[1])]
        chosen = (
            {min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])} if finite else ()
        )
        kept += sorted({*chosen, *[p for p in bucket if not math.isfinite(p[1])][:1]})
    return kept


def _dots(series: Series, x_axis: Axis, y_axis: Axis, colour: str) -> list[str]:
    """Markers with tooltips, for short series only."""
    if len(series.x) > 60 or series.faint:
        return []
    dots = []
    for x, y in zip(series.x, series.y, strict=True):
        if math.isfinite(x) and math.isfinite(y):
            tip = escape(f"{series.name}: {label(y)} at {label(x)}")
            place = f"cx='{x_axis(x):.1f}' cy='{y_axis(y):.1f}'"
            dots.append(f"<circle {place} r='2.6' fill='{colour}'><title>{tip}</title></circle>")
    return dots


def _bar(left: float, right: float, y_axis: Axis, value: float, name: str) -> str:
    low, high = sorted((y_axis(0.0), y_axis(value)))
    tip = escape(f"{name}: {label(value)}")
    box = f"x='{left:.1f}' y='{low:.1f}' width='{right - left:.1f}' height='{high - low:.1f}'"
    return f"<rect {box} fill='var(--c0)'><title>{tip}</title></rect>"


def _mark(x: float, text: str) -> str:
    line = f"<path d='M{x:.1f} {TOP}V{HEIGHT - BOTTOM}' class='mark'/>"
    return f"{line}<text x='{x + 4:.1f}' y='{TOP + 10}'>{escape(text)}</text>"


def _figure(title: str, body: str, legend: Sequence[tuple[str, int, bool]]) -> str:
    keys = "".join(
        f"<span><i style='background:var(--c{k % N_COLOURS});opacity:{0.35 if faint else 1}'></i>"
        f"{escape(name)}</span>"
        for name, k, faint in legend
    )
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='{escape(title, quote=True)}'>"
        f"{body}</svg>{f'<p class=legend>{keys}</p>' if keys else ''}</figure>"
    )
