"""Does an arm's loss follow the FP32 arm as nearly as BF16 PyTorch's does?

Three runs from one state on the same batches with the same noise: FP32, BF16 by the reference, BF16
by a backend. Rounding moves each weight a little, training amplifies it, and after some ten updates
no two of them have the same digits. What can be asked is that the backend strays no further from
FP32 than the reference in the same precision does. The distance is the root mean square, over all
updates, of the relative difference of the trailing means: the mean takes out the noise of single
samples, which is the same in all runs only as long as their weights are. How far a run strays is
itself a matter of chance, of few independent draws (updates / window): two sound BF16 backends of
the tiny preset end 200 updates at 0.33 and 0.54 %. ``FACTOR`` and ``FLOOR`` leave room for that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tpf.metrics.stats import trailing_mean
from tpf.stability.verdict import WINDOW

FACTOR = 1.5
"""Times the reference's distance that a backend may have."""
FLOOR = 0.01
"""A distance that is always allowed."""


@dataclass(frozen=True)
class Follow:
    """How far a loss strays from the FP32 one, and how far it may."""

    distance: float
    limit: float

    @property
    def holds(self) -> bool:
        """Whether it is near enough; a loss that is not finite never is."""
        return self.distance <= self.limit


def distance(losses: Sequence[float], exact: Sequence[float], window: int = WINDOW) -> float:
    """Return the root mean square relative difference of two trailing means.

    Infinite where a loss is not finite, or one curve is shorter than the other.
    """
    if len(losses) != len(exact) or not losses or not all(map(math.isfinite, losses)):
        return math.inf
    pairs = zip(trailing_mean(losses, window), trailing_mean(exact, window), strict=True)
    return math.sqrt(sum((a / b - 1) ** 2 for a, b in pairs) / len(losses))


def follow(losses: Sequence[float], reference: Sequence[float], exact: Sequence[float]) -> Follow:
    """Judge a backend's losses by those of the reference in BF16 and in FP32 (``exact``).

    A reference that is not finite excuses nothing.
    """
    allowed = FACTOR * distance(reference, exact)
    limit = max(allowed, FLOOR) if math.isfinite(allowed) else FLOOR
    return Follow(distance(losses, exact), limit)
