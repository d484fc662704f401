"""Checkpoints of models that nothing has trained, for tests of what is done with one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from tpf import checkpoint
from tpf.config import load
from tpf.model.model import Model


def save_untrained(folder: Path, overrides: Sequence[str], *, confident: bool = False) -> Path:
    """Write a checkpoint of the tiny model with random weights; return ``folder``.

    ``confident`` scatters what the confidence heads say, which else is the same for every sample.
    """
    config = load("tiny", ["data.conformers=ideal", *overrides])
    torch.manual_seed(0)
    weights = Model(config.model).state_dict()
    for name, value in weights.items():
        if confident and "aux_heads" in name and value.ndim == 2:
            weights[name] = torch.randn_like(value) * 0.3
    tensors = {"model": weights, "ema": weights, "optimizer": {}}
    checkpoint.save(folder, 0, config, tensors, {"seed": 0})
    return folder
