"""Say which tensor of the multiplicative update's forward is wrong, how often and where.

    python benchmarks/trimul_repeat.py [--calls N]

Runs on one Hopper GPU. Every intermediate is compared with FP32 products of what the call itself
read, so that a wrong one is not blamed on those that follow. VARIANTS undo changes of the kernels.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

import trimul_check as check

from tpf.bench.trimul_accuracy import NAMES
from tpf.bench.trimul_cases import TriMulInputs
from tpf.kernels import jit, launch, reference, tri_mul, tri_mul_bwd
from tpf.kernels.tri_mul_layout import Saved, Shape, Sizes

FAILING = (
    check.Case(640, 96, 96, mask="bool", layout="sliced"),
    check.Case(768, 96, 96, layout="transposed"),
)
OTHERS = (
    check.Case(768, 96, 96),
    check.Case(768, 64, 64, layout="transposed"),
    check.Case(768, 128, 128, layout="transposed"),
)
Edits = tuple[tuple[str, str, str], ...]
"""File, text, what stands in its place."""
IN = "tri_mul_in.cu"
GROUPS: Edits = (
    (IN, "bulk_wait_read<0>", "if (count == 0) continue;\n      bulk_wait_read<1>"),
    (IN, "bars.freed(group, tile));", "bars.freed(group, tile ^ 1));"),
)
DIVISION: Edits = (
    ("tri_mul.cuh", "constexpr float SHARE = 1.f / (16 * Steps)", "constexpr float N = 16 * Steps"),
    ("tri_mul.cuh", "quad_sum(sum) * SHARE", "quad_sum(sum) / N"),
    ("tri_mul.cuh", "quad_sum(squares) * SHARE", "quad_sum(squares) / N"),
    ("tri_mul_bwd.cuh", "quad_sum(sum[r]) * share", "quad_sum(sum[r]) / count"),
    ("tri_mul_bwd.cuh", "quad_sum(moment[r]) * share", "quad_sum(moment[r]) / count"),
)
BEFORE = GROUPS + DIVISION
RELEASE = "    arrive_warp(bars.empty(ring.index));\n"
ADVANCE = "    for (int i = 0; i < CONSUMERS; ++i) ring.advance(1);\n"
MOMENTS = "    const Moments m = moments<Z_STEPS>(z, lane);\n"
VARIANTS: dict[str, Edits] = {
    "tree": (),
    "before": BEFORE,
    "before, each group waited for": DIVISION,
    "before, without division": GROUPS,
    "before, stage given back when all of it was used": (
        *BEFORE,
        (IN, RELEASE, ""),
        (IN, ADVANCE + MOMENTS, MOMENTS + RELEASE + ADVANCE),
    ),
    "before, warps together in every unit": (
        *BEFORE,
        (IN, "      float value[32]", "      named_sync(1 + group, 128);\n      float value[32]"),
    ),
    "before, fence of the storer": (
        *BEFORE,
        (IN, "      send_unit(p, out", "      fence_async_shared();\n      send_unit(p, out"),
    ),
}  # fmt: skip


@contextmanager
def edited(edits: Edits) -> Iterator[None]:
    """Let the kernels be compiled from a copy of their sources with these edits."""
    source = jit.source_folder
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(source(), Path(folder) / "kernels"))
        for name, old, new in edits:
            text = (copy / name).read_text()
            assert old in text, (name, old)
            (copy / name).write_text(text.replace(old, new))
        jit.source_folder = lambda: copy
        jit._load.cache_clear()
        launch.forget_plans()
        try:
            yield
        finally:
            jit.source_folder = source
            jit._load.cache_clear()
            launch.forget_plans()


def build(cases: tuple[check.Case, ...]) -> None:
    """Compile what the cases need, in parallel."""
    wanted = []
    for c, hidden in {(case.c, case.hidden) for case in cases}:
        sizes = Sizes(c, hidden)
        variants = tri_mul.forward_variants(sizes) | tri_mul_bwd.backward_variants(sizes)
        wanted += [(v.name, v.defines) for v in variants.values()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda item: jit.build(*item), wanted))


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return r and - r m over the last axis."""
    r = (x.var(-1, correction=0) + reference.LAYER_NORM_EPS).rsqrt()
    return r, -r * x.mean(-1)


