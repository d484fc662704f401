"""The report and the tables of a validation with groups, ligands, seeds and pictures."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_report import check
from typer.testing import CliRunner

from tpf.cli.app import app
from tpf.metrics.calibration import BINS
from tpf.metrics.picture import Trace
from tpf.metrics.schema import LigandResult, SeedResult, TargetResult, Validation, write_json
from tpf.report.targets import group_rows, ligand_rows
from tpf.report.validate import validation_report


def kinases(seeds: int = 2) -> Validation:
    targets = []
    for t, (name, group) in enumerate((("1abl", "TK"), ("1src", "TK"), ("1cdk", "CMGC"))):
        results = [
            SeedResult.build(
                seed,
                [{"gpde": 1.0 + k, "lddt_intra_protein": 0.5 + 0.1 * t + 0.02 * seed, "rmsd": 3.0}
                 for k in range(2)],
            )
            for seed in range(seeds)
        ]  # fmt: skip
        ligands = [LigandResult("B", "STI", "small molecule", [1.0 + t, 2.0 + t])]
        targets.append(TargetResult(name, 280, results, 1, 0, ligands, group))
    return Validation.build("run, step 7", {"seeds": seeds}, targets, [])


def test_groups_and_ligands_by_hand() -> None:
    (cmgc, tk) = group_rows(kinases(), ["lddt_intra_protein", "gdt_ts"])
    assert cmgc == ["CMGC", 1, pytest.approx(0.71), None]
    assert tk == ["TK", 2, pytest.approx(0.56), None]  # (0.51 + 0.61) / 2
    assert ligand_rows(kinases()) == [["small molecule", 3, 2.5, pytest.approx(1 / 3)]]


def test_report_has_every_part() -> None:
    picture = [Trace("A", False, [[0.0, 0.0], [3.8, 0.0]], [95, 40], [[0.0, 1.0], None])]
    table = [[0.0, 0.0, 0.0]] * (BINS - 1) + [[4.0, 390.0, 350.0]]
    document = validation_report(kinases(), {"1abl": picture}, table)
    check(document)
    wanted = ("Seeds", "seed 1", "Groups", "CMGC", "Ligands", "small molecule", "experiment")
    for text in (*wanted, "calibration; mean error 10.0", "1abl TK, 280 tokens", "best", "top-1"):
        assert text in document, text
    assert document.count("<details>") == 3
    single = validation_report(kinases(1))
    check(single)
    assert "seed 1" not in single and "calibration" not in single


def test_comparison_on_the_command_line(tmp_path: Path) -> None:
    for name, seeds in (("a", 2), ("b", 2), ("c", 1)):
        (tmp_path / name).mkdir()
        write_json(kinases(seeds), tmp_path / name / "metrics.json")
    words = ["validate", "compare", str(tmp_path / "a"), str(tmp_path / "b"), "--resamples", "20"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and "+0.0000  95 % interval [+0.0000, +0.0000]" in done.stdout
    words[3] = str(tmp_path / "c")
    failed = CliRunner().invoke(app, words)
    assert "setting seeds differs (2 and 1)" in str(failed.exception)
