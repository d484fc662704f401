"""One Pairformer block, forward and backward: time, launches, memory, sub-layers, errors."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tpf.bench import profiling
from tpf.bench.accuracy import compare
from tpf.bench.block_cases import (
    BlockInputs,
    make_block,
    make_block_inputs,
    results,
    sublayers,
    whole,
)
from tpf.bench.cases import Settings
from tpf.bench.determinism import same_bits
from tpf.bench.record import Record, Row, Table
from tpf.bench.swap import CHOICES, Operators, open_choices
from tpf.bench.timing import WARM_UP, Call, Clock, forget, rounds
from tpf.model.graphs import VISITS
from tpf.model.pairformer import PairformerBlock
from tpf.report.html import Cell
from tpf.report.svg import bar_chart

BASELINE = "torch"
"""Its errors are what BF16 PyTorch itself has."""
OURS = ("graphs", "cuda", "kernels")
MAX_RATIO = 2.0
"""Our errors may be this multiple of PyTorch's."""
MAIN = ("s", "z", "ds", "dz")
NOTE = (
    "FP32 parameters, BF16 autocast, dropout 0.25, no mask. Wall: an eager call on an idle GPU, "
    "its work included, median over interleaved repetitions. Busy and launches: kernels, copies "
    "and fills by the profiler. Peak: beyond parameters and inputs; in brackets with them. The "
    "backward of graphs computes the block again and keeps no activations, as in training."
)


def bench_block(settings: Settings, record: Record) -> None:
    """Measure every backend at every crop."""
    chosen = {name: CHOICES[name] for name in settings.impls}
    found = open_choices("block", chosen, settings.device, record)
    block = make_block(settings.device)
    lines: list[tuple[Cell, ...]] = []
    header = (
        "N", "backend", "wall, ms", "busy, ms", "launches", "host, ms", "peak, MiB",
    )  # fmt: skip
    title = "Pairformer block, forward + backward"
    record.tables.append(Table(title, header, lines, text_columns=2, note=NOTE))
    for n in dict.fromkeys(shape.n for shape in settings.shapes):
        settings.say(f"block, N = {n}")
        lines += _time_crop(n, block, found, settings, record)
        for operators in found.values():
            operators.forget()
        forget(settings.device)
        record.save()
    if settings.errors:
        _errors(found, settings, record)


def inside(operators: Operators, call: Call) -> Call:
    """Return the call with these operators."""

    def run() -> object:
        with operators.used():
            return call()

    return run


def _time_crop(
    n: int, block: PairformerBlock, found: dict[str, Operators], settings: Settings, record: Record
) -> list[tuple[Cell, ...]]:
    x = make_block_inputs(n, settings.device)
    clock = Clock(settings.device)
    calls: dict[str, Call] = {}
    rows: dict[str, Row] = {}
    for name, operators in found.items():
        call = inside(operators, whole(block, x))
        with record.case(name, op="block", n=n) as case:
            for _ in range(WARM_UP):
                call()
            rows[name] = _facts(call, clock, operators)
        forget(settings.device)
        if not case.failed:
            calls[name] = call
    walls = clock.walls(list(calls.values()), rounds(len(calls), settings.reps))
    if clock.gpu:
        for name, call in calls.items():
            work = profiling.kernels(call)
            rows[name]["launches"], rows[name]["busy_ms"] = profiling.total(work)
            if settings.profile:
                title = f"Kernels of {name}, N = {n}"
                profiling.report(title, work, record, **_where(name, n))
        eager = {name: found[name] for name in calls if found[name].graphs is None}
        _sublayer_table(n, block, x, eager, record)
    lines: list[tuple[Cell, ...]] = []
    for name, wall in sorted(zip(calls, walls, strict=True), key=lambda item: item[1].median):
        row = rows[name]
        record.add(**_where(name, n), **wall.fields(), **row)
        peak = None if "peak_mib" not in row else f"{row['peak_mib']:.0f} ({row['total_mib']:.0f})"
        launches = None if "launches" not in row else round(row["launches"])
        host = row["host_us"] / 1e3
        lines.append((str(n), name, wall.median, row.get("busy_ms"), launches, host, peak))
    return lines


def _where(impl: str, n: int) -> dict[str, Any]:
    return {
        "op": "block", "impl": impl, "phase": "fwd_bwd", "n": n, "batch": 1, "dtype": "bfloat16",
    }  # fmt: skip