def wrong_parts(inputs: TriMulInputs, out: Tensor, saved: Tensor) -> dict[str, Tensor]:
    """Return where the parts of an outgoing update are wrong: masks [..] of elements."""
    w, z = inputs.weights, inputs.z.float()
    shape = Shape(z.shape[0], z.shape[1], Sizes.of(w))
    parts, positions = Saved(shape), (shape.batch, shape.n, shape.pitch)
    a, b, x = (view.of(saved).float() for view in parts.views)
    floats, count = saved.view(torch.float32), positions[0] * positions[1] * positions[2]
    z_stats = floats[parts.z_stats // 4 :][: 4 * count].view(*positions, 4)[:, :, : shape.n]
    x_stats = floats[parts.x_stats // 4 :][: 2 * count].view(*positions, 2)[:, :, : shape.n]
    found = {}

    def judge(name: str, got: Tensor, want: Tensor, tolerance: float) -> None:
        room = tolerance * (want.square().mean().sqrt() + 3 * want.abs())
        found[name] = ~((got - want).abs() <= room)

    norm_in, norm_out = w[:2], (w.layer_norm_out_weight, w.layer_norm_out_bias)
    zn = torch.nn.functional.layer_norm(z, z.shape[-1:], *norm_in)
    mask = 1.0 if inputs.mask is None else inputs.mask.float()[..., None]
    for name, got in (("a", a), ("b", b)):
        value, gate = getattr(w, f"linear_{name}_p"), getattr(w, f"linear_{name}_g")
        want = mask * (zn @ gate.mT).sigmoid() * (zn @ value.mT)
        judge(name, got, want.permute(0, 3, 1, 2).flatten(0, 1), 0.04)
    judge("z_stats", z_stats[..., :2], torch.stack(moments(z), -1), 1e-3)
    judge("x", x, a @ b.mT, 0.02)
    by_position = x.view(shape.batch, -1, shape.n, shape.n).permute(0, 2, 3, 1)
    judge("x_stats", x_stats, torch.stack(moments(by_position), -1), 1e-3)
    xn = torch.nn.functional.layer_norm(by_position, by_position.shape[-1:], *norm_out)
    judge("out", out.float(), (zn @ w.linear_g.mT).sigmoid() * (xn @ w.linear_z.mT), 0.04)
    return found


def where(wrong: Tensor) -> str:
    """Return the number of wrong elements and their indices along each axis."""
    axes = []
    for values in wrong.nonzero().T:
        distinct = values.unique().tolist()
        axes.append(f"{len(distinct)} of {distinct[0]}..{distinct[-1]} {distinct[:8]}")
    return f"{int(wrong.sum())} elements; by axis: {'; '.join(axes)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--calls", type=int, default=20)
    calls = parser.parse_args().calls
    failures = 0
    for variant, edits in VARIANTS.items():
        cases = FAILING + OTHERS if variant == "tree" else FAILING
        with edited(edits):
            build(cases)
            for case in cases:
                torch.manual_seed(0)
                inputs, wrong, differ = check.make(case), Counter[str](), Counter[str]()
                first = check.run(check.ours, inputs, case.direction)
                for call in range(calls):
                    fresh = tri_mul.tri_mul_fwd(
                        inputs.z, inputs.mask, inputs.weights, case.direction
                    )
                    for name, at in wrong_parts(inputs, *fresh).items():
                        if at.any():
                            wrong[name] += 1
                            if wrong[name] <= 3:
                                print(f"  call {call} {name}: {where(at)}", flush=True)
                    again = check.run(check.ours, inputs, case.direction)
                    for name, x, y in zip(NAMES, first, again, strict=True):
                        differ[name] += int(not torch.equal(x, y))
                print(f"{variant}: {case}\n  wrong in {calls} calls: {dict(wrong)};",
                      f"other bits: {dict(+differ)}", flush=True)  # fmt: skip
                failures += variant == "tree" and bool(wrong or +differ)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
