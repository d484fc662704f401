"""Check and time one Pairformer block (full dimensions), forward and backward, on a Hopper GPU.

Usage: python benchmarks/block_check.py [--crops 384 640 768] [--impls torch flex kernels cuda]
[--skip-errors] [--graph] [--kernels] [--json FILE].

FP32 parameters, BF16 autocast, BF16 streams, dropout 0.25, a mask with all pairs kept. Backends:
torch and flex (their triangle operator in the plain layers), kernels (our operators in the plain
layers) and cuda (the fused layers). Errors are relative L2 against the block in FP32 without
dropout, for results and all gradients. --graph also times the replay of a CUDA graph; --kernels
times each kernel of the fused layers and the ways to form weight gradients. The short table of all
backends comes last.
"""

from __future__ import annotations

import argparse
import collections
import copy
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tpf.config import ModelConfig
from tpf.kernels import norm, pair_kernels, pair_layers, pair_transition
from tpf.model import pairformer, primitives
from tpf.model.pairformer import COLUMNS, ROWS, PairformerBlock

DEVICE = "cuda"
IMPLS = ("torch", "flex", "kernels", "cuda")
OURS = ("pair_", "tri_attn", "tri_mul")
Call = Callable[[], Any]


def make_block(impl: str, dropout: float = 0.25) -> PairformerBlock:
    """Return a block with random weights, the same for every backend."""
    torch.manual_seed(0)
    backend = "cuda" if impl == "kernels" else impl
    block = PairformerBlock(ModelConfig(impl=backend, dropout_pair=dropout))
    for name, p in block.named_parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=p.shape[-1] ** -0.5)
        else:
            nn.init.normal_(p, mean=float(name.endswith("weight")), std=0.1)
    return block.to(DEVICE)


@contextmanager
def layers(impl: str) -> Iterator[None]:
    """Switch the fused layers off for the backend ``kernels``."""
    usual = pairformer.fusable, primitives.fusable
    if impl == "kernels":
        pairformer.fusable = primitives.fusable = lambda *args: False
    try:
        yield
    finally:
        pairformer.fusable, primitives.fusable = usual


class Inputs:
    """Streams, masks and gradients of one crop."""

    def __init__(self, n: int, dtype: torch.dtype = torch.bfloat16) -> None:
        torch.manual_seed(n)
        cfg = ModelConfig()
        s, ds = torch.randn(2, 1, n, cfg.c_s, device=DEVICE).to(torch.bfloat16).to(dtype)
        z, dz = torch.randn(2, 1, n, n, cfg.c_z, device=DEVICE).to(torch.bfloat16).to(dtype)
        self.s, self.z = s.requires_grad_(), z.requires_grad_()
        self.ds, self.dz = ds, dz
        self.mask = torch.ones(1, n, dtype=torch.bool, device=DEVICE)
        self.pair_mask = self.mask[:, :, None] & self.mask[:, None]


def step(block: PairformerBlock, x: Inputs) -> Call:
    """Return the call of the block forward and backward."""

    def call() -> None:
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            s, z = block(x.s, x.z, x.mask, x.pair_mask)
        torch.autograd.backward([s, z], [x.ds, x.dz])
        for leaf in (x.s, x.z, *block.parameters()):
            leaf.grad = None

    return call


