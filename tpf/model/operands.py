"""A call of a module taken apart: its tensors, and a hashable description of all the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

PLAIN = frozenset((bool, int, float, str, tuple))
"""Types of the attributes of a module that describe it."""
OWN = ("tpf.model.", "torch.nn.")
"""Packages whose modules do nothing but compute on tensors."""

Spec = Any
"""Description of a value: equal ones are equal but for the contents of tensors."""
Place = tuple[dict[str, Any], str]
"""Where a module keeps a parameter or buffer: dictionary and name."""


class NotGraphableError(Exception):
    """The reason why a call is left to eager execution."""


class _Leaf(NamedTuple):
    """A tensor."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


class _Node(NamedTuple):
    """A tuple, list or dataclass."""

    kind: type
    items: tuple[Spec, ...]


def _leaf(x: Tensor, device: torch.device) -> _Leaf:
    if type(x) not in (Tensor, nn.Parameter) or x.layout != torch.strided or x.device != device:
        raise NotGraphableError(f"{type(x).__name__} on {x.device} is no plain tensor on {device}")
    strides = x.stride()
    if 0 in strides and any(s == 0 and n > 1 for s, n in zip(strides, x.shape, strict=True)):
        raise NotGraphableError(f"a tensor {tuple(x.shape)} is broadcast, strides {strides}")
    return _Leaf(x.shape, strides, x.dtype)


def flatten(value: object, tensors: list[Tensor], device: torch.device) -> Spec:
    """Append the tensors of a nested value to ``tensors`` and return its description.

    Raises ``NotGraphableError`` for anything but tensors on ``device``, tuples, lists, dataclasses,
    numbers, strings and None.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return _leaf(value, device)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        items: Sequence[object] = value
    elif dataclasses.is_dataclass(value):
        items = [getattr(value, field.name) for field in dataclasses.fields(value)]
    else:
        raise NotGraphableError(f"an argument is a {type(value).__name__}")
    return _Node(type(value), tuple(flatten(item, tensors, device) for item in items))


def rebuild(spec: Spec, tensors: Iterator[Tensor]) -> Any:
    """Undo ``flatten`` with the next of other tensors."""
    if isinstance(spec, _Leaf):
        return next(tensors)
    if not isinstance(spec, _Node):
        return spec
    items = [rebuild(item, tensors) for item in spec.items]
    if dataclasses.is_dataclass(spec.kind):
        names = (field.name for field in dataclasses.fields(spec.kind))
        return spec.kind(**dict(zip(names, items, strict=True)))
    make: Callable[[list[Any]], Any] = getattr(spec.kind, "_make", spec.kind)
    return make(items)


class Template(NamedTuple):
    """What equal targets share. Operands are fixed arguments, the module's tensors, the rest."""

    function: Callable[..., Any]
    fixed: Spec
    fixed_count: int
    places: list[Place]
    """Of the module's tensors."""

    def split(
        self, operands: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
        """Return the fixed arguments, the module's tensors and the rest of the operands."""
        start = self.fixed_count
        end = start + len(self.places)
        return operands[:start], operands[start:end], operands[end:]


class Target:
    """A module, or a method of one, with its first arguments: what a series of calls shares."""

    def __init__(
        self, function: Callable[..., Any], fixed_args: tuple[Any, ...], device: torch.device
    ) -> None:
        """Describe them; raise ``NotGraphableError`` if calls may do more than compute."""
        owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
        if not isinstance(owner, nn.Module):
            raise NotGraphableError(f"{function} is neither a module nor a method of one")
        if nn.modules.module._has_any_global_hook():  # type: ignore[no-untyped-call]
            raise NotGraphableError("hooks are registered for all modules")
        method = getattr(function, "__func__", type(owner).forward)
        self.name = f"{type(owner).__name__}.{method.__name__}"
        self.held: list[Tensor] = []
        """The tensors of the fixed arguments, then those of the module."""
        fixed = flatten(fixed_args, self.held, device)
        self.template = Template(function, fixed, len(self.held), [])
        key: list[Any] = [method, fixed]
        self._describe(owner, device, key)
        self.key = tuple(key)

    def _describe(self, module: nn.Module, device: torch.device, key: list[Any]) -> None:
        kind, state = type(module), module.__dict__
        if not kind.__module__.startswith(OWN):
            raise NotGraphableError(f"module {kind.__name__} is not one of the network's")
        if (
            module._forward_hooks or module._forward_pre_hooks
            or module._backward_hooks or module._backward_pre_hooks
        ):  # fmt: skip
            raise NotGraphableError(f"a module {kind.__name__} has hooks")
        if module._compiled_call_impl is not None:
            raise NotGraphableError(f"a module {kind.__name__} is compiled")
        key.append(kind)
        key += [value for value in state.values() if type(value) in PLAIN]
        for store in (module._parameters, module._buffers):
            for name, x in store.items():
                if x is None:
                    key.append(name)
                    continue
                key.append(_leaf(x, device))
                self.held.append(x)
                self.template.places.append((store, name))
        for child in module._modules.values():
            if child is not None:
                self._describe(child, device, key)


@contextmanager
def swapped(places: Sequence[Place], tensors: Sequence[Tensor]) -> Iterator[None]:
    """Let a module compute with other parameters and buffers inside the block."""
    before = [store[name] for store, name in places]
    try:
        for (store, name), x in zip(places, tensors, strict=True):
            store[name] = x
        yield
    finally:
        for (store, name), x in zip(places, before, strict=True):
            store[name] = x
