"""Check the triangle attention kernels against FP64 and time them beside flex_attention.

    python benchmarks/attention_check.py [--build] [--check] [--large] [--time] [--backward]
        [--flex] [--no-stream] [--shapes NxD,...] [--json PATH]

Runs on one Hopper GPU (--build needs none); prints a table last. Inputs lie inside larger buffers
filled with NaN, so a read outside a tensor shows in the results.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tpf.kernels import jit, library, reference, tri_attn

SIZES = (1, 7, 16, 63, 64, 65, 127, 128, 129, 200, 257, 384, 512, 640, 767, 768, 1024)
HEAD_WIDTHS = (8, 16, 24, 32, 48, 64, 13)
MASKS = ("none", "random", "rows", "tail")
LAYOUTS = ("projection", "end", "fused", "heads_first")
BIAS_LAYOUTS = ("plain", "heads_last", "transposed")
TIMED = ((384, 16), (640, 16), (768, 16), (256, 32), (384, 32), (640, 32), (768, 32), (1024, 32))


@dataclass(frozen=True)
class Case:
    """One input: sizes, mask kind, layouts and the dtype of the bias."""

    n: int
    d: int
    o: int = 3
    b: int = 1
    h: int = 2
    mask: str = "none"
    layout: str = "projection"
    bias_layout: str = "plain"
    bias_dtype: torch.dtype = torch.bfloat16
    sharp: float = 1.0


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, gain: float = 1.0) -> Tensor:
    """Return normal values inside a larger allocation of NaN."""
    room = torch.full((math.prod(shape) + 4096,), math.nan, dtype=dtype, device="cuda")
    view = room[2048 : 2048 + math.prod(shape)].view(shape)
    return view.copy_(torch.randn(shape, device="cuda") * gain)


def heads(case: Case, gain: float = 1.0) -> Tensor:
    """Return a tensor [B, O, H, N, D] in the memory layout of the case."""
    b, o, h, n, d = case.b, case.o, case.h, case.n, case.d
    if case.layout == "end":
        return poisoned((b, n, o, h, d), torch.bfloat16, gain).permute(0, 2, 3, 1, 4)
    if case.layout == "fused":
        return (
            poisoned((b, o, n, 3 * h * d), torch.bfloat16, gain)[..., h * d : 2 * h * d]
            .view(b, o, n, h, d)
            .transpose(2, 3)
        )
    if case.layout == "heads_first":
        return poisoned((b, o, h, n, d), torch.bfloat16, gain)
    return poisoned((b, o, n, h, d), torch.bfloat16, gain).transpose(2, 3)


def make(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return q, k, v, bias [B, H, N, N] and mask [B, O, N] of a case."""
    b, o, h, n = case.b, case.o, case.h, case.n
    q, k, v = heads(case, case.sharp), heads(case, case.sharp), heads(case)
    if case.bias_layout == "heads_last":
        bias = poisoned((b, n, n, h), case.bias_dtype).permute(0, 3, 1, 2)
    elif case.bias_layout == "transposed":
        bias = poisoned((b, h, n, n), case.bias_dtype).transpose(2, 3)
    else:
        bias = poisoned((b, h, n, n), case.bias_dtype)
    mask = None
    if case.mask != "none":
        mask = torch.rand(b, o, n, device="cuda") > 0.3
        if case.mask == "rows":
            mask[:, 0] = False
        elif case.mask == "tail":
            mask = (torch.arange(n, device="cuda") < max(1, n * 2 // 3)).expand(b, o, n)
    return q, k, v, bias, mask


def relative(x: Tensor, exact: Tensor) -> float:
    """Return the relative L2 error."""
    norm = float(exact.double().norm())
    return float((x.double() - exact.double()).norm()) / (norm or 1.0)


def worst_row(x: Tensor, exact: Tensor) -> float:
    """Return the largest relative error of a row, to show single broken rows."""
    error = (x.double() - exact.double()).norm(dim=-1)
    return float((error / (exact.double().norm(dim=-1) + 1e-2)).max())


def check_case(case: Case, backward: bool) -> dict[str, float]:
    """Return the errors of a case against FP64, and 1.0 under ``repeat`` if calls differ."""
    q, k, v, bias, mask = make(case)
    scale = 1 / math.sqrt(case.d)
    out, lse, residual = library.tri_attn_fwd(q, k, v, bias, mask, scale, True, "cuda")
    exact, exact_lse, _ = reference.attention_forward(
        *(x.double().contiguous() for x in (q, k, v, bias)), mask, scale, False
    )
    finite = exact_lse.isfinite()
    errors = {
        "out": relative(out, exact),
        "row": worst_row(out, exact),
        "residual": relative(out.float() + residual.float(), exact),
        "lse": float((lse.double() - exact_lse)[finite].abs().max()) if finite.any() else 0.0,
        "empty": float((lse[~finite] != math.inf).sum() + out[~finite].abs().sum()),
    }
    again = library.tri_attn_fwd(q, k, v, bias, mask, scale, True, "cuda")
    plain = library.tri_attn_fwd(q, k, v, bias, mask, scale, False, "cuda")
    same = all(torch.equal(x, y) for x, y in zip((out, lse, residual), again, strict=True))
    errors["repeat"] = float(not (same and torch.equal(plain[0], out)))
    if backward:
        dout = heads(case)
        saved = (scale, out, lse, residual)
        grads = library.tri_attn_bwd(dout, q, k, v, bias, mask, *saved, "cuda")
        wide = [x.double().contiguous() for x in (dout, q, k, v, bias)]
        want = reference.attention_backward(
            *wide, mask, scale, exact, exact_lse, exact.new_empty(0)
        )
        for name, grad, right in zip(("dq", "dk", "dv", "dbias"), grads, want, strict=True):
            errors[name] = relative(grad, right)
        again = library.tri_attn_bwd(dout, q, k, v, bias, mask, *saved, "cuda")
        if not all(torch.equal(x, y) for x, y in zip(grads, again, strict=True)):
            errors["repeat"] += 2.0
    return errors


def check_large(batch: int = 3, n: int = 2048) -> dict[str, float]:
    """Return the errors at N = 2048, D = 32, where byte offsets pass 2^31, on sampled parts.

    out, dq, dk, dv of the first and the last slice; dbias of four query rows, over all slices.
    """
    case = Case(n, 32, n, batch, 4, layout="end")
    q, k, v, bias, _ = make(case)
    dout, scale = heads(case), 1 / math.sqrt(case.d)
    saved = library.tri_attn_fwd(q, k, v, bias, None, scale, True, "cuda")
    grads = library.tri_attn_bwd(dout, q, k, v, bias, None, scale, *saved, "cuda")
    errors: dict[str, float] = {}
    for b, o in ((0, 0), (batch - 1, n - 1)):
        part = [x[b : b + 1, o : o + 1].double() for x in (q, k, v)]
        pair = bias[b : b + 1].double()
        out, lse, none = reference.attention_forward(*part, pair, None, scale, False)
        wide = dout[b : b + 1, o : o + 1].double()
        want = reference.attention_backward(wide, *part, pair, None, scale, out, lse, none)
        pairs = {"out": (saved[0][b, o], out[0, 0])}
        for name, grad, right in zip(("dq", "dk", "dv"), grads[:3], want[:3], strict=True):
            pairs[name] = (grad[b, o], right[0, 0])
        for name, (found, right) in pairs.items():
            errors[name] = max(errors.get(name, 0.0), relative(found, right))
    rows = [0, 63, n // 2 + 1, n - 1]
    for b in (0, batch - 1):
        total = torch.zeros(case.h, len(rows), n, dtype=torch.float64, device="cuda")
        for first in range(0, n, 64):
            use = slice(first, first + 64)
            rq, rd = (x[b, use, :, rows].double() for x in (q, dout))
            ks, vs = k[b, use].double(), v[b, use].double()
            s = scale * rq @ ks.mT + bias[b, :, rows].double()
            p, dp = s.softmax(-1), rd @ vs.mT
            total += (p * (dp - (p * dp).sum(-1, keepdim=True))).sum(0)
        errors["dbias"] = max(errors.get("dbias", 0.0), relative(grads[3][b][:, rows], total))
    return errors


LIMITS = {
    "out": 4e-3, "row": 3e-2, "residual": 3.5e-3, "lse": 2e-4, "empty": 0.0, "repeat": 0.0,
    "dq": 8e-3, "dk": 8e-3, "dv": 6e-3, "dbias": 8e-3,
}  # fmt: skip
"""Largest accepted errors; a row mean of bf16 rounding is 2e-3."""


def cases() -> list[Case]:
    """Return the checked inputs: every size with every width, other properties in turn."""
    turns = zip(
        itertools.cycle(MASKS),
        itertools.cycle(LAYOUTS[i] for i in (0, 1, 2, 3, 1, 0, 3)),
        itertools.cycle(BIAS_LAYOUTS),
        itertools.cycle(
            (torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16, torch.float32)
        ),
        itertools.cycle((1, 2, 1)),
        itertools.cycle((3, 5, 1, 8)),
        strict=False,
    )
    found = [
        Case(n, d, o, b, 2, mask, layout, bias_layout, dtype)
        for (n, d), (mask, layout, bias_layout, dtype, b, o) in zip(
            itertools.product(SIZES, HEAD_WIDTHS), turns, strict=False
        )
    ]
    for n, d, sharp in itertools.product((384, 768), (16, 32), (1.0, 3.0)):
        found += [Case(n, d, 12, 1, 4, mask, sharp=sharp) for mask in ("none", "random")]
    found.append(Case(384, 32, 384, 1, 4))
    return found


def build_all(backward: bool) -> int:
    """Compile all variants that the checks and timings use, in parallel; return their number."""
    wanted: list[tuple[str, dict[str, int]]] = []
    for fp32 in (False, True):
        wanted.append(("tri_attn_pack", {"BIAS_F32": int(fp32)}))
        for d in HEAD_WIDTHS:
            for masked, save in itertools.product((False, True), repeat=2):
                wanted.append(("tri_attn_fwd", tri_attn.forward_defines(d, fp32, masked, save)))
            if backward:
                from tpf.kernels import tri_attn_bwd_plan as plans

                for vector in (False, True):
                    wanted += plans.variants(plans.Problem(1, 8, 4, 64, d, fp32), vector).items()
    unique = {(name, tuple(sorted(defines.items()))) for name, defines in wanted}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda item: jit.build(item[0], dict(item[1])), unique))
    return len(unique)


def run_checks(backward: bool) -> tuple[int, dict[str, float]]:
    """Check all cases; print failures and return their number and the worst errors."""
    worst: dict[str, float] = {}
    failures, start = 0, time.perf_counter()
    for index, case in enumerate(cases()):
        if index % 20 == 0:
            print(f"case {index}, {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
        errors = check_case(case, backward)
        bad = {k: e for k, e in errors.items() if not e <= LIMITS[k]}
        failures += bool(bad)
        if bad and failures <= 25:
            print("FAIL", case, {k: f"{e:.3g}" for k, e in bad.items()}, flush=True)
        for key, error in errors.items():
            worst[key] = max(worst.get(key, 0.0), error if error == error else math.inf)
    return failures, worst


def milliseconds(call: Callable[[], Any]) -> float:
    """Return the median GPU time of a call, by replays of a captured graph of it."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return eager_milliseconds(graph.replay)


def eager_milliseconds(call: Callable[[], Any], repeats: int = 30) -> float:
    """Return the median GPU time between the events around a call."""
    for _ in range(5):
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


def host_microseconds(call: Callable[[], Any], repeats: int = 50) -> float:
    """Return the median time that a call keeps the host busy."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def time_shape(n: int, d: int, backward: bool, flex: bool) -> dict[str, float]:
    """Return milliseconds of the kernels (and of flex_attention) at B = 1, O = N, H = 4."""
    q, k, v, bias, _ = make(Case(n, d, n, 1, 4))
    scale = 1 / math.sqrt(d)
    args = (q, k, v, bias, None, scale)
    found = {
        "fwd": milliseconds(lambda: library.tri_attn_fwd(*args, False, "cuda")),
        "fwd_residual": milliseconds(lambda: library.tri_attn_fwd(*args, True, "cuda")),
        "host_fwd_us": host_microseconds(lambda: library.tri_attn_fwd(*args, True, "cuda")),
    }
    dout = torch.randn_like(q)
    if backward:
        saved = library.tri_attn_fwd(*args, True, "cuda")
        call = lambda: library.tri_attn_bwd(dout, *args, *saved, "cuda")  # noqa: E731
        found["bwd"] = milliseconds(call)
        found["host_bwd_us"] = host_microseconds(call)
    if flex:
        from tpf.kernels.flex import flex_triangle_attention

        leaves = [x.clone().requires_grad_() for x in (q, k, v, bias)]
        dense = [x.contiguous().detach().requires_grad_() for x in leaves]
        out = flex_triangle_attention(*dense, None, scale)
        found["flex_fwd"] = milliseconds(lambda: flex_triangle_attention(*dense, None, scale))
        if backward:
            found["flex_bwd"] = eager_milliseconds(
                lambda: torch.autograd.grad(out, dense, dout, retain_graph=True)
            )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--no-stream", action="store_true", help="run tri_attn with STREAM off")
    for flag in ("build", "check", "large", "time", "backward", "flex"):
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("--shapes", default=",".join(f"{n}x{d}" for n, d in TIMED))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    tri_attn.STREAM = not args.no_stream
    if args.build:
        start = time.perf_counter()
        count = build_all(args.backward)
        print(f"built {count} kernels in {time.perf_counter() - start:.0f} s", flush=True)
        if not (args.check or args.large or args.time):
            return 0
    torch.manual_seed(0)
    record: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    failures = 0
    if args.check:
        start = time.perf_counter()
        failures, worst = run_checks(args.backward)
        record["check"] = {"cases": len(cases()), "failures": failures, "worst": worst}
        print(f"check: {len(cases())} cases, {failures} failures, "
              f"{time.perf_counter() - start:.0f} s; worst",
              {k: f"{v:.3g}" for k, v in worst.items()}, flush=True)  # fmt: skip
    if args.large:
        errors = record["large"] = check_large()
        failures += any(not e <= LIMITS[name] for name, e in errors.items())
        print("N=2048:", {k: f"{v:.3g}" for k, v in errors.items()}, flush=True)
    if args.time:
        record["ms"] = {}
        for shape in args.shapes.split(","):
            n, d = map(int, shape.split("x"))
            found = time_shape(n, d, args.backward, args.flex)
            record["ms"][shape] = found
            print(f"N={n:5} D={d:3}", *(f"{k} {v:.3f}" for k, v in found.items()), flush=True)
    if args.json:
        args.json.write_text(json.dumps(record, indent=1))
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
