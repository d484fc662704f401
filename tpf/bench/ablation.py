"""Tables 9 and 12: variants of our forward, and of the paper's backward."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from tpf.bench.cases import Inputs, Settings, Shape, make_inputs
from tpf.bench.record import Record, Table
from tpf.bench.timing import WARM_UP, Call, Clock, Timing, blocks, forget, reduction_percent, rounds
from tpf.kernels import tri_attn
from tpf.kernels.tri_attn_bwd_paper import ORDERED, Atomic, tri_attn_bwd_paper
from tpf.report.html import Cell

BLOCKS, CALLS = 8, 20
"""Table 9: paired blocks, and calls of each variant in a block."""
FORWARD_VARIANTS = ("baseline", "core", "combined")
"""One slice for each bias tile; slices share it; the same with work items that overlap (STREAM)."""
TABLE_9_SHAPES = tuple(Shape(n, 32) for n in (384, 640, 768))
TABLE_12_SHAPES = (Shape(768, 16), Shape(640, 32))
ATOMICS: Mapping[str, Atomic] = {
    "ordered": ORDERED,
    "atomic dbias": Atomic(dbias=True),
    "atomic dQ": Atomic(dq="element"),
    "both": Atomic(dq="element", dbias=True),
    "bulk dQ": Atomic(dq="bulk"),
    "both, bulk": Atomic(dq="bulk", dbias=True),
}


@contextmanager
def forward_variant(name: str) -> Iterator[None]:
    """Let the forward kernel be one of FORWARD_VARIANTS for the calls inside."""
    tiles, stream = tri_attn.FORWARD_TILES, tri_attn.STREAM
    if name == "baseline":
        tri_attn.FORWARD_TILES = {key: tile._replace(group=1) for key, tile in tiles.items()}
    tri_attn.STREAM = name == "combined"
    try:
        yield
    finally:
        tri_attn.FORWARD_TILES, tri_attn.STREAM = tiles, stream


def table_9(settings: Settings, record: Record) -> None:
    """Compare the variants of the forward in paired blocks, alone and with the backward."""
    lines: list[tuple[Cell, ...]] = []
    header = ("N x D", "phase", "variant", "ms", "reduction, %")
    note = (
        f"{BLOCKS} paired blocks of {CALLS} calls a variant, order rotated in each block; mean of "
        "the paired reductions against the baseline."
    )
    title = "Table 9: variants of the forward"
    record.tables.append(Table(title, header, lines, text_columns=3, note=note))
    attend = record.open_backends(("cuda",), settings.device)["cuda"]
    for shape in settings.shapes:
        settings.say(f"forward variants, N = {shape.n}, D = {shape.dim}")
        inputs = make_inputs(shape, 0, settings.device, layout=settings.layout)

        def forward(inputs: Inputs = inputs) -> torch.Tensor:
            return attend(*inputs.leaves, inputs.mask)

        def both(inputs: Inputs = inputs) -> object:
            return torch.autograd.grad(forward(inputs), inputs.leaves, inputs.dout)

        for phase, call in (("fwd", forward), ("fwd_bwd", both)):
            lines += _paired_blocks(shape, phase, call, settings, record)
        forget(settings.device)
        record.save()


def _paired_blocks(
    shape: Shape, phase: str, call: Call, settings: Settings, record: Record
) -> list[tuple[Cell, ...]]:
    with Clock(settings.device) as clock:
        arms = []
        for name in FORWARD_VARIANTS:
            in_variant = _inside(name, call)
            for _ in range(WARM_UP):
                in_variant()
            arms.append(clock.prepare(in_variant))
        timings = clock.measure(arms, blocks(len(arms), BLOCKS, CALLS))
    lines: list[tuple[Cell, ...]] = []
    base = _block_means(timings[0])
    for name, timing in zip(FORWARD_VARIANTS, timings, strict=True):
        pairs = zip(_block_means(timing), base, strict=True)
        cut = statistics.fmean(reduction_percent(theirs, mine) for mine, theirs in pairs)
        record.add(
            op="attention", impl="cuda", variant=name, phase=phase, **shape.fields(),
            dtype="bfloat16", layout=settings.layout, mask=False, **timing.fields(),
            reduction_percent=cut,
        )  # fmt: skip
        lines.append((f"{shape.n} x {shape.dim}", phase, name, timing.median, round(cut, 1)))
    return lines


def _inside(name: str, call: Call) -> Call:
    def in_variant() -> object:
        with forward_variant(name):
            return call()

    return in_variant


def _block_means(timing: Timing) -> list[float]:
    return [
        statistics.fmean(timing.samples[start : start + CALLS])
        for start in range(0, len(timing.samples), CALLS)
    ]


def table_12(settings: Settings, record: Record) -> None:
    """Compare the paper's backward with ordered partials and with atomics."""
    lines: list[tuple[Cell, ...]] = []
    header = ("N x D", "sums", "backward, ms", "change")
    title = "Table 12: the paper's backward with atomics"
    record.tables.append(Table(title, header, lines, text_columns=2))
    for shape in settings.shapes:
        settings.say(f"atomic variants, N = {shape.n}, D = {shape.dim}")
        inputs = make_inputs(shape, 0, settings.device, layout=settings.layout)
        with Clock(settings.device) as clock:
            calls = _atomic_calls(inputs)
            names, arms = [], []
            for name, call in calls.items():
                with record.case("paper", variant=name, **shape.fields()):
                    for _ in range(WARM_UP):
                        call()
                    arms.append(clock.prepare(call))
                    names.append(name)
            timings = dict(
                zip(names, clock.measure(arms, rounds(len(arms), settings.reps)), strict=True)
            )
        base = timings.get("ordered")
        for name, timing in timings.items():
            record.add(
                op="attention", impl="paper", variant=name, phase="bwd", **shape.fields(),
                dtype="bfloat16", layout=settings.layout, mask=False, **timing.fields(),
                **clock.conditions,
            )  # fmt: skip
            change = None if base is None else 100 * (timing.median / base.median - 1)
            text = None if change is None else f"{change:+.1f} %"
            lines.append((f"{shape.n} x {shape.dim}", name, timing.median, text))
        forget(settings.device)
        record.save()


def _atomic_calls(inputs: Inputs) -> dict[str, Call]:
    """Return the backward call of every variant on the same saved tensors."""
    with torch.no_grad():
        q, k, v, bias = (x.detach() for x in inputs.leaves)
        call = (q, k, v, bias[:, 0], inputs.kernel_mask, inputs.scale)
        saved = tri_attn.tri_attn_fwd(*call, True)

    def variant(atomic: Atomic) -> Call:
        return lambda: tri_attn_bwd_paper(*call, *saved, inputs.dout, atomic)

    return {name: variant(atomic) for name, atomic in ATOMICS.items()}
