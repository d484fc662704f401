"""The rule by which a loss curve follows another: what passes, and what must not."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from tpf.stability import follow

UPDATES = 200
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def curve(stray: float, seed: int) -> list[float]:
    """Return a falling loss with the same noise of samples in all, and a slow stray of its own."""
    steps = np.arange(UPDATES)
    noise = np.random.default_rng(0).normal(scale=0.2, size=UPDATES)
    walk = np.cumsum(np.random.default_rng(seed).normal(size=UPDATES)) / math.sqrt(UPDATES)
    return [float(x) for x in (2 + 3 * np.exp(-steps / 60) + noise) * (1 + stray * walk)]


EXACT, BF16 = curve(0, 1), curve(0.005, 2)


def test_worked_distance() -> None:
    assert follow.distance([2.0, 2.0], [1.0, 1.0]) == pytest.approx(1.0)
    # Trailing means (4, 5) and (4, 4): differences 0 and 25 %.
    assert follow.distance([4, 6], [4, 4], window=2) == pytest.approx(0.25 / math.sqrt(2))
    assert follow.distance(EXACT, EXACT) == 0


@pytest.mark.parametrize("seed", range(3, 8))
def test_a_sound_backend_follows(seed: int) -> None:
    found = follow.follow(curve(0.005, seed), BF16, EXACT)
    assert found.holds and found.limit >= follow.FLOOR


WRONG = {
    "two percent too large": [1.02 * x for x in BF16],
    "learns at two thirds of the rate": [BF16[k * 2 // 3] for k in range(UPDATES)],
    "goes astray in the last quarter": [x * (1.1 if k > 150 else 1) for k, x in enumerate(BF16)],
    "not finite": [*BF16[:-1], math.nan],
    "cut short": BF16[:-1],
    "no losses": [],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_one_does_not(name: str) -> None:
    assert not follow.follow(WRONG[name], BF16, EXACT).holds


def test_the_limit_is_the_reference_s_own_distance() -> None:
    far = [1.04 * x for x in EXACT]
    found = follow.follow([1.05 * x for x in EXACT], far, EXACT)
    assert found.limit == pytest.approx(0.06) and found.holds
    broken = [math.nan] * UPDATES
    assert follow.follow(BF16, broken, EXACT).limit == follow.FLOOR


STORED = sorted(RESULTS.glob("loss-curve-*.json"))


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_stored_curves_follow(path: Path) -> None:
    """Judge measured curves anew: 200 updates in FP32, in BF16, and by each backend."""
    found = json.loads(path.read_text())
    curves = found["curves"]
    exact, reference = curves.pop("torch@fp32"), curves.pop("torch")
    assert len(exact) == UPDATES and curves.keys() == found["backends"].keys()
    for name, losses in curves.items():
        judged = follow.follow(losses, reference, exact)
        assert judged.holds and judged.distance == pytest.approx(
            found["backends"][name]["distance"]
        )
        assert not follow.follow([1.03 * x for x in losses], reference, exact).holds
