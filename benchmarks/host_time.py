"""Time what an eager call of our CUDA operators costs on the host, in microseconds.

    python benchmarks/host_time.py [CASE ...] [--n N] [--calls N] [--profile] [--json FILE]

With a Hopper GPU the real path is timed up to the last launch; the GPU is idle when a call starts.
Without one, a library of empty functions replaces the driver (needs a C compiler), tensors lie in
host memory and products that belong to cuBLAS are skipped; everything else is the real path.
--profile lists the functions in which the time goes.
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import functools
import json
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tpf.config import ModelConfig
from tpf.kernels import jit, norm, ops, pair_kernels, pair_layers, tri_attn
from tpf.kernels.ops import TriMulWeights, triangle_attention, triangle_multiplication
from tpf.model.pairformer import PairDims, PairStack, TriangleAttention
from tpf.model.primitives import Transition

Call = Callable[[], Any]
HEADS, HEAD_DIM, CHANNELS = 4, 32, 128

DRIVER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
static int nothing(void) { return 0; }
int cuLaunchKernel(void) { return 0; }
int cuTensorMapReplaceAddress(void) { return 0; }
int cuTensorMapEncodeTiled(void* map) { memset(map, 1, 128); return 0; }
int cuGetProcAddress_v2(const char* name, void** found, int version, unsigned long flags, void* status) {
  *found = dlsym(RTLD_DEFAULT, name);
  if (!*found) *found = (void*)nothing;
  return 0;
}
int cuGetProcAddress(const char* name, void** found, int version, unsigned long flags) {
  return cuGetProcAddress_v2(name, found, version, flags, 0);
}
"""  # noqa: E501


def replace_driver() -> None:
    """Load empty driver functions under the driver's name and pretend that the CPU is a GPU."""
    folder = Path(tempfile.mkdtemp(prefix="tpf-driver-"))
    (folder / "driver.c").write_text(DRIVER)
    library = folder / "libcuda.so.1"
    command = ["cc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{library.name}", "-o", str(library)]
    subprocess.run([*command, str(folder / "driver.c"), "-ldl"], check=True)
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)

    def product(a: Tensor, b: Tensor, *, out: Tensor | None = None, **dtype: Any) -> Tensor:
        size = (*a.shape[:-1], b.shape[-1])
        return a.new_empty(size, dtype=dtype.get("out_dtype")) if out is None else out

    torch.set_num_threads(1)
    replaced: list[tuple[Any, str, Any]] = [
        (jit, "build", lambda name, defines: jit.Binary(name, b"cubin", "")),
        (tri_attn, "device_index", lambda x: 0),
        (tri_attn, "raw_stream", lambda device: 0),
        (tri_attn, "processors", lambda device: 132),
        (ops, "_why_not_hopper", lambda name, x: None),
        (pair_layers, "_is_hopper", lambda device: True),
        (pair_layers, "weight_gradient", lambda dy, x: product(dy.t(), x, out_dtype=torch.float32)),
        (torch, "mm", product),
        (torch, "bmm", product),
        (torch.cuda, "device", nullcontext),
        (torch.cuda, "current_stream", lambda: None),
        (torch._C, "_cuda_getDevice", lambda: 0),
    ]
    for owner, name, value in replaced:
        setattr(owner, name, value)


def both(function: Callable[..., Tensor], leaves: Sequence[Tensor]) -> dict[str, Call]:
    """Return a forward without gradient and a forward with backward of the function."""
    dout = torch.randn_like(function(*leaves))

    def forward() -> Tensor:
        with torch.no_grad():
            return function(*leaves)

    def train() -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(*leaves), leaves, dout)

    return {"forward": forward, "forward + backward": train}


class Nothing(torch.autograd.Function):
    """Keeps its inputs and returns ready gradients: what PyTorch itself costs."""

    @staticmethod
    def forward(ctx: Any, *leaves: Tensor) -> Tensor:
        ctx.save_for_backward(*leaves)
        return leaves[0].view_as(leaves[0])

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
        return ctx.saved_tensors


