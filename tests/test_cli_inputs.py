"""Wrong words, values, files and places of every command: one sentence and the right exit code."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.command import in_empty_folder
from tests.untrained import save_untrained
from tpf.cli.options import line_without_machines, paths_and_overrides
from tpf.kernels import ops

EXAMPLES = Path(__file__).resolve().parents[1] / "data" / "examples"
UBIQUITIN = EXAMPLES / "1ubq.cif.gz"
Tpf = Callable[..., tuple[int, str, str]]


@pytest.fixture
def tpf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tpf:
    def run(command: str, *words: str | Path) -> tuple[int, str, str]:
        inside = in_empty_folder(command, tmp_path, monkeypatch, capsys)
        return inside(*map(str, words))

    return run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose entry has 76 tokens, more than its limit."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "data").mkdir()
    shutil.copy(UBIQUITIN, folder / "data")
    few = [f"validate.{name}" for name in ("samples=1", "sampling_steps=1", "recycles=0")]
    overrides = [*few, f"data.path={folder / 'data'}", "validate.max_tokens=50"]
    return save_untrained(folder / "run", overrides)


def refused(done: tuple[int, str, str], code: int, sentence: str) -> None:
    got, output, errors = done
    assert (got, output) == (code, ""), errors
    assert errors.startswith("tpf: ") and errors.count("\n") == 1, errors
    assert re.search(sentence, errors), errors


@pytest.mark.parametrize(
    ("command", "words", "sentence"),
    [
        ("train", ["--lr", "abc"], "--lr abc: .*number.*; tpf train --help lists"),
        ("train", ["--crop=1.5"], "--crop 1.5: .*integer"),
        ("train", ["--nosuch"], "no such option: --nosuch"),
        ("train", ["--config"], "'--config' requires an argument"),
        ("train", ["--accumulate", "0"], "--accumulate 0: .*1"),
        ("traain", [], "no such command 'traain'"),
        ("validate", [], "missing argument 'checkpoint'; tpf validate --help"),
        ("validate", ["compare", "a"], "missing argument 'second'; tpf validate compare --help"),
        ("validate", ["compare", "a", "b", "--resamples", "0"], "--resamples 0: .*1"),
        ("predict", ["a", "b"], "missing option '--out'; tpf predict --help"),
        ("predict", ["a", "b=c", "--out", "x"], "predict got no INPUT"),
        ("validate", ["a", "b"], r"got 2 paths \(a, b\)"),
        ("validate", ["a=b"], "got no path"),
    ],
)
def test_words_that_the_parser_does_not_take(
    command: str, words: list[str], sentence: str, tpf: Tpf
) -> None:
    refused(tpf(command, *words), 2, sentence)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train.lr=abc"], "train.lr: Value 'abc'"),
        (["train.lr=nan"], "train.lr is nan; give a value above 0"),
        (["--lr", "inf"], "train.lr is inf"),
        (["--steps", "0"], "train.steps is 0"),
        (["train.lr=[1"], r"override 'train.lr=\[1'.*quote it"),
        (["nosuch.key=1"], "nosuch: .*config.yaml of any run"),
        (["train=3"], "a group takes keys, as train.lr=1e-3"),
        (["data.workers=-1"], "data.workers is -1; give 0 or more"),
        (["validate.max_targets=0"], "validate.max_targets is 0"),
        (["model.tri_heads=0"], "model.tri_heads is 0"),
        (["model.dropout_pair=2"], "model.dropout_pair is 2.0; give a probability"),
        (["loss.mse=nan"], "loss.mse is nan"),
        (["train.beta1=1"], "train.beta1 is 1.0; give a decay"),
        (["name=a/b"], "name is 'a/b'"),
        (["data.crop_contiguous=0", "data.crop_spatial=0", "data.crop_interface=0"], "weigh one"),
        (["--wandb", "maybe"], "train.wandb: Invalid value 'maybe', expected one of"),
        (["--rdzv", "a:1"], "--rdzv a:1 needs --nodes"),
        (["--nodes", "2", "--gpus", "2", "--rdzv", "29400"], "--rdzv HOST:PORT.*not '29400'"),
        (["--init", "a", "--resume", "b"], "--init and --resume both"),
        (["--resume", "a", "--out", "b"], "--resume a goes on in that folder; leave out --out b"),
        (["--replay", str(UBIQUITIN)], "not a replay file; give replay-step"),
        (["data.ccd=nothing", "--data", str(UBIQUITIN)], "data.ccd is nothing; no such file"),
        (["data.msa=nothing"], "data.msa nothing: .*No such file.*give a folder"),
    ],
)
def test_values_that_a_run_cannot_have(
    words: list[str], sentence: str, tmp_path: Path, tpf: Tpf
) -> None:
    refused(tpf("train", *words), 2, sentence)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("crop: [1", "not readable as YAML"),
        ("train: {lr: abc}", "train.lr: Value 'abc'"),
        ("model: {c_q: 3}", "model.c_q: Key 'c_q'"),
        ("[1, 2]", "not a table of keys and values"),
    ],
)
def test_configuration_files_name_file_and_key(
    text: str, sentence: str, tmp_path: Path, tpf: Tpf
) -> None:
    (tmp_path / "c.yaml").write_text(text)
    refused(tpf("train", "--config", "c.yaml"), 2, f"--config c.yaml: .*{sentence}")


def test_the_line_to_run_elsewhere_is_the_one_that_was_typed(tpf: Tpf) -> None:
    words = ["--gpus", "16", "--config", "full", "--nodes=2", "--rdzv", "a:1", "train.clip=5"]
    line = "tpf train --config full train.clip=5 --gpus 16 --nodes 2 --rdzv FIRST_NODE:29400"
    refused(tpf("train", *words), 3, f"run on each of 2 nodes with 8 GPUs: {line}$")
    assert line_without_machines("train") == "tpf train --config full train.clip=5"
    assert line_without_machines("validate") == "tpf validate"


@pytest.mark.parametrize("name", ["run", "compare", "itself", "validate"])
def test_a_checkpoint_may_have_any_name(name: str, model: Path, tmp_path: Path, tpf: Tpf) -> None:
    """Also options and values before it, and a name with an equals sign."""
    shutil.copytree(model, tmp_path / name)
    path = f"./{name}" if name == "compare" else name
    words = ["--samples", "1", "validate.max_tokens=80", path, "--out", "out", "--json"]
    code, output, errors = tpf("validate", *words)
    assert code == 0, errors
    (target,) = json.loads(output)["targets"]
    assert target["id"] == "1ubq" and errors == "target 1 of 1: 1ubq\n"


def test_words_are_sorted_into_paths_and_values(tmp_path: Path) -> None:
    odd = tmp_path / "a=b"
    assert paths_and_overrides([str(odd), "x"]) == ([Path("x")], [str(odd)])
    odd.mkdir()
    assert paths_and_overrides([odd, "c=d"]) == ([odd], ["c=d"])


def test_a_validation_without_a_scored_target_fails(model: Path, tmp_path: Path, tpf: Tpf) -> None:
    code, output, errors = tpf("validate", model, "--out", "out")
    assert code == 1 and "skipped 1ubq: size: 76 tokens, more than 50" in output
    assert errors == (
        "tpf: no target was scored: 1 skipped, such as 1ubq (size: 76 tokens, more than 50; "
        "--max-tokens 76 admits all, in training validate.max_tokens=76); see out/metrics.json\n"
    )
    assert (tmp_path / "out" / "metrics.json").is_file()


def test_places_that_cannot_be_written(model: Path, tmp_path: Path, tpf: Tpf) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "a.fa").write_text(">a\nMKVL\n")
    for command, words in (
        ("train", ["--data", UBIQUITIN]),
        ("validate", [model, "validate.max_tokens=80"]),
        ("predict", [model, "a.fa"]),
        ("weights", ["import", model]),
    ):
        refused(tpf(command, *words, "--out", "file/x"), 2, "file.*choose another")
        refused(tpf(command, *words, "--out", "file"), 2, "--out file exists")


@pytest.mark.parametrize(
    ("command", "words", "sentence"),
    [
        ("score", ["empty.cif", str(UBIQUITIN)], "empty.cif: read: the file is empty"),
        ("score", [str(UBIQUITIN), "folder"], "folder: this is a folder; give a structure"),
        ("score", ["none.cif", str(UBIQUITIN)], "none.cif: no such file; give a structure"),
        ("predict", ["MODEL", "empty.cif", "--out", "o"], "empty.cif: read: the file is empty"),
        ("predict", ["MODEL", "folder", "--out", "o"], "folder: this is a folder; give an mmCIF"),
        ("predict", ["MODEL", "bad.yaml", "--out", "o"], r"bad.yaml: not valid yaml \(line 2: "),
        ("predict", ["nothing", "x.fa", "--out", "o"], "nothing: no such file or folder"),
        ("validate", ["MODEL", "--data", "folder"], "folder has no structure files"),
        ("validate", ["MODEL", "--targets", "none"], "--targets none: cannot read the list"),
        ("validate", ["compare", "old.json", "old.json"], "old.json: .*give the output of"),
        ("validate", ["compare", "folder", "folder"], "folder/metrics.json: no such file"),
        ("weights", ["info", "empty.cif"], "empty.cif: empty"),
    ],
)
def test_files_that_cannot_be_read(
    command: str, words: list[str], sentence: str, model: Path, tmp_path: Path, tpf: Tpf
) -> None:
    (tmp_path / "empty.cif").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "bad.yaml").write_text("sequences: [1\n")
    (tmp_path / "old.json").write_text('{"checkpoint": 3}')
    there = sorted(tmp_path.iterdir())
    refused(tpf(command, *(str(model) if w == "MODEL" else w for w in words)), 2, sentence)
    assert sorted(tmp_path.iterdir()) == there


@pytest.mark.parametrize("stop", [KeyboardInterrupt, RuntimeError("one\ntwo")])
def test_what_ends_a_command_is_said_on_one_line(
    stop: BaseException, tpf: Tpf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*_: object) -> None:
        raise stop

    monkeypatch.setattr("tpf.score.score_files", end)
    interrupted = stop is KeyboardInterrupt
    code, sentence = (130, "tpf: interrupted$") if interrupted else (1, "unexpected .*: one .*show")
    refused(tpf("score", UBIQUITIN, UBIQUITIN), code, sentence)


def test_doctor_finds_an_operator_that_is_wrong(tpf: Tpf, monkeypatch: pytest.MonkeyPatch) -> None:
    """And says so in a table that is whole where there is no terminal."""
    right = ops.triangle_attention

    def wrong(*arguments: Any, impl: ops.Impl, **named: Any) -> Tensor:
        return right(*arguments, impl=impl, **named) * (1.001 if impl == "auto" else 1)

    monkeypatch.setattr(ops, "triangle_attention", wrong)
    code, output, errors = tpf("doctor")
    assert (code, errors) == (1, "tpf: 1 checks failed: triangle attention\n")
    assert "…" not in output and output.splitlines()[-1].startswith("--impl auto uses: ")
