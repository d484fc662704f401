"""Table 6: errors on attention calls that were captured from a training step."""

from __future__ import annotations

import statistics
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from tpf.bench.accuracy import FLOOR, TENSORS, over_backends
from tpf.bench.capture import capture, save_calls
from tpf.bench.cases import Inputs, Settings
from tpf.bench.record import Record, Table
from tpf.errors import UsageError
from tpf.report.html import Cell

CAPTURE_HELP = (
    "the folder of a run, whose next step is captured, or a safetensors file with the tensors "
    "I.q, I.k, I.v [B, O, H, N, D], I.bias [B, 1, H, N, N], I.dout and, if masked, I.mask (bool "
    "[B, O, 1, 1, N]) for each captured call I = 0, 1, ..."
)


def table_6(settings: Settings, record: Record) -> None:
    """Replay captured calls of a training step in every backend; medians over the calls.

    The output is judged on the query rows that the mask keeps. Calls that are captured here are
    written into the folder of the results.
    """
    if settings.capture is None:
        raise UsageError(f"--table 6 needs --capture RUN: {CAPTURE_HELP}")
    if settings.capture.is_dir():
        settings.say(f"capturing the next step of {settings.capture}")
        calls = capture(settings.capture, settings)
        if record.folder is not None:
            save_calls(calls, record.folder / "calls.safetensors")
    else:
        calls = read_capture(settings.capture, settings.device)
    attends = record.open_backends(settings.impls, settings.device)
    errors = over_backends(calls, attends, record, {"inputs": "captured"}, valid_queries=True)
    lines: list[tuple[Cell, ...]] = []
    for tensor in TENSORS:
        cells: dict[str, Cell] = {}
        for name, of in errors.items():
            cells[name] = statistics.median(e[tensor].rel_l2 for e in of)
        for name in attends:
            if name in cells:
                record.add(
                    op="attention", impl=name, metric="rel_l2", tensor=tensor, inputs="captured",
                    calls=len(calls), mean=cells[name], floor=cells[FLOOR], statistic="median",
                )  # fmt: skip
        lines.append((tensor, *(cells.get(name) for name in (*attends, FLOOR))))
    title = f"Table 6: {len(calls)} captured calls, relative L2 error, %"
    record.tables.append(Table(title, ("tensor", *attends, FLOOR), lines))


def read_capture(path: Path, device: torch.device) -> list[Inputs]:
    """Read captured calls; raise ``UsageError`` if the file is missing or not of that form."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UsageError(
            f"--capture {path}: cannot be read ({error}); give {CAPTURE_HELP}"
        ) from error
    calls: list[Inputs] = []
    while f"{len(calls)}.q" in tensors:
        i = len(calls)
        names = [f"{i}.{name}" for name in ("q", "k", "v", "bias", "dout")]
        missing = [name for name in names if name not in tensors]
        if missing:
            raise UsageError(f"--capture {path}: no {', '.join(missing)}; give {CAPTURE_HELP}")
        q, k, v, bias, dout = (tensors[name].to(device, torch.bfloat16) for name in names)
        mask = tensors.get(f"{i}.mask")
        mask = None if mask is None else mask.to(device)
        for leaf in (q, k, v, bias):
            leaf.requires_grad_()
        calls.append(Inputs(q, k, v, bias, mask, dout))
    if not calls:
        raise UsageError(f"--capture {path}: holds no call; give {CAPTURE_HELP}")
    return calls
