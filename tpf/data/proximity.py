"""Which points or groups of points are near each other, by sorting points into cells."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

_CHUNK = 2_000_000
"""Pairs whose distances are held at a time."""


def close_pairs(
    a: NDArray[np.floating], b: NDArray[np.floating], cutoff: float
) -> Iterator[tuple[NDArray[np.intp], NDArray[np.intp]]]:
    """Yield index arrays (i, j) of all pairs of points a [n,3], b [m,3] nearer than ``cutoff``.

    Coordinates in Angstrom; points that are not finite are near nothing. Each pair comes once.
    """
    own = np.flatnonzero(np.isfinite(a).all(axis=1))
    other = np.flatnonzero(np.isfinite(b).all(axis=1))
    if len(own) == 0 or len(other) == 0:
        return
    low = np.minimum(a[own].min(0), b[other].min(0))
    cell_a = np.floor((a[own] - low) / cutoff).astype(np.int64) + 1
    cell_b = np.floor((b[other] - low) / cutoff).astype(np.int64) + 1
    width = np.maximum(cell_a.max(0), cell_b.max(0)) + 2
    key_b = np.ravel_multi_index(tuple(cell_b.T), tuple(width))
    order = np.argsort(key_b, kind="stable")
    other, key_b = other[order], key_b[order]
    for shift in np.ndindex(3, 3, 3):
        key = np.ravel_multi_index(tuple((cell_a + np.array(shift) - 1).T), tuple(width))
        first = np.searchsorted(key_b, key, "left")
        count = np.searchsorted(key_b, key, "right") - first
        for part in _parts(count):
            i = np.repeat(part, count[part])
            within = np.arange(len(i)) - np.repeat(
                np.cumsum(count[part]) - count[part], count[part]
            )
            j = other[first[i] + within]
            i = own[i]
            near = ((a[i] - b[j]) ** 2).sum(axis=1) < cutoff**2
            yield i[near], j[near]


def _parts(count: NDArray[np.intp]) -> Iterator[NDArray[np.intp]]:
    """Split the indices with a count above zero so that the counts of a part sum to one chunk."""
    index = np.flatnonzero(count)
    if len(index):
        total = np.cumsum(count[index]) // _CHUNK
        yield from np.split(index, np.flatnonzero(np.diff(total)) + 1)


def near_any(a: NDArray[np.floating], b: NDArray[np.floating], cutoff: float) -> NDArray[np.bool_]:
    """Return for each point of a [n, 3] whether a point of b [m, 3] is nearer than ``cutoff``."""
    near = np.zeros(len(a), np.bool_)
    for i, _ in close_pairs(a, b, cutoff):
        near[i] = True
    return near


def close_groups(
    pos: NDArray[np.floating], group: NDArray[np.integer], cutoff: float
) -> list[tuple[int, int]]:
    """Return the pairs (g < h) of groups with a pair of points nearer than ``cutoff``.

    ``pos`` [n, 3] Angstrom, ``group`` [n] numbers from 0.
    """
    n = int(group.max()) + 1 if len(group) else 0
    found: set[int] = set()
    for i, j in close_pairs(pos, pos, cutoff):
        g, h = group[i].astype(np.int64), group[j].astype(np.int64)
        found.update(np.unique((g * n + h)[g < h]).tolist())
    return [divmod(key, n) for key in sorted(found)]
