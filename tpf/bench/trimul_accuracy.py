"""Errors of the triangle multiplicative update and its gradients against FP64."""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import Tensor

from tpf.bench.accuracy import FLOOR, compare, spread
from tpf.bench.cases import Settings, Shape
from tpf.bench.record import Record, Table
from tpf.bench.timing import forget
from tpf.bench.trimul_cases import DIRECTIONS, Multiplier, TriMulInputs, fields, make_trimul
from tpf.kernels import reference
from tpf.kernels.ops import Direction, TriMulWeights
from tpf.report.html import Cell

STREAMS = ("out", "dz")
"""The results in BF16, which have a floor: the FP64 result rounded once."""
NAMES = (*STREAMS, *TriMulWeights._fields)
NOTE = "Relative L2 error, %; worst: of the ten gradients of parameters."


def exact(inputs: TriMulInputs, direction: Direction) -> dict[str, Tensor]:
    """Return the update and its gradients in FP64."""
    with torch.no_grad():
        weights = TriMulWeights._make(x.double() for x in inputs.weights)
        z, dout = inputs.z.double(), inputs.dout.double()
        out = reference.multiplication_forward(z, inputs.mask, weights, direction)
        dz, grads = reference.multiplication_backward(dout, z, inputs.mask, weights, direction)
        return dict(zip(NAMES, (out, dz, *grads), strict=True))


def computed(
    multiplier: Multiplier, inputs: TriMulInputs, direction: Direction
) -> dict[str, Tensor]:
    """Return the update and its gradients by an implementation."""
    parameters = [x.detach().requires_grad_() for x in multiplier.pack(inputs.weights)]
    z = inputs.z.detach().requires_grad_()
    out = multiplier.update(z, inputs.mask, parameters, direction)
    dz, *grads = torch.autograd.grad(out, [z, *parameters], inputs.dout)
    return dict(zip(NAMES, (out.detach(), dz, *multiplier.split(grads)), strict=True))


def errors(found: dict[str, Multiplier], settings: Settings, record: Record) -> None:
    """Measure the errors of every backend over seeds, without a mask and with one."""
    lines: list[tuple[Cell, ...]] = []
    header = ("N x C", "direction", "mask", "backend", *STREAMS, "worst", "which")
    title = "Errors of the triangle multiplicative update against FP64"
    record.tables.append(Table(title, header, lines, text_columns=4, note=NOTE))
    for shape in settings.shapes:
        for direction, masked in ((DIRECTIONS[0], False), (DIRECTIONS[1], True)):
            settings.say(f"trimul errors, N = {shape.n}, C = {shape.dim}, {direction}")
            lines += _one_case(shape, direction, masked, found, settings, record)
            forget(settings.device)
            record.save()


def _one_case(
    shape: Shape, direction: Direction, masked: bool, found: dict[str, Multiplier],
    settings: Settings, record: Record,
) -> list[tuple[Cell, ...]]:  # fmt: skip
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    alive = dict(found)
    for seed in range(settings.seeds):
        inputs = make_trimul(shape, seed, settings.device, masked=masked)
        want = exact(inputs, direction)
        streams = {name: want[name] for name in STREAMS}
        rounded = {name: x.to(torch.bfloat16) for name, x in streams.items()}
        for name, pair in compare(rounded, streams).items():
            values[FLOOR][name].append(pair.rel_l2)
        for impl, multiplier in list(alive.items()):
            with record.case(impl, op="trimul", **fields(shape)) as case:
                pairs = compare(computed(multiplier, inputs, direction), want)
            if case.failed:
                del alive[impl]
                values.pop(impl, None)
                continue
            for name, pair in pairs.items():
                values[impl][name].append(pair.rel_l2)
    floors = values.pop(FLOOR)
    lines: list[tuple[Cell, ...]] = []
    for impl, of in values.items():
        means = {name: spread(of[name]).mean for name in NAMES}
        for name in NAMES:
            record.add(
                op="trimul", impl=impl, metric="rel_l2", tensor=name, inputs="normal",
                **fields(shape), direction=direction, mask=masked, seeds=settings.seeds,
                mean=means[name], sd=spread(of[name]).sd,
                floor=spread(floors[name]).mean if name in floors else None,
            )  # fmt: skip
        worst = max(
            TriMulWeights._fields,
            key=lambda name: means[name] if math.isfinite(means[name]) else math.inf,
        )
        shown = (means["out"], means["dz"], means[worst], worst)
        where = (f"{shape.n} x {shape.dim}", direction, "random" if masked else "none")
        lines.append((*where, impl, *shown))
    floor = (spread(floors[name]).mean for name in STREAMS)
    lines.append((*where, FLOOR, *floor, None, None))
    return lines
