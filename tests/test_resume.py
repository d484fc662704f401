"""Exact resume: a run that stops after every step, and generators that others have used."""

from __future__ import annotations

import dataclasses
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import Messages, assert_bitwise, records

from tpf.cli.display import Silent
from tpf.config import Config, load
from tpf.errors import UsageError
from tpf.runfolder import RunFolder, remove_unstarted
from tpf.train import Options, Trainer, train

EXAMPLES = Path(__file__).resolve().parents[1] / "data" / "examples"
STEPS = 12
CONFIG = load(
    "tiny",
    [
        f"data.path={EXAMPLES / '1ubq.cif.gz'}",
        "data.crop=16",
        "train.lr=2e-3",
        "train.warmup=2",
        "train.diffusion_samples=2",
        "train.checkpoint_every=1",
        f"train.keep={STEPS + 1}",
        f"train.steps={STEPS}",
    ],
)


def _config(steps: int) -> Config:
    return dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, steps=steps))


def _use_generators(_: Trainer) -> None:
    """Leave every global generator in a state that no other run has."""
    entropy = random.SystemRandom().getrandbits(32)
    torch.manual_seed(entropy)
    np.random.seed(entropy)  # noqa: NPY002
    random.seed(entropy)


def _train(out: Path, steps: int, resume: bool) -> None:
    options = Options(out, resume, validate=False, prepare=_use_generators)
    train(_config(steps), options, Silent())


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("straight") / "run"
    train(CONFIG, Options(out, validate=False), Silent())
    return out


def test_resuming_at_every_step_is_bitwise(straight: Path, tmp_path: Path) -> None:
    """Each step is run by a trainer of its own that starts from the checkpoint before it."""
    out = tmp_path / "run"
    for step in range(1, STEPS + 1):
        _train(out, step, resume=step > 1)
        name = Path("checkpoints") / f"step-{step:06d}"
        assert_bitwise(straight / name, out / name)
    for folder in (straight, out):
        assert [r["step"] for r in records(folder)] == list(range(1, STEPS + 1))
        assert all(r["max_mem_gb"] > 0.01 for r in records(folder))


def test_fewer_steps_than_a_run_has_done_are_refused(straight: Path) -> None:
    before = (straight / "config.yaml").read_text()
    with pytest.raises(UsageError, match=f"--steps 2: run .* is after step {STEPS} already"):
        _train(straight, 2, resume=True)
    assert (straight / "config.yaml").read_text() == before


def test_resuming_a_damaged_run_takes_the_checkpoint_before(straight: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(straight, out)
    last = out / "checkpoints" / f"step-{STEPS:06d}"
    content = bytearray((last / "ema.safetensors").read_bytes())
    content[-1] ^= 1
    (last / "ema.safetensors").write_bytes(content)

    later = out / "validation" / f"step-{STEPS:06d}"
    other = later.with_name(f"{later.name}-2")  # of a second tpf validate
    for folder in (later, other):
        folder.mkdir(parents=True)
    said = Messages()
    train(CONFIG, Options(out, True, validate=False), said)
    assert "ema.safetensors is damaged" in said.texts[0]
    assert f"resuming {out} after step {STEPS - 1}" in said.texts[1]
    assert other.exists() and not later.exists()  # it may have been of other weights
    name = Path("checkpoints") / last.name
    assert_bitwise(straight / name, out / name)


@pytest.mark.parametrize("inside", ["checkpoints/step-000002/state.json", "notes.txt", ".git/HEAD"])
def test_only_what_precedes_a_first_checkpoint_is_removed(tmp_path: Path, inside: str) -> None:
    said = Messages()
    run = RunFolder.create(tmp_path / "run", CONFIG)
    kept = run.path / inside
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text("")
    remove_unstarted(run.path, said.message)
    assert kept.is_file() and (run.path / "config.yaml").is_file()
    kept.unlink()
    if kept.parent != run.path:
        kept.parent.rmdir()
    with run.lock:
        run.lock.take(said.message)
        with pytest.raises(UsageError, match="is in use by process"):
            remove_unstarted(run.path, said.message)
    (run.path / "checkpoints" / ".step-000000.77").mkdir(parents=True)  # half written
    remove_unstarted(run.path, said.message)
    remove_unstarted(run.path, said.message)  # nothing there
    assert not run.path.exists() and not said.texts
