"""One call of a function as a pair of CUDA graphs: what is captured, replayed and copied."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tpf.model.dropout import Draw, giving
from tpf.model.operands import (
    NotGraphableError,
    Spec,
    Target,
    Template,
    flatten,
    rebuild,
    swapped,
)

T = TypeVar("T")


class Needs(NamedTuple):
    """What autograd has to do with a call."""

    grad: bool
    """Whether there will be a backward."""
    operands: tuple[bool, ...]
    """Which operands require a gradient; kernels are chosen by it even without a backward."""

    @classmethod
    def of(cls, operands: Sequence[Tensor]) -> Needs:
        each = tuple(x.requires_grad for x in operands)
        return cls(torch.is_grad_enabled() and any(each), each)


class Capture(Protocol):
    """Makes graphs."""

    def __call__(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Return what replays ``run``, and the results that every replay overwrites."""
        ...

    def restart(self) -> None:
        """Begin a new pool of memory; the old one goes with its graphs."""
        ...

    def pool_bytes(self) -> tuple[int, int]:
        """Return the memory set apart for graphs, and how much of it is free between replays."""
        ...


class CudaCapture:
    """Captures in one memory pool, which is safe as long as results are copied after each replay.

    Nothing waits for the GPU, and other threads may use CUDA meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.restart()

    def __call__(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        run()  # loads kernels and makes workspaces, neither of which may happen in a capture
        try:
            graph, outputs = self._record(run)
        except BaseException:
            self.restart()
            raise
        return graph.replay, outputs

    def restart(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # A pool dies with its last graph and cannot be used again: this one outlives the others.
        self._anchor, _ = self._record(lambda: torch.zeros((), device=self._stream.device))

    def _record(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with _no_collection(), torch.cuda.stream(self._stream):
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                outputs = run()
                graph.capture_end()
            except BaseException:
                self._abandon(graph)
                raise
        return graph, outputs

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a failed capture for CUDA and for the allocator, as far as it has not ended."""
        with suppress(RuntimeError):
            graph.capture_end()
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self._stream.device_index, self._pool)

    def pool_bytes(self) -> tuple[int, int]:
        snapshot: Any = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        own = [s for s in snapshot if tuple(s["segment_pool_id"]) == tuple(self._pool)]
        reserved = sum(s["total_size"] for s in own)
        return reserved, reserved - sum(s["allocated_size"] for s in own)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from destroying CUDA objects inside the block."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Modes(NamedTuple):
    """The state of PyTorch on which the kernels of a call depend."""

    device: torch.device
    autocast: bool
    autocast_dtype: torch.dtype
    deterministic: bool
    fp32_products: str

    @classmethod
    def now(cls, device: torch.device) -> Modes:
        return cls(
            device,
            torch.is_autocast_enabled(device.type),
            torch.get_autocast_dtype(device.type),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
        )

    def context(self, enabled: bool) -> torch.autocast:
        """Return the autocast of the call, or none; casts are part of a graph, never kept."""
        kind = self.device.type
        return torch.autocast(kind, self.autocast_dtype, enabled=enabled, cache_enabled=False)


class Plan(NamedTuple):
    """What calls of one shape share."""

    template: Template
    args: Spec
    """Of the arguments after the fixed ones."""
    draws: tuple[Draw, ...]
    modes: Modes

    def evaluate(
        self, operands: Sequence[Tensor], factors: Sequence[Tensor], needs: Needs
    ) -> tuple[list[Tensor], list[Tensor], Spec]:
        """Run the function on leaves that share the memory of operands; return them, the results.

        Operands are those held by a target, then the arguments; ``factors`` are the dropout.
        """
        pairs = zip(operands, needs.operands, strict=True)
        leaves = [x.detach().requires_grad_(needed) for x, needed in pairs]
        template = self.template
        fixed, own, rest = template.split(leaves)
        args = (*rebuild(template.fixed, iter(fixed)), *rebuild(self.args, iter(rest)))
        with (
            giving(factors),
            swapped(template.places, own),
            self.modes.context(self.modes.autocast),
            torch.set_grad_enabled(needs.grad),
        ):
            result = template.function(*args)
        outputs: list[Tensor] = []
        return leaves, outputs, flatten(result, outputs, self.modes.device)

    def gradients(
        self, operands: Sequence[Tensor], factors: Sequence[Tensor], needs: Needs,
        outputs: Sequence[int], douts: Sequence[Tensor | None],
    ) -> list[Tensor | None]:  # fmt: skip
        """Compute the function again; return the gradient of every operand that needs one.

        ``douts`` are the gradients of the results numbered ``outputs``.
        """
        leaves, results, _ = self.evaluate(operands, factors, needs)
        pairs = [(results[k], d) for k, d in zip(outputs, douts, strict=True) if d is not None]
        pairs = [(out, dout) for out, dout in pairs if out.requires_grad]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        with self.modes.context(False):
            found = torch.autograd.grad(
                [out for out, _ in pairs], wanted, [d for _, d in pairs], allow_unused=True
            )
        each = iter(found)
        return [next(each) if needed else None for needed in needs.operands]


