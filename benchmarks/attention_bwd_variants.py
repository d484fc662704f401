"""Compare the present dQ kernel of the attention backward with `handover` on one Hopper GPU.

Usage: python benchmarks/attention_bwd_variants.py [--build]. Both compute the same sums in the same
order: gradients must be bitwise those of the first call of the present kernels. Small shapes are
compared with FP64 too (relative L2 error in percent); then both run CALLS times at each size, and
differences are located: dq and dbias come from the dQ kernel, dk and dv from the other. At last
both are timed in turn, whole calls as CUDA graphs, kernels by events. --build compiles only.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
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

WAYS = {"present": False, "handover": True}
"""By name, ``Tuning.handover``."""
WIDTHS = (16, 32)
CASES = (
    (1, 5, 2, 130, {"mask": True}), (2, 37, 2, 300, {"mask": True, "end": True}),
    (1, 40, 1, 64, {}), (1, 100, 3, 257, {"sharp": 3.0}), (1, 384, 4, 384, {}),
)  # fmt: skip
SIZES, CALLS, ROUNDS, REPEATS, PAUSE = (384, 640, 768), 200, 5, 5, 0.02
Times = dict[tuple[int, int, str], dict[str, list[float]]]


@contextmanager
def tuned(d: int, name: str) -> Iterator[None]:
    """Let the backward run the variant."""
    key = plans.Q_BIAS, d
    usual = plans.TUNING[key]
    try:
        plans.TUNING[key] = usual._replace(handover=WAYS[name])
        launch.forget_plans()
        yield
    finally:
        plans.TUNING[key] = usual
        launch.forget_plans()


def compile_one(job: tuple[str, dict[str, int]]) -> str:
    """Compile a kernel into the cache of binaries; returns what is wrong with it."""
    binary = jit.build(*job)
    serialised = [line for line in binary.warnings if "C75" in line]
    return f"{job}: {binary.spill_bytes} {serialised}" if binary.spill_bytes or serialised else ""


def build() -> None:
    """Compile all kernels at once."""
    jobs = []
    for d in WIDTHS:
        for name in WAYS:
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
    """Compare the present kernels with FP64 on small shapes, and both with them."""
    for b, o, h, n, flags in CASES:
        inputs = common.make_inputs(b, o, h, n, d, **flags)
        call = prepared(inputs)
        with tuned(d, "present"):
            want = call()
        found = [f"{e:.4f}" for e in common.errors(inputs, want)]
        print(f"D={d} {(b, o, h, n)} {flags}: error % {found}", flush=True)
        for name in WAYS:
            with tuned(d, name):
                common.poison()
                report(f"D={d} {(b, o, h, n)} {name}", call, want, REPEATS)


def report(title: str, call: Callable[[], tuple[Tensor, ...]], want: Sequence[Tensor],
           repeats: int) -> None:  # fmt: skip
    """Call many times without waiting, and tell which gradients differed, how often and where."""
    bits = [x.view(torch.int32 if x.element_size() == 4 else torch.int16) for x in want]
    counts = torch.zeros(repeats, len(bits), dtype=torch.int64, device=bits[0].device)
    wrong = [torch.zeros_like(x, dtype=torch.bool) for x in bits]
    for turn in range(repeats):
        for i, (x, y) in enumerate(zip(call(), bits, strict=True)):
            differs = x.view(y.dtype) != y
            counts[turn, i] = differs.sum()
            wrong[i] |= differs
    total = counts.tolist()
    for i, name in enumerate(common.NAMES):
        calls = {turn: row[i] for turn, row in enumerate(total) if row[i]}
        if calls:
            places = wrong[i].nonzero()
            low, high = places.amin(0).tolist(), places.amax(0).tolist()
            print(f"BAD {title} {name}: elements by call {calls}; indices {low} .. {high}; "
                  f"first {places[:4].tolist()}", flush=True)  # fmt: skip


def stress(d: int, n: int) -> None:
    """Call both CALLS times."""
    call = prepared(common.make_inputs(1, n, 4, n, d))
    with tuned(d, "present"):
        want = call()
    for name in WAYS:
        with tuned(d, name):
            report(f"D={d} N={n} {name}", call, want, CALLS)
    print(f"D={d} N={n}: {CALLS} calls of {', '.join(WAYS)} compared", flush=True)


def graph_of(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def measure(times: Times, d: int, n: int) -> None:
    """Time both in turn, as the clock falls while the chip grows warm."""
    call = prepared(common.make_inputs(1, n, 4, n, d))
    for _ in range(ROUNDS):
        for name in WAYS:
            with tuned(d, name):
                graph = graph_of(call)
                torch.cuda._sleep(2_000_000)  # what follows is queued behind it
                total = common.median_ms(graph.replay, 3)
                spans = common.kernel_ms(call, 2)
            row = times.setdefault((d, n, name), {})
            for key, value in {"total": total, **spans}.items():
                row.setdefault(key, []).append(value)
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
    for d in WIDTHS:
        check(d)
        for n in SIZES:
            stress(d, n)
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
