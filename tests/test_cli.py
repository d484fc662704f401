"""The command line as a user meets it: exit codes, one-line errors, speed of --help."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.command import in_empty_folder
from tpf.cli.train import _start, train
from tpf.config import load, to_yaml
from tpf.errors import UsageError, told
from tpf.launch import Plan

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "data" / "examples"


def tpf(*words: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "WORLD_SIZE"}
    return subprocess.run(
        [sys.executable, "-m", "tpf.cli", *map(str, words)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment | {"OMP_NUM_THREADS": "1"},
        timeout=240,
        check=False,
    )


def one_sentence(done: subprocess.CompletedProcess[str], code: int) -> str:
    """Check the exit code and that standard error is one line without a traceback; return it."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    "words", [[], ["train"], ["validate", "run"], ["score"], ["data", "check"], ["doctor"]]
)
def test_help_is_instant(words: list[str]) -> None:
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        done = tpf(*words, "--help")
        times.append(time.perf_counter() - begin)
        assert done.returncode == 0 and "--help" in done.stdout
    assert min(times) < 1.5  # 0.3 s on an idle machine


def test_help_does_not_import_torch() -> None:
    code = "import sys; sys.argv = ['tpf']; import tpf.cli.app; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_help_texts_are_documented() -> None:
    """docs/cli.txt holds the help of every command; `make docs` writes it."""
    from tpf.cli.helptext import all_help

    assert (ROOT / "docs" / "cli.txt").read_text() == all_help()


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["train", "--crop", "0"], 2, "crop is 0"),
        (["train", "--gpus", "16"], 3, r"--gpus 16: .*tpf train --gpus 16"),
        (["train", "--data", "no/such/folder"], 2, "no/such/folder: no such file or folder"),
        (["train", "model.c_zz=3"], 2, "Did you mean: 'c_z'"),
        (["train", "--config", "tinny"], 2, "--config tinny"),
        (["train", "--lr", "-1"], 2, "lr is -1"),
        (["train", "--batch-size", "0"], 2, "batch_size is 0"),
        (["train", "--accumulate", "2", "--batch-size", "2"], 2, "--accumulate and --batch-size"),
        (["train", "--init", "nothing"], 2, "nothing: no such file or folder"),
        (["train", "--resume", "nothing"], 2, "--resume nothing: not a run folder"),
        (["train", "--impl", "magic"], 2, "--impl magic: no such backend; choose from auto"),
        (["train", "--impl", "cuda"], 3, "--impl cuda needs an NVIDIA GPU"),
        (["train", "--replay", "nothing"], 2, "--replay nothing: no such file"),
        (["data", "check", "nothing"], 2, "nothing: no such file or folder"),
        (["data", "show", "nothing"], 2, "nothing: no such file or folder"),
        (["data", "show", "nothing", "--seed", "-1"], 2, "--seed -1: .*greater than or equal to 0"),
        (["validate", "nothing"], 2, "nothing: no such file or folder"),
        (["score", "a.cif", "b.cif"], 2, "a.cif: no such file"),
    ],
)
def test_wrong_input_is_one_sentence(
    words: list[str],
    code: int,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = in_empty_folder(words[0], tmp_path, monkeypatch, capsys)
    got, output, errors = run(*words[1:])
    assert (got, output) == (code, "")
    assert errors.count("\n") == 1 and re.search(sentence, errors), errors
    assert not list(tmp_path.iterdir()), "a refused command leaves nothing behind"


def test_a_process_ends_with_the_code_and_the_sentence(tmp_path: Path) -> None:
    done = tpf("train", "--crop", "0", cwd=tmp_path)
    assert one_sentence(done, 2) == "tpf: data.crop is 0; give a value above 0\n"
    debug = tpf("train", "--crop", "0", "--debug", cwd=tmp_path)
    assert debug.returncode == 1 and "Traceback" in debug.stderr


def test_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no structure files" in one_sentence(tpf("train", "--data", "empty", cwd=tmp_path), 2)


def test_folder_of_bad_files_names_the_reasons(tmp_path: Path) -> None:
    folder = tmp_path / "bad"
    folder.mkdir()
    (folder / "cut.cif.gz").write_bytes((EXAMPLES / "1ubq.cif.gz").read_bytes()[:2000])
    (folder / "model.cif").write_text("ATOM      1  N   MET A   1      27.340  24.430   2.614\n")
    message = one_sentence(tpf("train", "--data", folder, cwd=tmp_path), 2)
    assert "none of 2 entries is usable" in message


def test_pdb_format_is_refused_with_the_way_out(tmp_path: Path) -> None:
    file = tmp_path / "1abc.pdb"
    file.write_text("HEADER    TEST\nATOM      1  N   MET A   1      27.340  24.430   2.614\nEND\n")
    done = tpf("data", "check", file)
    assert done.returncode == 0 and "mmCIF" in done.stdout


def test_existing_out_is_never_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "precious").write_text("x")
    message = one_sentence(tpf("train", "--out", out, cwd=tmp_path), 2)
    assert "never overwritten" in message and (out / "precious").read_text() == "x"


