"""PyTorch files, read without running anything that they hold.

``torch.load(weights_only=True)`` builds tensors and plain containers only. Checkpoints of training
frameworks also hold settings of other classes, which it refuses; those are read as ``Opaque``
objects that do nothing, so such a file loads as well, and still none of its code runs.
"""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tpf.errors import UsageError

_SETTINGS = (
    "datetime.",
    "lightning.",
    "lightning_fabric.",
    "ml_collections.",
    "numpy.",
    "omegaconf.",
    "openfold3.",
    "pathlib.",
    "pytorch_lightning.",
    "_operator.add",
    "operator.add",
)
"""Names that training frameworks write beside weights; any other is refused."""

_PARTS = (("ema", "params"), ("params",), ("state_dict",), ("module",), ("model",), ())
"""Where a checkpoint may keep its weights, best first: averaged, of Lightning, of DeepSpeed."""


class Opaque:
    """Stands for an object of a checkpoint that is not a weight; keeps and does nothing."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def __setstate__(self, state: object) -> None: ...


def load(path: Path) -> Any:
    """Return the content of a PyTorch file, its tensors mapped from the disk and not yet read.

    Raises ``UsageError`` for a file that is no PyTorch archive, is damaged, or names anything that
    has no place beside weights.
    """
    if not zipfile.is_zipfile(path):
        raise UsageError(
            f"{path}: neither a safetensors file nor a whole PyTorch archive; copy it again, or "
            "save it anew with torch.save of PyTorch 1.6 or later"
        )
    try:
        foreign = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        for name in foreign:
            if not name.startswith(_SETTINGS):
                raise UsageError(
                    f"{path}: holds {name}, which is code and not a weight; nothing was loaded. "
                    "Ask its author for a file of tensors alone"
                )
        with torch.serialization.safe_globals([(Opaque, name) for name in foreign]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"{path}: not a file of tensors alone ({reason}); nothing was loaded. "
            "Ask its author for a file of tensors alone"
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"{path}: damaged ({reason}); copy it again") from error


def find_weights(path: Path, content: Any) -> tuple[str, dict[str, Tensor]]:
    """Return where the weights stand in a checkpoint ('' at its top), and the tensors by name.

    Averaged weights come before those of the last step. Raises ``UsageError`` when there are none.
    """
    for keys in _PARTS:
        node = content
        for key in keys:
            node = node.get(key) if isinstance(node, dict) else None
        if isinstance(node, dict) and any(isinstance(x, Tensor) for x in node.values()):
            tensors = {str(name): x for name, x in node.items() if isinstance(x, Tensor)}
            return ".".join(keys), tensors
    held = ", ".join(map(str, content)) if isinstance(content, dict) else type(content).__name__
    raise UsageError(
        f"{path}: no weights under ema.params, state_dict, module, model or at the top; "
        f"it holds {held[:200] or 'nothing'}"
    )
