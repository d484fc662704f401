"""Weak scaling of training over the GPUs of one machine, and what several ranks must keep.

  python -m benchmarks.scaling OUT --gpus 1,2 --seconds 560      # compact, crops 384 and 640
  python -m benchmarks.scaling OUT --gpus 1,2 --cpu --seconds 280    # Gloo ranks, tiny preset

``OUT/result.json`` grows with each part, as far as the time reaches:

  scaling     one sample a GPU (a made-up protein of exactly the crop's size, 48 copies): seconds a
              step by ``tpf bench step``, phases of the slowest rank, share of the reduction (NCCL),
              efficiency against one GPU, MFU
  repeat      the same training twice on the most ranks: bitwise equal losses and states
  fewer       its checkpoint resumed on one rank, beside its own continuation: largest relative
              difference of the losses
  killed      a rank killed with SIGKILL in the middle; the launcher starts all anew from the last
              checkpoint, and the end must be that of the run that nobody disturbed, bit by bit

Exit code 1 if something that must be equal is not, or a part could not run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.jobs import Job, records, same_run
from benchmarks.train300 import QUICK_VALIDATION
from tpf.checkpoint import resolve
from tpf.config import load
from tpf.phases import PHASES
from tpf.stability.arm import branch

CHECKPOINT_EVERY = 5
NEAR = 0.02
"""Relative difference of losses that another order of sums may make in a few steps."""


def measure(job: Job, ranks: int, config: str, crops: str, reps: int) -> list[dict[str, Any]]:
    """Time steps on so many ranks and return a row for each crop."""
    folder = job.out / f"step-{ranks}"
    device = ["--device", "cpu"] if job.cpu else []
    words = ["--impls", "torch" if job.cpu else "cuda", "--crop", crops, "--reps", str(reps)]
    words += ["--config", config, *device, "--out", str(folder)]
    job.tpf("bench", "step", *words, ranks=ranks)
    path = folder / "bench.json"
    rows = json.loads(path.read_text())["rows"] if path.is_file() else []
    return [row for row in rows if "mean_ms" in row]


def scaled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the table of weak scaling: rows by crop and ranks with efficiency and shares."""
    single = {row["n"]: row["median_ms"] for row in rows if row["ranks"] == 1}
    found = []
    for row in sorted(rows, key=lambda r: (r["n"], r["ranks"])):
        line = {name: row[name] for name in ("n", "ranks", "median_ms", "p10_ms", "p90_ms", "reps")}
        line |= {f"{phase}_ms": row[f"{phase}_ms"] for phase in PHASES}
        line["reduce_share"] = row["reduce_ms"] / row["gpu_ms"]
        line["samples_per_s"] = 1e3 * row["ranks"] / row["median_ms"]
        if row["n"] in single:
            line["efficiency"] = single[row["n"]] / row["median_ms"]
        found.append(line | {name: row[name] for name in ("mfu", "total_mib") if name in row})
    return found


def kill_a_rank(job: Job, ranks: int, train: list[str], run: Path, after: int) -> dict[str, Any]:
    """Kill the last rank once step ``after`` is logged, and return how the run went on."""
    process = job.start(*train, "--out", str(run), ranks=ranks, restarts=1)
    while process.poll() is None and job.left > 0 and len(records(run)) < after:
        time.sleep(0.05)
    victims = rank_processes(process.pid)
    if process.poll() is None and victims:
        os.kill(victims[-1], signal.SIGKILL)
    return {"ranks_seen": len(victims), "exit_code": job.finish(process)}


def rank_processes(parent: int) -> list[int]:
    """Return the processes below ``parent`` that are ranks: not its helpers, nor their loaders."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [pid for pid in map(int, children) if _is_rank(pid)]


def _is_rank(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"tpf.cli" in words or b"spawn_main" in words


def largest_difference(first: Path, second: Path, start: int) -> float | None:
    """Return the largest relative difference of the losses of two runs after a step."""
    losses = [{r["step"]: r["loss"] for r in records(run)} for run in (first, second)]
    shared = [k for k in losses[0].keys() & losses[1].keys() if k > start]
    pairs = [(losses[0][k], losses[1][k]) for k in shared]
    return max((abs(a / b - 1) for a, b in pairs), default=None)


def training_parts(job: Job, ranks: int, config: str, steps: int, overrides: list[str]) -> None:
    """Do the parts repeat, fewer and killed on so many ranks."""
    crop, impl = ("24", "torch") if job.cpu else ("256", "cuda")
    train = [
        "train", "--config", config, "--crop", crop, "--impl", impl, "--batch-size", str(ranks),
        "--checkpoint-every", str(CHECKPOINT_EVERY), "--keep", "99", "--wandb", "disabled",
        "--steps", str(steps), *QUICK_VALIDATION, *overrides,
    ]  # fmt: skip
    first, again, fewer, killed = (job.out / x for x in ("first", "again", "fewer", "killed"))
    job.tpf(*train, "--out", str(first), ranks=ranks)
    job.tpf(*train, "--out", str(again), ranks=ranks)
    job.note(repeat={"ranks": ranks, **same_run(first, again)})
    middle = steps // 2 // CHECKPOINT_EVERY * CHECKPOINT_EVERY
    if (first / "checkpoints" / f"step-{middle:06d}").is_dir() and job.left > 30:
        stored = load(str(first / "config.yaml"))
        branch(resolve(first / "checkpoints" / f"step-{middle:06d}"), fewer, stored)
        code = job.tpf("train", "--resume", str(fewer))
        off = largest_difference(first, fewer, middle)
        near = off is not None and off < NEAR
        job.note(fewer={"exit_code": code, "from": ranks, "to": 1, "off": off, "equal": near})
    if job.left > 30:
        how = kill_a_rank(job, ranks, train, killed, CHECKPOINT_EVERY + 2)
        found = same_run(first, killed)
        whole = how["exit_code"] == 0 and found["steps_compared"] == steps
        job.note(killed={**how, **found, "equal": found["equal"] and whole})


def main() -> int:
    """Do the parts and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpus", default="1,2")
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--config", default=None, help="[compact; tiny on the CPU]")
    parser.add_argument("--crops", default=None, help="[384,640; 16 on the CPU]")
    parser.add_argument("--reps", type=int, default=None, help="timed steps [20; 2 on the CPU]")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only-scaling", action="store_true", help="leave out the trainings")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE of the trainings")
    given = parser.parse_intermixed_args()
    job = Job(given.out, given.seconds, given.cpu)
    config = given.config or ("tiny" if given.cpu else "compact")
    crops, reps = given.crops or ("16" if given.cpu else "384,640"), given.reps
    worlds = [int(word) for word in given.gpus.split(",")]
    rows: list[dict[str, Any]] = []
    for ranks in worlds:
        rows += measure(job, ranks, config, crops, reps or (2 if given.cpu else 20))
        job.note(scaling=scaled(rows))
    complete = {row["ranks"] for row in rows} == set(worlds)
    parts = []
    if not given.only_scaling and max(worlds) > 1:
        training_parts(job, max(worlds), config, given.steps, given.overrides)
        parts = [job.result.get(name, {"equal": False}) for name in ("repeat", "fewer", "killed")]
    equal = all(part["equal"] for part in parts)
    job.note(seconds=job.seconds - job.left, complete=complete, equal=equal)
    return 0 if complete and equal else 1


if __name__ == "__main__":
    sys.exit(main())
