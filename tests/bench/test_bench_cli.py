"""``tpf bench`` as a user meets it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from tests.command import Run, in_empty_folder


@pytest.fixture
def tpf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return in_empty_folder("bench", tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        ([], 2, "name one of attention"),
        (["speed"], 2, "bench speed: choose from attention"),
        (["--table", "7"], 2, "--table 7: choose from 2, 4, 6, 8, 9, 10, 12, 13"),
        (["accuracy", "--table", "8"], 2, "--table 8 belongs to tpf bench attention"),
        (["--table", "2", "--figure", "4"], 2, "give one of them"),
        (["attention", "--impls", "cuda,magic"], 2, "--impls magic: no such backend"),
        (["--table", "12", "--impls", "flex"], 2, "compares only paper"),
        (["attention", "--impls", ""], 2, "--impls names no backend; choose from"),
        (["attention", "--crop", "many"], 2, "--crop many: give numbers"),
        (["attention", "--dim", "65"], 2, "--dim 65: must be 1 to 64"),
        (["attention", "--device", "tpu"], 2, "--device tpu: choose cuda or cpu"),
        (["attention", "--layout", "odd"], 2, "--layout odd"),
        (["accuracy", "--table", "6", "--device", "cpu"], 2, "needs --capture RUN"),
        (["attention"], 3, "needs an NVIDIA GPU.*--device cpu"),
        (["accuracy"], 3, "needs an NVIDIA GPU"),
        (["determinism"], 3, "needs an NVIDIA GPU"),
        (["memory", "--device", "cpu"], 3, "bench memory needs an NVIDIA GPU"),
        (["--table", "9"], 3, "bench table-9 needs an NVIDIA GPU"),
        (["--figure", "9"], 3, "bench figure-9 needs an NVIDIA GPU"),
        (["trimul"], 3, "bench trimul needs an NVIDIA GPU"),
        (["block"], 3, "bench block needs an NVIDIA GPU"),
        (["step"], 3, "bench step needs an NVIDIA GPU"),
        (["--table", "10"], 3, "bench table-10 needs an NVIDIA GPU"),
        (["--table", "13"], 3, "bench table-13 needs an NVIDIA GPU"),
        (["trimul", "--impls", "flex"], 2, "bench trimul compares only cuda, torch"),
        (["trimul", "--dim", "129"], 2, "--dim 129: must be 1 to 128"),
        (["block", "--dim", "64"], 2, "--dim 64: bench block has fixed widths"),
        (["trimul", "--gpus", "2", "--device", "cpu"], 2, "--gpus 2: bench trimul uses one GPU"),
        (["step", "--gpus", "2", "--device", "cpu"], 3, "GPUs: tpf bench step --device cpu"),
        (["block", "--table", "4"], 2, "--table 4 belongs to tpf bench step"),
        (["step", "--config", "huge", "--device", "cpu"], 2, "--config huge: neither a preset"),
    ],
)
def test_wrong_use_is_one_sentence_and_leaves_nothing(
    words: list[str], code: int, sentence: str, tmp_path: Path, tpf: Run
) -> None:
    got, _, errors = tpf(*words, "--out", "run")
    assert got == code, errors
    assert errors.count("\n") == 1 and re.search(sentence, errors), errors
    assert not list(tmp_path.iterdir())


def test_table_2_needs_no_gpu_and_overwrites_nothing(tmp_path: Path, tpf: Run) -> None:
    code, shown, errors = tpf("--table", "2", "--json", "--out", "run")
    assert code == 0, errors
    result = json.loads(shown)
    assert result == json.loads((tmp_path / "run" / "bench.json").read_text())
    sizes = {(r["n"], r["tensor"]): r["mean"] for r in result["rows"]}
    assert sizes[768, "dbias_resident"] == 252 and sizes[1024, "ds"] == 16384
    assert {"gpu", "driver", "torch", "cuda", "commit", "date", "versions"} <= set(
        result["environment"]
    )
    assert result["command"].startswith("tpf bench --table 2")
    code, _, errors = tpf("--table", "2", "--out", "run")
    assert code == 2 and "never overwritten" in errors


def test_a_tiny_run_on_the_cpu(tmp_path: Path, tpf: Run) -> None:
    words = ("--device", "cpu", "--crop", "16", "--dim", "8,16", "--seeds", "2", "--out", "run")
    code, shown, errors = tpf("accuracy", "--impls", "torch,eager,trifast", *words)
    assert code == 0, errors
    assert "Figure 4: sharp inputs, random masks" in shown
    assert "trifast: not installed (pip install trifast)" in shown
    report = (tmp_path / "run" / "report.html").read_text()
    assert "<svg" in report and "<script" not in report
    rows = json.loads((tmp_path / "run" / "bench.json").read_text())["rows"]
    assert {r["dim"] for r in rows if "dim" in r} == {8, 16}
    assert torch.tensor([r["mean"] for r in rows if "mean" in r]).isfinite().all()


def test_tiny_operators_and_block_on_the_cpu(tmp_path: Path, tpf: Run) -> None:
    words = ("--device", "cpu", "--crop", "8", "--reps", "2", "--impls", "torch,eager")
    code, shown, errors = tpf("--table", "10", "--dim", "16", *words, "--errors", "--out", "update")
    assert code == 0, errors
    assert "Table 10" in shown and "Errors of the triangle multiplicative update" in shown
    code, shown, errors = tpf("block", *words, "--out", "block")
    assert code == 0 and "Pairformer block, forward + backward" in shown, errors
    assert "<svg" in (tmp_path / "update" / "report.html").read_text()
