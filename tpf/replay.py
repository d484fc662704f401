"""Run again the step of one sample that was not finite, with every module watched."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from tpf import checkpoint, dist, guard
from tpf.config import Config, from_dict, to_dict
from tpf.data.batch import to_device
from tpf.errors import UsageError
from tpf.model.model import Model
from tpf.step import Draws, draws, sample_loss


def write_replay(
    path: Path, config: Config, model: torch.nn.Module, features: dict[str, Any], draw: Draws
) -> None:
    """Store what is needed to run one sample's step again (atomic)."""
    micro = {"batch": features, "step": draw.step, "index": draw.index}
    content = {"config": to_dict(config), "model": model.state_dict(), **micro}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        torch.save(content, temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any]:
    """Read a replay file without executing anything in it; raise ``UsageError`` if it is none."""
    if not path.is_file():
        raise UsageError(f"--replay {path}: no such file; give the replay file of a run")
    none = f"--replay {path}: not a replay file; give replay-step-*.pt of a run folder"
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for files that it did not write
        raise UsageError(none) from error
    if not isinstance(content, dict) or not {"config", "model", "batch"} <= content.keys():
        raise UsageError(none)
    return content


def replay(path: Path) -> str:
    """Run again the step of a replay file; return what was not finite first."""
    content = _read(path)
    config = from_dict(content["config"])
    device = dist.prepare(config.train).device
    model = Model(config.model).to(device)
    checkpoint.load_weights(model, content["model"], str(path))
    model.train()
    draw = draws(config.train, content["step"], content["index"])
    where = locate(model, content["batch"], config, draw, device)
    return f"step {content['step'] + 1}, sample {', '.join(content['batch']['id'])}: {where}"


def locate(
    model: Model, features: dict[str, Any], config: Config, draw: Draws, device: torch.device
) -> str:
    """Run one sample's step again with every module watched; say what is not finite first."""
    batch = to_device(features, device)
    if bad := guard.first_nonfinite(batch, "features"):
        return bad
    for name, parameter in model.named_parameters():
        parameter.grad = None
        if not parameter.isfinite().all():
            return f"parameter {name}"
    with guard.watch(model) as found:
        loss = sample_loss(model, batch, config, draw)
        if not found:
            bad = guard.first_nonfinite(loss.terms, "loss")
            if bad:
                found.append(bad)
        if not found:
            loss.total.backward()  # type: ignore[no-untyped-call]
    return found[0] if found else guard.overflow(model) or "nothing: finite when run again"
