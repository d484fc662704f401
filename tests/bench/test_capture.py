"""Table 6 from a run to the table: the calls of its next step, captured and replayed."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.command import in_empty_folder
from tests.ranks import small
from tpf.bench import capture
from tpf.bench.captured import read_capture
from tpf.bench.cases import Settings
from tpf.cli.display import Silent
from tpf.errors import UsageError
from tpf.train import Options, train

CPU = torch.device("cpu")
LAYERS = 2 + 2 + 2
"""Triangle attention of the tiny preset with one block each: MSA, Pairformer, confidence."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("capture") / "run"
    config = small("train.batch_size=1", "train.steps=3", "train.warmup=0", "model.checkpoint=true")
    train(config, Options(run, validate=False), Silent())
    return run


def test_calls_are_those_of_the_next_step(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings((), (), CPU)
    calls = capture.capture(trained, settings)
    assert 0 < len(calls) <= LAYERS
    again = capture.capture(trained, settings)
    for one, two in zip(calls, again, strict=True):
        assert one.q.shape[1:2] == one.q.shape[3:4] and one.bias.shape[1] == 1
        for x in dataclasses.fields(one):
            left, right = getattr(one, x.name), getattr(two, x.name)
            assert left is right is None or torch.equal(left, right)
    monkeypatch.setattr(capture, "CALLS", 3)
    fewer = capture.capture(trained, settings)
    assert 0 < len(fewer) < len(calls)
    assert any(torch.equal(fewer[0].q, call.q) for call in calls)


def test_a_run_without_gradients_is_refused(trained: Path) -> None:
    with pytest.raises(UsageError, match="no gradient reaches the attention at step 0"):
        capture.capture(trained / "checkpoints" / "step-000000", Settings((), (), CPU))


def test_table_6_of_a_run_and_of_the_file_that_it_leaves(
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tpf = in_empty_folder("bench", tmp_path, monkeypatch, capsys)
    words = ("--table", "6", "--device", "cpu", "--impls", "torch,eager,trifast")
    code, shown, errors = tpf(*words, "--capture", str(trained), "--out", "first")
    assert code == 0, errors
    assert "6 captured calls" in shown and "trifast: not installed" in shown
    kept = tmp_path / "first" / "calls.safetensors"
    assert load_file(kept)["0.q"].dtype == torch.bfloat16
    assert len(read_capture(kept, CPU)) == len(capture.capture(trained, Settings((), (), CPU)))
    code, _, errors = tpf(*words, "--capture", str(kept), "--out", "second")
    assert code == 0, errors
    found = []
    for name in ("first", "second"):
        rows = json.loads((tmp_path / name / "bench.json").read_text())["rows"]
        found.append({(r["impl"], r["tensor"]): r["mean"] for r in rows if "tensor" in r})
    assert found[0] == pytest.approx(found[1], rel=1e-6)  # the file has other strides
    assert len(found[0]) == 2 * 5 and all(math.isfinite(x) for x in found[0].values())
    assert found[0]["torch", "dq"] < found[0]["eager", "dq"]
