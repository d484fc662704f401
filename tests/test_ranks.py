"""Several ranks on the CPU: the same training as one, and failures that stop all with a reason."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from ranks import SMALL, Ended, Prepare, run_ranks, slurm_variables, small
from runs import Messages, assert_bitwise, records, state

import tpf.trainer
from tests.forked import Forked
from tpf import checkpoint
from tpf.cli.rank import run_rank
from tpf.errors import Interrupted, NonFinite, TpfError, UsageError
from tpf.launch import Plan, launch
from tpf.replay import replay
from tpf.runfolder import RunFolder
from tpf.train import Options, _closing, train
from tpf.trainer import Trainer


def go(size: int, out: Path, *overrides: str, resume: bool = False) -> list[Ended | int]:
    return run_ranks(size, small(*overrides), Options(out, resume, validate=False))


def well(ends: list[Ended | int]) -> None:
    """Check that all ranks ended without an error."""
    assert all(isinstance(end, Ended) and end.error is None for end in ends), ends


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same two steps of four samples on one, two (twice) and four ranks.

    With a name that ends in "whole" every rank keeps all of the optimiser's state. All save after
    the first step, too: what came together for that must not get into the second.
    """
    folder = tmp_path_factory.mktemp("ranks")
    sizes = {"2": 2, "again": 2, "4": 4, "2 whole": 2, "4 whole": 4}
    found = {name: folder / name for name in ("1", *sizes)}
    for name, size in sizes.items():
        shard = f"train.shard={'whole' not in name}"
        well(go(size, found[name], shard, "train.checkpoint_every=1"))
    train(small(), Options(found["1"], validate=False), Messages())
    return found


def test_losses_and_samples_do_not_depend_on_the_number_of_ranks(runs: dict[str, Path]) -> None:
    one = records(runs["1"])
    for name in ("2", "4"):
        for record, expected in zip(records(runs[name]), one, strict=True):
            assert record["samples"] == expected["samples"] and len(record["samples"]) == 4
            for term in ("loss", "mse", "smooth_lddt", "distogram", "plddt", "grad_norm"):
                assert record[term] == pytest.approx(expected[term], rel=2e-4), (name, term)
    assert [r["loss"] for r in records(runs["4"])][0] == one[0]["loss"]  # before any sum of ranks


def test_weights_do_not_depend_on_the_number_of_ranks(runs: dict[str, Path]) -> None:
    one = state(runs["1"])
    for name in ("2", "4"):
        found = state(runs[name])
        assert found.keys() == one.keys()
        for key, value in found.items():
            torch.testing.assert_close(value, one[key], rtol=1e-4, atol=3e-5, msg=f"{name} {key}")


def test_a_layout_repeats_bit_by_bit(runs: dict[str, Path]) -> None:
    assert_bitwise(runs["2"], runs["again"])


@pytest.mark.parametrize("ranks", ["2", "4"])
def test_sharing_the_optimiser_changes_no_bit(runs: dict[str, Path], ranks: str) -> None:
    """Four ranks have parts that end inside parameters."""
    assert_bitwise(runs[ranks], runs[f"{ranks} whole"])


