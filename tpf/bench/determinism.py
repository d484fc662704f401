"""Figure 10: are the gradients of repeated calls finite and bitwise equal?"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from tpf.bench.accuracy import computed
from tpf.bench.cases import Attend, Inputs, Settings, make_inputs
from tpf.bench.record import Record, Table
from tpf.bench.timing import forget
from tpf.report.html import Cell

CALLS = 5
GRADIENTS = ("dq", "dk", "dv", "dbias")
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(x: Tensor, y: Tensor) -> Tensor:
    """Return whether two tensors have the same bits, as a scalar tensor on their device."""
    bits = _BITS[x.element_size()]
    return (x.view(bits) == y.view(bits)).all()


def repeatable(attend: Attend, inputs: Inputs, calls: int = CALLS) -> list[bool]:
    """Return for each gradient whether it is finite and the same in every call."""
    first = computed(attend, inputs)
    good = {name: first[name].isfinite().all() for name in GRADIENTS}
    for _ in range(calls - 1):
        again = computed(attend, inputs)
        for name in GRADIENTS:
            good[name] = good[name] & same_bits(first[name], again[name])
    return [bool(x) for x in torch.stack(list(good.values())).tolist()]


def figure_10(settings: Settings, record: Record) -> None:
    """Count per shape the inputs whose four gradients all repeat; ``seeds`` inputs each."""
    attends = record.open_backends(settings.impls, settings.device)
    passed: dict[str, list[int | None]] = {name: [] for name in attends}
    record.views.append(partial(_show, settings, passed, record))
    for shape in settings.shapes:
        settings.say(f"determinism, N = {shape.n}, D = {shape.dim}")
        counts = {name: [0] * (1 + len(GRADIENTS)) for name in attends}
        for seed in range(settings.seeds):
            inputs = make_inputs(shape, seed, settings.device, layout=settings.layout)
            for name in list(counts):
                with record.case(name, **shape.fields()) as case:
                    good = repeatable(attends[name], inputs)
                if case.failed:
                    del counts[name]
                    continue
                both = [all(good), *good]
                counts[name] = [n + g for n, g in zip(counts[name], both, strict=True)]
        for name in attends:
            passed[name].append(counts[name][0] if name in counts else None)
        for name, found in counts.items():
            for tensor, n in zip(("all", *GRADIENTS), found, strict=True):
                record.add(
                    op="attention", impl=name, metric="bitwise", tensor=tensor, inputs="normal",
                    **shape.fields(), seeds=settings.seeds, calls=CALLS, passed=n,
                    total=settings.seeds, mean=n / settings.seeds,
                )  # fmt: skip
        forget(settings.device)
        record.save()


def _show(settings: Settings, passed: dict[str, list[int | None]], record: Record) -> None:
    shapes = [f"{s.n} x {s.dim}" for s in settings.shapes]
    total = settings.seeds * len(shapes)
    lines: list[tuple[Cell, ...]] = []
    for name, found in passed.items():
        missing = [None] * (len(shapes) - len(found))
        lines.append((name, *found, *missing, f"{sum(n or 0 for n in found)}/{total}"))
    note = (
        f"Inputs of {settings.seeds} whose dQ, dK, dV and dbias are all finite and bitwise equal "
        f"in {CALLS} calls."
    )
    title = "Figure 10: repeatable backward"
    record.tables.append(Table(title, ("backend", *shapes, "all"), lines, note=note))
