"""metrics.json and targets.csv: aggregation, round trip, comparison."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tpf.errors import UsageError
from tpf.metrics.schema import (
    LigandResult,
    SeedResult,
    Skipped,
    TargetResult,
    Validation,
    compare,
    correlations,
    dataset_values,
    from_dict,
    read_json,
    to_dict,
    write_csv,
    write_json,
)

SETTINGS = {"samples": 2, "sampling_steps": 20, "seeds": [0, 1]}


def validation(
    shift: float = 0.0,
    ids: Sequence[str] = ("1aaa", "1bbb", "1ccc"),
    seeds: int = 2,
    **settings: Any,
) -> Validation:
    targets = []
    for t, name in enumerate(ids):
        results = []
        for seed in range(seeds):
            samples = [
                {
                    "gpde": 1.0 + k,
                    "lddt_intra_protein": 0.5 + 0.1 * t + 0.02 * seed + 0.04 * k + shift,
                    "plddt_protein": 50.0 + 10 * t + 4 * k,
                    "rmsd": float("nan") if t == 2 else 2.0 - k,
                }
                for k in range(2)
            ]
            results.append(SeedResult.build(seed, samples))
        ligands = [LigandResult("B", "ATP", "nucleotide", [1.5] * seeds)]
        targets.append(TargetResult(name, 100 + t, results, 2, 1, ligands, "TK"))
    skipped = [Skipped("9zzz", "2000 tokens exceed --max-tokens 500")]
    return Validation.build("step-000100", SETTINGS | settings, targets, skipped)


def test_dataset_values_by_hand() -> None:
    result = validation()
    first = result.targets[0].seeds[0]
    assert first.top1["lddt_intra_protein"] == pytest.approx(0.5)
    assert first.best["lddt_intra_protein"] == pytest.approx(0.54)
    assert first.reported["lddt_intra_protein"] == pytest.approx(0.52)
    value = result.dataset["lddt_intra_protein"]
    assert value.mean == pytest.approx(0.62 + 0.01)  # mean of 0.62 (seed 0) and 0.64 (seed 1)
    assert value.sd == pytest.approx(np.std([0.62, 0.64], ddof=1)) and value.n == 3
    assert result.dataset["rmsd"].mean == pytest.approx(1.5) and result.dataset["rmsd"].n == 2
    assert dataset_values(result.targets, "top1")["lddt_intra_protein"].mean == pytest.approx(0.61)
    assert result.model_selection.value == pytest.approx(0.63)
    assert validation(seeds=1).dataset["rmsd"].sd is None


def test_repeated_targets_count_once() -> None:
    assert len(validation(ids=("1aaa", "1aaa", "1bbb")).targets) == 2


def test_round_trip(tmp_path: Path) -> None:
    result = validation()
    write_json(result, tmp_path / "metrics.json")
    assert read_json(tmp_path) == result == from_dict(to_dict(result))
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.json"]
    document = json.loads((tmp_path / "metrics.json").read_text())
    assert set(document) == {
        "checkpoint",
        "settings",
        "targets",
        "dataset",
        "model_selection",
        "skipped",
    }
    target = document["targets"][0]
    named = {"id", "n_tokens", "seeds", "chains", "interfaces", "ligands", "group"}
    assert set(target) == named
    assert set(target["seeds"][0]) == {"seed", "samples", "top1", "best", "reported"}
    assert set(document["dataset"]["gpde"]) == {"mean", "sd", "n"}
    assert document["model_selection"]["weights"] == "fine-tuning"


def test_csv_has_a_row_for_every_choice(tmp_path: Path) -> None:
    result = validation()
    write_csv(result, tmp_path / "targets.csv")
    rows = list(csv.DictReader((tmp_path / "targets.csv").open()))
    assert len(rows) == 3 * 2 * (2 + 3)
    assert [row["choice"] for row in rows[:5]] == ["sample0", "sample1", "top1", "best", "reported"]
    assert float(rows[4]["lddt_intra_protein"]) == pytest.approx(0.52)
    assert rows[-1]["rmsd"] == ""


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        read_json(tmp_path)
    (tmp_path / "metrics.json").write_text("{")
    with pytest.raises(UsageError, match="not readable"):
        read_json(tmp_path)
    for text in ("[]", "{}"):
        (tmp_path / "metrics.json").write_text(text)
        with pytest.raises(UsageError, match=f"{tmp_path}/metrics.json: .* output of tpf validate"):
            read_json(tmp_path)


def test_comparison_of_a_constant_shift() -> None:
    found = compare(validation(0.01), validation(), resamples=200)
    assert (found.value, found.low, found.high) == pytest.approx((0.01, 0.01, 0.01))
    assert found.metrics == ("lddt_intra_protein",)


def test_the_order_of_targets_does_not_matter() -> None:
    one, two = validation(0.01), validation()
    turned = dataclasses.replace(two, targets=two.targets[::-1])
    assert compare(one, turned, resamples=50) == compare(one, two, resamples=50)


def test_comparison_refuses_different_validations() -> None:
    with pytest.raises(UsageError, match="setting sampling_steps differs"):
        compare(validation(), validation(sampling_steps=200))
    with pytest.raises(UsageError, match="target lists differ"):
        compare(validation(), validation(ids=("1aaa", "1bbb")))
    with pytest.raises(UsageError, match="seeds of target 1aaa differ"):
        compare(validation(), validation(seeds=1))


def test_correlation_of_confidence_and_accuracy() -> None:
    found = correlations(validation(seeds=1))
    assert found == {"protein": pytest.approx(1.0)}
