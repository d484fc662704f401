"""Figure 9: what the saved rounding residual of the output changes, by backward algorithm."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from tpf.bench.accuracy import FLOOR, TENSORS, compare, exact, rounded, spread
from tpf.bench.cases import Inputs, Kind, Settings, Shape, make_inputs
from tpf.bench.determinism import same_bits
from tpf.bench.record import Record, Table
from tpf.bench.timing import forget
from tpf.kernels import reference
from tpf.report.html import Cell
from tpf.report.svg import bar_chart

Forward = Callable[..., tuple[Tensor, Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
CHANGED = ("dq", "dk", "dbias")
EQUAL = ("out", "dv")
"""Bitwise the same with and without the residual."""


def _reference_backward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, scale: float, out: Tensor,
    lse: Tensor, residual: Tensor, dout: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return reference.attention_backward(dout, q, k, v, bias, mask, scale, out, lse, residual)


def passes(name: str) -> tuple[Forward, Backward]:
    """Return the forward and the backward of cuda, paper or torch, which can drop the residual."""
    if name == "torch":
        return reference.attention_forward, _reference_backward
    from tpf.kernels.tri_attn import tri_attn_fwd
    from tpf.kernels.tri_attn_bwd import tri_attn_bwd
    from tpf.kernels.tri_attn_bwd_paper import tri_attn_bwd_paper

    if name == "cuda":
        return tri_attn_fwd, tri_attn_bwd
    return tri_attn_fwd, tri_attn_bwd_paper


def computed(name: str, inputs: Inputs, save_residual: bool) -> dict[str, Tensor]:
    """Return output and gradients with or without the residual."""
    forward, backward = passes(name)
    with torch.no_grad():
        q, k, v, bias = (x.detach() for x in inputs.leaves)
        call = (q, k, v, bias[:, 0], inputs.kernel_mask, inputs.scale)
        out, lse, residual = forward(*call, save_residual)
        *dqkv, dbias = backward(*call, out, lse, residual, inputs.dout)
        return dict(zip(TENSORS, (out, *dqkv, dbias[:, None]), strict=True))


def figure_9(settings: Settings, record: Record) -> None:
    """Compare the errors with and without the residual on identical inputs."""
    names = tuple(record.open_backends(settings.impls, settings.device))
    kinds: tuple[Kind, ...] = ("normal", "sharp")
    lines: list[tuple[Cell, ...]] = []
    header = (
        "inputs", "N x D", "backend", "tensor", "residual off", "residual on", "change", "floor",
    )  # fmt: skip
    note = "RMSE against FP64, mean over seeds. O and dV must be bitwise equal in both settings."
    title = "Figure 9: the residual of the output"
    record.tables.append(Table(title, header, lines, text_columns=4, note=note))
    for kind in kinds:
        for shape in settings.shapes:
            settings.say(f"residual, {kind}, N = {shape.n}, D = {shape.dim}")
            lines += _one_case(shape, kind, names, settings, record)
            forget(settings.device)
            record.save()


def _one_case(
    shape: Shape, kind: Kind, names: tuple[str, ...], settings: Settings, record: Record
) -> list[tuple[Cell, ...]]:
    fields = {**shape.fields(), "inputs": kind}
    rmse: dict[tuple[str, str], list[float]] = defaultdict(list)
    equal = dict.fromkeys(names, 0)
    for seed in range(settings.seeds):
        inputs = make_inputs(shape, seed, settings.device, kind=kind, layout=settings.layout)
        want = exact(inputs)
        for tensor, pair in compare(rounded(want), want).items():
            rmse[FLOOR, tensor].append(pair.rmse)
        for name in names:
            with_it, without = computed(name, inputs, True), computed(name, inputs, False)
            equal[name] += all(bool(same_bits(with_it[t], without[t])) for t in EQUAL)
            for label, got in ((f"{name} on", with_it), (f"{name} off", without)):
                for tensor, pair in compare(got, want).items():
                    rmse[label, tensor].append(pair.rmse)
    lines: list[tuple[Cell, ...]] = []
    for name in names:
        record.add(
            op="attention", impl=name, metric="bitwise", tensor="out, dv", **fields,
            seeds=settings.seeds, passed=equal[name], total=settings.seeds,
        )  # fmt: skip
        if equal[name] < settings.seeds:
            record.failures.append(
                f"{name}, N = {shape.n}, D = {shape.dim}, {kind}: O or dV changed with the "
                f"residual for {settings.seeds - equal[name]} of {settings.seeds} seeds"
            )
        for tensor in CHANGED:
            floor = spread(rmse[FLOOR, tensor]).mean
            on, off = (spread(rmse[f"{name} {x}", tensor]) for x in ("on", "off"))
            for residual, found in ((True, on), (False, off)):
                record.add(
                    op="attention", impl=name, metric="rmse", tensor=tensor, **fields,
                    residual=residual, seeds=settings.seeds, mean=found.mean, sd=found.sd,
                    floor=floor,
                )  # fmt: skip
            change = f"{100 * (on.mean / off.mean - 1):+.1f} %"
            where = (kind, f"{shape.n} x {shape.dim}", name, tensor)
            lines.append((*where, off.mean, on.mean, change, floor))
            record.figures.append(
                bar_chart(
                    ("off", "on", FLOOR), (off.mean, on.mean, floor), errors=(off.sd, on.sd, None),
                    title=f"{name} {tensor}, {kind}, N = {shape.n}, D = {shape.dim}",
                    y_label="RMSE",
                )
            )  # fmt: skip
    return lines