def test_resume_takes_any_mode_and_number_of_ranks(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system of rank 1 does not list the newest checkpoint yet."""
    start, listed = tmp_path / "start", checkpoint._steps

    def late(run: Path) -> list[tuple[int, Path]]:
        return listed(run)[: -1 if os.environ.get("RANK") == "1" else None]

    monkeypatch.setattr(checkpoint, "_steps", late)
    well(go(2, start, "train.steps=1"))
    for name, size in (("2 whole", 2), ("4", 4), ("4 whole", 4)):
        shutil.copytree(start, tmp_path / name)
        shard = f"train.shard={'whole' not in name}"
        well(go(size, tmp_path / name, shard, resume=True))
    assert_bitwise(tmp_path / "2 whole", runs["2"])
    assert_bitwise(tmp_path / "4", tmp_path / "4 whole")


def test_average_comes_together_for_validation_and_leaves_the_weights(tmp_path: Path) -> None:
    def note(trainer: Trainer) -> None:
        applied = trainer.ema.applied

        @contextmanager
        def noted(spare: torch.Tensor) -> Iterator[None]:
            own = trainer.flat.vector.clone()
            with applied(spare):
                torch.save(dict(trainer.model.state_dict()), tmp_path / f"{trainer.world.rank}.pt")
                yield
            assert torch.equal(own, trainer.flat.vector) and not spare.any()

        trainer.ema.applied = noted  # type: ignore[method-assign]

    config = small("train.steps=1", "train.batch_size=2", "validate.max_tokens=10")
    well(run_ranks(2, config, Options(tmp_path / "run"), {0: note, 1: note}))
    saved = state(tmp_path / "run")
    for rank in (0, 1):
        seen = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert {f"ema/{name}" for name in seen} == {n for n in saved if n.startswith("ema/")}
        assert all(torch.equal(value, saved[f"ema/{name}"]) for name, value in seen.items())


def test_tasks_of_srun_are_ranks(runs: dict[str, Path], tmp_path: Path) -> None:
    options = Options(tmp_path / "run", validate=False)
    ends = run_ranks(2, small("train.steps=1"), options, variables=slurm_variables)
    assert all(isinstance(end, Ended) and end.error is None for end in ends), ends
    assert records(tmp_path / "run")[0]["loss"] == records(runs["2"])[0]["loss"]


def test_records_split_the_time_of_a_step(runs: dict[str, Path]) -> None:
    for record in records(runs["2"]):
        phases = ("data", "forward", "backward", "clipping", "reduce", "optimiser", "ema")
        times = [record[f"{phase}_ms"] for phase in phases]  # each of its slowest rank
        assert all(0 < time <= record["step_ms"] for time in times)
        assert sum(times) > record["step_ms"] / 2 and record["tokens_per_s"] > 0


def test_resume_on_another_number_of_ranks_says_so(runs: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert go(2, out, "train.steps=1")[0].error is None
    said = Messages()
    train(small(), Options(out, resume=True, validate=False), said)
    assert any("2 ranks before, 1 now" in text and "not bit by bit" in text for text in said.texts)
    assert any("train.steps is 2 from here on; it was 1" in text for text in said.texts)
    assert [r["step"] for r in records(out)] == [1, 2]
    straight = state(runs["1"])
    for key, value in state(out).items():
        torch.testing.assert_close(value, straight[key], rtol=1e-4, atol=3e-5, msg=key)


# Faults of one rank --------------------------------------------------------------------------


def bad_gradient(trainer: Trainer) -> None:
    parameter = trainer.model.linear_z.weight
    parameter.register_hook(lambda g: g * math.nan if trainer.step == 1 else g)


def bad_input(trainer: Trainer) -> None:
    def spoil(module: torch.nn.Module, inputs: tuple[dict[str, torch.Tensor]]) -> None:
        if trainer.step == 1:
            inputs[0]["ref_pos"].fill_(math.nan)

    trainer.model.input_embedder.register_forward_pre_hook(spoil)


def bad_gradient_and_disk(trainer: Trainer) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    bad_gradient(trainer)
    tpf.trainer.write_replay = fail  # in a process of its own


def bad_memory(trainer: Trainer) -> None:
    def fail(*_: object) -> None:
        if trainer.step == 1:
            raise torch.OutOfMemoryError

    trainer.model.input_embedder.register_forward_pre_hook(fail)


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (bad_gradient, NonFinite, r"gradient norm is nan; .*gradient of parameter linear_z"),
        (bad_gradient_and_disk, NonFinite, r"gradient norm is nan; .*No space left on device"),
        (bad_input, NonFinite, r"loss is nan; first not finite: .*"),
        (bad_memory, TpfError, r"\(16 tokens, .*\): out of GPU memory"),
    ],
)
def test_a_fault_on_one_rank_stops_all_with_its_reason(
    fault: Prepare, kind: type[TpfError], words: str, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    options = Options(out, validate=False)
    ends = run_ranks(2, small("train.batch_size=2"), options, {1: fault})
    for end in ends:
        assert isinstance(end, Ended) and type(end.error) is kind and end.error.shared
        pattern = rf"^rank 1 failed: step 2, sample 1ubq.*{words}"
        assert re.search(pattern, str(end.error)), end.error
        (note,) = end.error.__notes__
        assert note.startswith("On rank 1:\n")
        assert kind is NonFinite or "in fail\n    raise torch.OutOfMemoryError" in note
    assert [r["step"] for r in records(out)] == [1]
    assert checkpoint.load(checkpoint.resolve(out)).step == 1  # the state before the step
    assert not (out / "stacks").exists()
    if kind is NonFinite and fault is not bad_gradient_and_disk:
        replay(Path(str(ends[0].error).rsplit("--replay ", 1)[1]))


def test_main_rank_that_cannot_log_ends_all_and_stays_to_the_end(tmp_path: Path) -> None:
    def unwritable(trainer: Trainer) -> None:
        trainer.notes["probe"] = object()

    options = Options(tmp_path / "run", validate=False)
    for end in run_ranks(2, small("train.batch_size=2"), options, {0: unwritable}):
        assert isinstance(end, Ended) and end.error.shared
        assert "rank 0 failed: unexpected TypeError" in str(end.error)


def test_run_that_was_taken_over_ends_without_saving(tmp_path: Path) -> None:
    """The main rank was suspended during its first step, while one elsewhere took the folder."""
    lock = tmp_path / "run" / "lock"

    def suspended(trainer: Trainer) -> None:
        def taken(*_: object) -> None:
            lock.write_text(json.dumps(json.loads(lock.read_text()) | {"host": "far"}))

        trainer.model.input_embedder.register_forward_pre_hook(taken)

    config = small("train.batch_size=2", "train.checkpoint_every=1")
    options = Options(tmp_path / "run", validate=False)
    for end in run_ranks(2, config, options, {0: suspended}):
        assert isinstance(end, Ended) and end.error.shared
        assert re.search("rank 0 failed: .*taken over by process .* on far", str(end.error))
    assert not (tmp_path / "run" / "train.jsonl").exists()
    assert [p.name for p in (tmp_path / "run" / "checkpoints").glob("*0*")] == ["step-000000"]
    assert json.loads(lock.read_text())["host"] == "far"


def test_ranks_that_end_together_wait_for_the_files_of_the_main_one(tmp_path: Path) -> None:
    events: list[str] = []

    class Watched(Messages):
        def close(self) -> None:
            events.append("closed")

    class Other:
        is_main = True

        def barrier(self) -> None:
            events.append("met")

    run = RunFolder(tmp_path)
    error = Interrupted("by a signal")
    for shared, expected in ((True, ["closed", "met"]), (False, ["closed"])):
        error.shared = shared
        events.clear()
        with pytest.raises(Interrupted), _closing(run, Watched(), Other()):  # type: ignore[arg-type]
            raise error
        assert events == expected


def test_wrong_input_is_said_once_on_all_ranks(tmp_path: Path) -> None:
    for end in go(2, tmp_path / "run", f"data.path={tmp_path / 'none'}"):
        assert isinstance(end, Ended) and isinstance(end.error, UsageError)
        assert "none: no such file or folder" in str(end.error) and "rank" not in str(end.error)
    assert not (tmp_path / "run").exists()


def test_a_step_that_hangs_leaves_the_stacks_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def sleeping_beauty(trainer: Trainer) -> None:
        trainer.model.input_embedder.register_forward_pre_hook(lambda *_: time.sleep(60))

    monkeypatch.setattr("tpf.watchdog.GRACE", 1.0)
    out = tmp_path / "run"
    config = small("train.batch_size=2", "train.step_limit=2")
    begin = time.monotonic()
    ends = run_ranks(2, config, Options(out, validate=False), {1: sleeping_beauty})
    assert ends == [1, 1] and time.monotonic() - begin < 30
    assert "test_ranks.py" in (out / "stacks" / "rank-1.txt").read_text()
    assert "all_reduce" in (out / "stacks" / "rank-0.txt").read_text()
    assert "rank 1: step 1 did not end within 2 s (train.step_limit)" in capfd.readouterr().err
    train(
        small("train.batch_size=2", "train.steps=1"), Options(out, True, validate=False), Messages()
    )
    assert all((out / "stacks" / f"rank-{rank}.txt").read_text() for rank in (0, 1))


def test_ranks_started_anew_without_a_checkpoint_begin_at_step_0(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    out = RunFolder.create(tmp_path / "run", small()).path  # where the ranks before died
    well(go(2, out, "train.checkpoint_every=1"))
    assert_bitwise(out, runs["2"])


# The launcher --------------------------------------------------------------------------------


def _launch(out: Path, plan: Plan, restarts: int) -> Forked:
    """Start ``tpf train --gpus`` without GPUs, with a validation that scores nothing."""
    config = small("validate.max_tokens=10", "train.batch_size=2", "train.steps=1000")

    def entry() -> None:
        try:
            launch(plan, run_rank, config, out, False, None, True, restarts=restarts)
        except TpfError as error:
            print(f"tpf: {error}", file=sys.stderr)
            sys.exit(error.exit_code)

    return Forked([], entry=entry)


def _ranks_of(process: Forked) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [
        int(child)
        for child in children
        if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text()
    ]


def test_killed_rank_is_started_anew_and_a_signal_is_passed_on(tmp_path: Path) -> None:
    """Kill -9 of one rank of two; after the restart, SIGINT to the whole process group."""
    out = tmp_path / "run"
    process = _launch(out, Plan("launch", 2), restarts=1)
    process.wait_for_lines(out / "train.jsonl", 3)
    os.kill(_ranks_of(process)[1], signal.SIGKILL)
    begin, before = time.monotonic(), len(records(out))
    process.wait_for_lines(out / "train.jsonl", before + 3)
    assert time.monotonic() - begin < 60
    process.interrupt()
    code, _, errors = process.end(60)
    assert code == 130, errors
    assert "rank 1 of this machine was killed by SIGKILL; all ranks start again" in errors
    assert re.search(r"resuming .* after step \d+", errors)
    assert re.search(r"interrupted after step \d+; go on with: tpf train --resume", errors)
    steps = [r["step"] for r in records(out)]
    assert steps == list(range(1, len(steps) + 1))
    assert checkpoint.load(checkpoint.resolve(out)).step == steps[-1]


@pytest.mark.slow
def test_killed_rank_without_restarts_ends_the_job(tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = _launch(out, Plan("launch", 2), restarts=0)
    process.wait_for_lines(out / "train.jsonl", 3)
    os.kill(_ranks_of(process)[1], signal.SIGKILL)
    code, _, errors = process.end(60)
    assert code == 1
    assert re.search(r"rank 1 \(process \d+\) was killed by SIGKILL, as the system", errors), errors
    assert "nothing is lost but the work since the last checkpoint" in errors


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_two_launchers_are_two_nodes(number: signal.Signals, tmp_path: Path) -> None:
    """The rank of one node is killed and starts anew on both; then a signal to one node."""
    out = tmp_path / "run"
    nodes = [_launch(out, Plan("launch", 1, 2, "localhost:29417"), restarts=1) for _ in range(2)]
    nodes[0].wait_for_lines(out / "train.jsonl", 2)
    os.kill(_ranks_of(nodes[0])[0], signal.SIGKILL)
    nodes[0].wait_for_lines(out / "train.jsonl", len(records(out)) + 2)
    os.kill(nodes[1].pid, number)  # one node is told, both stop
    for node in nodes:
        code, _, errors = node.end()
        assert code == 130, errors
        assert "interrupted after step" in errors
    assert checkpoint.load(checkpoint.resolve(out)).step == len(records(out))


@pytest.mark.slow
def test_torchrun_script_on_two_processes(tmp_path: Path) -> None:
    script = Path(__file__).resolve().parents[1] / "cli" / "torchrun.sh"
    words = ["--config", "tiny", "--out", str(tmp_path / "run"), *SMALL, "train.batch_size=2"]
    done = subprocess.run(
        ["bash", str(script), *words],
        env=os.environ | {"NPROC": "2", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [r["step"] for r in records(tmp_path / "run")] == [1, 2]
    assert len(records(tmp_path / "run")[0]["samples"]) == 2
