"""Static pictures of structures as inline SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from tpf.metrics.picture import Trace

SIZE = 440
MARGIN = 12
BANDS = ((90, "#0053d6"), (70, "#65a8e6"), (50, "#e0b400"), (0, "#e8743b"))
"""Least pLDDT and its colour, as the AlphaFold database draws them."""


def structure_figure(chains: Sequence[Trace], title: str) -> str:
    """Return a figure of a prediction coloured by pLDDT, on its reference in grey if it has one."""
    points = [p for c in chains for p in (*c.predicted, *c.truth) if p is not None]
    if not points:
        return ""
    low = [min(p[axis] for p in points) for axis in (0, 1)]
    high = [max(p[axis] for p in points) for axis in (0, 1)]
    scale = (SIZE - 2 * MARGIN) / max(high[0] - low[0], high[1] - low[1], 1.0)
    height = round((high[1] - low[1]) * scale) + 2 * MARGIN

    def place(point: list[float]) -> tuple[float, float]:
        return (
            round(MARGIN + (point[0] - low[0]) * scale, 1),
            round(MARGIN + (high[1] - point[1]) * scale, 1),
        )

    body = []
    for chain in chains:
        at = [None if p is None else place(p) for p in chain.truth]
        body.append(_dots(at, "3.4", "#9aa0a6") if chain.ligand else _line(at, "#9aa0a6", 3.2))
    for chain in chains:
        at = [None if p is None else place(p) for p in chain.predicted]
        for k, (_, colour) in enumerate(BANDS):
            own = [p if _band(v) == k else None for p, v in zip(at, chain.plddt, strict=True)]
            if chain.ligand:
                body.append(_dots(own, "2.4", colour))
            else:
                body.append(_line(_with_next(at, own), colour, 1.7))
    legend = "".join(
        f"<span><i style='background:{colour}'></i>pLDDT {'≥' if least else '<'} {least or 50}"
        "</span>"
        for least, colour in BANDS
    )
    if any(chain.truth for chain in chains):
        legend += "<span><i style='background:#9aa0a6'></i>experiment</span>"
    label = escape(title, quote=True)
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f"<svg viewBox='0 0 {SIZE} {max(height, 40)}' role='img' aria-label='{label}' "
        f"style='max-width:{SIZE}px'>{''.join(body)}</svg><p class=legend>{legend}</p></figure>"
    )


def _band(plddt: float) -> int:
    return next(k for k, (least, _) in enumerate(BANDS) if plddt >= least)


Place = tuple[float, float] | None


def _with_next(every: Sequence[Place], own: Sequence[Place]) -> list[Place]:
    """Add to each run of points the one after it, so that colours meet without a gap."""
    return [p or (every[k] if k and own[k - 1] is not None else None) for k, p in enumerate(own)]


def _line(points: Sequence[Place], colour: str, width: float) -> str:
    pieces, pen_down = [], False
    for point in points:
        if point is not None:
            pieces.append(f"{'L' if pen_down else 'M'}{point[0]:g} {point[1]:g}")
        pen_down = point is not None
    if not pieces:
        return ""
    style = f"stroke='{colour}' stroke-width='{width}' stroke-linejoin='round'"
    return f"<path d='{''.join(pieces)}' fill='none' {style} stroke-linecap='round'/>"


def _dots(points: Sequence[Place], radius: str, colour: str) -> str:
    found = [p for p in points if p is not None]
    return "".join(
        f"<circle cx='{p[0]:g}' cy='{p[1]:g}' r='{radius}' fill='{colour}'/>" for p in found
    )
