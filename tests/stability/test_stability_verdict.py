"""The rules of the study on worked numbers."""

from __future__ import annotations

import math

import pytest

from tpf.stability.verdict import (
    Losses,
    first_difference,
    first_loss_difference,
    judge,
)

FLAT = Losses([4.0] * 30)


def test_trailing_mean_has_a_window_of_25() -> None:
    rising = Losses([float(k) for k in range(1, 31)])
    assert rising.means[0] == 1 and rising.means[3] == 2.5
    assert rising.means[24] == 13 and rising.means[29] == 18  # means of 1..25 and of 6..30
    assert rising.first_mean == 13 and rising.end_mean == 18
    assert rising.peak == (30, 30.0)


def test_short_arm_takes_all_its_updates() -> None:
    short = Losses([9.0, 6.0, 3.0])
    assert short.means == [9, 7.5, 6] and short.first_mean == 6 and short.end_mean == 6


def test_nan_comes_before_divergence() -> None:
    arm = Losses([4.0] * 29 + [math.nan], nonfinite=30)
    verdict = judge(arm, FLAT, 30)
    assert verdict.name == "nan" and "update 30" in verdict.reason
    assert arm.finite[-1] == (29, 4.0)


def test_arm_that_stopped_at_nan_is_not_unfinished() -> None:
    assert judge(Losses([4.0] * 9, nonfinite=10), FLAT, 30).name == "nan"


@pytest.mark.parametrize(("last", "name"), [(8.0, "stable"), (8.1, "diverged")])
def test_end_beyond_twice_the_reference(last: float, name: str) -> None:
    """The last 25 of 30 losses are ``last``; the reference ends at 4."""
    verdict = judge(Losses([4.0] * 5 + [last] * 25), FLAT, 30)
    assert verdict.name == name


@pytest.mark.parametrize(("peak", "name"), [(20.0, "stable"), (20.1, "diverged")])
def test_peak_beyond_five_first_means(peak: float, name: str) -> None:
    """The first window is flat at 4, a single later loss stands out."""
    verdict = judge(Losses([4.0] * 26 + [peak] + [4.0] * 3), FLAT, 30)
    assert verdict.name == name
    if name == "diverged":
        assert "at update 27" in verdict.reason


def test_without_a_usable_reference_an_arm_is_judged_by_itself() -> None:
    for reference in (None, Losses([4.0] * 3), Losses([4.0] * 29, nonfinite=30), Losses([])):
        verdict = judge(Losses([400.0] * 30), reference, 30)
        assert verdict.name == "stable" and "no end to compare with" in verdict.reason
    assert judge(Losses([4.0] * 25 + [21.0] * 5), None, 30).name == "diverged"


def test_unfinished() -> None:
    assert judge(Losses([4.0] * 29), FLAT, 30).reason == "29 of 30 updates"
    assert judge(Losses([]), FLAT, 30).name == "unfinished"


def test_first_loss_difference() -> None:
    assert first_loss_difference(Losses([4.08]), FLAT) == pytest.approx(0.02)
    assert first_loss_difference(Losses([math.nan], 1), FLAT) is None
    assert first_loss_difference(Losses([]), FLAT) is None


def test_first_difference_over_the_common_length() -> None:
    assert first_difference([1, 2, 3], [1, 2]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 2
