"""What happens when a step is not finite: find the first bad tensor, keep a replay file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tpf.config import Config, to_dict
from tpf.errors import TpfError, UsageError


class NonFinite(TpfError):
    """A loss or gradient that is NaN or infinite."""


def _tensors(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, f"{path}.{key}")
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{path}[{index}]")


def first_nonfinite(value: Any, path: str) -> str | None:
    """Return the path of the first floating tensor in a nested value that is not finite."""
    for name, tensor in _tensors(value, path):
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            return name
    return None


@contextmanager
def watch(model: nn.Module) -> Iterator[list[str]]:
    """Collect into the yielded list the first module whose output, or gradient, is not finite."""
    found: list[str] = []
    handles = []

    def forward_hook(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if not found and (bad := first_nonfinite(output, "output")):
                kind = type(module).__name__
                source = first_nonfinite(inputs, "input")
                origin = f" (its {source} was not finite either)" if source else ""
                found.append(f"module {name} ({kind}): {bad}{origin}")

        return hook

    def gradient_hook(name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if not found and parameter.grad is not None and not parameter.grad.isfinite().all():
                found.append(f"gradient of parameter {name}")

        return hook

    for name, module in model.named_modules():
        if name:
            handles.append(module.register_forward_hook(forward_hook(name)))
    for name, parameter in model.named_parameters():
        handles.append(parameter.register_post_accumulate_grad_hook(gradient_hook(name)))  # type: ignore[no-untyped-call]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def write_replay(path: Path, config: Config, model: nn.Module, micro: dict[str, Any]) -> None:
    """Store what is needed to run one sample's step again (atomic).

    ``micro`` has ``batch`` (nested tensors), ``step`` and ``index``.
    """
    content = {"config": to_dict(config), "model": model.state_dict(), **micro}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    torch.save(content, temporary)
    temporary.replace(path)


def read_replay(path: Path) -> dict[str, Any]:
    """Read a replay file without executing anything in it; raise ``UsageError`` if it is none."""
    if not path.is_file():
        raise UsageError(f"--replay {path}: no such file")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for files that it did not write
        raise UsageError(f"--replay {path}: not a replay file of tpf ({error})") from error
    if not isinstance(content, dict) or not {"config", "model", "batch"} <= content.keys():
        raise UsageError(f"--replay {path}: not a replay file of tpf")
    return content
