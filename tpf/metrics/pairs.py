"""Close pairs of atoms, tile by tile, so that memory stays bounded for any number of atoms."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tpf.metrics.structure import Bools, Floats, Ints

EPS = 1e-10
"""Square Angstrom inside the root of every distance (metrics.md part A)."""
TILE_VALUES = 1 << 18
"""Distances held at a time (2 MiB in FP64, which stays in cache)."""
MIN_ROWS = 32


def distances(x: Floats, i: Ints, j: Ints) -> Floats:
    """Return the distances of index pairs [n] of positions [A, 3]."""
    delta = x[i] - x[j]
    return np.asarray(np.sqrt(EPS + np.einsum("nc,nc->n", delta, delta)))


def within(x: Floats, others: Floats, cutoff: float) -> Bools:
    """Return which positions [A, 3] have any of ``others`` [M, 3] closer than the cut-off."""
    near = np.zeros(len(x), dtype=bool)
    rows = max(1, TILE_VALUES // max(1, len(others)))
    for start in range(0, len(x), rows):
        part = x[start : start + rows]
        square = np.full((len(part), len(others)), EPS)
        for c in range(3):
            square += (part[:, None, c] - others[None, :, c]) ** 2
        near[start : start + rows] = (square < cutoff * cutoff).any(axis=1)
    return near


def close_pairs(x: Floats, cutoff: float) -> Iterator[tuple[Ints, Ints, Floats]]:
    """Yield (i, j, distance) with distance < cutoff, every unordered pair of [A, 3] once.

    Atoms are sorted along the longest axis, and a tile of rows meets only the columns that the
    cut-off can reach. Positions must be finite.
    """
    n = len(x)
    if n < 2:
        return
    axis = int(np.ptp(x, axis=0).argmax())
    order = np.argsort(x[:, axis], kind="stable")
    xs = np.ascontiguousarray(x[order].T)
    ends = np.searchsorted(xs[axis], xs[axis] + cutoff, side="right")
    start = 0
    while start < n - 1:
        stop, end = _tile(ends, start)
        square = np.full((stop - start, end - start), EPS)
        for c in range(3):
            delta = xs[c, start:stop, None] - xs[c, None, start:end]
            delta *= delta
            square += delta
        row, column = np.nonzero(square < cutoff * cutoff)
        upper = column > row
        row, column = row[upper], column[upper]
        found = np.sqrt(square[row, column])
        yield order[row + start], order[column + start], found
        start = stop


def _tile(ends: Ints, start: int) -> tuple[int, int]:
    """Return the end of the rows and of the columns of the tile that begins at ``start``.

    A tile has about as many rows as its first row has columns in reach: with more, most of it
    would lie out of reach.
    """
    rows = min(len(ends) - start, max(MIN_ROWS, int(ends[start]) - start))
    while rows > 1 and rows * (int(ends[start + rows - 1]) - start) > TILE_VALUES:
        rows //= 2
    return start + rows, int(ends[start + rows - 1])
