"""Checkpoints: folders of safetensors files, written whole or not at all.

A checkpoint ``checkpoints/step-000100`` holds ``model.safetensors``, ``ema.safetensors``,
``optimizer.safetensors``, ``state.json`` (step, seed, configuration, size and SHA-256 of each
file). Every random draw of training is a function of (seed, step, sample), so these two numbers
are the whole state of the random generators of all ranks and of the sampler. Nothing is ever
unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tpf.config import Config, from_dict, to_dict
from tpf.errors import TpfError, UsageError
from tpf.files import write_whole

FORMAT = 2
_STEP = re.compile(r"^step-(\d{6,})$")
_FILES = ("model", "ema", "optimizer")


class CheckpointError(TpfError):
    """A checkpoint that is missing, incomplete or of another model."""


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds; tensors are on the CPU."""

    path: Path
    step: int
    config: Config
    model: dict[str, Tensor]
    ema: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    extra: dict[str, Any]


def unused(wanted: Path) -> Path:
    """Return the path, or the first of path-2, path-3, ... that does not exist."""
    folder, copy = wanted, 2
    while folder.exists():
        folder, copy = wanted.with_name(f"{wanted.name}-{copy}"), copy + 1
    return folder


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all (temporary sibling, fsync, rename)."""
    write_whole(path, text.encode(), durable=True)


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _seal(state: dict[str, Any]) -> str:
    """Return the checksum of the entries of ``state.json`` other than itself."""
    content = {name: value for name, value in state.items() if name != "seal"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _write_files(
    folder: Path, tensors: dict[str, dict[str, Tensor]]
) -> dict[str, dict[str, int | str]]:
    """Write the tensor files into a folder and return the size and checksum of each."""
    files: dict[str, dict[str, int | str]] = {}
    for name in _FILES:
        path = folder / f"{name}.safetensors"
        save_file({k: v.detach().cpu().contiguous() for k, v in tensors[name].items()}, str(path))
        path.chmod(0o644)  # safetensors keeps its files from other users
        _sync(path)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    return files


def save(
    run: Path,
    step: int,
    config: Config,
    tensors: dict[str, dict[str, Tensor]],
    extra: dict[str, Any],
) -> Path:
    """Write the checkpoint of ``step`` under ``run`` and point ``last`` to it.

    ``tensors`` has the dictionaries ``model``, ``ema`` and ``optimizer``. The folder gets its name
    when all of it is on the disk, and ``last`` moves after that. Raises ``TpfError`` naming the
    folder when the disk is full or not writable; earlier checkpoints stay untouched.
    """
    folder = run / "checkpoints"
    final = folder / f"step-{step:06d}"
    if final.exists() and not damage(final):
        return final
    temporary = folder / f".{final.name}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in [*folder.glob(".step-*"), final]:  # of killed processes, or damaged
            shutil.rmtree(left, ignore_errors=True)
        temporary.mkdir()
        state: dict[str, Any] = {
            "format": FORMAT,
            "step": step,
            "config": to_dict(config),
            "files": _write_files(temporary, tensors),
            "extra": extra,
        }
        state["seal"] = _seal(state)
        write_text(temporary / "state.json", json.dumps(state, indent=1))
        _sync(temporary)
        temporary.rename(final)
        _sync(folder)
        write_text(folder / "last", final.name + "\n")
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise TpfError(
            f"checkpoint {final} cannot be written ({error}); earlier ones are untouched: "
            f"free space or make it writable, then --resume {run}"
        ) from error
    return final


def prune(run: Path, keep: int, step: int) -> None:
    """Delete all but the newest ``keep`` checkpoints up to ``step``.

    Later ones are damaged ones, which a resumed run has yet to reach: they do not count.
    """
    for path in [path for number, path in _steps(run) if number <= step][:-keep]:
        hidden = path.with_name(f".{path.name}.{os.getpid()}")  # never seen half deleted
        try:
            path.rename(hidden)
        except OSError:
            continue
        shutil.rmtree(hidden, ignore_errors=True)


def _steps(run: Path) -> list[tuple[int, Path]]:
    folder = run / "checkpoints"
    if not folder.is_dir():
        return []
    found = [(int(m.group(1)), p) for p in folder.iterdir() if (m := _STEP.match(p.name))]
    return sorted(found)


def _read_state(path: Path) -> dict[str, Any]:
    """Return ``state.json``; raise ``CheckpointError`` unless all files have their sizes."""
    try:
        state: dict[str, Any] = json.loads((path / "state.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path}: state.json cannot be read ({error})") from error
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"checkpoint {path}: format {state.get('format')}, this version reads {FORMAT}; "
            "use the version that wrote it"
        )
    if state.get("seal") != _seal(state):
        raise CheckpointError(f"checkpoint {path}: state.json was changed after it was written")
    for name, written in state["files"].items():
        file = path / name
        if not file.is_file() or file.stat().st_size != written["bytes"]:
            raise CheckpointError(f"checkpoint {path}: {name} is missing or truncated")
    return state


def _read_checked(path: Path) -> dict[str, Any]:
    """Return ``state.json``; raise ``CheckpointError`` unless every file is as it was written."""
    state = _read_state(path)
    for name, written in state["files"].items():
        try:
            found = _sha256(path / name)
        except OSError as error:
            raise CheckpointError(f"checkpoint {path}: {name} cannot be read ({error})") from error
        if found != written["sha256"]:
            raise CheckpointError(
                f"checkpoint {path}: {name} is damaged (its SHA-256 is not the one written)"
            )
    return state


def damage(path: Path) -> str | None:
    """Return what is wrong with a checkpoint folder, None if every byte is as it was written."""
    try:
        _read_checked(path)
    except CheckpointError as error:
        return str(error)
    return None


def load(path: Path) -> Checkpoint:
    """Read one checkpoint folder; raise ``CheckpointError`` if any part is missing or damaged."""
    state = _read_checked(path)
    try:
        model, ema, optimizer = (load_file(str(path / f"{name}.safetensors")) for name in _FILES)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {path}: cannot be read ({error})") from error
    config = from_dict(state["config"])
    return Checkpoint(path, int(state["step"]), config, model, ema, optimizer, state["extra"])


def load_last(run: Path, warn: Callable[[str], None]) -> Checkpoint:
    """Read the newest checkpoint of a run that is whole; ``warn(message)`` tells of damaged ones.

    Raises ``CheckpointError`` when the run has none.
    """
    candidates = _steps(run)
    if not candidates:
        raise CheckpointError(
            f"run {run}: no checkpoint to resume from; start again in a new --out"
        )
    for _, path in reversed(candidates):
        try:
            return load(path)
        except CheckpointError as error:
            warn(f"{error}; falling back to the checkpoint before it")
    raise CheckpointError(f"run {run}: every checkpoint is damaged; start again with a new --out")


def resolve(path: str | Path) -> Path:
    """Return the checkpoint folder meant by a run folder or a checkpoint folder.

    Raises ``UsageError`` naming the path and what was expected there.
    """
    path = Path(path)
    if (path / "state.json").is_file():
        return path
    if (path / "checkpoints").is_dir():
        for _, step in reversed(_steps(path)):
            with contextlib.suppress(CheckpointError):  # the contents are checked when loaded
                _read_state(step)
                return step
        raise UsageError(f"run {path}: holds no whole checkpoint")
    if not path.exists():
        raise UsageError(f"checkpoint {path}: no such file or folder")
    raise UsageError(f"checkpoint {path}: neither a run folder nor a checkpoint folder of tpf")


def load_weights(module: torch.nn.Module, tensors: dict[str, Tensor], origin: str) -> None:
    """Load a full state dict into a model, or raise ``UsageError`` naming the first differences."""
    have = module.state_dict()
    missing = sorted(have.keys() - tensors.keys())
    unknown = sorted(tensors.keys() - have.keys())
    common = sorted(have.keys() & tensors.keys())
    shapes = [k for k in common if have[k].shape != tensors[k].shape]
    if missing or unknown or shapes:
        example = (
            f"{shapes[0]} is {list(tensors[shapes[0]].shape)}, this model has "
            f"{list(have[shapes[0]].shape)}"
            if shapes
            else f"missing {missing[0]}"
            if missing
            else f"unknown {unknown[0]}"
        )
        raise UsageError(
            f"checkpoint {origin} belongs to another model ({len(missing)} tensors missing, "
            f"{len(unknown)} unknown, {len(shapes)} of another shape; {example}); "
            "use the --config that it was trained with"
        )
    module.load_state_dict(tensors)
