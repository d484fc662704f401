"""What tests hear of a run and read off its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tpf import checkpoint
from tpf.cli.display import Silent


class Messages(Silent):
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def message(self, text: str) -> None:
        self.texts.append(text)


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]


def state(path: Path) -> dict[str, torch.Tensor]:
    """Return every stored tensor of a checkpoint, or of a run's newest one."""
    saved = checkpoint.load(checkpoint.resolve(path))
    parts = {"model": saved.model, "ema": saved.ema, "optimizer": saved.optimizer}
    return {f"{part}/{name}": t for part, tensors in parts.items() for name, t in tensors.items()}


def assert_bitwise(first: Path, second: Path) -> None:
    """Check that two checkpoints, or the newest of two runs, hold the same bits."""
    one, two = state(first), state(second)
    assert one.keys() == two.keys()
    different = [name for name in one if not torch.equal(one[name], two[name])]
    assert not different, f"{len(different)} tensors differ, such as {different[0]}"
