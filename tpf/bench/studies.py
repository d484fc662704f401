"""Every study by operator, table and figure of the paper, with its default settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from tpf.bench import (
    ablation,
    accuracy,
    attention,
    block,
    captured,
    determinism,
    memory,
    residual,
    step_studies,
    trimul,
    workspace,
)
from tpf.bench.backends import BACKENDS
from tpf.bench.cases import PAPER_SHAPES, Settings, Shape
from tpf.bench.record import Record
from tpf.bench.swap import CHOICES
from tpf.bench.trimul_backends import MULTIPLIERS
from tpf.bench.trimul_cases import TRIMUL_SHAPES
from tpf.errors import HardwareError, UsageError

TINY_SHAPES = (Shape(24, 16),)
"""Default shapes without a GPU."""
TINY_SEEDS = 3
CROPS = tuple(Shape(n, 128) for n in (384, 640, 768))
"""Crops of the studies of networks, whose widths are fixed."""
ALL = tuple(BACKENDS)
UPDATES = tuple(MULTIPLIERS)
NETWORKS = tuple(CHOICES)
EVERY = tuple(dict.fromkeys(ALL + UPDATES + NETWORKS))
COMPARED = tuple(name for name in NETWORKS if name != "eager")
TRAINED = tuple(name for name in COMPARED if name != "torch")


@dataclass(frozen=True)
class Study:
    """One experiment: what runs it, on what, and with which backends by default."""

    name: str
    run: Callable[[Settings, Record], None]
    shapes: tuple[Shape, ...] = PAPER_SHAPES
    impls: tuple[str, ...] = ALL
    seeds: int = 10
    reps: int = 20
    device: Literal["none", "any", "gpu", "hopper"] = "any"
    only: tuple[str, ...] = ALL
    """Backends that the study can compare."""
    widest: int = 64
    """Largest --dim; 0 if widths are fixed."""
    ranks: bool = False
    """Whether several processes can take part."""


def _update_study(name: str) -> Study:
    return Study(name, trimul.table_10, TRIMUL_SHAPES, UPDATES, 3, only=UPDATES, widest=128)


def _step_study(
    name: str, run: Callable[[Settings, Record], None], impls: tuple[str, ...], reps: int
) -> Study:
    return Study(name, run, CROPS, impls, 1, reps, only=NETWORKS, widest=0, ranks=True)


ATTENTION = Study("attention", attention.table_8)
ACCURACY = Study("accuracy", accuracy.figure_4)
DETERMINISM = Study("determinism", determinism.figure_10, seeds=100)
MEMORY = Study("memory", memory.memory, (Shape(768, 32),), EVERY, device="gpu", only=EVERY)
TRIMUL = _update_study("trimul")
BLOCK = Study("block", block.bench_block, CROPS, COMPARED, 1, only=NETWORKS, widest=0)
STEP = _step_study("step", step_studies.bench_step, COMPARED, 20)

OPERATIONS: Mapping[str, Study] = {
    s.name: s for s in (ATTENTION, TRIMUL, BLOCK, STEP, MEMORY, DETERMINISM, ACCURACY)
}
SIZED = tuple(Shape(n, 32) for n in (384, 640, 768, 1024))
TABLES: Mapping[int, tuple[str, Study]] = {
    2: ("memory", Study("table-2", workspace.table_2, SIZED, device="none")),
    4: ("step", _step_study("table-4", step_studies.table_4, TRAINED, 380)),
    6: ("accuracy", Study("table-6", captured.table_6)),
    8: ("attention", ATTENTION),
    9: ("attention", Study(
        "table-9", ablation.table_9, ablation.TABLE_9_SHAPES, ("cuda",), device="hopper",
        only=("cuda",),
    )),
    10: ("trimul", _update_study("table-10")),
    12: ("attention", Study(
        "table-12", ablation.table_12, ablation.TABLE_12_SHAPES, ("paper",), device="hopper",
        only=("paper",),
    )),
    13: ("step", _step_study("table-13", step_studies.table_13, ("cuequivariance",), 40)),
}  # fmt: skip
FIGURES: Mapping[int, tuple[str, Study]] = {
    3: ("step", _step_study("figure-3", step_studies.figure_3, TRAINED, 180)),
    4: ("accuracy", ACCURACY),
    9: ("accuracy", Study(
        "figure-9", residual.figure_9, impls=("cuda", "paper"), only=("cuda", "paper", "torch")
    )),
    10: ("determinism", DETERMINISM),
}  # fmt: skip


def choose(operation: str | None, table: int | None, figure: int | None) -> Study:
    """Return the study that OP, --table or --figure names; raise ``UsageError`` otherwise."""
    if operation is not None and operation not in OPERATIONS:
        raise UsageError(f"bench {operation}: choose from {', '.join(OPERATIONS)}")
    if table is not None and figure is not None:
        raise UsageError(f"--table {table} and --figure {figure}: give one of them")
    for flag, number, known in (("table", table, TABLES), ("figure", figure, FIGURES)):
        if number is None:
            continue
        if number not in known:
            raise UsageError(f"--{flag} {number}: choose from {', '.join(map(str, known))}")
        owner, study = known[number]
        if operation not in (None, owner):
            raise UsageError(f"--{flag} {number} belongs to tpf bench {owner}, not {operation}")
        return study
    if operation is None:
        raise UsageError(f"bench: name one of {', '.join(OPERATIONS)}, --table or --figure")
    return OPERATIONS[operation]


def check_device(study: Study, device: torch.device) -> None:
    """Raise ``HardwareError`` if the study cannot run on the device."""
    name = f"bench {study.name}"
    if study.device == "none":
        return
    if device.type == "cuda" and torch.cuda.is_available():
        found = torch.cuda.get_device_capability(device)
        if study.device == "hopper" and found != (9, 0):
            raise HardwareError(f"{name} needs a GPU of compute capability (9, 0), this is {found}")
        return
    if study.device in ("gpu", "hopper"):
        raise HardwareError(f"{name} needs an NVIDIA GPU, and none is visible or chosen")
    if device.type == "cuda":
        raise HardwareError(
            f"{name} needs an NVIDIA GPU, none is visible; --device cpu tries the PyTorch backends "
            "on tiny shapes, and --table 2 needs no GPU"
        )


def check_impls(study: Study, names: tuple[str, ...]) -> None:
    """Raise ``UsageError`` for a name that is no backend or not one of this study."""
    if not names:
        raise UsageError(f"--impls names no backend; choose from {', '.join(study.only)}")
    for name in names:
        if name not in EVERY:
            raise UsageError(
                f"--impls {name}: no such backend; choose from {', '.join(study.only)}"
            )
        if name not in study.only:
            raise UsageError(
                f"--impls {name}: bench {study.name} compares only {', '.join(study.only)}"
            )


def default_shapes(
    study: Study, device: torch.device, crops: tuple[int, ...], dims: tuple[int, ...]
) -> tuple[Shape, ...]:
    """Return the study's shapes; crops and dims given replace its own, in all combinations."""
    own = TINY_SHAPES if device.type == "cpu" and study.device != "none" else study.shapes
    if not crops and not dims:
        return own
    crops = crops or tuple(dict.fromkeys(shape.n for shape in own))
    dims = dims or tuple(dict.fromkeys(shape.dim for shape in own))
    return tuple(Shape(n, dim) for dim in dims for n in crops)
