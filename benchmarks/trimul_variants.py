"""Compare choices that change the time of the triangle multiplicative update alone.

``trimul_check.py --variants`` runs ``compare``: every choice of ``VARIANTS`` against FP64, then all
in turn on the same inputs, as CUDA graphs. ``--probe`` runs ``probe``: times of kernels with a part
of their source left out, which show what they wait for (results are wrong).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from trimul_check import Case, check_case, failed, make, ours

from tpf.bench.profiling import kernels
from tpf.bench.timing import Call, Clock, rounds
from tpf.bench.trimul_cases import TriMulInputs
from tpf.kernels import jit, launch, tri_mul, tri_mul_bwd, tri_mul_layout
from tpf.kernels.ops import TriMulWeights
from tpf.kernels.tri_mul import Variant
from tpf.kernels.tri_mul_layout import Sizes, Tuning

VARIANTS = {
    "now": Tuning(),
    "rows": Tuning(by_rows=True),
    "slice": Tuning(in_slice=2),
    "overlap": Tuning(in_overlap=True),
    "in_storer": Tuning(in_storer=True),
    "slice+in_storer": Tuning(in_slice=2, in_storer=True),
    "overlap+in_storer": Tuning(in_overlap=True, in_storer=True),
    "wide": Tuning(bwd_wide=True),
    "storer": Tuning(bwd_storer=True),
    "wide+storer": Tuning(bwd_wide=True, bwd_storer=True),
    "all": Tuning(by_rows=True, in_overlap=True, in_storer=True, bwd_wide=True, bwd_storer=True),
}
CHECKED = (
    Case(65, 64, 64, "incoming", "bool"),
    Case(130, 128, 128, "outgoing", "float", b=2),
    Case(100, 96, 96, "incoming"),
)
WIDE = (
    Case(70, 192, 192, "outgoing", "bool"),
    Case(100, 256, 256, "incoming", "float", "transposed"),
    Case(65, 256, 64, "outgoing", b=2),
    Case(129, 144, 208, "incoming", "tail"),
)
"""Widths whose backward is not fused; no variant but the layout changes them."""
TIMED = tuple((c, n) for c in (64, 128) for n in (384, 640, 768))
REPS = 15
PARTS = ("pack", "in", "out", "bwd_out", "bwd_in", "grads", "bmm", "other")


def use(tuning: Tuning) -> None:
    """Make all calls from now on with these choices."""
    tri_mul_layout.TUNING = tuning
    tri_mul.forward_variants.cache_clear()
    tri_mul_bwd.backward_variants.cache_clear()
    launch.forget_plans()


def build(tunings: Sequence[Tuning]) -> int:
    """Compile all kernels of these choices in parallel; return their number."""
    wanted: dict[str, Variant] = {}
    for tuning in tunings:
        use(tuning)
        for c, hidden in {(x.c, x.hidden) for x in (*CHECKED, *WIDE)}:
            for v in kernels_of(Sizes(c, hidden)):
                wanted[f"{v.name} {sorted(v.defines.items())}"] = v
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda v: jit.build(v.name, v.defines), wanted.values()))
    return len(wanted)


def kernels_of(sizes: Sizes) -> list[Variant]:
    """Return the kernels for these sizes."""
    found = list(tri_mul.forward_variants(sizes).values())
    if sizes.fused_backward:
        found += tri_mul_bwd.backward_variants(sizes).values()
    return found


def check() -> int:
    """Check every choice against FP64; print failures and return their number."""
    cases = [(name, case) for name in VARIANTS for case in CHECKED]
    cases += [(name, case) for name in ("now", "rows") for case in WIDE]
    failures = 0
    for name, case in cases:
        use(VARIANTS[name])
        if bad := failed(case, check_case(case)):
            failures += 1
            print("FAIL", name, case, {k: f"{e:.3g}" for k, e in bad.items()}, flush=True)
    print(f"check: {len(cases)} cases, {failures} failures", flush=True)
    return failures


def call_of(inputs: TriMulInputs, phase: str) -> Call:
    """Return a warm call on these inputs: forward, or forward and backward, outgoing."""
    leaves = [x.detach().requires_grad_() for x in (inputs.z, *inputs.weights)]

    def forward() -> torch.Tensor:
        return ours(leaves[0], inputs.mask, TriMulWeights(*leaves[1:]), "outgoing")

    def both() -> object:
        return torch.autograd.grad(forward(), leaves, inputs.dout)

    call = forward if phase == "fwd" else both
    for _ in range(2):
        call()
    return call


def by_part(call: Call) -> dict[str, float]:
    """Return the microseconds of a call by part; the passes of a kernel count together."""
    spent = dict.fromkeys(PARTS, 0.0)
    for name, work in kernels(call).items():
        part = name.removeprefix("tri_mul_")
        if part not in PARTS:
            part = "bmm" if any(x in name for x in ("gemm", "nvjet", "cutlass")) else "other"
        spent[part] += 1e3 * work.ms
    return spent


class Measured(NamedTuple):
    """Milliseconds of forward and of forward + backward; microseconds by part."""

    fwd: float
    both: float
    parts: dict[str, float]


def measure(c: int, n: int) -> dict[str, Measured]:
    """Time all choices in turn on the same inputs."""
    inputs = make(Case(n, c, c))
    with Clock(torch.device("cuda", torch.cuda.current_device())) as clock:
        arms, parts = [], []
        for tuning in VARIANTS.values():
            use(tuning)
            for phase in ("fwd", "both"):
                call = call_of(inputs, phase)
                arms.append(clock.prepare(call))
            parts.append(by_part(call) if n == TIMED[-1][1] else {})
        times = [t.median for t in clock.measure(arms, rounds(len(arms), REPS))]
    return {
        name: Measured(times[2 * k], times[2 * k + 1], parts[k]) for k, name in enumerate(VARIANTS)
    }


def compare() -> int:
    """Build, check and time all choices; print a table and return the number of failures."""
    start = time.perf_counter()
    print(f"built {build(list(VARIANTS.values()))} kernels in {time.perf_counter() - start:.0f} s")
    torch.manual_seed(0)
    failures = check()
    print(f"checked after {time.perf_counter() - start:.0f} s", flush=True)
    found = {shape: measure(*shape) for shape in TIMED}
    for c in (64, 128):
        print(f"\nC = {c}, N = 768, us" + "".join(f"{x:>9}" for x in PARTS))
        for name in VARIANTS:
            parts = found[c, 768][name].parts
            print(f"{name:20}" + "".join(f"{parts[x]:9.1f}" for x in PARTS))
    print("\nforward; both, ms   " + "".join(f"{f'{c} x {n}':>16}" for c, n in TIMED))
    for name in VARIANTS:
        cells = (found[shape][name] for shape in TIMED)
        print(f"{name:20}" + "".join(f"{m.fwd:8.3f};{m.both:7.3f}" for m in cells))
    print(f"{failures} failures, {time.perf_counter() - start:.0f} s in all", flush=True)
    return failures


class Probe(NamedTuple):
    """A kernel with texts of its source replaced."""

    kernel: str
    label: str
    changes: tuple[tuple[str, str], ...]


SPIN = (("mbar_wait_idle(bars", "mbar_wait(bars"),)
PROBES = (
    Probe("in", "no store", (("    tma_store(&p.ab", "    if (p.grid.n < 0) tma_store(&p.ab"),)),
    Probe("in", "no gate", (("* sigmoid(g)", "+ g"),)),
    Probe("in", "k = 16", (("q < Z_STEPS; ++q)\n    wgmma", "q < 1; ++q)\n    wgmma"),)),
    Probe("in", "spin", SPIN),
    Probe("out", "spin", SPIN),
    Probe("bwd_out", "spin", SPIN),
    Probe("bwd_out", "no store", (("tma_store(", "if (p.grid.n < 0) tma_store("),)),
    Probe("bwd_out", "k = 16", (("q < Z_STEPS", "q < 1"), ("q < H_STEPS", "q < 1"))),
    Probe("bwd_out", "no sums", (("  if (!SUMS) return;", "  return;"),)),
    Probe("bwd_in", "spin", SPIN),
    Probe("bwd_in", "no store", (("tma_store(", "if (p.grid.n < 0) tma_store("),)),
    Probe("bwd_in", "k = 16", (("q < Z_STEPS", "q < 1"),)),
    Probe("bwd_in", "no sums", (("  if (!SUMS) return;", "  return;"),)),
    Probe("bwd_in", "half D", (("u < TEAM; ++u", "u < 1; ++u"),)),
    Probe("bwd_in", "no gate", (("sigmoid(fmaf(gate[i]", "(fmaf(gate[i]"),)),
)


@contextlib.contextmanager
def probed(index: int, probe: Probe) -> Iterator[None]:
    """Let the kernel of a probe be compiled from its changed source."""
    name = f"tri_mul_{probe.kernel}"
    forward, backward = tri_mul.forward_variants, tri_mul_bwd.backward_variants

    def marked(variants: dict[str, Variant]) -> dict[str, Variant]:
        mark = {"PROBE": index}  # a kernel is compiled once for the same constants
        return {
            key: v._replace(defines=v.defines | mark) if v.name == name else v
            for key, v in variants.items()
        }

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        for source in jit.source_folder().glob("*.cu*"):
            shutil.copy(source, folder)
        path = Path(folder, f"{name}.cu")
        text = path.read_text()
        for old, new in probe.changes:
            if old not in text:
                raise ValueError(f"{path.name} has no {old!r}; change the probe {probe.label!r}")
            text = text.replace(old, new)
        path.write_text(text)
        for module, attribute, value in (
            (jit, "source_folder", lambda: Path(folder)),
            (tri_mul, "forward_variants", lambda sizes: marked(forward(sizes))),
            (tri_mul_bwd, "backward_variants", lambda *sizes: marked(backward(*sizes))),
        ):
            stack.enter_context(mock.patch.object(module, attribute, value))
        launch.forget_plans()
        yield
    launch.forget_plans()


def probe(only_build: bool) -> None:
    """Print the microseconds of each kernel with a part left out, N = 768; or only compile it."""
    widths = 64, 128
    inputs = [] if only_build else [make(Case(768, c, c)) for c in widths]
    print("probe, us" + "".join(f"{f'C = {c}':>10}" for c in widths))
    for index, one in enumerate((*(Probe(part, "", ()) for part in PARTS[1:5]), *PROBES)):
        with probed(index, one):
            if only_build:
                for v in (v for c in widths for v in kernels_of(Sizes(c, c))):
                    if v.name == f"tri_mul_{one.kernel}":
                        jit.build(v.name, v.defines)
                continue
            spent = [by_part(call_of(x, "both"))[one.kernel] for x in inputs]
        print(f"{one.kernel:8} {one.label:10}" + "".join(f"{x:10.1f}" for x in spent), flush=True)


def main(variants: bool, probes: bool, only_build: bool) -> int:
    """Run what the command line asks for; return the number of failures."""
    failures = 0
    if variants and only_build:
        print(f"built {build(list(VARIANTS.values()))} kernels")
    elif variants:
        failures = compare()
    if probes:
        use(Tuning())
        probe(only_build)
    return failures
