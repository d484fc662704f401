"""Runs of ``tpf`` as processes with a limit of time, and what their folders say afterwards."""

from __future__ import annotations

import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpf import checkpoint
from tpf.bench.record import conditions
from tpf.checkpoint import write_text
from tpf.phases import PHASES
from tpf.report.train import Record, read_records
from tpf.stability.probe import digest
from tpf.stability.verdict import first_difference

SAVING = 90.0
"""Seconds that a run has to finish its step and save after it was asked to stop."""


@dataclass
class Job:
    """A result that grows, in a folder, before a deadline."""

    out: Path
    seconds: float
    cpu: bool = False
    result: dict[str, Any] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.out.mkdir(parents=True)
        self.result |= {"environment": conditions(), "command": sys.argv}

    @property
    def left(self) -> float:
        """Seconds before the deadline."""
        return self.seconds - (time.monotonic() - self.began)

    def note(self, **facts: Any) -> None:
        """Add facts to ``result.json`` at once."""
        self.result |= facts
        write_text(self.out / "result.json", json.dumps(self.result, indent=1) + "\n")

    def start(self, *words: str, ranks: int = 1, restarts: int = 0) -> subprocess.Popen[bytes]:
        """Start ``tpf WORDS`` on so many GPUs, or under torchrun on the CPU; it logs to a file."""
        command = [sys.executable, "-m", "tpf.cli", *words]
        if ranks > 1 and self.cpu:
            launcher = ["--standalone", "--nproc-per-node", str(ranks)]
            launcher += ["--max-restarts", str(restarts)]
            command[1:2] = ["-m", "torch.distributed.run", *launcher, "-m"]
        elif words[0] in ("train", "bench") and not self.cpu:
            command += ["--gpus", str(ranks)]
            command += ["--restarts", str(restarts)] if restarts else []
        print(shlex.join(["tpf", *command[command.index("tpf.cli") + 1 :]]), file=sys.stderr)
        variables = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if self.cpu else {}
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # as in cli/torchrun.sh, for restarts
        with (self.out / "log.txt").open("ab") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | variables, start_new_session=True
            )

    def finish(self, process: subprocess.Popen[bytes], seconds: float | None = None) -> int:
        """Wait for a process; when its time is up let it save its state. Return its code."""
        try:
            return process.wait(max(1.0, self.left if seconds is None else seconds))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        try:
            return process.wait(SAVING)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return process.wait()

    def tpf(
        self, *words: str, ranks: int = 1, seconds: float | None = None, restarts: int = 0
    ) -> int:
        """Run ``tpf WORDS`` to the end, for ``seconds``, or to the deadline; return its code."""
        return self.finish(self.start(*words, ranks=ranks, restarts=restarts), seconds)


def records(run: Path) -> list[Record]:
    """Return the log of a run, none if it has not begun."""
    return read_records(run / "train.jsonl")


def state_digest(run: Path, step: int) -> str | None:
    """Return a hash of weights, EMA and optimiser after a step, if a checkpoint of it is there."""
    path = run / "checkpoints" / f"step-{step:06d}"
    if not path.is_dir():
        return None
    saved = checkpoint.load(path)
    return digest([saved.model, saved.ema, saved.optimizer])


def same_run(first: Path, second: Path, start: int = 0) -> dict[str, Any]:
    """Compare two runs bit by bit: losses and gradient norms after ``start``, and last states."""
    one, two = ([r for r in records(run) if r["step"] > start] for run in (first, second))
    both = min(len(one), len(two))
    values = [[(r["loss"], r["grad_norm"]) for r in found[:both]] for found in (one, two)]
    different = first_difference(*values)
    states = {}
    for path in sorted((second / "checkpoints").glob("step-*")):
        step = int(path.name.removeprefix("step-"))
        mine = state_digest(first, step)
        if step > start and mine is not None:
            states[step] = mine == state_digest(second, step)
    return {
        "steps_compared": both,
        "first_difference": None if different is None else start + different,
        "states_equal": states,
        "equal": both > 0 and different is None and all(states.values()),
    }


def breakdown(run: Path, skip: int) -> dict[str, Any]:
    """Return medians over the steps after the first ``skip``: the step, its phases, data, MFU."""
    steps = records(run)
    steps = steps[min(skip, len(steps) // 2) :]
    names = ["step_ms", "data_ms", *(f"{phase}_ms" for phase in PHASES), "tokens_per_s", "mfu"]
    found: dict[str, Any] = {"measured_steps": len(steps)}
    for name in names:
        if values := [r[name] for r in steps if name in r]:
            found[name] = statistics.median(values)
    if values := [r["max_mem_gb"] for r in steps if "max_mem_gb" in r]:
        found["max_mem_gb"] = max(values)
    return found


def busy_share(trace: Path) -> dict[str, float]:
    """Return how much of the traced steps some kernel, copy or fill ran on the GPU."""
    events = json.loads(trace.read_text())["traceEvents"]
    steps = [e for e in events if str(e.get("name", "")).startswith("ProfilerStep")]
    steps = [e for e in steps if e.get("cat") == "user_annotation"]
    work = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    begin = min(e["ts"] for e in steps)
    end = max(e["ts"] + e["dur"] for e in steps)
    spans = sorted((max(e["ts"], begin), min(e["ts"] + e["dur"], end)) for e in work)
    busy = union([span for span in spans if span[0] < span[1]])
    return {
        "steps": len(steps), "wall_ms": (end - begin) / 1e3, "busy_ms": busy / 1e3,
        "busy_share": busy / (end - begin), "launches_per_step": len(work) / len(steps),
    }  # fmt: skip


def union(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length of what sorted spans cover."""
    covered, reached = 0.0, float("-inf")
    for start, end in spans:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered
