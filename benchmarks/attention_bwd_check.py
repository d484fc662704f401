"""Check and time the backward of triangle attention on one Hopper GPU.

Usage: python benchmarks/attention_bwd_check.py [--tiny] [--no-shapes] [--variants] [--paper]
[--flex] [--json FILE]. Gradients are compared with FP64 on the same inputs (relative L2 error in
percent), repeated calls must agree bitwise, and each kernel is timed by events. --variants times
other tunings of the main kernels, --paper the paper's algorithm, --flex compiled flex_attention.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tpf.kernels import jit, launch, reference
from tpf.kernels import tri_attn_bwd_plan as plans
from tpf.kernels.tri_attn_bwd import tri_attn_bwd
from tpf.kernels.tri_attn_bwd_paper import tri_attn_bwd_paper

DEVICE = "cuda"
ROUNDS, PAUSE = 5, 0.02
"""Rounds over the variants, and seconds between two of them in which the chip cools down."""
NAMES = ("dq", "dk", "dv", "dbias")
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor]


def make_inputs(
    b: int, o: int, h: int, n: int, d: int, *, mask: bool = False, wide: bool = False,
    end: bool = False, sharp: float = 1.0, seed: int = 0,
) -> Inputs:  # fmt: skip
    """Return q, k, v, bias, mask, dout in the projections' layout (end: transposed pair)."""
    torch.manual_seed(seed)

    def operand(factor: float) -> Tensor:
        shape = (b, n, o, h, d) if end else (b, o, n, h, d)
        x = (torch.randn(shape, device=DEVICE) * factor).bfloat16()
        return x.permute(0, 2, 3, 1, 4) if end else x.transpose(2, 3)

    q, k, v, dout = operand(sharp), operand(sharp), operand(1.0), operand(1.0)
    bias = torch.randn((b, n, n, h) if end else (b, h, n, n), device=DEVICE)
    bias = bias.to(torch.float32 if wide else torch.bfloat16)
    keep = None
    if mask:
        keep = torch.rand(b, o, n, device=DEVICE) > 0.3
        keep[:, 0] = False
    return q, k, v, bias.permute(0, 3, 1, 2) if end else bias, keep, dout


def gradients(
    inputs: Inputs, backward: Callable = tri_attn_bwd, compensate: bool = True
) -> tuple[tuple[Tensor, ...], Callable]:
    """Return our gradients and a function that computes them again."""
    q, k, v, bias, mask, dout = inputs
    scale = q.shape[-1] ** -0.5
    out, lse, residual = reference.attention_forward(q, k, v, bias, mask, scale, compensate)

    def call() -> tuple[Tensor, ...]:
        return backward(q, k, v, bias, mask, scale, out, lse, residual, dout)

    return call(), call


def errors(inputs: Inputs, got: tuple[Tensor, ...]) -> list[float]:
    """Return the relative L2 error (percent) of each gradient against FP64."""
    q, k, v, bias, mask, dout = inputs
    wide = [x.double() for x in (q, k, v, bias)]
    scale = q.shape[-1] ** -0.5
    out, lse, none = reference.attention_forward(*wide, mask, scale, False)
    want = reference.attention_backward(dout.double(), *wide, mask, scale, out, lse, none)
    found = []
    for g, w in zip(got, want, strict=True):
        norm = w.norm().item()
        error = (g.double() - w).norm().item()
        found.append(100 * error / norm if norm > 1e-9 else error)
    return found


def median_ms(call: Callable, repeats: int = 20) -> float:
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def kernel_ms(call: Callable, repeats: int = 10) -> dict[str, float]:
    """Return the median time of each kernel of a call."""
    spans: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}
    plain = jit.Kernel.launch

    def timed(self: jit.Kernel, *args: object, **kwargs: object) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        plain(self, *args, **kwargs)  # type: ignore[arg-type]
        end.record()
        spans.setdefault(self.name, []).append((start, end))

    jit.Kernel.launch = timed  # type: ignore[method-assign]
    launch.forget_plans()  # they hold the method
    try:
        for _ in range(repeats):
            call()
    finally:
        jit.Kernel.launch = plain  # type: ignore[method-assign]
        launch.forget_plans()
    torch.cuda.synchronize()
    return {n: statistics.median(a.elapsed_time(b) for a, b in s) for n, s in spans.items()}


def poison() -> None:
    """Fill the memory that the allocator will hand out next with NaN."""
    for size in (1 << 27, 1 << 22, 1 << 16):
        blocks = [torch.full((size,), math.nan, device=DEVICE) for _ in range(4)]
        del blocks


