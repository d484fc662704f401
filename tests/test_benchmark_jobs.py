"""What the benchmark scripts read off the folders of runs, by worked numbers and planted faults."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import jobs, scaling
from tests.ranks import small
from tpf.cli.display import Silent
from tpf.phases import PHASES
from tpf.stability.arm import branch
from tpf.train import Options, train


def test_union_of_spans() -> None:
    assert jobs.union([(0, 2), (1, 3), (5, 6), (5, 5.5)]) == 4
    assert jobs.union([]) == 0


def test_busy_share_of_a_trace(tmp_path: Path) -> None:
    def event(category: str, name: str, start: float, length: float) -> dict[str, Any]:
        return {"cat": category, "name": name, "ts": start, "dur": length}

    events = [
        event("user_annotation", "ProfilerStep#6", 100, 100),
        event("user_annotation", "ProfilerStep#7", 200, 100),
        event("gpu_user_annotation", "ProfilerStep#6", 0, 900),
        event("cpu_op", "aten::mm", 100, 200),
        event("kernel", "gemm", 110, 40),
        event("kernel", "other stream", 130, 40),
        event("gpu_memcpy", "copy", 290, 40),
        {"name": "metadata", "ph": "M"},
    ]
    path = tmp_path / "rank-0.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = jobs.busy_share(path)
    assert found["busy_share"] == pytest.approx(70 / 200) and found["wall_ms"] == 0.2
    assert found["steps"] == 2 and found["launches_per_step"] == 1.5


def write_log(run: Path, losses: list[float]) -> None:
    run.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({"step": k, "loss": x, "grad_norm": 1.0, "step_ms": 10.0 * k, "mfu": 0.1})
        for k, x in enumerate(losses, 1)
    ]
    (run / "train.jsonl").write_text("".join(line + "\n" for line in lines))


def test_runs_are_compared_over_the_steps_that_both_have(tmp_path: Path) -> None:
    write_log(tmp_path / "a", [3, 2, 1, 0.5])
    write_log(tmp_path / "b", [3, 2, 1])
    write_log(tmp_path / "c", [3, 2, 1.0000001, 0.5])
    good = jobs.same_run(tmp_path / "a", tmp_path / "b")
    assert good["equal"] and good["steps_compared"] == 3
    bad = jobs.same_run(tmp_path / "a", tmp_path / "c", start=1)
    assert not bad["equal"] and bad["first_difference"] == 3
    assert not jobs.same_run(tmp_path / "a", tmp_path / "none")["equal"]
    off = scaling.largest_difference(tmp_path / "a", tmp_path / "c", 1)
    assert off == pytest.approx(1e-7, rel=1e-3)
    assert scaling.largest_difference(tmp_path / "a", tmp_path / "c", 4) is None
    found = jobs.breakdown(tmp_path / "a", 2)
    assert found == {"measured_steps": 2, "step_ms": 35.0, "mfu": 0.1}


def test_states_of_a_resumed_run_are_compared_bit_by_bit(tmp_path: Path) -> None:
    config = small("train.batch_size=1", "train.steps=2", "train.checkpoint_every=1")
    first, second = tmp_path / "first", tmp_path / "second"
    train(config, Options(first, validate=False), Silent())
    branch(first / "checkpoints" / "step-000001", second, config)
    train(config, Options(second, resume=True, validate=False), Silent())
    found = jobs.same_run(first, second, start=1)
    assert found == {
        "steps_compared": 1, "first_difference": None, "states_equal": {2: True}, "equal": True,
    }  # fmt: skip
    assert jobs.state_digest(first, 1) != jobs.state_digest(first, 2)
    assert jobs.state_digest(first, 9) is None


def test_table_of_weak_scaling() -> None:
    def row(n: int, ranks: int, ms: float) -> dict[str, Any]:
        phases = {f"{phase}_ms": 10.0 for phase in PHASES} | {"reduce_ms": 30.0}
        times = {"median_ms": ms, "p10_ms": ms, "p90_ms": ms, "mean_ms": ms, "reps": 20}
        return {"n": n, "ranks": ranks, **times, **phases, "gpu_ms": 80.0, "mfu": 0.3}

    lines = scaling.scaled([row(640, 2, 500), row(384, 2, 250), row(384, 1, 200)])
    assert [(x["n"], x["ranks"]) for x in lines] == [(384, 1), (384, 2), (640, 2)]
    assert lines[0]["efficiency"] == 1 and lines[1]["efficiency"] == 0.8
    assert lines[1]["samples_per_s"] == 8 and lines[1]["reduce_share"] == 0.375
    assert "efficiency" not in lines[2] and lines[2]["mfu"] == 0.3


def test_a_job_stops_its_process_in_time_and_keeps_its_result(tmp_path: Path) -> None:
    job = jobs.Job(tmp_path / "job", seconds=100, cpu=True)
    job.note(a=1)
    job.note(b=2)
    result = json.loads((tmp_path / "job" / "result.json").read_text())
    assert (result["a"], result["b"]) == (1, 2) and "gpu" in result["environment"]
    waits = "import signal, sys, time; signal.signal(2, lambda *_: sys.exit(130)); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", waits])
    assert job.finish(process, seconds=1.0) in (130, -signal.SIGINT)
