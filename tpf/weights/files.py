"""Weights on disk: read from a run or any weight file, written as safetensors or for OpenFold3.

Our own file is one safetensors file of FP32 tensors under the model's names. Its metadata says
which model it is of, where the weights came from and after how many steps. A file is written whole
or not at all and never replaces another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tpf import checkpoint
from tpf.config import ModelConfig
from tpf.errors import TpfError, UsageError
from tpf.files import make_folder
from tpf.weights import pickled
from tpf.weights.names import with_aliases

FORMAT = "tpf 1"
"""Value of the key ``format`` in the metadata of our files."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Tensors of a file under its own names, most of them not yet read from the disk."""

    path: Path
    kind: str
    """What the file is, in words."""
    tensors: dict[str, Tensor]
    origin: str
    """Where the weights come from, in words."""
    step: int | None = None
    """Optimiser steps behind them, if the file says."""
    config: ModelConfig | None = None
    """The model they are of, if the file says."""


def read(path: Path) -> Weights:
    """Open a run, a checkpoint, or a file of safetensors or PyTorch's.

    Of checkpoints the averaged weights are taken. Raises ``UsageError`` naming the file and what is
    wrong with it.
    """
    if path.is_dir():
        folder = checkpoint.resolve(path)
        saved = checkpoint.load(folder)
        return Weights(
            path=folder,
            kind="checkpoint of tpf",
            tensors=saved.ema,
            origin=f"{folder} (averaged weights)",
            step=saved.step,
            config=saved.config.model,
        )
    if not path.is_file():
        raise UsageError(f"{path}: no such file or folder")
    if path.stat().st_size == 0:
        raise UsageError(f"{path}: empty; copy it again")
    try:
        return _read_safetensors(path)
    except SafetensorError:
        return _read_pickled(path)


def _read_safetensors(path: Path) -> Weights:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if "format" not in metadata or not metadata["format"].startswith("tpf"):
        return Weights(path=path, kind="safetensors file", tensors=tensors, origin=path.name)
    try:
        if metadata["format"] != FORMAT:
            raise UsageError(f"format {metadata['format']}, this version reads {FORMAT}")
        step = metadata.get("step")
        return Weights(
            path=path,
            kind="weight file of tpf",
            tensors=tensors,
            origin=metadata["origin"],
            step=int(step) if step is not None else None,
            config=ModelConfig(**json.loads(metadata["model"])),
        )
    except (KeyError, TypeError, ValueError, UsageError) as error:
        raise UsageError(
            f"{path}: its metadata cannot be read ({error}); read it with the version of tpf that "
            "wrote it, or update"
        ) from error


def _read_pickled(path: Path) -> Weights:
    content = pickled.load(path)
    part, tensors = pickled.find_weights(path, content)
    step = content.get("global_step")
    return Weights(
        path=path,
        kind="PyTorch file",
        tensors=tensors,
        origin=f"{path.name} ({part})" if part else path.name,
        step=step if isinstance(step, int) else None,
    )


def write(path: Path, tensors: Mapping[str, Tensor], config: ModelConfig, source: Weights) -> None:
    """Write our own weight file of FP32 tensors [as the model has them]; ``source`` is named in it.

    Raises ``UsageError`` if the path exists, ``TpfError`` if the disk is full or not writable.
    """
    metadata = {
        "format": FORMAT,
        "model": json.dumps(dataclasses.asdict(config)),
        "origin": source.origin,
    }
    if source.step is not None:
        metadata["step"] = str(source.step)
    whole = {name: x.to(torch.float32).contiguous() for name, x in tensors.items()}
    _write_new(path, lambda temporary: save_file(whole, temporary, metadata=metadata))


def write_openfold3(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the state dict that OpenFold3 reads: its names at the top level of a PyTorch file.

    Aliases share the storage of what they repeat. Raises as ``write`` does.
    """
    state = with_aliases({name: x.to(torch.float32) for name, x in tensors.items()})
    _write_new(path, lambda temporary: torch.save(state, temporary))


def refuse_existing(path: Path) -> None:
    """Raise ``UsageError`` if there is anything at ``path``."""
    if os.path.lexists(path):  # a broken link as well
        raise UsageError(f"--out {path} exists and nothing is overwritten; choose another name")


def _write_new(path: Path, fill: Callable[[Path], object]) -> None:
    """Let ``fill`` write a temporary sibling, then give it its name unless that is taken."""
    refuse_existing(path)
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fill(temporary)
        with temporary.open("rb") as handle:
            os.fsync(handle.fileno())
        temporary.chmod(0o644)  # safetensors leaves it to its owner alone
        try:
            os.link(temporary, path)  # unlike a rename it fails if the name was taken meanwhile
        except FileExistsError:
            refuse_existing(path)
            raise
        except OSError:  # a file system without hard links
            refuse_existing(path)
            temporary.rename(path)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise TpfError(f"--out {path}: {error}; free space or choose another folder") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
