"""Figure 4: errors of output and gradients against FP64 on the same BF16 inputs.

One FP64 reference serves all backends. The floor is the error of that reference rounded once to
BF16: no implementation with BF16 results can be expected below it.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from tpf.bench.cases import Attend, Inputs, Kind, Settings, Shape, make_inputs
from tpf.bench.record import Record, Row, Table
from tpf.bench.timing import forget
from tpf.kernels import reference
from tpf.report.html import Cell
from tpf.report.svg import bar_chart

TENSORS = ("out", "dq", "dk", "dv", "dbias")
FLOOR = "floor"
GOAL = 1.15
"""Errors up to this multiple of the floor reach the goal."""
FAR = 25.0
"""Errors beyond this multiple of the floor are flagged as wrong (BF16 softmax: 5 to 21)."""
NOTE = (
    "Relative L2 error, %, mean over seeds; * marks the lowest backend of a line, ! more than "
    f"{FAR:g} times the floor or not finite. Floor: FP64 rounded once to BF16."
)
Results = Mapping[str, Tensor]


class ErrorPair(NamedTuple):
    """Error of one tensor: root mean square, and relative L2 in percent."""

    rmse: float
    rel_l2: float


def exact(inputs: Inputs) -> dict[str, Tensor]:
    """Return output and gradients of the operator in FP64."""
    with torch.no_grad():
        q, k, v, bias = (x.detach().double() for x in inputs.leaves)
        mask, scale, bias = inputs.kernel_mask, inputs.scale, bias[:, 0]
        out, lse, none = reference.attention_forward(q, k, v, bias, mask, scale, False)
        dout = inputs.dout.double()
        grads = reference.attention_backward(dout, q, k, v, bias, mask, scale, out, lse, none)
        *dqkv, dbias = grads
        return dict(zip(TENSORS, (out, *dqkv, dbias[:, None]), strict=True))


def computed(attend: Attend, inputs: Inputs) -> dict[str, Tensor]:
    """Return output and gradients of a backend."""
    out = attend(*inputs.leaves, inputs.mask)
    grads = torch.autograd.grad(out, inputs.leaves, inputs.dout)
    return dict(zip(TENSORS, (out.detach(), *grads), strict=True))


def rounded(want: Results) -> dict[str, Tensor]:
    """Return the FP64 results rounded once to BF16."""
    return {name: x.to(torch.bfloat16) for name, x in want.items()}


def compare(got: Results, want: Results, mask: Tensor | None = None) -> dict[str, ErrorPair]:
    """Return the errors of all tensors; mask [B, O, 1, 1, N] limits the output to valid queries."""
    if mask is not None:
        dropped = ~mask.transpose(-1, -2)
        got, want = ({**x, "out": x["out"].masked_fill(dropped, 0)} for x in (got, want))
    norms = torch.stack(
        [(got[name].double() - x).norm() for name, x in want.items()]
        + [x.norm() for x in want.values()]
    ).tolist()
    pairs = {}
    for k, (name, x) in enumerate(want.items()):
        error, size = norms[k], norms[k + len(want)]
        relative = 100 * error / size if size > 0 else (math.inf if error > 0 else 0.0)
        pairs[name] = ErrorPair(error / math.sqrt(x.numel()), relative)
    return pairs


class Spread(NamedTuple):
    """Mean and sample standard deviation over seeds."""

    mean: float
    sd: float | None


def spread(values: list[float]) -> Spread:
    """Return mean and sample standard deviation (n - 1; none for one value)."""
    if not all(map(math.isfinite, values)):
        return Spread(math.nan, None)
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


def verdict(error: float, floor: float) -> str:
    """Return "floor" within the goal, "ok", or "far" for what must be wrong."""
    if error <= GOAL * floor:
        return "floor"
    return "ok" if error <= FAR * floor else "far"


Errors = dict[str, list[dict[str, ErrorPair]]]
"""By backend: the errors of each seed."""


def over_backends(
    batch: Iterable[Inputs],
    attends: dict[str, Attend],
    record: Record,
    fields: Row,
    *,
    valid_queries: bool = False,
) -> Errors:
    """Compare every backend with FP64 on each of the inputs; one that fails is left out.

    fields describe the inputs; with valid_queries the output is judged only where the mask keeps
    the query too.
    """
    errors: Errors = defaultdict(list)
    alive = dict(attends)
    for inputs in batch:
        want = exact(inputs)
        mask = inputs.mask if valid_queries else None
        errors[FLOOR].append(compare(rounded(want), want, mask))
        for name, attend in list(alive.items()):
            with record.case(name, **fields) as case:
                errors[name].append(compare(computed(attend, inputs), want, mask))
            if case.failed:
                del alive[name]
                errors.pop(name, None)
    return errors


def figure_4(settings: Settings, record: Record) -> None:
    """Measure the errors over seeds: normal and sharp inputs, with and without a mask."""
    attends = record.open_backends(settings.impls, settings.device)
    kinds: tuple[Kind, ...] = ("normal", "sharp")
    for kind in kinds:
        for masked in (False, True):
            lines: list[tuple[Cell, ...]] = []
            title = f"Figure 4: {kind} inputs, {'random masks' if masked else 'no mask'}"
            header = ("N x D", "tensor", *attends, FLOOR)
            record.tables.append(Table(title, header, lines, text_columns=2, note=NOTE))
            for shape in settings.shapes:
                settings.say(
                    f"accuracy, {kind}{', masked' * masked}, N = {shape.n}, D = {shape.dim}"
                )
                lines += _one_case(shape, kind, masked, attends, settings, record)
                forget(settings.device)
                record.save()


def _one_case(
    shape: Shape, kind: Kind, masked: bool, attends: dict[str, Attend], settings: Settings,
    record: Record,
) -> list[tuple[Cell, ...]]:  # fmt: skip
    drawn = (
        make_inputs(shape, seed, settings.device, kind=kind, masked=masked, layout=settings.layout)
        for seed in range(settings.seeds)
    )
    fields: Row = {**shape.fields(), "inputs": kind, "mask": masked}
    errors = over_backends(drawn, attends, record, fields)
    lines: list[tuple[Cell, ...]] = []
    for tensor in TENSORS:
        rmse = {name: spread([e[tensor].rmse for e in of]) for name, of in errors.items()}
        relative = {name: spread([e[tensor].rel_l2 for e in of]) for name, of in errors.items()}
        floor = rmse.pop(FLOOR)
        for metric, found, least in (
            ("rmse", rmse, floor.mean), ("rel_l2", relative, relative[FLOOR].mean),
        ):  # fmt: skip
            for name in rmse:
                record.add(
                    op="attention", impl=name, metric=metric, tensor=tensor, **fields,
                    seeds=settings.seeds, mean=found[name].mean, sd=found[name].sd, floor=least,
                    verdict=verdict(found[name].mean, least),
                )  # fmt: skip
        lines.append((f"{shape.n} x {shape.dim}", tensor, *_marked(relative, list(attends))))
        if kind == "normal" and not masked and tensor != "out":
            names = [*rmse, FLOOR]
            shown = [*rmse.values(), floor]
            record.figures.append(
                bar_chart(
                    names, [s.mean for s in shown], errors=[s.sd for s in shown],
                    title=f"{tensor}, N = {shape.n}, D = {shape.dim}", y_label="RMSE",
                )
            )  # fmt: skip
    return lines


def _marked(relative: dict[str, Spread], names: list[str]) -> list[Cell]:
    """Return a line of the table: errors in percent, the lowest and the wrong ones marked."""
    floor = relative[FLOOR].mean
    present = [relative[n].mean for n in names if n in relative]
    best = min((e for e in present if math.isfinite(e)), default=math.nan)
    cells: list[Cell] = []
    for name in names:
        if name not in relative:
            cells.append(None)
            continue
        error = relative[name].mean
        mark = "!" if verdict(error, floor) == "far" else "*" if error == best else ""
        cells.append(f"{error:.4f}{mark}")
    return [*cells, f"{floor:.4f}"]
