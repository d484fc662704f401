"""Compare trials of the forward kernel of triangle attention with the default one.

    python benchmarks/attention_forward.py [--build] [--shapes NxD,...] [--rounds 5]

Builds every trial, checks each against FP64 and for repeatability, times all in turn in one
process, and prints the table last. Needs one Hopper GPU (--build: none), about 30 s.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import torch
from attention_check import LIMITS, Case, check_case, make

from tpf.kernels import jit, launch, library, tri_attn
from tpf.kernels.tri_attn import ForwardTile, Lean


class Trial(NamedTuple):
    """What a row of the table runs."""

    lean: Lean | None
    full: bool = True
    """Check and time it with masks too."""
    fp32_bias: bool = False
    masked_group: int = 2
    """Slices that share a bias tile at head width 16 with a mask."""


TRIALS = {
    "default": Trial(None),
    "lean": Trial(Lean(products=False, early=False)),
    "lean early": Trial(Lean(products=False, early=True), full=False),
    "products": Trial(Lean(products=True, early=False), masked_group=4),
    "products early": Trial(Lean(products=True, early=True), full=False),
    "default, fp32 bias": Trial(None, full=False, fp32_bias=True),
    "lean, fp32 bias": Trial(Lean(products=False, early=False), full=False, fp32_bias=True),
}
SHAPES = "384x16,640x16,768x16,384x32,640x32,768x32"
CHECKED = (
    Case(1, 32),
    Case(65, 16, 5),
    Case(200, 32, 5, 2, mask="rows"),
    Case(200, 16, 5, 2, mask="rows"),
    Case(384, 16, 24, 1, 4, "tail"),
    Case(384, 32, 24, 1, 4, "random"),
    Case(640, 16, 128, 1, 4),
    Case(640, 32, 128, 1, 4),
    Case(768, 16, 12, 1, 4, "random", sharp=3.0),
    Case(768, 32, 12, 1, 4, sharp=3.0),
    Case(384, 32, 12, 1, 4, sharp=5.0),
)


def used(trial: Trial, case: Case) -> bool:
    """Return whether a trial runs a case."""
    return trial.full or case.mask == "none"


@contextmanager
def using(trial: Trial) -> Iterator[None]:
    """Let forward calls run a trial."""
    before = tri_attn.LEAN, tri_attn.FORWARD_TILES
    tri_attn.LEAN = trial.lean
    tri_attn.FORWARD_TILES = before[1] | {(16, True): ForwardTile(trial.masked_group, 4)}
    try:
        yield
    finally:
        tri_attn.LEAN, tri_attn.FORWARD_TILES = before


def build_all() -> None:
    """Compile what the checks and timings run, in parallel, and print registers and spills."""
    wanted: dict[tuple[str, tuple[tuple[str, int], ...]], str] = {}
    for name, trial in TRIALS.items():
        with using(trial):
            for d, masked, save in itertools.product((16, 32), (False, True), (False, True)):
                if trial.full or not masked:
                    defines = tri_attn.forward_defines(d, trial.fp32_bias, masked, save)
                    wanted["tri_attn_fwd", tuple(sorted(defines.items()))] = name
    for defines in ({"BIAS_F32": 0}, {"BIAS_F32": 0, "FINITE": 1}, {"BIAS_F32": 1}):
        wanted["tri_attn_pack", tuple(defines.items())] = "pack"
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        binaries = list(pool.map(lambda key: jit.build(key[0], dict(key[1])), wanted))
    for (_, defines), name, binary in zip(wanted, wanted.values(), binaries, strict=True):
        if binary.spill_bytes or binary.warnings:
            print("SPILLS OR WARNINGS", name, dict(defines), binary.spill_bytes, binary.warnings)


def check(trial: Trial) -> tuple[int, dict[str, float]]:
    """Return the number of failed cases of a trial and the worst errors."""
    worst: dict[str, float] = {}
    failures = 0
    for case in filter(functools.partial(used, trial), CHECKED):
        dtype = torch.float32 if trial.fp32_bias else torch.bfloat16
        errors = check_case(Case(**{**vars(case), "bias_dtype": dtype}), backward=False)
        bad = {k: f"{e:.3g}" for k, e in errors.items() if not e <= LIMITS[k]}
        failures += bool(bad)
        if bad:
            print("FAIL", trial, case, bad, flush=True)
        for key, error in errors.items():
            worst[key] = max(worst.get(key, 0.0), error if error == error else math.inf)
    return failures, worst


def check_negative(n: int = 200) -> float:
    """Return the largest error of the log-sums when all scores of all rows are negative."""
    q, k, v, bias, _ = make(Case(n, 32, 5))
    bias -= 40.0
    _, lse, _ = library.tri_attn_fwd(q, k, v, bias, None, 32**-0.5, True, "cuda")
    scores = 32**-0.5 * q.double() @ k.double().mT + bias[:, None].double()
    return float((lse.double() - scores.logsumexp(-1) * math.log2(math.e)).abs().max())


def capture(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Return a graph of a call."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph


def milliseconds(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    """Return the median time of a replay."""
    times = []
    for i in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i > 1:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def time_shape(n: int, d: int, mask: str, save: bool, rounds: int) -> dict[str, float]:
    """Return the milliseconds of every trial at B = 1, O = N, H = 4: lowest of medians in turn."""
    q, k, v, bias, words = make(Case(n, d, n, 1, 4, mask))
    graphs = {}
    for name, trial in TRIALS.items():
        if mask != "none" and not trial.full:
            continue
        b = bias.float() if trial.fp32_bias else bias
        with using(trial):
            graphs[name] = capture(
                lambda b=b: library.tri_attn_fwd(q, k, v, b, words, d**-0.5, save, "cuda")
            )
    found = dict.fromkeys(graphs, math.inf)
    for _, (name, graph) in itertools.product(range(rounds), graphs.items()):
        found[name] = min(found[name], milliseconds(graph, 6))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--build", action="store_true", help="only build")
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    start = time.perf_counter()
    build_all()
    print(f"built in {time.perf_counter() - start:.0f} s", flush=True)
    if args.build:
        return 0
    torch.manual_seed(0)
    notes, failures = {}, 0
    for name, trial in TRIALS.items():
        with using(trial):
            failed, worst = check(trial)
            worst["negative"] = check_negative()
        failures += failed + (not worst["negative"] <= LIMITS["lse"])
        notes[name] = " ".join(f"{key} {value:.2g}" for key, value in worst.items())
    print(f"checked in {time.perf_counter() - start:.0f} s, {failures} failures", flush=True)
    columns = {}
    for shape in args.shapes.split(","):
        n, d = map(int, shape.split("x"))
        columns[shape] = time_shape(n, d, "none", False, args.rounds)
        if n == 768:
            columns[f"{shape} residual"] = time_shape(n, d, "none", True, args.rounds)
            columns[f"{shape} masked"] = time_shape(n, d, "random", True, args.rounds)
    launch.forget_plans()
    print(f"timed in {time.perf_counter() - start:.0f} s; worst errors")
    for name, note in notes.items():
        print(f"{name:20}", note)
    print(f"{'ms':20}", *(f"{shape.replace(' ', '/')[:12]:>12}" for shape in columns))
    for name in TRIALS:
        print(
            f"{name:20}",
            *(f"{found.get(name, math.nan):12.3f}" for found in columns.values()),
            flush=True,
        )
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
