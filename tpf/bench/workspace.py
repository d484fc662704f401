"""Table 2: the workspace that the paper's backward needs, by formula."""

from __future__ import annotations

from typing import NamedTuple

from tpf.bench.cases import Settings, Shape
from tpf.bench.record import Record, Table
from tpf.report.html import Cell

KEYS = 64
"""Keys of one tile, that is of one dQ partial."""
GROUP = 4
"""Outer slices that share one dbias partial."""
MIB = 1 << 20
KEPT, REUSED = 512 * MIB, 256 * MIB
"""All dbias partials are kept up to the first size; beyond, the second bounds what is resident."""


class Workspace(NamedTuple):
    """Bytes of one backward call."""

    dq_partials: int
    dbias_partials: int
    dbias_resident: int
    residual: int
    ds: int


def workspace(shape: Shape) -> Workspace:
    """Return the bytes of Table 2: BF16 partials and residual; dS in FP32 if it were stored."""
    n, slices = shape.n, shape.batch * shape.n
    operand = slices * shape.heads * n * shape.dim * 2
    partial = shape.heads * n * n * 2
    partials = slices // GROUP * partial
    resident = partials if partials <= KEPT else REUSED // partial * partial
    return Workspace(
        dq_partials=-(-n // KEYS) * operand,
        dbias_partials=partials,
        dbias_resident=resident,
        residual=operand,
        ds=slices * shape.heads * n * n * 4,
    )


def table_2(settings: Settings, record: Record) -> None:
    """Record the workspace of every shape in MiB."""
    lines: list[tuple[Cell, ...]] = []
    for shape in settings.shapes:
        sizes = workspace(shape)
        for name, size in sizes._asdict().items():
            record.add(
                op="attention", impl="paper", metric="workspace_mib", tensor=name,
                **shape.fields(), mean=size / MIB,
            )  # fmt: skip
        lines.append((f"{shape.n} x {shape.dim}", *(size / MIB for size in sizes)))
    header = (
        "N x D", "dQ partials", "dbias partials", "of which resident", "residual", "dS in FP32",
    )  # fmt: skip
    record.tables.append(
        Table(
            "Table 2: workspace of the paper's backward, MiB",
            header,
            lines,
            note=f"By formula: {KEYS} keys a tile, {GROUP} slices a group.",
        )
    )
