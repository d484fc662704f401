"""300 training steps on one GPU: do they repeat, and where does their time go?

  python -m benchmarks.train300 OUT --seconds 560          # compact, crop 384, BF16, our kernels
  python -m benchmarks.train300 OUT --cpu --steps 6        # tiny preset

In this order, as far as the time reaches: a run; a run that goes on from its middle; a traced one;
the first run again. ``OUT/result.json`` grows with each: losses, gradient norms and states that are
equal bit by bit, medians of the phases of a step, MFU, share of the time that the GPU is busy. Exit
code 1 if something compared is not equal.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.jobs import Job, breakdown, busy_share, records, same_run
from tpf.checkpoint import resolve
from tpf.config import load
from tpf.stability.arm import branch
from tpf.trace import WAIT, WARM_UP

TRACED = 5
QUICK_VALIDATION = [
    "validate.max_targets=1", "validate.samples=1", "validate.sampling_steps=2",
    "validate.recycles=0",
]  # fmt: skip
"""``tpf train`` validates at both ends; here only the steps between count."""


def main() -> int:
    """Do the four parts and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--config", default=None, help="[compact; tiny on the CPU]")
    parser.add_argument("--crop", type=int, default=None, help="[384; 24 on the CPU]")
    parser.add_argument("--impl", default=None, help="[cuda; torch on the CPU]")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE of tpf train")
    given = parser.parse_intermixed_args()
    job = Job(given.out, given.seconds, given.cpu)
    middle = given.steps // 2
    first, second, third, traced = (given.out / x for x in ("first", "again", "resumed", "traced"))
    config = given.config or ("tiny" if given.cpu else "compact")
    recipe = [
        "--crop", str(given.crop or (24 if given.cpu else 384)),
        "--impl", given.impl or ("torch" if given.cpu else "cuda"), "--checkpoint-every",
        str(middle), "--wandb", "disabled", "--keep", "9", "train.precision=bf16-mixed",
        *QUICK_VALIDATION, *given.overrides,
    ]  # fmt: skip
    whole = ["train", "--config", config, *recipe, "--steps", str(given.steps)]
    code = job.tpf(*whole, "--out", str(first))
    job.note(first={"exit_code": code, "steps": len(records(first)), **breakdown(first, 10)})
    if (first / "checkpoints" / f"step-{middle:06d}").is_dir():
        stored = load(str(first / "config.yaml"))
        branch(resolve(first / "checkpoints" / f"step-{middle:06d}"), third, stored)
        job.tpf("train", "--resume", str(third))
        job.note(resumed=same_run(first, third, middle))
    if not given.cpu and job.left > 60:
        count = str(WAIT + WARM_UP + TRACED + 1)
        words = ["--steps", count, "--profile", str(TRACED), "--out", str(traced)]
        job.tpf("train", "--config", config, *recipe, *words)
        trace = traced / "profile" / "rank-0.json"
        job.note(traced=busy_share(trace) if trace.is_file() else None)
    if job.left > 30:
        job.tpf(*whole, "--out", str(second))
        job.note(again=same_run(first, second))
    compared = [job.result[name] for name in ("resumed", "again") if name in job.result]
    job.note(seconds=job.seconds - job.left, equal=all(c["equal"] for c in compared))
    return 0 if code == 0 and compared and job.result["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
