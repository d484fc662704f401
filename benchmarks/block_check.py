"""Time each kernel of the fused pair layers and the ways to form weight gradients, on a Hopper GPU.

    python benchmarks/block_check.py [--crops 384 768] [--json FILE]

Rates count what must be read and written once. The block as a whole: ``tpf bench block``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tpf.kernels import norm, pair_kernels, pair_layers, pair_transition

DEVICE = "cuda"
Call = Callable[[], Any]


def event_ms(call: Call, repeats: int = 20) -> float:
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


def gradient_by_parts(dy: Tensor, x: Tensor, parts: int = 32) -> Tensor:
    """Return the gradient of a weight as a sum of parts that fill the GPU (rows divide evenly)."""
    dy_parts, x_parts = (t.view(parts, -1, t.shape[1]) for t in (dy, x))
    return torch.bmm(dy_parts.mT, x_parts, out_dtype=torch.float32).sum(0)


def time_kernels(n: int) -> dict[str, Any]:
    """Time the kernels of the fused layers and the forms of a weight gradient."""
    rows, c, heads = n * n, 128, 4
    x, dy = torch.randn(2, rows, c, device=DEVICE).bfloat16()
    weight, bias = torch.randn(2, c, device=DEVICE)
    head_weight = torch.randn(heads, c, device=DEVICE)
    normed, dheads = norm.norm_and_heads(x, weight, bias, head_weight, rows)
    wide = torch.randn(rows, 4 * c, device=DEVICE).bfloat16()
    gate = wide.view(1, n, n, 4 * c)[..., 3 * c :]
    o = dy.view(1, n, n, c).transpose(1, 2)
    pair, scale = x.view(1, n, n, c), torch.rand(1, 1, n, c, device=DEVICE).bfloat16()
    _, chunk = next(pair_layers._chunks(rows, 4 * c))
    hidden = torch.randn(chunk, 8 * c, device=DEVICE).bfloat16()
    product, keep = hidden[:, : 4 * c].contiguous(), torch.ones(rows, device=DEVICE) > 0
    head_out, wide_in = torch.randn(2, 8 * c, c, device=DEVICE).bfloat16()
    head_out, wide_out = head_out[: 4 * c], head_out.view(-1)[: 4 * c * c].view(c, -1)
    unit = rows * c * 2 / 1e9  # gigabytes of one pair tensor
    part = chunk / rows  # of the rows that a transition works on at once
    calls: dict[str, tuple[Call, float]] = {
        "norm fwd": (lambda: norm.norm_forward(x, weight, bias), 2),
        "norm fwd + bias": (lambda: norm.norm_and_heads(x, weight, bias, head_weight, rows), 2),
        "norm bwd": (lambda: norm.norm_backward(dy, x, weight, bias, x), 4),
        "norm bwd + bias, y": (
            lambda: norm.norm_backward(
                dy, x, weight, bias, x, head_weight, dheads, keep_y=True
            ), 5,
        ),
        "residual": (lambda: pair_kernels.add_scaled(pair, pair, scale), 3),
        "gate fwd": (lambda: pair_kernels.gate_forward(o, gate), 3),
        "gate bwd": (lambda: pair_kernels.gate_backward(dy.view(pair.shape), o, gate, gate), 6),
        "swiglu fwd": (lambda: pair_kernels.swiglu_forward(hidden, keep, product), 12 * part),
        "swiglu bwd": (lambda: pair_kernels.swiglu_backward(hidden, keep, product), 24 * part),
        "transition fwd": (
            lambda: pair_transition.transition_forward(x, x, keep, wide_in, wide_out, dy), 3,
        ),
        "transition bwd": (
            lambda: pair_transition.transition_backward(
                x[:chunk], dy[:chunk], keep, wide_in, wide_out, hidden, product, normed
            ), 15 * part,
        ),
        "clone": (x.clone, 2),
        "product in": (lambda: torch.mm(x, head_out.t()), 5),
        "product back": (lambda: torch.mm(wide, head_out), 5),
        "weights in": (lambda: pair_kernels.weight_gradient(wide, x), 5),
        "weights in, parts": (lambda: gradient_by_parts(wide, x), 5),
        "weights out": (lambda: pair_kernels.weight_gradient(dy, x), 2),
        "weights out, parts": (lambda: gradient_by_parts(dy, x), 2),
        "transition weights": (lambda: pair_kernels.weight_gradient(hidden, x[:chunk]), 9 * part),
    }  # fmt: skip
    found = {}
    for name, (call, units) in calls.items():
        ms = event_ms(call)
        found[name] = {"ms": ms, "TB/s": units * unit / ms}
        print(f"  {name:22} N={n} {ms:.3f} ms  {units * unit / ms:.2f} TB/s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--crops", type=int, nargs="+", default=[384, 768])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = {"gpu": torch.cuda.get_device_name()} | {str(n): time_kernels(n) for n in args.crops}
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
