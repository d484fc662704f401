"""Inputs of the triangle multiplicative update, and the form in which implementations take them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tpf.bench.cases import DROPPED, Shape
from tpf.kernels.ops import Direction, TriMulWeights

DIRECTIONS: tuple[Direction, ...] = ("outgoing", "incoming")
TRIMUL_SHAPES = tuple(Shape(n, channels) for channels in (64, 128) for n in (384, 640, 768))
"""Those of Table 10: the width is that of z and of the hidden layer."""
Update = Callable[[Tensor, Tensor | None, Sequence[Tensor], Direction], Tensor]
"""(z, mask, parameters, direction) -> update."""


def as_they_are(weights: TriMulWeights) -> tuple[Tensor, ...]:
    """Return the ten parameters."""
    return tuple(weights)


@dataclass(frozen=True)
class Multiplier:
    """An implementation, with its parameters in the form that its interface takes."""

    update: Update
    pack: Callable[[TriMulWeights], tuple[Tensor, ...]] = as_they_are
    """The parameters as a module would keep them; differentiable."""
    split: Callable[[Sequence[Tensor]], TriMulWeights] = TriMulWeights._make
    """Gradients of packed parameters by their usual names."""

    def __call__(
        self, z: Tensor, mask: Tensor | None, weights: TriMulWeights, direction: Direction
    ) -> Tensor:
        """Compute the update from usual parameters; the packing counts."""
        return self.update(z, mask, self.pack(weights), direction)


@dataclass(frozen=True)
class TriMulInputs:
    """One call: z and the gradient of the update in BF16, parameters in FP32."""

    z: Tensor
    mask: Tensor | None
    weights: TriMulWeights
    dout: Tensor


def make_weights(
    channels: int, hidden: int, generator: torch.Generator, device: torch.device
) -> TriMulWeights:
    """Draw FP32 parameters that keep activations near one."""

    def normal(*size: int) -> Tensor:
        x = torch.randn(size, generator=generator, device=device)
        return x.mul_(size[-1] ** -0.5)

    def norm(width: int) -> tuple[Tensor, Tensor]:
        room = 0.2 * width**0.5 * normal(2, width)
        return 1 + room[0], room[1]

    branches = [normal(hidden, channels) for _ in range(4)]
    ends = [normal(channels, channels), normal(channels, hidden)]
    return TriMulWeights._make([*norm(channels), *branches, *norm(hidden), *ends])


def make_trimul(
    shape: Shape, seed: int, device: torch.device, *, masked: bool = False
) -> TriMulInputs:
    """Draw z and dout [B, N, N, C] from N(0, 1), rounded to BF16 once, and parameters."""
    size = (shape.batch, shape.n, shape.n, shape.dim)
    generator = torch.Generator(device).manual_seed(seed)
    z, dout = (
        torch.randn(size, generator=generator, device=device).to(torch.bfloat16) for _ in range(2)
    )
    mask = None
    if masked:
        mask = torch.rand(size[:3], generator=generator, device=device) > DROPPED
    return TriMulInputs(z, mask, make_weights(shape.dim, shape.dim, generator, device), dout)


def fields(shape: Shape) -> dict[str, int]:
    """Return the sizes under the names of the result file."""
    return {"dim": shape.dim, "n": shape.n, "batch": shape.batch}
