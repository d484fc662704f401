"""Find the first tensor that is not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


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


def overflow(model: nn.Module) -> str | None:
    """Return the parameter with the largest gradient if their global norm overflows."""
    named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    if not named or torch.stack([grad.norm() for _, grad in named]).norm().isfinite():
        return None
    largest = int(torch.stack([grad.abs().max() for _, grad in named]).argmax())
    return f"gradient of parameter {named[largest][0]} (finite, but the norm overflows)"
