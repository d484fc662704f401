"""Check the triangle multiplicative update's kernels against FP64 and time them beside others.

    python benchmarks/trimul_check.py [--build] [--check] [--time] [--profile] [--compile] [--peers]
        [--shapes NxC,...] [--json PATH]

Runs on one Hopper GPU (--build needs none); a short table comes last. Inputs lie inside larger
buffers filled with NaN. Errors are relative L2; those of plain bf16 PyTorch stand beside ours.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tpf.kernels import jit, reference, tri_mul, tri_mul_bwd
from tpf.kernels.ops import Direction, TriMulWeights, triangle_multiplication

SIZES = (1, 5, 16, 63, 64, 65, 100, 101, 129, 384, 640, 768)
CHANNELS = ((64, 64), (128, 128), (32, 32), (96, 96), (16, 48), (128, 64))
TIMED = ((384, 64), (640, 64), (768, 64), (384, 128), (640, 128), (768, 128))
DIRECTIONS: tuple[Direction, ...] = ("outgoing", "incoming")
MASKS = ("none", "bool", "float", "tail")
LAYOUTS = ("dense", "sliced", "transposed")


@dataclass(frozen=True)
class Case:
    """One input: sizes, direction, mask kind and the memory layout of z and of its gradient."""

    n: int
    c: int
    hidden: int
    direction: Direction = "outgoing"
    mask: str = "none"
    layout: str = "dense"
    b: int = 1
    offset: float = 0.3
    """Mean of z in deviations."""


@dataclass
class Inputs:
    """The tensors of a case."""

    z: Tensor
    mask: Tensor | None
    weights: TriMulWeights
    dout: Tensor


def poisoned(shape: tuple[int, ...], layout: str, offset: float) -> Tensor:
    """Return normal bf16 values [B, N, N, C] surrounded by NaN."""
    b, n, _, c = shape
    width = c + 16 if layout == "sliced" else c
    room = torch.full((b * n * n * width + 4096,), math.nan, dtype=torch.bfloat16, device="cuda")
    view = room[2048:-2048].view(b, n, n, width)[..., width - c :]
    view = view.transpose(1, 2) if layout == "transposed" else view
    return view.copy_(torch.randn(shape, device="cuda") + offset)


def make_weights(c: int, hidden: int) -> TriMulWeights:
    """Return FP32 weights that keep activations near one."""

    def linear(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, device="cuda") / columns**0.5

    def norm(width: int) -> tuple[Tensor, Tensor]:
        room = torch.randn(2, width, device="cuda") * 0.2
        return 1 + room[0], room[1]

    branches = (linear(hidden, c) for _ in range(4))
    return TriMulWeights(*norm(c), *branches, *norm(hidden), linear(c, c), linear(c, hidden))


def make(case: Case) -> Inputs:
    """Return the inputs of a case."""
    shape = (case.b, case.n, case.n, case.c)
    mask = None
    if case.mask == "bool":
        mask = torch.rand(shape[:3], device="cuda") > 0.3
    elif case.mask == "float":
        mask = torch.rand(shape[:3], device="cuda").round().bfloat16()
    elif case.mask == "tail":
        keep = (torch.arange(case.n, device="cuda") < max(1, case.n * 2 // 3)).float()
        mask = (keep[:, None] * keep).expand(shape[:3])
    z, dout = poisoned(shape, case.layout, case.offset), poisoned(shape, case.layout, 0.0)
    return Inputs(z, mask, make_weights(case.c, case.hidden), dout)


def plain(z: Tensor, mask: Tensor | None, w: TriMulWeights, direction: Direction) -> Tensor:
    """Compute the update as a bf16 PyTorch program does: the baseline of accuracy and time."""
    low = TriMulWeights(*(x.to(z.dtype) for x in w))
    zn = F.layer_norm(z, z.shape[-1:], low.layer_norm_in_weight, low.layer_norm_in_bias)
    a = F.linear(zn, low.linear_a_p) * F.linear(zn, low.linear_a_g).sigmoid()
    b = F.linear(zn, low.linear_b_p) * F.linear(zn, low.linear_b_g).sigmoid()
    if mask is not None:
        keep = mask[..., None].to(z.dtype)
        a, b = a * keep, b * keep
    a, b = a.permute(0, 3, 1, 2), b.permute(0, 3, 1, 2)
    x = a @ b.mT if direction == "outgoing" else a.mT @ b
    x = x.permute(0, 2, 3, 1)
    xn = F.layer_norm(x, x.shape[-1:], low.layer_norm_out_weight, low.layer_norm_out_bias)
    return F.linear(xn, low.linear_z) * F.linear(zn, low.linear_g).sigmoid()


def relative(x: Tensor, exact: Tensor) -> float:
    """Return the relative L2 error."""
    norm = float(exact.double().norm())
    return float((x.double() - exact.double()).norm()) / (norm or 1.0)


def worst_row(x: Tensor, exact: Tensor) -> float:
    """Return the largest error of a position in units of the mean row, to show broken rows."""
    error = (x.double() - exact).norm(dim=-1)
    return float(error.max() / (exact.norm(dim=-1).mean() + 1e-12))


Update = Callable[[Tensor, Tensor | None, TriMulWeights, Direction], Tensor]
ours: Update = functools.partial(triangle_multiplication, impl="cuda")


def run(update: Update, inputs: Inputs, direction: Direction) -> list[Tensor]:
    """Return the update, dz and the ten weight gradients."""
    leaves = [inputs.z.detach().requires_grad_()]
    leaves += [w.detach().requires_grad_() for w in inputs.weights]
    out = update(leaves[0], inputs.mask, TriMulWeights(*leaves[1:]), direction)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs.dout)]


NAMES = ("out", "dz", *TriMulWeights._fields)
LIMITS = {"out": 8e-3, "dz": 9e-3, "row": 4e-2, "dz_row": 6e-2, "repeat": 0.0}
WEIGHT_LIMIT = 1.2e-2
"""Largest accepted errors where the sums are long; N below SMALL is judged by the ratio alone."""
SMALL = 64
RATIO_LIMIT = 2.0


def exact_results(case: Case, inputs: Inputs) -> list[Tensor]:
    """Return the update and its gradients in FP64."""
    w = TriMulWeights(*(x.double() for x in inputs.weights))
    z, dout = inputs.z.double(), inputs.dout.double()
    out = reference.multiplication_forward(z, inputs.mask, w, case.direction)
    dz, grads = reference.multiplication_backward(dout, z, inputs.mask, w, case.direction)
    return [out, dz, *grads]


def check_case(case: Case) -> dict[str, float]:
    """Return errors against FP64, the worst ratio to plain bf16 PyTorch, 1 if calls differ."""
    inputs = make(case)
    got, again = (run(ours, inputs, case.direction) for _ in range(2))
    exact = exact_results(case, inputs)
    base = run(plain, inputs, case.direction)
    errors = {name: relative(x, e) for name, x, e in zip(NAMES, got, exact, strict=True)}
    errors["row"], errors["dz_row"] = worst_row(got[0], exact[0]), worst_row(got[1], exact[1])
    baseline = (max(relative(x, e), 2e-3) for x, e in zip(base, exact, strict=True))
    errors["ratio"] = max(errors[name] / e for name, e in zip(NAMES, baseline, strict=True))
    errors["repeat"] = float(not all(torch.equal(x, y) for x, y in zip(got, again, strict=True)))
    return errors


def failed(case: Case, errors: dict[str, float]) -> dict[str, float]:
    """Return the errors of a case that are too large."""
    limits = dict.fromkeys(errors, WEIGHT_LIMIT) | LIMITS | {"ratio": RATIO_LIMIT}
    if case.n < SMALL:  # few terms: an error may be large by chance, as that of PyTorch may
        limits |= dict.fromkeys(NAMES, 0.1) | {"row": 0.2, "dz_row": 0.2, "ratio": 4.0}
    return {k: e for k, e in errors.items() if not e <= limits[k]}


def cases() -> list[Case]:
    """Return the checked inputs: every size with every width, other properties in turn."""
    turns = zip(
        itertools.cycle(DIRECTIONS + DIRECTIONS[::-1] + DIRECTIONS[:1]),
        itertools.cycle(MASKS),
        itertools.cycle(LAYOUTS),
        itertools.cycle((1, 2, 1, 1, 1)),
        strict=False,
    )
    found = [
        Case(n, c, hidden, direction, mask, layout, b if n < 384 else 1)
        for (n, (c, hidden)), (direction, mask, layout, b) in zip(
            itertools.product(SIZES, CHANNELS), turns, strict=False
        )
    ]
    for direction, mask in itertools.product(DIRECTIONS, ("none", "bool")):
        found.append(Case(384, 128, 128, direction, mask))
        found.append(Case(384, 64, 64, direction, mask, offset=20.0))
    return found


def build_all() -> int:
    """Compile all variants that the checks and timings use, in parallel; return their number."""
    wanted = set()
    for c, hidden in CHANNELS:
        sizes = tri_mul.Sizes(c, hidden)
        variants = tri_mul.forward_variants(sizes) | tri_mul_bwd.backward_variants(sizes)
        wanted |= {(v.name, tuple(sorted(v.defines.items()))) for v in variants.values()}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda item: jit.build(item[0], dict(item[1])), wanted))
    return len(wanted)


def run_checks() -> tuple[int, dict[str, float]]:
    """Check all cases; print failures and return their number and the worst errors (N >= SMALL)."""
    worst: dict[str, float] = {}
    failures, start = 0, time.perf_counter()
    for index, case in enumerate(cases()):
        if index % 20 == 0:
            print(f"case {index}, {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
        errors = check_case(case)
        bad = failed(case, errors)
        failures += bool(bad)
        if bad and failures <= 25:
            print("FAIL", case, {k: f"{e:.3g}" for k, e in bad.items()}, flush=True)
        if case.n >= SMALL:
            for key, error in errors.items():
                worst[key] = max(worst.get(key, 0.0), error if error == error else math.inf)
    return failures, worst


def graph_milliseconds(call: Callable[[], Any], repeats: int = 30) -> float:
    """Return the median GPU time of a call, by replays of a captured graph of it."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    times = []
    for _ in range(repeats + 5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[5:])


