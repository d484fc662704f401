"""Training as a whole: run folder, exact resume, interruption, failures that are explained."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from runs import Messages, assert_bitwise, records

from tests.forked import Forked
from tpf import checkpoint
from tpf.cli.display import Silent
from tpf.config import Config, load
from tpf.errors import NonFinite, UsageError
from tpf.replay import replay
from tpf.step import draws
from tpf.train import Options, train

EXAMPLES = Path(__file__).resolve().parents[1] / "data" / "examples"
SMALL = [
    f"data.path={EXAMPLES / '1ubq.cif.gz'}",
    "data.crop=24",
    "train.lr=2e-3",
    "train.warmup=2",
    "train.diffusion_samples=2",
    "train.rollout_steps=2",
    "train.checkpoint_every=2",
    "validate.samples=2",
    "validate.sampling_steps=2",
    "validate.recycles=0",
]


def small(*overrides: str) -> Config:
    return load("tiny", [*SMALL, *overrides])


def run(config: Config, out: Path, *, resume: bool = False, init: Path | None = None) -> Any:
    return train(config, Options(out, resume, init), Silent())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps that nothing disturbed."""
    out = tmp_path_factory.mktemp("finished") / "run"
    run(small("train.steps=6"), out)
    return out


def test_run_folder_holds_what_it_promises(finished: Path) -> None:
    names = {p.name for p in finished.iterdir()}
    wanted = {"config.yaml", "environment.json", "train.jsonl", "checkpoints", "validation"}
    assert wanted | {"report.html"} <= names and "stacks" not in names
    assert load(str(finished / "config.yaml")) == small("train.steps=6")
    log = records(finished)
    assert [r["step"] for r in log] == [1, 2, 3, 4, 5, 6]
    for name in ("loss", "mse", "smooth_lddt", "distogram", "lr", "grad_norm", "step_ms",
                 "data_ms", "tokens_per_s", "samples", "skipped"):  # fmt: skip
        assert name in log[0]
    assert log[0]["samples"] == ["1ubq"]
    assert log[0]["lr"] == pytest.approx(1e-3) and log[1]["lr"] == pytest.approx(2e-3)
    for step in (0, 6):
        folder = finished / "validation" / f"step-{step:06d}"
        assert {"metrics.json", "targets.csv", "report.html", "predicted"} <= {
            p.name for p in folder.iterdir()
        }
        assert len(list((folder / "predicted").glob("1ubq-seed0-sample*.cif"))) == 2


def test_loader_workers_do_not_change_the_run(finished: Path, tmp_path: Path) -> None:
    run(small("train.steps=6", "data.workers=2"), tmp_path / "run")
    assert_bitwise(finished, tmp_path / "run")


def _start(out: Path, steps: int, *overrides: str, resume: bool = False) -> Forked:
    words = ["train", "--config", "tiny", "--steps", str(steps), "--out", str(out)]
    return Forked([*words, *(["--resume"] if resume else SMALL), *overrides])


def test_kill_9_loses_only_the_steps_since_the_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = _start(out, 400)
    process.wait_for_lines(out / "train.jsonl", 7)
    time.sleep(random.SystemRandom().uniform(0, 0.5))  # any moment of a step or a checkpoint
    process.kill()
    process.end()
    reached = checkpoint.load(checkpoint.resolve(out)).step
    logged = len(records(out))
    assert 6 <= reached <= logged and logged - reached <= 2
    end = reached + 3
    code, _, errors = _start(out, end, resume=True).end(200)
    assert code == 0, errors
    straight = tmp_path / "straight"
    train(small(f"train.steps={end}"), Options(straight, validate=False), Silent())
    assert_bitwise(straight, out)


@pytest.mark.parametrize(
    ("number", "workers"), [(signal.SIGINT, 0), (signal.SIGTERM, 2), (signal.SIGUSR1, 2)]
)
def test_signals_save_and_exit_130(tmp_path: Path, number: signal.Signals, workers: int) -> None:
    """The signal goes to the whole process group, as a terminal and a scheduler send it."""
    out = tmp_path / "run"
    process = _start(out, 400, f"data.workers={workers}")
    process.wait_for_lines(out / "train.jsonl", 3)
    process.interrupt(number)
    code, _, errors = process.end()
    assert code == 130, errors
    assert re.search(r"interrupted after step \d+; go on with: tpf train --resume", errors)
    logged = len(records(out))
    assert checkpoint.load(checkpoint.resolve(out)).step == logged


def _poisoned(finished: Path, folder: Path, name: str) -> Path:
    saved = checkpoint.load(checkpoint.resolve(finished))
    saved.ema[name].view(-1)[0] = float("nan")
    tensors = {"model": saved.model, "ema": saved.ema, "optimizer": saved.optimizer}
    return checkpoint.save(folder, saved.step, saved.config, tensors, saved.extra)


def test_cycles_are_those_of_the_step_on_every_rank() -> None:
    cfg = load("full").train
    seen = set()
    for step in range(64):
        cycles = {draws(cfg, step, index).cycles for index in range(4)}
        assert len(cycles) == 1
        seen |= cycles
    assert seen == {1, 2, 3, 4}


def test_nonfinite_step_names_the_culprit_and_can_be_replayed(
    finished: Path, tmp_path: Path
) -> None:
    name = "pairformer_stack.blocks.1.pair_stack.tri_att_start.linear_z.weight"
    start = _poisoned(finished, tmp_path / "poisoned", name)
    with pytest.raises(NonFinite, match=f"sample 1ubq: .*first not finite: parameter {name}") as e:
        run(small("train.steps=6"), tmp_path / "run", init=start)
    file = Path(str(e.value).rsplit("--replay ", 1)[1])
    assert name in replay(file)


def test_checkpoint_of_another_preset_is_refused(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="belongs to another model"):
        run(small("model.c_s=64"), tmp_path / "run", init=finished)
    assert not (tmp_path / "run").exists()


def test_bad_entries_are_counted_and_the_run_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "1ubq.cif.gz").write_bytes((EXAMPLES / "1ubq.cif.gz").read_bytes())
    (folder / "cut.cif.gz").write_bytes((EXAMPLES / "1a8o.cif.gz").read_bytes()[:3000])

    said = Messages()
    config = small("train.steps=2", f"data.path={folder}")
    train(config, Options(tmp_path / "run", validate=False), said)
    assert any("cut" in text for text in said.texts)


@pytest.mark.slow
def test_wandb_offline_needs_no_login(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tpf.cli", "train", "--config", "tiny", "--steps", "2",
             "--wandb", "offline", "--out", str(tmp_path / "run"), *SMALL]  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
