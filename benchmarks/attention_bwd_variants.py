"""Check and time variants of the main kernels of the attention backward on one Hopper GPU.

Usage: python benchmarks/attention_bwd_variants.py [--build]. Every variant computes the same sums
in the same order, so that its gradients must be bitwise those of the present kernels, call after
call; those are compared with FP64 (relative L2 error in percent). Then all are timed in turn: whole
calls as CUDA graphs, kernels by events. --build compiles only.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import attention_bwd_check as common
from tpf.kernels import jit, launch, reference
from tpf.kernels import tri_attn_bwd_plan as plans
from tpf.kernels.tri_attn_bwd import tri_attn_bwd

PRESENT = "present"
WAYS: dict[int, dict[str, tuple[plans.Tuning, plans.Tuning]]] = {
    16: {
        PRESENT: (plans.TUNING[plans.KV, 16], plans.TUNING[plans.Q_BIAS, 16]),
        "groups, handover": (plans.Tuning(4, False, True, True),
                             plans.Tuning(4, False, True, False, True)),
        "groups, both": (plans.Tuning(4, False, True, True),
                         plans.Tuning(4, False, True, True, True)),
        "groups, both, hints": (plans.Tuning(4, False, True, True),
                                plans.Tuning(4, False, True, True, True, 32, True)),
    },
    32: {
        PRESENT: (plans.TUNING[plans.KV, 32], plans.TUNING[plans.Q_BIAS, 32]),
        "groups, handover": (plans.Tuning(2, False, True, True),
                             plans.Tuning(4, False, False, False, True)),
        "groups, handover ahead": (plans.Tuning(2, False, True, True),
                                   plans.Tuning(4, False, True, False, True, 16)),
        "groups, both ahead": (plans.Tuning(2, False, True, True),
                               plans.Tuning(4, False, True, True, True, 20)),
        "groups, both ahead, hints": (plans.Tuning(2, False, True, True),
                                      plans.Tuning(4, False, True, True, True, 20, True)),
    },
}  # fmt: skip
"""By padded head width and name (kv, q and bias), the tunings of both kernels."""
CASES = (
    (1, 5, 2, 130, {"mask": True}), (2, 37, 2, 300, {"mask": True, "end": True}),
    (1, 40, 1, 64, {}), (1, 100, 3, 257, {"sharp": 3.0}), (1, 384, 4, 384, {}),
)  # fmt: skip
SIZES, ROUNDS, REPEATS, PAUSE = (384, 640, 768), 7, 5, 0.02
Times = dict[tuple[int, int, str], dict[str, list[float]]]


@contextmanager
def tuned(d: int, name: str) -> Iterator[None]:
    """Let the backward run the variant."""
    keys = (plans.KV, d), (plans.Q_BIAS, d)
    usual = [plans.TUNING[key] for key in keys]
    try:
        plans.TUNING.update(zip(keys, WAYS[d][name], strict=True))
        launch.forget_plans()
        yield
    finally:
        plans.TUNING.update(zip(keys, usual, strict=True))
        launch.forget_plans()


def compile_one(job: tuple[str, dict[str, int]]) -> str:
    """Compile a kernel into the cache of binaries; returns what is wrong with it."""
    binary = jit.build(*job)
    serialised = [line for line in binary.warnings if "C75" in line]
    return f"{job}: {binary.spill_bytes} {serialised}" if binary.spill_bytes or serialised else ""


def build() -> None:
    """Compile all kernels at once."""
    jobs = []
    for d, ways in WAYS.items():
        for name in ways:
            with tuned(d, name):
                jobs += list(plans.variants(plans.Problem(1, 64, 4, 64, d, False)).items())
    unique = [job for i, job in enumerate(jobs) if job not in jobs[:i]]
    workers = min(16, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for problem in filter(None, pool.map(compile_one, unique)):
            print("BAD", problem)


def prepared(inputs: common.Inputs) -> Callable[[], tuple[Tensor, ...]]:
    q, k, v, bias, mask, dout = inputs
    scale = q.shape[-1] ** -0.5
    saved = reference.attention_forward(q, k, v, bias, mask, scale, True)
    return functools.partial(tri_attn_bwd, q, k, v, bias, mask, scale, *saved, dout)


def check(d: int) -> None:
    """Compare the present kernels with FP64 and the variants with them."""
    for b, o, h, n, flags in CASES:
        inputs = common.make_inputs(b, o, h, n, d, **flags)
        call = prepared(inputs)
        with tuned(d, PRESENT):
            want = call()
        found = [f"{e:.4f}" for e in common.errors(inputs, want)]
        print(f"D={d} {(b, o, h, n)} {flags} {PRESENT}: error % {found}", flush=True)
        for name in WAYS[d]:
            with tuned(d, name):
                common.poison()
                calls = [call() for _ in range(REPEATS)]
            wrong = {
                gradient
                for got in calls
                for gradient, x, y in zip(common.NAMES, got, want, strict=True)
                if not torch.equal(x, y)
            }
            if wrong:
                print(f"BAD D={d} {(b, o, h, n)} {name}: {sorted(wrong)} differ", flush=True)


def graph_of(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def measure(times: Times, d: int, n: int) -> None:
    """Time the variants in turn, as the clock falls while the chip grows warm."""
    call = prepared(common.make_inputs(1, n, 4, n, d))
    want = None
    for turn in range(ROUNDS):
        for name in WAYS[d]:
            with tuned(d, name):
                graph = graph_of(call)
                torch.cuda._sleep(2_000_000)  # what follows is queued behind it
                spans = common.kernel_ms(call, 2)
                total = common.median_ms(graph.replay, 3)
                got = call()
            row = times.setdefault((d, n, name), {})
            for key, value in {"total": total, **spans}.items():
                row.setdefault(key, []).append(value)
            want = want or got
            if not all(torch.equal(x, y) for x, y in zip(got, want, strict=True)):
                print(f"BAD D={d} N={n} {name} differs in round {turn}", flush=True)
            time.sleep(PAUSE)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", action="store_true")
    args = parser.parse_args()
    start = time.perf_counter()
    build()
    print(f"compiled after {time.perf_counter() - start:.0f} s", flush=True)
    if args.build:
        return
    times: Times = {}
    for d in WAYS:
        check(d)
        for n in SIZES:
            measure(times, d, n)
    print(f"{torch.cuda.get_device_name()}, {time.perf_counter() - start:.0f} s; least / median ms")
    for (d, n, name), row in times.items():
        shown = [
            f"{key.removeprefix('tri_attn_')} {min(x):.3f} / {statistics.median(x):.3f}"
            for key, x in row.items()
        ]
        print(f"D={d} N={n} {name}: {', '.join(shown)}")


if __name__ == "__main__":
    main()