def check_shapes(results: dict, tiny: bool, backward: Callable, name: str) -> None:
    """Compare small and usual shapes with FP64; name tells the algorithm."""
    cases = [(1, 2, 1, 1, 8, {}), (1, 3, 2, 65, 32, {"mask": True})]
    if not tiny:
        sizes = (7, 16, 63, 64, 127, 128, 129, 200, 257)
        for i, n in enumerate(sizes):
            for d in (16, 32, 64):
                flags = {"mask": i % 2 == 0, "wide": i % 3 == 0, "end": i % 3 == 1}
                cases.append((1 + i % 2, 5, 2, n, d, flags))
        cases += [(1, 4, 3, 100, d, {"mask": True}) for d in (1, 5, 8, 24, 40, 48)]
        cases += [(2, 37, 2, 300, d, {"mask": True}) for d in (16, 32, 64)]
        for d in (16, 32):
            for sharp in (1.0, 3.0):
                cases.append((1, 384, 4, 384, d, {"sharp": sharp}))
        cases.append((1, 384, 4, 384, 32, {"mask": True, "wide": True}))
        cases.append((1, 384, 4, 384, 32, {"end": True}))
    worst = [0.0] * 4
    for b, o, h, n, d, flags in cases:
        inputs = make_inputs(b, o, h, n, d, **flags)
        poison()
        got, call = gradients(inputs, backward)
        torch.cuda.synchronize()
        found = errors(inputs, got)
        same = all(torch.equal(x, y) for _ in range(2) for x, y in zip(got, call(), strict=True))
        bad = not same or any(not e < 0.4 for e in found)
        worst = [max(x, y) for x, y in zip(worst, found, strict=True)]
        if bad or n >= 384 or tiny:
            print("BAD" if bad else "ok ", (b, o, h, n, d), flags, [f"{e:.4f}" for e in found],
                  "" if same else "NOT REPEATABLE", flush=True)  # fmt: skip
        results[f"{name} error {(b, o, h, n, d)} {flags}"] = found
    print(f"{name}: {len(cases)} shapes, worst %:", [f"{e:.4f}" for e in worst],
          flush=True)  # fmt: skip


def time_variants(results: dict) -> None:
    """Time tunings (slices, split, ahead) of the main kernels at N = 768."""
    tuning = plans.Tuning
    choices = {
        (plans.KV, 32): [(2, False, True), (2, False), (1, False), (1, True)],
        (plans.Q_BIAS, 32): [(4, False), (4, True), (2, False, True), (2, True, True)],
        (plans.KV, 16): [(4, False, True), (2, False, True), (2, False), (2, True, True)],
        (plans.Q_BIAS, 16): [(4, False, True), (4, False), (4, True), (2, True, True)],
    }
    inputs = {d: make_inputs(1, 768, 4, 768, d) for d in (16, 32)}
    saved = {d: reference.attention_forward(*x[:5], d**-0.5, True) for d, x in inputs.items()}
    times: dict[tuple[str, int, tuple], list[float]] = {}
    for _ in range(ROUNDS):  # in turn, as the clock falls while the chip grows warm
        for (kernel, d), options in choices.items():
            for option in options:
                q, k, v, bias, mask, dout = inputs[d]
                usual = plans.TUNING[kernel, d]
                plans.TUNING[kernel, d] = tuning(*option)
                launch.forget_plans()
                call = functools.partial(
                    tri_attn_bwd, q, k, v, bias, mask, d**-0.5, *saved[d], dout
                )
                try:
                    found = kernel_ms(call, 3)[kernel]
                finally:
                    plans.TUNING[kernel, d] = usual
                    launch.forget_plans()
                times.setdefault((kernel, d, option), []).append(found)
                time.sleep(PAUSE)
    for (kernel, d, option), found in times.items():
        results[f"variant {kernel} D={d} {option}"] = found
        print(f"{kernel} D={d} slices, split, ahead {option}: {statistics.median(found):.3f}")


def time_shapes(results: dict, backward: Callable, name: str) -> None:
    """Time whole calls and their kernels; name tells the algorithm."""
    for d in (32, 16):
        for n in (384, 640, 768):
            inputs = make_inputs(1, n, 4, n, d)
            _, call = gradients(inputs, backward)
            row = {"total": median_ms(call), **kernel_ms(call)}
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            call()
            row["peak MiB"] = (torch.cuda.max_memory_allocated() - before) / 2**20
            results[f"{name} time D={d} N={n}"] = row
            shown = {k.replace("tri_attn_", ""): round(v, 3) for k, v in row.items()}
            print(f"{name} D={d} N={n}", shown, flush=True)


def time_flex(results: dict) -> None:
    from tpf.kernels.flex import flex_triangle_attention

    for d in (32, 16):
        q, k, v, bias, _, dout = make_inputs(1, 768, 4, 768, d)
        leaves = [x.contiguous().requires_grad_() for x in (q, k, v, bias)]
        out = flex_triangle_attention(*leaves, None, d**-0.5)
        backward = functools.partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)
        ms = median_ms(backward, 10)
        results[f"flex D={d} N=768"] = ms
        print(f"flex backward D={d} N=768: {ms:.3f}", flush=True)


def host_us(backward: Callable, repeats: int = 200) -> float:
    """Return the host time of one call in microseconds."""
    _, call = gradients(make_inputs(1, 64, 4, 64, 32), backward)
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent / repeats * 1e6


def check_algorithm(results: dict, backward: Callable, name: str, args: argparse.Namespace) -> None:
    """Check and time a backward; name tells the algorithm."""
    if not args.no_shapes:
        check_shapes(results, args.tiny, backward, name)
    if not args.tiny:
        time_shapes(results, backward, name)
        results[f"{name} host us"] = us = host_us(backward)
        print(f"{name} host time of a call: {us:.0f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in ("tiny", "no-shapes", "variants", "paper", "flex"):
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict = {"gpu": torch.cuda.get_device_name()}
    check_algorithm(results, tri_attn_bwd, "ours", args)
    if args.variants:
        time_variants(results)
    if args.paper:
        check_algorithm(results, tri_attn_bwd_paper, "paper", args)
    if args.flex:
        time_flex(results)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
