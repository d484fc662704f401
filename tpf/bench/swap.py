"""Which implementations a network's triangle operators have, for the calls of a benchmark.

The network asks for its operators and fused layers by their names in ``tpf.model.pairformer`` and
``tpf.model.primitives``; ``Operators.used`` replaces those names for a while, so that one network
with one set of parameters serves all implementations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from tpf.bench.backends import BACKENDS, UnavailableError, check_backend, open_backend
from tpf.bench.cases import Attend
from tpf.bench.record import Record
from tpf.bench.trimul_backends import MULTIPLIERS
from tpf.bench.trimul_cases import Multiplier
from tpf.errors import TpfError
from tpf.kernels.ops import (
    Direction,
    TriMulWeights,
    triangle_attention,
    triangle_multiplication,
)
from tpf.model import graphs, pairformer, primitives
from tpf.model.graphs import Graphs


@contextmanager
def replaced(module: ModuleType, **values: object) -> Iterator[None]:
    """Give names of a module other values inside the block."""
    before = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


@dataclass(frozen=True)
class Operators:
    """The two triangle operators of a network."""

    attention: Attend
    multiplication: Multiplier
    fused: bool = False
    """Let whole layers run on the Hopper kernels where they can; they bring their attention."""
    graphs: Graphs | None = None
    """Replay blocks as CUDA graphs."""

    def forget(self) -> None:
        """Drop the graphs, and with them the networks that they were captured from."""
        if self.graphs is not None:
            self.graphs.clear()

    def held_mib(self) -> tuple[float, float]:
        """Return what the graphs hold in MiB, and how much of it counts as free memory."""
        held, free = (0, 0) if self.graphs is None else self.graphs.held_bytes()
        return held / 2**20, free / 2**20

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let all networks use these operators inside the block."""

        def attend(
            q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, *, impl: str
        ) -> Tensor:
            if _beside_kernels(q):
                return triangle_attention(q, k, v, bias, mask, impl="torch")
            return self.attention(q, k, v, bias, mask)

        def multiply(
            z: Tensor, mask: Tensor | None, weights: TriMulWeights, direction: Direction, *,
            impl: str,
        ) -> Tensor:  # fmt: skip
            if _beside_kernels(z):
                return triangle_multiplication(z, mask, weights, direction, impl="torch")
            return self.multiplication(z, mask, weights, direction)

        own = {"triangle_attention": attend, "triangle_multiplication": multiply}
        plain = {} if self.fused else {"fusable": _never}
        with (
            replaced(pairformer, **own, **plain),
            replaced(primitives, **plain),
            graphs.using(self.graphs),
        ):
            yield


def _never(*_: object) -> bool:
    return False


def _beside_kernels(x: Tensor) -> bool:
    """Return whether x belongs to a part in FP32 (the confidence head), which has the reference."""
    return x.is_cuda and x.dtype != torch.bfloat16


@dataclass(frozen=True)
class Choice:
    """The backends of the two operators by name."""

    attention: str
    multiplication: str
    fused: bool = False
    graphs: bool = False

    def check(self, device: torch.device) -> None:
        """Raise ``UnavailableError`` if one of the backends is known not to run here."""
        check_backend(BACKENDS[self.attention], device)
        with self._naming_the_update():
            check_backend(MULTIPLIERS[self.multiplication], device)

    def open(self, device: torch.device, limit: float = 0.0) -> Operators:
        """Load the backends; raise ``UnavailableError`` with the reason if one cannot run."""
        attention = open_backend(BACKENDS[self.attention], device, limit)
        with self._naming_the_update():
            multiplication = open_backend(MULTIPLIERS[self.multiplication], device, limit)
        graphs = Graphs(device) if self.graphs else None
        return Operators(attention, multiplication, self.fused, graphs)

    @contextmanager
    def _naming_the_update(self) -> Iterator[None]:
        """Say whose update is missing where the attention is there."""
        try:
            yield
        except UnavailableError as reason:
            if self.multiplication == self.attention:
                raise
            raise UnavailableError(f"its update, {self.multiplication}: {reason}") from reason


CHOICES: dict[str, Choice] = {
    "graphs": Choice("cuda", "cuda", fused=True, graphs=True),
    "cuda": Choice("cuda", "cuda", fused=True),
    "kernels": Choice("cuda", "cuda"),
    "flex": Choice("flex", "torch"),
    "torch": Choice("torch", "torch"),
    "eager": Choice("eager", "eager"),
    **{
        name: Choice(name, "cuequivariance")
        for name in (
            "cuequivariance", "protenix", "trifast", "openfold3", "megafold", "deepspeed",
            "scalefold",
        )
    },
    "turbopairformer": Choice("turbopairformer", "turbopairformer"),
}  # fmt: skip
"""Networks by the name that ``--impls`` takes: cuda is all we have, graphs the same as CUDA graphs,
kernels our two operators in the plain layers; third parties have their attention and, as in the
paper, cuEquivariance's update (turbopairformer its own) in our plain layers."""


def open_choices(
    op: str, choices: dict[str, Choice], device: torch.device, record: Record
) -> dict[str, Operators]:
    """Return the operators that can run; the others get a row with the reason."""
    found = {}
    for name, choice in choices.items():
        try:
            found[name] = choice.open(device, record.limit)
        except UnavailableError as reason:
            record.unavailable(op, name, reason)
    if not found:
        raise TpfError(f"no backend can run here: {'; '.join(record.notes)}")
    return found
