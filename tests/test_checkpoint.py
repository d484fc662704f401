"""Checkpoints are whole or absent, and damage is named."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tpf import checkpoint
from tpf.config import load
from tpf.errors import TpfError, UsageError
from tpf.runfolder import RunFolder
from tpf.saver import Saver, State

CONFIG = load("tiny", ["train.keep=2"])


def _tensors(value: float, size: int = 3) -> dict[str, dict[str, torch.Tensor]]:
    return {
        name: {"w": torch.full((size,), float(value))} for name in ("model", "ema", "optimizer")
    }


def _save(run: Path, step: int, size: int = 3) -> Path:
    return checkpoint.save(run, step, load("tiny"), _tensors(step, size), {"seed": 0})


def _begin(saver: Saver, step: int, tensors: State, extra: dict[str, Any]) -> None:
    copied = {
        part: {name: saver.copy(f"{part} {name}", x) for name, x in named.items()}
        for part, named in tensors.items()
    }
    saver.save(step, CONFIG, copied, extra)


def _names(run: Path) -> list[str]:
    return sorted(p.name for p in (run / "checkpoints").iterdir())


def test_round_trip(tmp_path: Path) -> None:
    path = _save(tmp_path, 7)
    saved = checkpoint.load(path)
    assert saved.step == 7 and saved.config == load("tiny") and saved.extra == {"seed": 0}
    assert torch.equal(saved.ema["w"], torch.full((3,), 7.0))
    assert (tmp_path / "checkpoints" / "last").read_text().strip() == path.name


def test_no_temporary_files_stay(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    assert _names(tmp_path) == ["last", "step-000001"]


def test_prune_keeps_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 3, 1_000_000):
        _save(tmp_path, step)
    checkpoint.prune(tmp_path, 2, 1_000_000)
    assert checkpoint.resolve(tmp_path).name == "step-1000000"
    assert not (tmp_path / "checkpoints" / "step-000002").exists()
    assert (tmp_path / "checkpoints" / "step-000003").exists()
    _save(tmp_path, 4)
    checkpoint.prune(tmp_path, 1, 4)  # of a run that went back before a damaged checkpoint
    assert _names(tmp_path) == ["last", "step-000004", "step-1000000"]


@pytest.mark.parametrize("damage", ["truncate", "delete", "state", "step", "bit"])
def test_damaged_checkpoint_falls_back_to_the_one_before(tmp_path: Path, damage: str) -> None:
    _save(tmp_path, 1)
    last = _save(tmp_path, 2)
    if damage == "truncate":
        file = last / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-4])
    elif damage == "delete":
        (last / "ema.safetensors").unlink()
    elif damage == "bit":
        file = last / "optimizer.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    elif damage == "step":
        state = json.loads((last / "state.json").read_text())
        (last / "state.json").write_text(json.dumps(state | {"step": 3}))
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
    with pytest.raises(TpfError, match="free space or make it writable"):
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


def test_pruning_leaves_nothing_half_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed while it deletes leaves no folder that looks like a checkpoint."""
    for step in (1, 2):
        _save(tmp_path, step)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    checkpoint.prune(tmp_path, 1, 2)
    visible = [name for name in _names(tmp_path) if not name.startswith(".")]
    assert visible == ["last", "step-000002"]


@contextmanager
def _largest_file(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_failed_write_leaves_the_earlier_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    with _largest_file(20_000), pytest.raises(TpfError, match="step-000002 cannot be written"):
        _save(tmp_path, 2, size=10_000)
    assert _names(tmp_path) == ["last", "step-000001"]
    assert checkpoint.load_last(tmp_path, print).step == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a tmpfs")
    words = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_full_disk_is_survived_and_told_once(small_disk: Path) -> None:
    saver = Saver(small_disk)
    _begin(saver, 1, _tensors(1, 10_000), {})  # 120 kB
    saver.wait()
    _begin(saver, 2, _tensors(2, 20_000), {})  # 240 kB more
    with pytest.raises(TpfError, match=r"step-000002 cannot be written .*earlier ones"):
        saver.wait()
    assert _names(small_disk) == ["last", "step-000001"]
    assert (small_disk / "checkpoints" / "last").read_text() == "step-000001\n"
    _begin(saver, 3, _tensors(3, 20_000), {})
    while (problem := saver.problem()) is None:
        time.sleep(0.01)
    assert "step-000003" in problem and saver.problem() is None
    _begin(saver, 4, _tensors(4, 5_000), {})  # fits again
    assert saver.close() is None
    assert checkpoint.load_last(small_disk, print).step == 4


def test_saver_copies_before_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that follow change the tensors while a slow disk is written."""
    goes_on = threading.Event()
    write = checkpoint.save

    def slow(*arguments: Any) -> Path:
        assert goes_on.wait(30)
        return write(*arguments)

    monkeypatch.setattr(checkpoint, "save", slow)
    saver, tensors, skipped = Saver(tmp_path), _tensors(1), [1]
    for step in (1, 2, 3):
        _begin(saver, step, tensors, {"skipped": skipped})
        assert not (tmp_path / "checkpoints" / f"step-{step:06d}").exists()
        for named in tensors.values():
            named["w"] += 1
        skipped.append(step + 1)
        goes_on.set()
    saver.wait()
    assert _names(tmp_path) == ["last", "step-000002", "step-000003"]  # CONFIG keeps two
    for step in (2, 3):
        saved = checkpoint.load(tmp_path / "checkpoints" / f"step-{step:06d}")
        assert torch.equal(saved.model["w"], torch.full((3,), float(step)))
        assert saved.extra == {"skipped": list(range(1, step + 1))}


@pytest.mark.gpu
def test_saver_copies_in_the_order_of_the_stream(tmp_path: Path) -> None:
    saver = Saver(tmp_path)
    state = {part: {"w": torch.zeros(1 << 24, device="cuda")} for part in _tensors(0)}
    for step in (1, 2):
        for named in state.values():
            named["w"] += 1
        _begin(saver, step, state, {})
        for named in state.values():
            named["w"].add_(10).sub_(10)
    saver.wait()
    for step in (1, 2):
        saved = checkpoint.load(tmp_path / "checkpoints" / f"step-{step:06d}")
        assert all((part["w"] == step).all() for part in (saved.model, saved.ema, saved.optimizer))


def test_run_folder_that_cannot_be_written_is_wrong_usage(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be written") as caught:
        RunFolder.create(tmp_path / "file" / "run", CONFIG)
    assert caught.value.exit_code == 2
    with _largest_file(100), pytest.raises(UsageError, match="cannot be written"):
        RunFolder.create(tmp_path / "run", CONFIG)
    assert not (tmp_path / "run").exists()


def test_full_disk_of_the_step_log_is_one_sentence(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    with _largest_file(100), pytest.raises(TpfError, match=r"train\.jsonl: cannot be written"):
        run.log({"step": 1, "text": "x" * 200})
