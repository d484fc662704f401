"""Checkpoints are whole or absent, and damage is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tpf import checkpoint
from tpf.config import load
from tpf.errors import TpfError, UsageError


def _save(run: Path, step: int) -> Path:
    tensors = {name: {"w": torch.full((3,), float(step))} for name in ("model", "ema", "optimizer")}
    return checkpoint.save(run, step, load("tiny"), tensors, {"seed": 0})


def test_round_trip(tmp_path: Path) -> None:
    path = _save(tmp_path, 7)
    saved = checkpoint.load(path)
    assert saved.step == 7 and saved.config == load("tiny") and saved.extra == {"seed": 0}
    assert torch.equal(saved.ema["w"], torch.full((3,), 7.0))
    assert (tmp_path / "checkpoints" / "last").read_text().strip() == path.name


def test_no_temporary_files_stay(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == ["last", "step-000001"]


def test_prune_keeps_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 3, 1_000_000):
        _save(tmp_path, step)
    checkpoint.prune(tmp_path, 2)
    assert checkpoint.resolve(tmp_path).name == "step-1000000"
    assert not (tmp_path / "checkpoints" / "step-000002").exists()
    assert (tmp_path / "checkpoints" / "step-000003").exists()


@pytest.mark.parametrize("damage", ["truncate", "delete", "state"])
def test_damaged_checkpoint_falls_back_to_the_one_before(tmp_path: Path, damage: str) -> None:
    _save(tmp_path, 1)
    last = _save(tmp_path, 2)
    if damage == "truncate":
        file = last / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-4])
    elif damage == "delete":
        (last / "ema.safetensors").unlink()
    else:
        (last / "state.json").write_text("{")
    messages: list[str] = []
    assert checkpoint.load_last(tmp_path, messages.append).step == 1
    assert "step-000002" in messages[0] and "falling back" in messages[0]


def test_interrupted_write_is_not_seen(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    half = tmp_path / "checkpoints" / ".step-000002.123"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    assert checkpoint.load_last(tmp_path, print).step == 1


def test_unwritable_folder_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(TpfError, match="free space or choose another --out"):
        _save(tmp_path, 1)


def test_weights_of_another_model_are_refused() -> None:
    module = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"bias is \[3\], this model has \[2\]"):
        checkpoint.load_weights(module, nn.Linear(2, 3).state_dict(), "x")
    with pytest.raises(UsageError, match="1 tensors missing"):
        checkpoint.load_weights(module, {"weight": torch.zeros(2, 2)}, "x")


def test_resolve_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        checkpoint.resolve(tmp_path / "none")
    with pytest.raises(UsageError, match="neither a run folder"):
        checkpoint.resolve(tmp_path)
