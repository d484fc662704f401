"""Does the loss with our kernels follow PyTorch's? Three trainings from one state, side by side.

  python benchmarks/loss_curve.py OUT                 # one Hopper GPU, compact preset: 3 minutes
  python benchmarks/loss_curve.py OUT --cpu --steps 20     # tiny preset, seconds

A stability study (tpf/stability) with the arms torch in FP32, torch in BF16 and each backend in
BF16: one warm-up of 20 steps, then the same batches and noise in all. ``OUT/loss-curve.json`` has
the curves and the verdict by the rule of tpf/stability/follow.py; it is written after every arm,
also when the time is up. Exit code 1 if a backend strays too far or an arm is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tpf.bench.record import conditions
from tpf.checkpoint import write_text
from tpf.config import Config, load
from tpf.errors import Interrupted
from tpf.stability import follow
from tpf.stability.report import write_results
from tpf.stability.results import Results, collect
from tpf.stability.study import FP32, REFERENCE, Settings, Study
from tpf.stability.verdict import WINDOW

EXACT = REFERENCE + FP32
WARM_UP = 20
GPU_CROP, CPU_CROP = 160, 24
SHORT = [
    "train.lr=1e-3", "train.ema=0.999", "train.batch_size=1", "train.precision=bf16-mixed",
    "train.diffusion_samples=8", "train.diffusion_chunk=8", "train.rollout_steps=1",
    "train.max_recycles=0", "model.checkpoint=false", "train.checkpoint_every=1000", "train.keep=1",
    "train.wandb=disabled",
]  # fmt: skip
"""Few copies and no recycling, so that 600 steps take two minutes."""


def document(results: Results, steps: int) -> dict[str, Any]:
    """Return the curves and, of every backend, whether it follows."""
    curves = {curve.arm.name: curve.losses.raw for curve in results.curves}
    backends = [name for name in curves if name not in (REFERENCE, EXACT)]
    complete = all(curve.outcome is not None for curve in results.curves)
    comparable = len(curves[REFERENCE]) == len(curves[EXACT]) == steps
    judged = {
        name: follow.follow(curves[name], curves[REFERENCE], curves[EXACT])
        for name in backends
        if comparable
    }
    reference = follow.distance(curves[REFERENCE], curves[EXACT]) if comparable else None
    return {
        "environment": conditions(),
        "command": sys.argv,
        "rule": {"window": WINDOW, "factor": follow.FACTOR, "floor": follow.FLOOR},
        "complete": complete,
        "reference_distance": reference,
        "backends": {
            name: asdict(found) | {"holds": found.holds} for name, found in judged.items()
        },
        "failures": results.failures,
        "rows": results.rows,
        "curves": curves,
    }


def configuration(cpu: bool, overrides: list[str]) -> Config:
    """Return what all arms share."""
    return load("tiny" if cpu else "compact", [*SHORT, *overrides])


def main() -> int:
    """Run the study and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--impls", default=None, help="backends to judge [cuda; eager on the CPU]")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=540, help="stop, and write what is there")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE")
    given = parser.parse_intermixed_args()
    impls = (given.impls or ("eager" if given.cpu else "cuda")).split(",")
    crop = CPU_CROP if given.cpu else GPU_CROP
    settings = Settings(
        impls=(REFERENCE, EXACT, *impls), crops=(crop,), warmup_steps=WARM_UP, warmup_crop=crop,
        steps=given.steps, cpu=given.cpu,
    )  # fmt: skip
    config = configuration(given.cpu, given.overrides)
    study = Study.create(given.out, settings, config, lambda text: print(text, file=sys.stderr))

    def write(found: Study) -> None:
        results = collect(found)
        write_results(found, results)
        text = json.dumps(document(results, given.steps), indent=1)
        write_text(given.out / "loss-curve.json", text + "\n")

    timer = threading.Timer(given.seconds, os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()
    try:
        study.run(write)
    except Interrupted as error:
        print(error, file=sys.stderr)
        return error.exit_code
    finally:
        timer.cancel()
    found = json.loads((given.out / "loss-curve.json").read_text())
    print(json.dumps({k: found[k] for k in ("complete", "reference_distance", "backends")}))
    judged = found["backends"].values()
    good = found["complete"] and judged and all(backend["holds"] for backend in judged)
    return 0 if good and not found["failures"] else 1


if __name__ == "__main__":
    sys.exit(main())