def test_restarts_never_go_on_in_a_folder_that_was_there_before(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="never overwritten"):
        _start(Plan("launch", 2), load("tiny"), tmp_path, False, None, False, restarts=1)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--config", "compact"], "--config compact: run run was trained with tiny"),
        (["--crop", "32"], "data.crop was 64 and would be 32"),
    ],
)
def test_resume_keeps_the_recipe(words: list[str], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(load("tiny")))
    message = one_sentence(tpf("train", "--resume", "run", *words, cwd=tmp_path), 2)
    assert sentence in message, message


@pytest.mark.parametrize(
    ("variables", "option", "words"),
    [
        ({}, {"wandb": "offline"}, "--wandb offline: .*; pip install wandb"),
        ({"WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "1"}, {"out": None}, "needs --out"),
    ],
)
def test_what_cannot_start_leaves_no_run_folder(
    variables: dict[str, str],
    option: dict[str, Any],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.chdir(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=words):
        train(**{"config": "tiny", "out": Path("run"), **option})
    assert not list(tmp_path.iterdir())


def test_operator_that_does_not_repeat_is_told_with_the_way_out() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError) as caught:
            torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
    finally:
        torch.use_deterministic_algorithms(False)
    error = told(caught.value)
    assert str(error).startswith(
        "put_ does not have a deterministic implementation; give train.det"
    )
    assert error.exit_code == 1 and "torch" not in str(error)


def test_data_check_counts_and_strict(tmp_path: Path) -> None:
    (tmp_path / "bad.cif").write_text("not a structure")
    done = tpf("data", "check", EXAMPLES / "1ubq.cif.gz", tmp_path / "bad.cif")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "2 files: 1 ok, 1 cannot be used"
    assert tpf("data", "check", "--strict", tmp_path / "bad.cif").returncode == 1
    lines = tpf("data", "check", "--json", EXAMPLES / "1ubq.cif.gz").stdout.splitlines()
    assert json.loads(lines[0])["id"] == "1ubq"


def test_data_show(tmp_path: Path) -> None:
    done = tpf("data", "show", EXAMPLES / "1ubq.cif.gz", "--crop", "32", "--json")
    facts = json.loads(done.stdout)
    assert facts["tokens"] == 76 and len(facts["crop"]["tokens"]) == 32


def test_score_of_a_file_with_itself() -> None:
    done = tpf("score", EXAMPLES / "1ubq.cif.gz", EXAMPLES / "1ubq.cif.gz", "--json")
    metrics = json.loads(done.stdout)["metrics"]
    assert metrics["lddt_intra_protein"] == 1 and metrics["rmsd"] < 1e-3


def test_corrupt_gzip_is_named(tmp_path: Path) -> None:
    file = tmp_path / "x.cif.gz"
    file.write_bytes(gzip.compress(b"data_x\n")[:-6])
    done = tpf("data", "check", file)
    assert done.returncode == 0
    assert done.stdout.startswith("x.cif.gz: read: damaged gzip stream")


def test_doctor_reports_and_ends_with_the_choice() -> None:
    done = tpf("doctor", "--json")
    report = json.loads(done.stdout)
    names = {f["name"]: f["status"] for f in report["findings"]}
    tested = ("torch", "triangle attention", "triangle multiplication", "pair block")
    assert {names[name] for name in tested} == {"ok"}
    assert report["auto"].startswith("--impl auto uses:")