def host_microseconds(call: Callable[[], Any], repeats: int = 50) -> float:
    """Return the median time that a call keeps the host busy."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def peak_mib(call: Callable[[], Any]) -> float:
    """Return the most memory that PyTorch holds during a call, inputs included."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**20


def kernel_times(call: Callable[[], Any]) -> dict[str, float]:
    """Return microseconds on the GPU of each kernel of a call (sums of equal names)."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            call()
        torch.cuda.synchronize()
    found = {event.key[:60]: event.device_time_total / 5 for event in profile.key_averages()}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def peers(compiled: bool, other: bool) -> Iterator[tuple[str, Update]]:
    """Yield the implementations to time beside ours."""
    if compiled:
        yield "compile", torch.compile(plain)
    if other:
        try:
            from cuequivariance_torch import triangle_multiplicative_update as update
        except ImportError as error:
            print(f"cuequivariance_torch is not importable: {error}", flush=True)
            return

        def cuequivariance(
            z: Tensor, mask: Tensor | None, w: TriMulWeights, direction: Direction
        ) -> Tensor:
            low = TriMulWeights(*(x.to(z.dtype) for x in w))
            return update(
                z, direction=direction, mask=mask,
                norm_in_weight=low.layer_norm_in_weight, norm_in_bias=low.layer_norm_in_bias,
                p_in_weight=torch.cat([low.linear_a_p, low.linear_b_p]),
                g_in_weight=torch.cat([low.linear_a_g, low.linear_b_g]),
                norm_out_weight=low.layer_norm_out_weight, norm_out_bias=low.layer_norm_out_bias,
                p_out_weight=low.linear_z, g_out_weight=low.linear_g,
            )  # fmt: skip

        yield "cueq", cuequivariance


def time_update(update: Update, n: int, c: int, direction: Direction) -> dict[str, float]:
    """Return GPU and host times and the peak memory of an implementation."""
    inputs = make(Case(n, c, c, direction))
    leaves = [inputs.z.detach().clone().requires_grad_()]
    leaves += [w.detach().clone().requires_grad_() for w in inputs.weights]
    dout = inputs.dout.contiguous()
    del inputs

    def forward() -> Tensor:
        return update(leaves[0], None, TriMulWeights(*leaves[1:]), direction)

    def inference() -> Tensor:
        with torch.no_grad():
            return forward()

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), leaves, dout)

    return {
        "fwd_ms": graph_milliseconds(inference),
        "both_ms": graph_milliseconds(both),
        "host_fwd_us": host_microseconds(inference),
        "host_both_us": host_microseconds(both),
        "peak_mib": peak_mib(both),
    }


def time_all(args: argparse.Namespace) -> dict[str, Any]:
    """Time the chosen shapes and print a line for each implementation."""
    record: dict[str, Any] = {}
    for shape in args.shapes.split(","):
        n, c = map(int, shape.split("x"))
        found = {direction: time_update(ours, n, c, direction) for direction in DIRECTIONS}
        for name, update in peers(args.compile, args.peers):
            try:
                found[name] = time_update(update, n, c, "outgoing")
            except Exception as error:  # a peer that fails must not stop the others
                print(f"{name}: {error!r}"[:300], flush=True)
        if args.profile:
            inputs = make(Case(n, c, c))
            by_kernel = kernel_times(functools.partial(run, ours, inputs, "outgoing"))
            for kernel, time_us in list(by_kernel.items())[:14]:
                print(f"  {time_us:9.1f} us  {kernel}", flush=True)
        for name, times in found.items():
            print(f"N={n:4} C={c:4} {name:9}", *(f"{k} {v:.3f}" for k, v in times.items()),
                  flush=True)  # fmt: skip
        record[shape] = found
    return record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for flag in ("build", "check", "time", "profile", "compile", "peers"):
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("--shapes", default=",".join(f"{n}x{c}" for n, c in TIMED))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.build:
        start = time.perf_counter()
        print(f"built {build_all()} kernels in {time.perf_counter() - start:.0f} s", flush=True)
        if not (args.check or args.time):
            return 0
    torch.manual_seed(0)
    record: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    failures = 0
    if args.check:
        start = time.perf_counter()
        failures, worst = run_checks()
        record["check"] = {"cases": len(cases()), "failures": failures, "worst": worst}
        print(f"check: {len(cases())} cases, {failures} failures, "
              f"{time.perf_counter() - start:.0f} s; worst",
              {k: f"{v:.3g}" for k, v in worst.items()}, flush=True)  # fmt: skip
    if args.time:
        record["times"] = time_all(args)
    if args.json:
        args.json.write_text(json.dumps(record, indent=1))
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