def sublayers(block: PairformerBlock, x: Inputs, fused: bool) -> dict[str, Call]:
    """Return each residual layer of the block, forward and backward, by name."""
    stack = block.pair_stack

    def updated(layer: Any, axis: int) -> Callable[[Tensor], Tensor]:
        def plain(z: Tensor) -> Tensor:
            return z + stack._drop(layer(z, x.pair_mask), axis)

        def ours(z: Tensor) -> Tensor:
            if isinstance(layer, pairformer.TriangleMultiplication):
                return pair_layers.add_update(z, layer(z, x.pair_mask), stack._scale(z, axis))
            return pair_layers.add_attention(
                z, x.pair_mask, stack._scale(z, axis), layer.weights(), ending=not layer.starting
            )

        return ours if fused else plain

    impl: Any = block.impl
    pair: dict[str, Callable[[Tensor], Tensor]] = {
        "tri mul out": updated(stack.tri_mul_out, ROWS),
        "tri mul in": updated(stack.tri_mul_in, ROWS),
        "tri att start": updated(stack.tri_att_start, ROWS),
        "tri att end": updated(stack.tri_att_end, COLUMNS),
        "pair transition": lambda z: stack.pair_transition.add_to(z, x.pair_mask, impl),
    }
    single: dict[str, Callable[[Tensor], Tensor]] = {
        "single attention": lambda s: s + block.attn_pair_bias(s, x.z, x.mask),
        "single transition": lambda s: block.single_transition.add_to(s, x.mask, impl),
    }

    def call(function: Callable[[Tensor], Tensor], source: Tensor, gradient: Tensor) -> Call:
        def run() -> None:
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                out = function(source)
            out.backward(gradient)
            for leaf in (x.s, x.z, *block.parameters()):
                leaf.grad = None

        return run

    calls = {name: call(f, x.z, x.dz) for name, f in pair.items()}
    return calls | {name: call(f, x.s, x.ds) for name, f in single.items()}


def wall_ms(call: Call, repeats: int = 10) -> float:
    """Return the median time of a call between two synchronisations."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def profile(call: Call, repeats: int = 3) -> dict[str, tuple[int, float]]:
    """Return (launches, ms) of each kernel and copy in one call."""
    call()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as prof:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    found: dict[str, tuple[int, float]] = collections.defaultdict(lambda: (0, 0.0))
    for event in prof.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not getattr(
            event, "is_user_annotation", 0
        ):
            count, total = found[event.name]
            found[event.name] = count + 1, total + event.time_range.elapsed_us() / 1e3
    return {name: (count // repeats, ms / repeats) for name, (count, ms) in found.items()}


def busy(kernels: dict[str, tuple[int, float]]) -> tuple[int, float]:
    return sum(count for count, _ in kernels.values()), sum(ms for _, ms in kernels.values())


def graph_ms(call: Call) -> float:
    """Return the median time of a replay of the call as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return wall_ms(graph.replay)