def operators(n: int, device: str) -> dict[str, dict[str, Call]]:
    """Return the calls of the two triangle operators."""
    z = torch.randn(1, n, n, CHANNELS, device=device).bfloat16()
    mask = torch.ones(1, n, n, dtype=torch.bool, device=device)
    z.requires_grad_()
    shapes = [(CHANNELS,) if "norm" in f else (CHANNELS,) * 2 for f in TriMulWeights._fields]
    weights = [torch.randn(s, device=device, requires_grad=True) for s in shapes]
    size = (1, n, n, HEADS, HEAD_DIM)
    qkv = [torch.randn(size, device=device).bfloat16().transpose(2, 3) for _ in range(3)]
    bias = torch.randn(1, 1, HEADS, n, n, device=device).bfloat16()
    keys = mask[:, :, None, None]

    def update(z: Tensor, *weights: Tensor) -> Tensor:
        return triangle_multiplication(z, mask, TriMulWeights(*weights), "outgoing", impl="cuda")

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return triangle_attention(q, k, v, bias, keys, impl="cuda")

    return {
        "nothing, 11 leaves": both(Nothing.apply, [z, *weights]),
        "trimul": both(update, [z, *weights]),
        "attention": both(attend, [x.requires_grad_() for x in (*qkv, bias)]),
    }


def layers(n: int, device: str) -> dict[str, dict[str, Call]]:
    """Return the calls of the layers of the pair block."""
    x = torch.randn(1, n, n, CHANNELS, device=device).bfloat16()
    mask = torch.ones(1, n, n, dtype=torch.bool, device=device)
    scale = x.new_ones(1, 1, n, CHANNELS)
    z, update = (x.clone().requires_grad_() for _ in range(2))
    weight, shift = (torch.randn(CHANNELS, device=device, requires_grad=True) for _ in range(2))
    gate, o = torch.randn_like(x), torch.randn_like(x).transpose(1, 2)
    dims = PairDims.trunk(ModelConfig())
    attention = TriangleAttention(dims, "ending").to(device).weights()
    transition = Transition(CHANNELS, 4).to(device).weights()
    stack = PairStack(dims).to(device)
    add_attention = functools.partial(
        pair_layers.add_attention, mask=mask, scale=scale, ending=True
    )
    parameters = list(stack.parameters())
    with torch.no_grad():
        for p in parameters:
            p.normal_(std=0.1)
    return {
        "norm": both(norm.layer_norm, [z, weight, shift]),
        "gate": {
            "forward": lambda: pair_kernels.gate_forward(o, gate),
            "backward alone": lambda: pair_kernels.gate_backward(x, o, gate, gate),
        },
        "residual": both(lambda z, u: pair_layers.add_update(z, u, scale), [z, update]),
        "attention layer": both(
            lambda z, *w: add_attention(z, weights=pair_layers.AttentionWeights(*w)),
            [z, *attention],
        ),
        "transition": both(
            lambda z, *w: pair_layers.add_transition(z, mask, pair_layers.TransitionWeights(*w)),
            [z, *transition],
        ),
        "pair stack": both(lambda z, *_: stack(z, mask), [z, *parameters]),
    }


def wait() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(call: Call, calls: int) -> dict[str, float]:
    """Return microseconds of a warm call: median, its processor time, the least."""
    for _ in range(3):
        call()
    spent, used = [], []
    for _ in range(calls):
        wait()
        start, start_cpu = time.perf_counter(), time.process_time()
        call()
        used.append(1e6 * (time.process_time() - start_cpu))
        spent.append(1e6 * (time.perf_counter() - start))
    wait()
    return {
        "median_us": statistics.median(spent),
        "processor_us": statistics.median(used),
        "least_us": min(spent),
    }


def profile(call: Call, calls: int) -> None:
    """Print the functions in which the time of a call goes; the profiler's own time is included."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(calls):
        call()
    profiler.disable()
    wait()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--n", type=int, help="tokens (default: 384; 8 without a GPU)")
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    if not gpu:
        replace_driver()
    size = args.n or (384 if gpu else 8), "cuda" if gpu else "cpu"
    cases = operators(*size) | layers(*size)
    results: dict[str, dict[str, float]] = {}
    print(f"{'us of a call':36} {'median':>9} {'processor':>9} {'least':>9}")
    for case in args.cases or cases:
        for phase, call in cases[case].items():
            name = f"{case}, {phase}"
            results[name] = measure(call, args.calls)
            row = results[name]
            times = " ".join(f"{row[key]:9.1f}" for key in row)
            print(f"{name:36} {times}", flush=True)
            if args.profile:
                profile(call, args.calls)
    if args.json:
        where = torch.cuda.get_device_name() if gpu else "no GPU"
        record = {"device": where, "torch": torch.__version__, "n": size[0], "us": results}
        args.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
