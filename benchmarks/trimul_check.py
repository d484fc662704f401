"""Check the triangle multiplicative update's kernels against FP64 on every kind of input.

    python benchmarks/trimul_check.py [--build] [--json PATH]

Runs on one Hopper GPU (with --build it only compiles, which needs none). Inputs lie inside larger
buffers filled with NaN. Errors are relative L2; those of plain bf16 PyTorch stand beside ours.
Times and peers: ``tpf bench trimul``.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tpf.bench.accuracy import compare
from tpf.bench.trimul_accuracy import NAMES, exact
from tpf.bench.trimul_backends import plain_update
from tpf.bench.trimul_cases import DIRECTIONS, Multiplier, TriMulInputs, make_weights
from tpf.kernels import jit, tri_mul, tri_mul_bwd
from tpf.kernels.ops import Direction, TriMulWeights, triangle_multiplication
from tpf.kernels.tri_mul_layout import Sizes

SIZES = (1, 5, 16, 63, 64, 65, 100, 101, 129, 384, 640, 768)
CHANNELS = ((64, 64), (128, 128), (32, 32), (96, 96), (16, 48), (128, 64), (256, 192))
MASKS = ("none", "bool", "float", "tail")
LAYOUTS = ("dense", "sliced", "transposed")
Update = Callable[[Tensor, Tensor | None, TriMulWeights, Direction], Tensor]
ours: Update = functools.partial(triangle_multiplication, impl="cuda")


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


def poisoned(shape: tuple[int, ...], layout: str, offset: float) -> Tensor:
    """Return normal bf16 values [B, N, N, C] surrounded by NaN."""
    b, n, _, c = shape
    width = c + 16 if layout == "sliced" else c
    room = torch.full((b * n * n * width + 4096,), math.nan, dtype=torch.bfloat16, device="cuda")
    view = room[2048:-2048].view(b, n, n, width)[..., width - c :]
    view = view.transpose(1, 2) if layout == "transposed" else view
    return view.copy_(torch.randn(shape, device="cuda") + offset)


def make(case: Case) -> TriMulInputs:
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
    generator = torch.Generator("cuda").manual_seed(torch.initial_seed())
    weights = make_weights(case.c, case.hidden, generator, z.device)
    return TriMulInputs(z, mask, weights, dout)


def worst_row(x: Tensor, exact: Tensor) -> float:
    """Return the largest error of a position in units of the mean row, to show broken rows."""
    error = (x.double() - exact).norm(dim=-1)
    return float(error.max() / (exact.norm(dim=-1).mean() + 1e-12))


LIMITS = {"out": 8e-3, "dz": 9e-3, "row": 4e-2, "dz_row": 6e-2, "repeat": 0.0}
WEIGHT_LIMIT = 1.2e-2
"""Largest accepted errors where the sums are long; N below SMALL is judged by the ratio alone."""
SMALL = 64
RATIO_LIMIT = 2.0
LEAST_ERROR = 2e-3
"""Errors of PyTorch below this one count as this one."""


def run(update: Update, inputs: TriMulInputs, direction: Direction) -> list[Tensor]:
    """Return the update, dz and the ten weight gradients."""
    leaves = [x.detach().requires_grad_() for x in (inputs.z, *inputs.weights)]
    out = update(leaves[0], inputs.mask, TriMulWeights(*leaves[1:]), direction)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs.dout)]


def check_case(case: Case) -> dict[str, float]:
    """Return errors against FP64, the worst ratio to plain bf16 PyTorch, 1 if calls differ."""
    inputs, plain = make(case), Multiplier(plain_update)
    got, again = (run(ours, inputs, case.direction) for _ in range(2))
    want = exact(inputs, case.direction)
    named = (dict(zip(NAMES, x, strict=True)) for x in (got, run(plain, inputs, case.direction)))
    errors, base = (
        {name: pair.rel_l2 / 100 for name, pair in compare(x, want).items()} for x in named
    )
    ratio = max(errors[name] / max(base[name], LEAST_ERROR) for name in NAMES)
    errors["row"], errors["dz_row"] = worst_row(got[0], want["out"]), worst_row(got[1], want["dz"])
    errors["ratio"] = ratio
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
    found.append(Case(65, 256, 64, b=2))  # rows that leave 2 over in products of cuBLAS
    found.append(Case(129, 144, 208, "incoming", "tail"))
    return found


def build_all() -> int:
    """Compile all variants that the checks and timings use, in parallel; return their number."""
    wanted = set()
    for c, hidden in {(case.c, case.hidden) for case in cases()}:
        sizes = Sizes(c, hidden)
        variants = dict(tri_mul.forward_variants(sizes))
        if sizes.fused_backward:
            variants |= tri_mul_bwd.backward_variants(sizes)
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--build", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    start = time.perf_counter()
    print(f"built {build_all()} kernels in {time.perf_counter() - start:.0f} s", flush=True)
    if args.build:
        return 0
    torch.manual_seed(0)
    start = time.perf_counter()
    failures, worst = run_checks()
    print(f"check: {len(cases())} cases, {failures} failures, "
          f"{time.perf_counter() - start:.0f} s; worst",
          {k: f"{v:.3g}" for k, v in worst.items()}, flush=True)  # fmt: skip
    if args.json:
        record: dict[str, Any] = {"device": torch.cuda.get_device_name(), "worst": worst}
        record |= {"torch": torch.__version__, "cases": len(cases()), "failures": failures}
        args.json.write_text(json.dumps(record, indent=1))
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
