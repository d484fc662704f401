"""Statistics over seeds, targets and steps (metrics.md B4, B5, part C and D)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from tpf.errors import UsageError
from tpf.metrics.selection import selection_weights
from tpf.metrics.structure import Bools, Floats, Ints

INTERVAL = (2.5, 97.5)
"""Percentiles of the bootstrap interval, linear interpolation."""
RESAMPLES = 10_000
CHUNK = 1000
"""Resamples evaluated at a time."""


@dataclass(frozen=True)
class Difference:
    """Difference in model selection of checkpoint A minus B over the same targets."""

    value: float
    low: float
    high: float
    resamples: int
    metrics: tuple[str, ...]
    """Metrics of the weight set that both checkpoints have."""


def over_seeds(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and the sample standard deviation (n - 1; None for one value)."""
    array = np.asarray(values, dtype=np.float64)
    return float(array.mean()), float(array.std(ddof=1)) if len(array) > 1 else None


def resample_indices(n: int, resamples: int = RESAMPLES, seed: int = 0) -> Ints:
    """Return draws [resamples, n] with replacement from ``n`` targets (PCG64)."""
    generator = np.random.Generator(np.random.PCG64(seed))
    return generator.integers(0, n, size=(resamples, n), dtype=np.int64)


def interval(values: Floats) -> tuple[float, float]:
    """Return the 2.5 and 97.5 percentiles of finite values."""
    low, high = np.percentile(values[np.isfinite(values)], INTERVAL)
    return float(low), float(high)


def paired_bootstrap(
    a: Floats, b: Floats, weights: Mapping[str, float], names: Sequence[str], indices: Ints
) -> Difference:
    """Compare two checkpoints by model selection on resamples of the same targets.

    ``a`` and ``b`` are [T, K] values of the metrics ``names`` (NaN where a target lacks one);
    ``indices`` [R, T]. Both checkpoints use the same draws, and a metric without any target in
    one of them is left out of both.
    """
    w = np.array([weights[name] for name in names], dtype=np.float64)
    point = _selection_difference(a, b, w, np.arange(len(a))[None])[0]
    if not np.isfinite(point):
        raise UsageError(
            "the checkpoints share no metric of the selection weights; nothing to compare"
        )
    parts = [
        _selection_difference(a, b, w, indices[start : start + CHUNK])
        for start in range(0, len(indices), CHUNK)
    ]
    low, high = interval(np.concatenate(parts))
    shared = np.isfinite(a).any(axis=0) & np.isfinite(b).any(axis=0)
    used = tuple(names[k] for k in np.flatnonzero(shared).tolist())
    return Difference(float(point), low, high, len(indices), used)


def _selection_difference(a: Floats, b: Floats, weights: Floats, indices: Ints) -> Floats:
    """Difference in weighted means [R]; NaN for a resample without a common metric."""
    n = len(a)
    times = np.zeros((len(indices), n))
    np.add.at(times, (np.arange(len(indices))[:, None], indices), 1.0)
    mean_a, has_a = _resampled(a, times)
    mean_b, has_b = _resampled(b, times)
    w = weights * (has_a & has_b)
    with np.errstate(invalid="ignore"):
        return np.asarray(((mean_a - mean_b) * w).sum(-1) / w.sum(-1))


def _resampled(values: Floats, times: Floats) -> tuple[Floats, Bools]:
    """Mean over present targets [R, K] (0 where none) and whether there is any."""
    present = np.isfinite(values)
    count = times @ present
    total = times @ np.where(present, values, 0.0)
    return total / np.maximum(count, 1.0), count > 0


def target_table(
    seeds_by_target: Sequence[Sequence[Mapping[str, float]]], names: Sequence[str]
) -> Floats:
    """Return [T, K]: each metric averaged over the seeds in which the target has it, else NaN."""
    table = np.full((len(seeds_by_target), len(names)), np.nan)
    for t, seeds in enumerate(seeds_by_target):
        for k, name in enumerate(names):
            found = [seed[name] for seed in seeds if np.isfinite(seed.get(name, np.nan))]
            if found:
                table[t, k] = np.mean(found)
    return table


def compare_tables(
    a: Floats, b: Floats, names: Sequence[str], weights: str, resamples: int, seed: int = 0
) -> Difference:
    """Bootstrap the difference of two [T, K] tables under a named weight set."""
    indices = resample_indices(len(a), resamples, seed)
    return paired_bootstrap(a, b, selection_weights(weights), names, indices)


def pearson(x: ArrayLike, y: ArrayLike) -> float | None:
    """Return the correlation of two series [n], None for fewer than two or constant values."""
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    return float(np.corrcoef(x, y)[0, 1])


def trailing_mean(values: ArrayLike, window: int = 25) -> Floats:
    """Return the mean over the last min(window, n) values at every position [n]."""
    array = np.asarray(values, dtype=np.float64)
    ends = range(1, len(array) + 1)
    return np.array([array[max(0, end - window) : end].mean() for end in ends])
