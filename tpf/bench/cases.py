"""What is benchmarked: shapes, random inputs, and the settings of a study."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Kind = Literal["normal", "sharp"]
Layout = Literal["projection", "heads"]

SHARP = 3.0
"""Factor on q and k of the sharp inputs, whose softmax is peaked."""
DROPPED = 0.3
"""Share of the keys that a random mask drops."""

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(q, k, v, bias, mask) -> out with the shapes of ``tpf.kernels.ops.triangle_attention``."""


class Shape(NamedTuple):
    """Sizes of one call: N tokens, head width D; as many outer slices as tokens."""

    n: int
    dim: int
    heads: int = 4
    batch: int = 1

    @property
    def scale(self) -> float:
        """Factor on the products of queries and keys."""
        return 1 / math.sqrt(self.dim)

    def fields(self) -> dict[str, int]:
        """Return the sizes under the names of the result file."""
        return {"dim": self.dim, "n": self.n, "batch": self.batch, "heads": self.heads}


PAPER_SHAPES = tuple(Shape(n, dim) for dim in (16, 32) for n in (384, 640, 768))


@dataclass(frozen=True)
class Inputs:
    """One call of the operator in BF16 and the gradient of its output."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor
    mask: Tensor | None
    dout: Tensor

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The tensors that need a gradient."""
        return self.q, self.k, self.v, self.bias

    @property
    def kernel_mask(self) -> Tensor | None:
        """The mask as [B, O, N], the form of the functions below the operator."""
        return None if self.mask is None else self.mask[:, :, 0, 0]

    @property
    def scale(self) -> float:
        """Factor on the products of queries and keys."""
        return 1 / math.sqrt(self.q.shape[-1])


def make_inputs(
    shape: Shape,
    seed: int,
    device: torch.device,
    *,
    kind: Kind = "normal",
    masked: bool = False,
    layout: Layout = "projection",
) -> Inputs:
    """Draw N(0, 1) inputs and round them to BF16 once; every slice keeps at least one key.

    q, k, v and dout [B, O, H, N, D] lie in memory as [B, O, N, H, D] (what projections write) or,
    with layout "heads", as their shape says.
    """
    b, n, h, d = shape.batch, shape.n, shape.heads, shape.dim
    generator = torch.Generator(device).manual_seed(seed)

    def normal(size: tuple[int, ...], gain: float = 1.0) -> Tensor:
        x = torch.randn(size, generator=generator, device=device)
        return x.mul_(gain).to(torch.bfloat16)

    def operand(gain: float = 1.0) -> Tensor:
        if layout == "heads":
            return normal((b, n, h, n, d), gain)
        return normal((b, n, n, h, d), gain).transpose(2, 3)

    gain = SHARP if kind == "sharp" else 1.0
    q, k, v, dout = operand(gain), operand(gain), operand(), operand()
    bias = normal((b, 1, h, n, n))
    mask = None
    if masked:
        draws = torch.rand((b, n, 1, 1, n), generator=generator, device=device)
        mask = draws > DROPPED
        mask[..., 0] = True
    for leaf in (q, k, v, bias):
        leaf.requires_grad_()
    return Inputs(q, k, v, bias, mask, dout)


def silent(text: str) -> None:
    """Say nothing."""


@dataclass(frozen=True)
class Settings:
    """What a study measures."""

    impls: tuple[str, ...]
    shapes: tuple[Shape, ...]
    device: torch.device
    seeds: int = 10
    reps: int = 20
    layout: Layout = "projection"
    capture: Path | None = None
    config: str = "compact"
    """Preset or YAML file of the training step."""
    errors: bool = False
    """Also compare with a reference of higher precision."""
    profile: bool = False
    """Also list the kernels that ran on the GPU."""
    say: Callable[[str], None] = silent
    """Takes lines of progress."""