def peak_mib(call: Call) -> float:
    """Return the peak of allocated memory during a call, with parameters and inputs."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**20


def time_block(impl: str, n: int, with_graph: bool) -> dict[str, Any]:
    block, x = make_block(impl), Inputs(n)
    with layers(impl):
        call = step(block, x)
        call()
        kernels = profile(call)
        launches, gpu = busy(kernels)
        row: dict[str, Any] = {
            "wall ms": wall_ms(call), "busy ms": gpu, "launches": launches,
            "peak MiB": peak_mib(call),
        }  # fmt: skip
        if with_graph:
            row["graph ms"] = graph_ms(call)
        row["sub-layers"] = {
            name: busy(profile(part)) for name, part in sublayers(block, x, impl == "cuda").items()
        }
    longest = sorted(kernels.items(), key=lambda item: -item[1][1])[:25]
    row["kernels"] = {name[:90]: value for name, value in longest}
    ours = sum(ms for name, (_, ms) in kernels.items() if name.startswith(OURS))
    row["own kernels ms"] = ours
    return row


def run_once(block: PairformerBlock, x: Inputs, autocast: bool) -> dict[str, Tensor]:
    """Return results and gradients, in FP32."""
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=autocast):
        s, z = block(x.s, x.z, x.mask, x.pair_mask)
    names = [name for name, _ in block.named_parameters()]
    leaves = [x.s, x.z, *block.parameters()]
    grads = torch.autograd.grad([s, z], leaves, [x.ds, x.dz])
    found = dict(zip(["s", "z", "ds", "dz", *names], (s, z, *grads), strict=True))
    return {name: value.detach().float() for name, value in found.items()}


def errors(impls: list[str], n: int) -> dict[str, dict[str, float]]:
    """Return the relative error of every result and gradient in percent, by backend."""
    reference = make_block("torch", dropout=0.0)
    exact = run_once(reference, Inputs(n, torch.float32), autocast=False)
    found = {}
    for impl in dict.fromkeys(["torch", *impls]):
        block = make_block(impl, dropout=0.0)
        with layers(impl):
            got, again = (run_once(block, Inputs(n), autocast=True) for _ in range(2))
        found[impl] = {
            name: 100 * float((got[name] - want).norm() / want.norm())
            for name, want in exact.items()
        }
        same = all(torch.equal(got[name], again[name]) for name in exact)
        ratio = {name: found[impl][name] / found["torch"][name] for name in exact}
        worst = max(ratio, key=lambda name: ratio[name])
        shown = {name: round(found[impl][name], 3) for name in ("s", "z", "ds", "dz")}
        print(
            f"errors N={n} {impl}: {shown} %, worst ratio to torch {ratio[worst]:.2f} ({worst})"
            f", {'repeatable' if same else 'NOT REPEATABLE'}",
            flush=True,
        )
    return found


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


def time_kernels(n: int) -> dict[str, Any]:
    """Time the kernels of the fused layers and the forms of a weight gradient."""
    rows, c, heads = n * n, 128, 4
    x, dy = torch.randn(2, rows, c, device=DEVICE).bfloat16()
    weight, bias = torch.randn(2, c, device=DEVICE)
    head_weight = torch.randn(heads, c, device=DEVICE)
    normed, dheads = norm.norm_forward(x, weight, bias, head_weight, rows)
    wide = torch.randn(rows, 4 * c, device=DEVICE).bfloat16()
    gate = wide.view(1, n, n, 4 * c)[..., 3 * c :]
    o = dy.view(1, n, n, c).transpose(1, 2)
    pair, scale = x.view(1, n, n, c), torch.rand(1, 1, n, c, device=DEVICE).bfloat16()
    chunk = next(pair_layers._chunks(rows, 4 * c)).stop
    hidden = torch.randn(chunk, 8 * c, device=DEVICE).bfloat16()
    product, keep = hidden[:, : 4 * c].contiguous(), torch.ones(rows, device=DEVICE) > 0
    head_out, wide_in = torch.randn(2, 8 * c, c, device=DEVICE).bfloat16()
    head_out, wide_out = head_out[: 4 * c], head_out.view(-1)[: 4 * c * c].view(c, -1)
    unit = rows * c * 2 / 1e9  # gigabytes of one pair tensor
    part = chunk / rows  # of the rows that a transition works on at once
    calls: dict[str, tuple[Call, float]] = {
        "norm fwd": (lambda: norm.norm_forward(x, weight, bias), 2),
        "norm fwd + bias": (lambda: norm.norm_forward(x, weight, bias, head_weight, rows), 2),
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
        "weights, parts": (lambda: pair_kernels.weight_gradient(wide, x), 5),
        "weights, one product": (lambda: torch.mm(wide.t(), x, out_dtype=torch.float32), 5),
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
    parser.add_argument("--crops", type=int, nargs="+", default=[384, 640, 768])
    parser.add_argument("--impls", nargs="+", default=list(IMPLS), choices=IMPLS)
    parser.add_argument("--error-crop", type=int, default=384)
    for flag in ("skip-errors", "graph", "kernels"):
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name()}
    if args.kernels:
        results["kernels"] = time_kernels(max(args.crops))
    if not args.skip_errors:
        results["errors"] = errors(args.impls, args.error_crop)
    table = []
    for n in args.crops:
        for impl in args.impls:
            try:
                row = time_block(impl, n, args.graph)
            except torch.OutOfMemoryError:
                print(f"N={n} {impl}: out of memory", flush=True)
                continue
            results[f"{impl} {n}"] = copy.copy(row)
            print(f"N={n} {impl}: busy ms by kernel (launches)", flush=True)
            for name, (count, ms) in row.pop("kernels").items():
                print(f"  {ms:7.3f} {count:4d} {name}")
            parts = row.pop("sub-layers")
            print("  " + ", ".join(f"{k} {v[1]:.2f} ({v[0]})" for k, v in parts.items()))
            table.append((n, impl, row))
            if args.json:
                args.json.write_text(json.dumps(results, indent=1))
    for n, impl, row in table:
        print(f"{n} {impl:8}", {k: round(v, 2) for k, v in row.items()})


if __name__ == "__main__":
    main()
