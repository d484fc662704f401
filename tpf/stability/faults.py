"""Deliberately faulty triangle attention, to test that the study finds and names what is wrong.

Only ``tpf stability`` with ``--faults`` or ``--tiny`` makes these; no other command can.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tpf.bench.cases import Attend
from tpf.errors import UsageError
from tpf.kernels.ops import triangle_attention

Clock = Callable[[], int]
"""Returns the update in progress, counted from 1 after the warm-up."""


class _NoisyGradient(torch.autograd.Function):
    """The identity; its gradient is multiplied by 1 + amplitude * N(0, 1), element by element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, amplitude: float, generator: torch.Generator) -> Tensor:
        ctx.amplitude, ctx.generator = amplitude, generator
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        noise = torch.empty_like(gradient).normal_(generator=ctx.generator)
        return gradient * (1 + ctx.amplitude * noise), None, None


def noisy_bias_gradient(amplitude: float, clock: Clock) -> Attend:
    """Return the reference attention with a bias gradient multiplied by 1 + amplitude * noise.

    The noise follows from the update alone, so that a resumed arm is the same arm.
    """
    generators: dict[torch.device, torch.Generator] = {}
    seeded_for: dict[torch.device, int] = {}

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
        generator = generators.setdefault(bias.device, torch.Generator(bias.device))
        if seeded_for.get(bias.device) != clock():
            seeded_for[bias.device] = clock()
            generator.manual_seed(clock())
        run: Any = _NoisyGradient.apply
        return triangle_attention(q, k, v, run(bias, amplitude, generator), mask, impl="torch")

    return attend


def nan_at_update(update: float, clock: Clock) -> Attend:
    """Return the reference attention whose output is NaN in one update."""

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
        out = triangle_attention(q, k, v, bias, mask, impl="torch")
        return out * torch.nan if clock() == int(update) else out

    return attend


FAULTS: dict[str, Callable[[float, Clock], Attend]] = {
    "noise": noisy_bias_gradient,
    "nan": nan_at_update,
}
"""By the word before the colon of ``--faults noise:AMPLITUDE,nan:UPDATE``."""


def make_fault(text: str, clock: Clock) -> Attend:
    """Return the faulty backend that ``KIND:NUMBER`` names; raise ``UsageError`` for another."""
    kind, _, number = text.partition(":")
    if kind not in FAULTS:
        choices = ", ".join(FAULTS)
        raise UsageError(f"--faults {text}: no such fault; choose from {choices}, as nan:10")
    try:
        value = float(number)
    except ValueError:
        raise UsageError(f"--faults {text}: give a number after the colon, as nan:10") from None
    return FAULTS[kind](value, clock)
