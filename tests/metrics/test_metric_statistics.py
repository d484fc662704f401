"""Selection, dataset means, seeds, bootstrap and step statistics: worked numbers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tpf.errors import UsageError
from tpf.metrics.selection import (
    WEIGHTS,
    dataset_means,
    lower_is_better,
    model_selection,
    select,
)
from tpf.metrics.stats import (
    compare_tables,
    interval,
    over_seeds,
    paired_bootstrap,
    pearson,
    resample_indices,
    target_table,
    trailing_mean,
)

GPDE = (1.2, 0.8, 1.0, 2.0, 0.9)
LDDT = (0.70, 0.74, 0.80, 0.60, 0.72)
RMSD = (2.0, 1.5, 1.1, 3.0, 1.8)


def test_worked_top1_and_best() -> None:
    samples = [
        {"gpde": g, "lddt_intra_protein": v, "rmsd": r}
        for g, v, r in zip(GPDE, LDDT, RMSD, strict=True)
    ]
    chosen = select(samples)
    assert chosen.top1 == samples[1]
    assert chosen.best == {"gpde": 0.8, "lddt_intra_protein": 0.80, "rmsd": 1.1}
    assert chosen.reported["lddt_intra_protein"] == pytest.approx(0.77)
    assert chosen.reported["rmsd"] == pytest.approx(1.3)


def test_selection_needs_gpde_for_several_samples_only() -> None:
    assert select([{"rmsd": 1.0}]).reported == {"rmsd": 1.0}
    with pytest.raises(UsageError, match="gpde is missing"):
        select([{"rmsd": 1.0}, {"rmsd": 2.0}])
    with pytest.raises(UsageError, match="without samples"):
        select([])


def test_rasa_of_some_samples_is_dropped() -> None:
    chosen = select([{"gpde": 1.0, "rasa": 0.5}, {"gpde": 2.0}])
    assert "rasa" not in chosen.best and "rasa" not in chosen.reported


@pytest.mark.parametrize(
    "name", ["rmsd", "drmsd_intra_rna", "clash_inter_protein_ligand", "has_clash", "gpde"]
)
def test_smaller_is_better(name: str) -> None:
    assert lower_is_better(name)
    assert not lower_is_better("lddt_intra_protein") and not lower_is_better("gdt_ts")


def test_worked_dataset_mean_leaves_missing_out() -> None:
    means = dataset_means([{"pp": 0.6}, {"pp": 0.8}, {"pl": 1.0}, {"pl": float("nan")}])
    assert means["pp"] == (pytest.approx(0.7), 2)
    assert means["pl"] == (1.0, 1)


def test_weight_sets_sum_as_published() -> None:
    assert sum(WEIGHTS["initial"].values()) == 140
    assert sum(WEIGHTS["fine-tuning"].values()) == 119


def test_worked_model_selection() -> None:
    means = {
        "lddt_intra_protein": 0.9,
        "lddt_intra_ligand": 0.8,
        "lddt_inter_protein_ligand": 0.7,
        "rasa": 0.5,
        "rmsd": 3.0,
        "lddt_intra_rna": float("nan"),
    }
    chosen = model_selection(means)
    assert chosen.value == pytest.approx(0.766667, abs=1e-6)
    assert chosen.weights == "fine-tuning"
    assert "lddt_intra_rna" in chosen.missing and len(chosen.missing) == 7
    assert model_selection({}).value is None
    with pytest.raises(UsageError, match="initial or fine-tuning"):
        model_selection(means, "paper")


def test_worked_seeds() -> None:
    mean, sd = over_seeds((0.71, 0.73, 0.70, 0.74, 0.72))
    assert mean == pytest.approx(0.72) and sd == pytest.approx(0.0158114, abs=1e-7)
    assert over_seeds([0.5]) == (0.5, None)


def test_worked_exhaustive_bootstrap() -> None:
    indices = np.array(list(itertools.product(range(4), repeat=4)))
    values = np.array([0.02, -0.01, 0.03, 0.0])
    means = values[indices].mean(axis=-1)
    assert len(means) == 256 and values.mean() == pytest.approx(0.01)
    assert interval(means) == (pytest.approx(-0.005), pytest.approx(0.025))
    zero = np.zeros((4, 1))
    found = paired_bootstrap(values[:, None], zero, {"rasa": 10}, ["rasa"], indices)
    assert (found.value, found.low, found.high) == pytest.approx((0.01, -0.005, 0.025))


def test_worked_constant_difference() -> None:
    rng = np.random.default_rng(3)
    names = ["lddt_intra_protein", "lddt_intra_ligand", "rasa"]
    b = rng.random((85, 3))
    b[rng.random((85, 3)) < 0.3] = np.nan
    found = compare_tables(b + 0.01, b, names, "fine-tuning", resamples=500)
    assert (found.value, found.low, found.high) == pytest.approx((0.01, 0.01, 0.01))
    assert found.metrics == tuple(names) and found.resamples == 500


def test_bootstrap_agrees_with_a_loop_when_metrics_are_missing() -> None:
    rng = np.random.default_rng(5)
    names, weights = ["x", "y"], {"x": 3.0, "y": 1.0}
    a, b = rng.random((6, 2)), rng.random((6, 2))
    a[2:, 1] = np.nan  # many resamples lack y in a
    indices = resample_indices(6, 300)
    found = paired_bootstrap(a, b, weights, names, indices)

    def value(rows: np.ndarray) -> float:
        total, norm = 0.0, 0.0
        for k, name in enumerate(names):
            left = [v for v in a[rows, k] if np.isfinite(v)]
            right = [v for v in b[rows, k] if np.isfinite(v)]
            if left and right:
                total += weights[name] * (np.mean(left) - np.mean(right))
                norm += weights[name]
        return total / norm

    expected = np.percentile([value(rows) for rows in indices], (2.5, 97.5))
    assert (found.low, found.high) == pytest.approx(tuple(expected))
    assert found.value == pytest.approx(value(np.arange(6)))


def test_resamples_are_reproducible() -> None:
    first = resample_indices(85, 4)
    assert (first == resample_indices(85, 4)).all() and first.min() >= 0 and first.max() < 85
    expected = np.random.Generator(np.random.PCG64(0)).integers(0, 85, (4, 85))
    assert (first == expected).all()


def test_nothing_in_common_is_refused() -> None:
    nothing = np.full((3, 1), np.nan)
    with pytest.raises(UsageError, match="share no metric"):
        compare_tables(nothing, nothing, ["rasa"], "initial", 10)


def test_target_table_averages_over_the_seeds_that_have_the_metric() -> None:
    table = target_table([[{"x": 1.0}, {"x": 3.0, "y": 5.0}], [{}, {}]], ["x", "y"])
    np.testing.assert_array_equal(table, [[2.0, 5.0], [np.nan, np.nan]])


def test_trailing_mean() -> None:
    assert trailing_mean([9, 6, 3, 0], 3).tolist() == pytest.approx([9, 7.5, 6, 3])


def test_pearson() -> None:
    assert pearson([1, 2, 3], [2, 4, 6]) == pytest.approx(1.0)
    assert pearson([1], [2]) is None and pearson([1, 1], [2, 3]) is None
