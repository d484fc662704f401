"""``tpf stability`` as a user meets it: exit codes, files, interruption, going on."""

from __future__ import annotations

import csv
import json
import re
import time
from pathlib import Path

import pytest

from tests.command import Run, in_empty_folder
from tests.forked import Forked

EXAMPLES = Path(__file__).resolve().parents[2] / "data" / "examples"
SMALL = [
    "--config", "tiny", "--data", str(EXAMPLES / "1ubq.cif.gz"), "--crops", "16", "--warmup-crop",
    "16", "--warmup-steps", "2", "train.diffusion_samples=2", "train.rollout_steps=1",
]  # fmt: skip


@pytest.fixture
def tpf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return in_empty_folder("stability", tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["--impls", "magic"], 2, "--impls magic: no such backend; choose from auto"),
        (["--impls", ""], 2, "--impls names no backend"),
        (["--crops", "many"], 2, "--crops many: give numbers"),
        (["--crops", "0"], 2, "--crops 0: must be at least 1"),
        (["--steps", "0"], 2, "--steps 0: give 1 or more"),
        (["--warmup-steps", "0"], 2, "--warmup-steps 0: give 1 or more"),
        (["--warmup-impl", "trifast"], 2, "--warmup-impl trifast: choose one of tpf train --impl"),
        (["--nan", "ignore"], 2, "--nan ignore: choose stop or skip"),
        (["--faults", "hum:1"], 2, "--faults hum:1: no such fault; choose from noise, nan"),
        (["--faults", "nan"], 2, "--faults nan: give a number after the colon"),
        (["--tiny", "--config", "compact"], 2, "--tiny has the tiny preset"),
        (["--init", "nothing"], 2, "nothing: no such file or folder"),
        (["train.clipp=3"], 2, "Did you mean: 'clip'"),
        (["--lr", "-1"], 2, "lr is -1"),
        (["train.steps=5"], 2, "train.steps=5: a study sets it for every arm; use --warmup-steps"),
        (["--resume", "nothing"], 2, "--resume nothing: not a study folder"),
        (["--resume", "nothing", "--out", "other"], 2, "leave out --out other"),
        (["--resume"], 2, "--resume: no study in runs/"),
        (["--resume", "nothing", "--lr", "1"], 2, "train.lr=1.0 is fixed by the study"),
        (["--resume", "nothing", "--warmup-steps", "5"], 2, "--warmup-steps is fixed"),
        (["--impls", "cuda"], 3, "no backend of the study can run here: cuda: .*NVIDIA GPU"),
        (["--impls", "paper,flex"], 3, "paper: needs an NVIDIA GPU"),
    ],
)
def test_wrong_use_is_one_sentence_and_leaves_nothing(
    tpf: Run, tmp_path: Path, words: list[str], code: int, sentence: str
) -> None:
    found, _, errors = tpf(*words)
    assert found == code and errors.count("\n") == 1, errors
    assert re.search(sentence, errors), errors
    assert not list(tmp_path.iterdir())


def test_existing_out_is_never_overwritten(tpf: Run, tmp_path: Path) -> None:
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "precious").write_text("x")
    code, _, errors = tpf("--tiny", "--out", "study")
    assert code == 2 and "never overwritten" in errors
    assert (tmp_path / "study" / "precious").read_text() == "x"


def test_bad_data_is_told_and_leaves_nothing(tpf: Run, tmp_path: Path) -> None:
    code, _, errors = tpf("--data", "none", "--out", "study")
    assert code == 2 and errors.endswith("tpf: none: no such file or folder; give a folder, a list "
                                         "or an mmCIF file\n")  # fmt: skip
    assert not list(tmp_path.iterdir())


def _start(folder: Path, *words: str) -> Forked:
    return Forked(["stability", *words], cwd=folder, env={"CUDA_VISIBLE_DEVICES": ""})


def _losses(study: Path, arm: str) -> list[float | None]:
    lines = (study / "arms" / "crop-16" / arm / "run" / "train.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_interrupted_study_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Ctrl-C in the first arm; then the rest, with an arm and updates added to the study."""
    study = tmp_path / "study"
    process = _start(
        tmp_path, "--out", "study", "--impls", "torch", "--steps", "300", "--warmup-impl", "auto",
        *SMALL,
    )  # fmt: skip
    process.wait_for_lines(study / "arms" / "crop-16" / "torch" / "run" / "train.jsonl", 4)
    process.interrupt()
    code, _, errors = process.end()
    assert code == 130, errors
    assert errors.endswith("tpf: interrupted; go on with: tpf stability --resume study\n")
    before = _losses(study, "torch")
    stored = json.loads((study / "study.json").read_text())
    assert stored["settings"]["steps"] == 300
    row = stored["rows"][0]
    assert (row["verdict"], row["updates"]) == ("unfinished", len(before))
    # A shorter study, so that the rest takes seconds.
    updates = len(before) + 2
    stored["settings"]["steps"] = 1
    (study / "study.json").write_text(json.dumps(stored))
    process = _start(
        tmp_path, "--resume", "study", "--steps", str(updates), "--impls", "torch,cuda", "--faults",
        "nan:3", "--json",
    )  # fmt: skip
    code, output, errors = process.end()
    assert code == 0, errors
    assert "warm-up" not in errors
    assert _losses(study, "torch")[: len(before)] == before
    result = json.loads(output)
    found = {row["impl"]: (row["verdict"], row["updates"]) for row in result["rows"]}
    assert found == {"torch": ("stable", updates), "cuda": ("unavailable", 0), "nan:3": ("nan", 2)}
    assert result == json.loads((study / "study.json").read_text())
    assert {"gpu", "torch", "commit", "versions"} <= result["environment"].keys()
    assert result["failures"] == []
    rows = list(csv.DictReader((study / "curves.csv").open()))
    assert [row["impl"] for row in rows] == ["torch"] * updates + ["nan:3"] * 2
    assert rows[3]["update"] == "4" and float(rows[3]["loss"]) == before[3]
    assert float(rows[1]["trailing_mean"]) == pytest.approx(sum(before[:2]) / 2)
    report = (study / "report.html").read_text()
    assert "nan:3: not finite" in report and "crop 16" in report and "<script" not in report


def test_killed_study_ends_its_arm_with_the_state_saved(tmp_path: Path) -> None:
    log = tmp_path / "study" / "warmup" / "run" / "train.jsonl"
    words = [*SMALL]
    words[words.index("--warmup-steps") + 1] = "400"
    process = _start(tmp_path, "--out", "study", "--impls", "torch", *words)
    process.wait_for_lines(log, 3)
    process.kill()
    process.end()
    limit, done = time.monotonic() + 30, 0
    while time.monotonic() < limit and done == 0:
        steps = [p.name for p in (log.parent / "checkpoints").glob("step-*")]
        done = max(int(name.removeprefix("step-")) for name in steps)
        time.sleep(0.1)
    assert 3 <= done < 400


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_tiny_study_finds_its_faults(tmp_path: Path) -> None:
    process = _start(tmp_path, "--tiny", "--json", "--out", "study")
    code, output, errors = process.end(1200)
    assert code == 0, errors
    verdicts = {(row["crop"], row["impl"]): row["verdict"] for row in json.loads(output)["rows"]}
    expected = {"torch": "stable", "eager": "stable", "noise:1e4": "diverged", "nan:10": "nan"}
    assert verdicts == {(n, impl): v for n in (32, 48, 64) for impl, v in expected.items()}
