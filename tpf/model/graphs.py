"""CUDA graphs of the network's repeated functions: one launch for all the kernels of a block.

Issuing the kernels of a block one by one takes the host longer than the GPU needs to run them. Here
they are captured once and replayed. Calls of equal shapes share the graphs, whichever block they
belong to: a call copies its arguments, dropout factors and parameters to the static operands that
the graph reads, and its results to new memory. The backward is a second graph, which computes the
block again as checkpointing does. Dropout is drawn outside by the calls that eager code would make,
in the same order, so results and gradients are those of eager code bit by bit.

Graphs serve only inside ``using``. ``call`` and ``bind`` run eagerly what a graph cannot repeat:
modules with hooks, compiled ones, ones defined outside the network, and functions of dictionaries.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tpf.model.capture import Capture, CudaCapture, Entry, Modes, Needs, Plan
from tpf.model.dropout import Draw, noting
from tpf.model.operands import NotGraphableError, Spec, Target, flatten

VISITS = 2
"""Eager calls of one shape before its graphs are captured."""
CAPACITY = 32
"""Shapes whose graphs are kept; the one that was not used for longest goes first."""
SEEN = 1024
"""Shapes whose eager calls are counted."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


class _Replay(torch.autograd.Function):
    """A call by graphs, as autograd sees it; what it saves are its operands, as checkpointing."""

    @staticmethod
    def forward(
        ctx: Any, entry: Entry, target: Target, needs: Needs, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.entry, ctx.needs = entry, needs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        count = len(needs.operands)
        return tuple(entry.forward(target, tensors[:count], tensors[count:], needs))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *douts: Tensor | None) -> Any:
        tensors, count = ctx.saved_tensors, len(ctx.needs.operands)
        operands, factors = tensors[:count], tensors[count:]
        with using(None):
            grads = ctx.entry.backward(operands, factors, ctx.needs, douts)
        return None, None, None, *grads, *(None for _ in factors)


class _Seen(NamedTuple):
    """Eager calls of one shape, and the dropout that they drew."""

    visits: int
    draws: tuple[Draw, ...]


class Graphs:
    """The graphs of one model on one device."""

    def __init__(
        self, device: torch.device, capture: Capture | None = None, capacity: int = CAPACITY
    ) -> None:
        """Make an empty cache; ``capture`` replaces CUDA's."""
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self._capture = CudaCapture(device) if capture is None else capture
        self._capacity = capacity
        self._entries: OrderedDict[Hashable, Entry] = OrderedDict()
        self._seen: OrderedDict[Hashable, _Seen] = OrderedDict()
        self._failed: set[str] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Drop all graphs, with their memory, and counts."""
        self._entries.clear()
        self._seen.clear()
        self._capture.restart()

    def held_bytes(self) -> tuple[int, int]:
        """Return the memory that the graphs hold, and how much of it the allocator calls free."""
        reserved, free = self._capture.pool_bytes()
        return reserved + sum(entry.static_bytes() for entry in self._entries.values()), free

    def run(self, target: Target, args: tuple[Any, ...], eager: Callable[..., Any]) -> Any:
        """Call the target by its graphs, or ``eager(*args)`` while it has none."""
        tensors: list[Tensor] = []
        try:
            spec = flatten(args, tensors, self.device)
        except NotGraphableError:
            return eager(*args)
        operands = [*target.held, *tensors]
        if target.name in self._failed:
            return eager(*args)
        needs, modes = Needs.of(operands), Modes.now(self.device)
        key = (target.key, spec, modes)
        entry = self._ready(key, target, spec, modes, operands, needs)
        if entry is None:
            return self._visit(key, eager, args)
        factors = entry.draw()
        if needs.grad:
            apply: Any = _Replay.apply
            computed = apply(entry, target, needs, *operands, *factors)
        else:
            computed = entry.forward(target, operands, factors, needs)
        return entry.result(computed, operands, needs)

    def _visit(self, key: Hashable, eager: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call eagerly and note it; functions inside this one get no graphs of their own."""
        with using(None), noting() as draws:
            result = eager(*args)
        seen = self._seen.pop(key, None)
        self._seen[key] = _Seen(1 if seen is None else seen.visits + 1, tuple(draws))
        if len(self._seen) > SEEN:
            self._seen.popitem(last=False)
        return result

    def _ready(
        self, key: Hashable, target: Target, spec: Spec, modes: Modes,
        operands: Sequence[Tensor], needs: Needs,
    ) -> Entry | None:  # fmt: skip
        """Return the graphs of a shape, captured if it is seen often enough."""
        entry, seen = self._entries.get(key), self._seen.get(key)
        if entry is None and (seen is None or seen.visits < VISITS):
            return None
        try:
            with using(None):
                if entry is None:
                    assert seen is not None
                    plan = Plan(target.template, spec, seen.draws, modes)
                    entry = Entry(plan, operands, self._capture)
                entry.prepare(needs)
        except Exception as error:
            self._failed.add(target.name)
            _log.warning(
                "no CUDA graph of %s: %s; it runs eagerly from now on",
                target.name, " ".join(str(error).split()) or type(error).__name__,
            )  # fmt: skip
            return None
        self._entries[key] = entry
        self._entries.move_to_end(key)
        self._seen.pop(key, None)
        if len(self._entries) > self._capacity:
            self._entries.popitem(last=False)
        return entry


_active: ContextVar[Graphs | None] = ContextVar("_active", default=None)


def active() -> Graphs | None:
    """Return the graphs in use."""
    return _active.get()


@contextmanager
def using(graphs: Graphs | None) -> Iterator[None]:
    """Let ``call`` and ``bind`` use these graphs inside the block; None: no graphs."""
    token = _active.set(graphs)
    try:
        yield
    finally:
        _active.reset(token)


def _target(function: Callable[..., Any], fixed: tuple[Any, ...], graphs: Graphs) -> Target | None:
    """Describe a function for graphs; None if it has to run eagerly, now or always."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return None
    if torch.is_anomaly_enabled():
        return None
    if graphs.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    try:
        return Target(function, fixed, graphs.device)
    except NotGraphableError:
        return None


def call(function: Callable[..., T], args: tuple[Any, ...], eager: Callable[..., T]) -> T:
    """Return ``eager(*args)``, by graphs of ``function`` where they serve."""
    graphs = _active.get()
    target = None if graphs is None else _target(function, (), graphs)
    if graphs is None or target is None:
        return eager(*args)
    result: T = graphs.run(target, args, eager)
    return result


def bind(function: Callable[..., T], *fixed: Any) -> Callable[..., T]:
    """Return ``function`` with its first arguments, for many calls without gradient in a row.

    Neither they nor the parameters may change between the calls.
    """
    graphs, eager = _active.get(), partial(function, *fixed)
    target = None if graphs is None else _target(function, fixed, graphs)
    if graphs is None or target is None:
        return eager
    return lambda *args: graphs.run(target, args, eager)
