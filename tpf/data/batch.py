"""From numpy features to torch batches: batch axis, zero padding, devices, transport.

A batch has the names of the features; every tensor gets a leading batch axis. ``id`` becomes a
list of strings, ``ref_space_uid_to_perm`` a list of dictionaries of tensors, ``resolution`` [B].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from tpf.data.msa import one_hot

Batch = dict[str, Any]
PERMUTATIONS = "ref_space_uid_to_perm"
ONE_HOT = ("msa", "ref_element", "ref_atom_name_chars")
"""Large features that travel as the index of their one."""


def to_torch(features: dict[str, Any]) -> Batch:
    """Return one sample as a batch of one; broadcast arrays stay expanded tensors."""
    return collate([features])


def collate(samples: Sequence[dict[str, Any]]) -> Batch:
    """Return samples of equal names as one batch, padded with zeros at the end of each axis."""
    batch: Batch = {}
    for name, first in samples[0].items():
        values = [sample[name] for sample in samples]
        if name == PERMUTATIONS:
            batch[name] = [
                {uid: torch.from_numpy(orders) for uid, orders in value.items()} for value in values
            ]
        elif isinstance(first, dict):
            batch[name] = collate(values)
        elif isinstance(first, (np.ndarray, np.generic)):
            batch[name] = _stack([np.asarray(value) for value in values])
        else:
            batch[name] = values
    return batch


def _stack(arrays: list[NDArray[Any]]) -> Tensor:
    if len({a.shape for a in arrays}) == 1 and all(_is_constant(a) for a in arrays):
        values = torch.tensor([a.flat[0].item() for a in arrays], dtype=_torch_dtype(arrays[0]))
        return values.view(-1, *[1] * arrays[0].ndim).expand(-1, *arrays[0].shape)
    if len(arrays) == 1 and arrays[0].flags.writeable:
        return torch.from_numpy(arrays[0][None])  # no copy: a deep MSA is large
    shape = np.max([a.shape for a in arrays], axis=0)
    if all(a.shape == tuple(shape) for a in arrays):
        return torch.from_numpy(np.stack(arrays))
    padded = np.zeros((len(arrays), *shape), arrays[0].dtype)
    for row, array in zip(padded, arrays, strict=True):
        row[tuple(slice(0, size) for size in array.shape)] = array
    return torch.from_numpy(padded)


def _torch_dtype(array: NDArray[Any]) -> torch.dtype:
    return torch.from_numpy(np.zeros((), array.dtype)[None]).dtype


def _is_constant(array: NDArray[Any]) -> bool:
    """Tell whether an array is one broadcast value."""
    return array.size > 1 and not any(
        step for step, size in zip(array.strides, array.shape, strict=True) if size > 1
    )


def to_device(batch: Batch, device: torch.device | str) -> Batch:
    """Return the batch on a device; permutations stay where they are, expanded tensors expanded."""
    moved: Batch = {}
    for name, value in batch.items():
        if isinstance(value, Tensor):
            moved[name] = _move(value, torch.device(device))
        elif isinstance(value, dict):
            moved[name] = to_device(value, device)
        else:
            moved[name] = value
    return moved


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    core = tensor
    for axis, step in enumerate(tensor.stride()):
        if step == 0 and tensor.shape[axis] > 1:
            core = core.narrow(axis, 0, 1)
    return core.to(device, non_blocking=True).expand(tensor.shape)


@dataclass(frozen=True)
class Constant:
    """A broadcast array as it travels between processes."""

    value: Any
    shape: tuple[int, ...]
    dtype: DTypeLike


@dataclass(frozen=True)
class OneHot:
    """A one-hot int32 array as it travels between processes."""

    index: NDArray[np.uint8]
    classes: int


def pack(features: dict[str, Any]) -> dict[str, Any]:
    """Return the features with broadcast and large one-hot arrays made small, for pickling."""
    packed: dict[str, Any] = {}
    for name, value in features.items():
        if isinstance(value, np.ndarray) and _is_constant(value):
            packed[name] = Constant(value.flat[0], value.shape, value.dtype)
        elif name in ONE_HOT:
            packed[name] = OneHot(value.argmax(-1).astype(np.uint8), value.shape[-1])
        elif isinstance(value, dict) and name != PERMUTATIONS:
            packed[name] = pack(value)
        else:
            packed[name] = value
    return packed


def unpack(packed: dict[str, Any]) -> dict[str, Any]:
    """Undo ``pack``."""
    features: dict[str, Any] = {}
    for name, value in packed.items():
        if isinstance(value, Constant):
            features[name] = np.broadcast_to(np.asarray(value.value, value.dtype), value.shape)
        elif isinstance(value, OneHot):
            features[name] = one_hot(value.index, value.classes)
        elif isinstance(value, dict) and name != PERMUTATIONS:
            features[name] = unpack(value)
        else:
            features[name] = value
    return features