class Forward(NamedTuple):
    """A captured forward."""

    replay: Callable[[], None]
    outputs: list[Tensor]
    """The computed results."""
    result: Spec
    """Of all results."""
    through: dict[int, int]
    """Results that are operands themselves: number of the operand by number of the result."""
    computed: list[int]
    """Numbers of the computed results."""


class Backward(NamedTuple):
    """A captured backward: gradients of the computed results in, those of the operands out."""

    replay: Callable[[], None]
    douts: list[Tensor]
    grads: list[Tensor | None]


class Entry:
    """The graphs of one shape and the static operands that they read."""

    def __init__(self, plan: Plan, operands: Sequence[Tensor], capture: Capture) -> None:
        device = plan.modes.device
        self.plan = plan
        self._capture = capture
        self._operands = [x.detach().new_empty_strided(x.shape, x.stride()) for x in operands]
        self._ones = [torch.ones(d.shape, dtype=d.dtype, device=device) for d in plan.draws]
        self._factors = [torch.ones_like(x) for x in self._ones]
        self._holder: weakref.ref[Target] | None = None
        self._forwards: dict[Needs, Forward] = {}
        self._backwards: dict[Needs, Backward] = {}
        _copy(self._operands, operands)

    @torch.no_grad()
    def prepare(self, needs: Needs) -> None:
        """Capture what a call will need."""
        if needs not in self._forwards:
            self._forwards[needs] = self._capture_forward(needs)
        if needs.grad and needs not in self._backwards:
            forward = self._forwards[needs]
            douts = [torch.zeros_like(out) for out in forward.outputs]
            replay, grads = self._capture(
                lambda: self.plan.gradients(
                    self._operands, self._factors, needs, forward.computed, douts
                )
            )
            self._backwards[needs] = Backward(replay, douts, grads)

    def _capture_forward(self, needs: Needs) -> Forward:
        def run() -> tuple[list[Tensor], Spec, dict[int, int], list[int]]:
            leaves, outputs, result = self.plan.evaluate(self._operands, self._factors, needs)
            position = {id(x): k for k, x in enumerate(leaves)}
            through = {k: position[id(x)] for k, x in enumerate(outputs) if id(x) in position}
            computed = [k for k in range(len(outputs)) if k not in through]
            return [outputs[k].detach() for k in computed], result, through, computed

        replay, (outputs, result, through, computed) = self._capture(run)
        if not all(out.is_floating_point() for out in outputs):
            raise NotGraphableError("a result is not floating")
        return Forward(replay, outputs, result, through, computed)

    def draw(self) -> list[Tensor]:
        """Draw the dropout of one call."""
        pairs = zip(self._ones, self.plan.draws, strict=True)
        return [F.dropout(ones, draw.rate) for ones, draw in pairs]

    def forward(
        self, target: Target, operands: Sequence[Tensor], factors: Sequence[Tensor], needs: Needs
    ) -> list[Tensor]:
        """Return the computed results in new memory; what ``target`` holds is copied only once."""
        start = len(target.held) if self._holder is not None and self._holder() is target else 0
        _copy([*self._operands[start:], *self._factors], [*operands[start:], *factors])
        self._holder = weakref.ref(target)
        graph = self._forwards[needs]
        graph.replay()
        return [out.clone() for out in graph.outputs]

    def backward(
        self, operands: Sequence[Tensor], factors: Sequence[Tensor], needs: Needs,
        douts: Sequence[Tensor | None],
    ) -> list[Tensor | None]:  # fmt: skip
        """Return the gradients of the operands in new memory; eager if a result has none."""
        graph, given = self._backwards[needs], [d for d in douts if d is not None]
        if len(given) < len(douts):
            numbers = self._forwards[needs].computed
            return self.plan.gradients(operands, factors, needs, numbers, douts)
        self._holder = None
        _copy([*self._operands, *self._factors, *graph.douts], [*operands, *factors, *given])
        graph.replay()
        static = [g for g in graph.grads if g is not None]
        fresh = [torch.empty_like(g) for g in static]
        _copy(fresh, static)
        each = iter(fresh)
        return [None if g is None else next(each) for g in graph.grads]

    def result(self, computed: Sequence[Tensor], operands: Sequence[Tensor], needs: Needs) -> Any:
        """Return what the function returns, of the computed results and its own arguments."""
        forward, each = self._forwards[needs], iter(computed)
        count = len(forward.computed) + len(forward.through)
        tensors = (
            operands[forward.through[k]] if k in forward.through else next(each)
            for k in range(count)
        )
        return rebuild(forward.result, tensors)

    def static_bytes(self) -> int:
        """Return the memory of the static tensors outside the pool."""
        douts = [d for graph in self._backwards.values() for d in graph.douts]
        return sum(x.nbytes for x in (*self._operands, *self._ones, *self._factors, *douts))


def _copy(to: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    """Copy tensors, few launches for all of one dtype."""
    groups: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, x in zip(to, source, strict=True):
        targets, sources = groups.setdefault(target.dtype, ([], []))
        targets.append(target)
        sources.append(x)
    for targets, sources in groups.values():
        torch._foreach_copy_(targets, sources)