def _facts(call: Call, clock: Clock, operators: Operators) -> Row:
    """Return host time and memory of a warm call, with what graphs hold between calls."""
    row: Row = {"host_us": clock.host_us(call)}
    peak = clock.peak_mib(call)
    if peak is not None:
        held, free = operators.held_mib()
        row["peak_mib"] = peak + held
        row["total_mib"] = torch.cuda.max_memory_allocated(clock.device) / 2**20 + free
    return row


def _sublayer_table(
    n: int, block: PairformerBlock, x: BlockInputs, found: dict[str, Operators], record: Record
) -> None:
    """Record busy time and launches of every residual layer of the block."""
    columns: dict[str, dict[str, profiling.Work]] = {}
    for name, operators in found.items():
        columns[name] = {}
        for layer, part in sublayers(block, x, operators.fused).items():
            call = inside(operators, part)
            call()
            work = profiling.total(profiling.kernels(call))
            columns[name][layer] = work
            record.add(
                **_where(name, n), layer=layer, busy_ms=work.ms, launches=work.launches
            )  # fmt: skip
    layers = list(next(iter(columns.values()), {}))
    lines: list[tuple[Cell, ...]] = [
        (layer, *(f"{of[layer].ms:.3f} ({of[layer].launches:.0f})" for of in columns.values()))
        for layer in layers
    ]
    title = f"Sub-layers at N = {n}: busy ms (launches), forward + backward"
    record.tables.append(Table(title, ("layer", *columns), lines))
    if columns:
        first, of = next(iter(columns.items()))
        values = [work.ms for work in of.values()]
        chart = bar_chart(layers, values, title=f"{first}, N = {n}", y_label="busy ms")
        record.figures.append(chart)


def _errors(found: dict[str, Operators], settings: Settings, record: Record) -> None:
    """Compare all results and gradients at the smallest crop with the block in FP32."""
    n, device = min(shape.n for shape in settings.shapes), settings.device
    settings.say(f"block errors, N = {n}")
    block = make_block(device, dropout=0.0)
    reference = open_choices("block", {BASELINE: CHOICES[BASELINE]}, device, record)[BASELINE]
    with reference.used():
        want = results(block, make_block_inputs(n, device, torch.float32), autocast=False)
    want = {name: x.double() for name, x in want.items()}
    x = make_block_inputs(n, device)
    base: dict[str, float] = {}
    lines: list[tuple[Cell, ...]] = []
    header = ("backend", *MAIN, f"worst ratio to {BASELINE}", "of", "repeatable")
    note = "Relative L2 error in % against FP32 without autocast and dropout; all gradients judged."
    record.tables.append(Table(f"Errors of the block at N = {n}", header, lines, note=note))
    for name, operators in ({BASELINE: reference} | found).items():
        compute = functools.partial(results, block, x, autocast=True)
        with record.case(name, op="block", n=n) as case, operators.used():
            for _ in range(VISITS):
                compute()
            got, again = compute(), compute()
        if case.failed:
            continue
        found_errors = {k: pair.rel_l2 for k, pair in compare(got, want).items()}
        base = base or found_errors
        ratios = {k: error / base[k] for k, error in found_errors.items()}
        worst = max(ratios, key=lambda k: ratios[k])
        same = all(bool(same_bits(got[k], again[k])) for k in want)
        _record_errors(name, n, found_errors, ratios, same, record)
        shown = (found_errors[k] for k in MAIN)
        lines.append((name, *shown, ratios[worst], worst, "yes" if same else "no"))
        record.save()


def _record_errors(
    name: str, n: int, errors: dict[str, float], ratios: dict[str, float], same: bool,
    record: Record,
) -> None:  # fmt: skip
    for tensor, error in errors.items():
        record.add(
            op="block", impl=name, metric="rel_l2", tensor=tensor, inputs="normal", n=n, seeds=1,
            mean=error, ratio=ratios[tensor],
        )  # fmt: skip
    record.add(
        op="block", impl=name, metric="bitwise", tensor="all", inputs="normal", n=n, seeds=1,
        passed=int(same), total=1,
    )  # fmt: skip
    bad = [tensor for tensor, ratio in ratios.items() if not ratio <= MAX_RATIO]
    if name in OURS and bad:
        record.failures.append(
            f"block, {name}, N = {n}: error more than {MAX_RATIO:g} times that of {BASELINE}: "
            + ", ".join(f"{tensor} {ratios[tensor]:.2f}" for tensor in bad)
        )
