"""From the losses of an arm to its verdict, and what must be equal between arms.

The rules are those of spec metrics.md part C: an arm is ``nan`` if an update was not finite,
``diverged`` if it ends at more than twice the reference arm's trailing mean or its largest raw loss
exceeds five times its first trailing mean, and ``stable`` otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tpf.metrics.stats import trailing_mean

WINDOW = 25
"""Updates of the trailing mean."""
END_RATIO = 2.0
"""Largest trailing mean at the end, in units of the reference arm's."""
PEAK_RATIO = 5.0
"""Largest raw loss, in units of the arm's own first trailing mean."""
FIRST_LOSS_TOLERANCE = 0.02
"""Largest relative difference of an arm's first loss from the reference arm's."""

Name = Literal["nan", "diverged", "stable", "unfinished"]


@dataclass(frozen=True)
class Verdict:
    """The class of an arm and the sentence that explains it."""

    name: Name
    reason: str


@dataclass(frozen=True)
class Losses:
    """What the verdict needs of one arm.

    Update k (from 1) has the raw loss ``raw[k - 1]``; it is NaN where the update was not finite.
    """

    raw: Sequence[float]
    nonfinite: int | None = None
    """The first update that was not finite."""

    @property
    def finite(self) -> list[tuple[int, float]]:
        """(update, raw loss) of every finite update."""
        return [(k, loss) for k, loss in enumerate(self.raw, 1) if math.isfinite(loss)]

    @property
    def means(self) -> list[float]:
        """The trailing mean at every finite update."""
        values = [loss for _, loss in self.finite]
        return [float(mean) for mean in trailing_mean(values, WINDOW)]

    @property
    def first_mean(self) -> float | None:
        """The trailing mean over the first full window, or over all updates if they are fewer."""
        means = self.means
        return means[min(WINDOW, len(means)) - 1] if means else None

    @property
    def end_mean(self) -> float | None:
        """The trailing mean after the last finite update."""
        means = self.means
        return means[-1] if means else None

    @property
    def peak(self) -> tuple[int, float] | None:
        """(update, loss) of the largest raw loss."""
        return max(self.finite, key=lambda found: found[1], default=None)


def judge(arm: Losses, reference: Losses | None, updates: int) -> Verdict:
    """Return the verdict on an arm that should have done ``updates`` updates.

    ``reference`` is the reference arm of the same crop; None, or one that is not finite or not
    finished, leaves the comparison with it out, and the reason says so.
    """
    if arm.nonfinite is not None:
        return Verdict("nan", f"update {arm.nonfinite} was not finite")
    if len(arm.raw) < updates:
        return Verdict("unfinished", f"{len(arm.raw)} of {updates} updates")
    first, end, peak = arm.first_mean, arm.end_mean, arm.peak
    if first is None or end is None or peak is None:
        return Verdict("unfinished", "no updates")
    if peak[1] > PEAK_RATIO * first:
        ratio = f"{peak[1] / first:.1f} times the first trailing mean {first:.4g}"
        return Verdict("diverged", f"loss {peak[1]:.4g} at update {peak[0]} is {ratio}")
    usable = reference is not None and reference.nonfinite is None
    other = reference.end_mean if reference is not None and usable else None
    if reference is None or other is None or len(reference.raw) < updates:
        return Verdict("stable", "by its own losses; the reference arm has no end to compare with")
    if end > END_RATIO * other:
        ratio = f"{end / other:.2f} times the reference arm's {other:.4g}"
        return Verdict("diverged", f"the last trailing mean {end:.4g} is {ratio}")
    return Verdict("stable", f"ends at {end / other:.3f} times the reference arm's trailing mean")


def first_loss_difference(arm: Losses, reference: Losses) -> float | None:
    """Return |first loss / reference's first loss - 1|; None if either was not finite."""
    if not arm.raw or not reference.raw:
        return None
    one, two = arm.raw[0], reference.raw[0]
    return abs(one / two - 1) if math.isfinite(one) and math.isfinite(two) else None


def first_difference(one: Sequence[object], two: Sequence[object]) -> int | None:
    """Return the first update (from 1) at which two sequences differ over their common length."""
    return next((k for k, (a, b) in enumerate(zip(one, two, strict=False), 1) if a != b), None)
