"""Memory beyond the inputs, after the forward and at the peak, of operators, block and step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from tpf.bench import attention, backends, block_cases, step, swap, trimul, trimul_cases
from tpf.bench.block import inside
from tpf.bench.block_cases import BlockInputs
from tpf.bench.cases import Attend, Inputs, Settings, Shape, make_inputs
from tpf.bench.record import Record, Row, Table
from tpf.bench.timing import WARM_UP, Call, Clock, forget
from tpf.bench.trimul_backends import MULTIPLIERS
from tpf.config import load
from tpf.errors import TpfError
from tpf.report.html import Cell

CHANNELS = 128
"""Width of the multiplicative update that is measured."""


@dataclass(frozen=True)
class Case:
    """What is measured at one shape: the calls of each backend, made only when needed."""

    op: str
    label: str
    fields: Row
    calls: Mapping[str, Callable[[], tuple[Call | None, Call]]]
    """By backend: a function that returns the forward, if it can be held, and the whole, warm."""


def memory(settings: Settings, record: Record) -> None:
    """Measure every operator's backends at every crop."""
    ran = False
    for part in (_attention, _multiplication, _block, _step):
        lines: list[tuple[Cell, ...]] = []
        try:
            for case in part(settings, record):
                if not lines:
                    record.tables.append(_table(case.op, lines))
                settings.say(f"memory, {case.op}, N = {case.label}")
                lines += _measure_case(case, settings, record)
                record.save()
        except TpfError:  # no backend of this part: the notes say why
            continue
        ran = ran or bool(lines)
    if not ran:
        raise TpfError(f"no backend can run here: {'; '.join(record.notes)}")


def _table(op: str, lines: list[tuple[Cell, ...]]) -> Table:
    header = ("N", "backend", "after forward", "peak of the whole")
    note = {
        "block": "Beyond parameters, streams and their gradients.",
        "step": "Beyond parameters, sums of gradients, Adam's moments and EMA.",
    }.get(op, "The backward's gradients are part of the peak.")
    note = f"What PyTorch's allocator holds. {note}"
    return Table(f"Memory of {op} beyond its inputs, MiB", header, lines, 2, note)


def _measure_case(case: Case, settings: Settings, record: Record) -> list[tuple[Cell, ...]]:
    lines: list[tuple[Cell, ...]] = []
    for name, prepare in case.calls.items():
        with record.case(name, op=case.op, **case.fields) as tried:
            held, peak = _measure(prepare, settings.device)
        forget(settings.device)
        if tried.failed:
            continue
        common = {"op": case.op, "impl": name, **case.fields}
        whole = "step" if case.op == "step" else "fwd_bwd"
        if held is not None:
            record.add(**common, phase="fwd", peak_mib=held)
        record.add(**common, phase=whole, peak_mib=peak)
        lines.append((case.label, name, held, peak))
    return lines


def _measure(
    prepare: Callable[[], tuple[Call | None, Call]], device: torch.device
) -> tuple[float | None, float]:
    """Return MiB held after a forward whose backward is to come, and the peak of the whole."""
    forward, whole = prepare()
    clock = Clock(device)
    peak = clock.peak_mib(whole)
    assert peak is not None
    if forward is None:
        return None, peak
    before = torch.cuda.memory_allocated(device)
    out = forward()
    clock.wait()
    held = (torch.cuda.memory_allocated(device) - before) / 2**20
    del out
    return held, peak


def _names(settings: Settings, known: Mapping[str, object]) -> tuple[str, ...]:
    return tuple(name for name in settings.impls if name in known)


def _crops(settings: Settings) -> list[int]:
    return list(dict.fromkeys(shape.n for shape in settings.shapes))


def _attention_calls(inputs: Inputs, attend: Attend) -> tuple[Call, Call]:
    made = attention.calls_of(attend, inputs)
    return made["fwd"], made["fwd_bwd"]


def _attention(settings: Settings, record: Record) -> Iterator[Case]:
    found = record.open_backends(_names(settings, backends.BACKENDS), settings.device)
    for shape in settings.shapes:
        inputs = make_inputs(shape, 0, settings.device, layout=settings.layout)
        calls = {name: partial(_attention_calls, inputs, attend) for name, attend in found.items()}
        fields = {**shape.fields(), "layout": settings.layout}
        yield Case("attention", f"{shape.n} x {shape.dim}", fields, calls)


def _multiplication(settings: Settings, record: Record) -> Iterator[Case]:
    names = _names(settings, MULTIPLIERS)
    found = record.open_all("trimul", MULTIPLIERS, names, settings.device)
    for n in _crops(settings):
        shape = Shape(n, CHANNELS)
        inputs = trimul_cases.make_trimul(shape, 0, settings.device)
        calls = {
            name: partial(trimul.calls_of, multiplier, inputs, "outgoing")
            for name, multiplier in found.items()
        }
        yield Case("trimul", f"{n} x {CHANNELS}", trimul_cases.fields(shape), calls)


def _networks(op: str, settings: Settings, record: Record) -> dict[str, swap.Operators]:
    known = {name: choice for name, choice in swap.CHOICES.items() if not choice.graphs}
    chosen = {name: known[name] for name in _names(settings, known)}
    return swap.open_choices(op, chosen, settings.device, record)


def _block(settings: Settings, record: Record) -> Iterator[Case]:
    found = _networks("block", settings, record)
    block = block_cases.make_block(settings.device)
    for n in _crops(settings):
        x = block_cases.make_block_inputs(n, settings.device)

        def prepare(operators: swap.Operators, x: BlockInputs = x) -> tuple[Call, Call]:
            whole = inside(operators, block_cases.whole(block, x))
            for _ in range(WARM_UP):
                whole()
            return inside(operators, lambda: block_cases.forward(block, x)), whole

        calls = {name: partial(prepare, operators) for name, operators in found.items()}
        yield Case("block", str(n), {"n": n}, calls)


def _step(settings: Settings, record: Record) -> Iterator[Case]:
    found = _networks("step", settings, record)
    config = load(settings.config)
    world = step.join(settings, config)
    for n in _crops(settings):
        stepper = step.Stepper(n, config, world, record.folder or Path())

        def prepare(
            operators: swap.Operators, stepper: step.Stepper = stepper
        ) -> tuple[None, Call]:
            stepper.step(operators, 0)
            return None, lambda: stepper.step(operators, 0)

        calls = {name: partial(prepare, operators) for name, operators in found.items()}
        yield Case("step", str(n), {"n": n, "config": config.name}, calls)
