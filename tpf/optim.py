"""Optimiser, learning-rate schedule, gradients clipped per sample, and weight averages.

The recipe is that of AF3 SI 5.4 as OpenFold3 trains it (spec model.md section 7).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tpf.config import TrainConfig
from tpf.errors import TpfError, UsageError


def build_optimizer(model: nn.Module, cfg: TrainConfig) -> torch.optim.Adam:
    """Return Adam without weight decay over the trainable parameters of model."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.Adam(parameters, lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps)


def learning_rate(step: int, cfg: TrainConfig) -> float:
    """Return the learning rate of optimiser step ``step`` (the first one is 1).

    Linear from 0 over ``warmup`` steps, constant to ``decay_after``, then multiplied by
    ``decay`` at once and again every ``decay_every`` steps.
    """
    if step < cfg.warmup:
        return cfg.lr * step / cfg.warmup
    if step <= cfg.decay_after:
        return cfg.lr
    decays = (step - cfg.decay_after) // cfg.decay_every + 1
    return float(cfg.lr * cfg.decay**decays)


class SampleGradients:
    """Sums gradients that were clipped sample by sample, and averages them by participation.

    For each sample: ``backward()``, then ``add()``. After the last one: ``average(counts)``, the
    optimiser step, ``reset()``. With several processes, sum ``buffer`` over them before
    ``counted()``: it is one FP32 vector of all gradients followed by, for each parameter, the
    number of samples that reached it (whose gradient was not None), and by ``flags``. Sums run in
    a fixed order. Nothing waits for the device but ``counted``.
    """

    def __init__(self, model: nn.Module, clip: float, flags: int = 0) -> None:
        """Make an empty sum for the trainable parameters of model; clip is the largest norm."""
        self.clip = clip
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        sizes = [p.numel() for p in self._parameters]
        device = self._parameters[0].device if sizes else torch.device("cpu")
        self.buffer = torch.zeros(sum(sizes) + len(sizes) + flags, device=device)
        gradients, self._tail = self.buffer.split([sum(sizes), len(sizes) + flags])  # type: ignore[no-untyped-call]
        self._sums = [
            part.view_as(p)
            for part, p in zip(torch.split(gradients, sizes), self._parameters, strict=True)
        ]
        self._counts = list(self._tail[: len(sizes)].unbind())
        self.flags = self._tail[len(sizes) :]
        """What else the processes add up in the same call; [flags]."""
        self._averaged = False

    @torch.no_grad()
    def add(self) -> Tensor:
        """Clip the gradients now held by the parameters, add them, and clear them.

        Returns the global norm before clipping, a scalar on the device. If that is not finite
        the sums are not either.
        """
        if self._averaged:
            raise RuntimeError("gradients were averaged; call reset() before the next sample")
        taking_part = [k for k, p in enumerate(self._parameters) if p.grad is not None]
        gradients = [g.float() for p in self._parameters if (g := p.grad) is not None]
        for parameter in self._parameters:
            parameter.grad = None
        if not gradients:
            return self.buffer.new_zeros(())
        norm: Tensor = torch.stack(torch._foreach_norm(gradients)).norm()
        scale = torch.where(norm > self.clip, self.clip / norm, 1.0)
        torch._foreach_mul_(gradients, scale)
        torch._foreach_add_([self._sums[k] for k in taking_part], gradients)
        torch._foreach_add_([self._counts[k] for k in taking_part], 1.0)
        return norm

    def counted(self) -> tuple[list[float], list[float]]:
        """Return the samples that reached each parameter, and the flags; waits for the device."""
        values: list[float] = self._tail.tolist()
        return values[: len(self._counts)], values[len(self._counts) :]

    def average(self, counts: list[float]) -> None:
        """Give every parameter its mean over the samples that reached it; None without any.

        ``counts`` are those of ``counted``.
        """
        reached = [k for k, count in enumerate(counts) if count > 0]
        sums = [self._sums[k] for k in reached]
        if sums:
            torch._foreach_div_(sums, [counts[k] for k in reached])
        for parameter in self._parameters:
            parameter.grad = None
        for k in reached:
            parameter = self._parameters[k]
            parameter.grad = self._sums[k].to(parameter.dtype)
        self._averaged = True

    def reset(self) -> None:
        """Clear the sum and the parameters' gradients."""
        for parameter in self._parameters:
            parameter.grad = None
        self.buffer.zero_()
        self._averaged = False


class Ema:
    """Exponential moving average of a model's whole state dict.

    Floating tensors are averaged, others copied. ``decay`` is the configured one: it is not
    read from a stored state. A tensor that the model lists under several names is kept once.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        """Start from the present state of model."""
        if not 0.0 <= decay < 1.0:
            raise UsageError(f"the decay of the weight average is {decay}; give one in [0, 1)")
        self.decay = decay
        self._averages: dict[str, Tensor] = {}
        self._first_name: dict[str, str] = {}
        names: dict[int, str] = {}
        for name, value in model.state_dict(keep_vars=True).items():
            first = self._first_name[name] = names.setdefault(id(value), name)
            if first == name:
                self._averages[name] = value.detach().clone()
        self._applied = False

    def _pairs(self, model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (average, present value) of every tensor of model, sharing its memory."""
        state = model.state_dict()
        for name, average in self._averages.items():
            yield average, state[name]

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move the average towards the present state of model: once per optimiser step."""
        if self._applied:
            raise RuntimeError("the average is applied to the model; it cannot be updated now")
        averages, values = [], []
        for average, value in self._pairs(model):
            if value.is_floating_point():
                averages.append(average)
                values.append(value)
            else:
                average.copy_(value)
        torch._foreach_lerp_(averages, values, 1.0 - self.decay)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averaged state under the model's names (no copies)."""
        return {name: self._averages[first] for name, first in self._first_name.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over a stored average; raise ``TpfError`` if names or shapes differ."""
        for name in sorted(state.keys() ^ self._first_name.keys()):
            where = "the stored average" if name in state else "the model"
            raise TpfError(f"weight average: {name} is in {where} only; load one of this model")
        for name, average in self._averages.items():
            if state[name].shape != average.shape:
                raise TpfError(
                    f"weight average: {name} has shape {tuple(state[name].shape)}, the model has "
                    f"{tuple(average.shape)}; load one of this model"
                )
            average.copy_(state[name])

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        """Overwrite the state of model by the average."""
        for average, value in self._pairs(model):
            value.copy_(average)

    @contextmanager
    def applied_to(self, model: nn.Module) -> Iterator[None]:
        """Give model the averaged state inside the block, and its own again after it."""
        self._swap(model)
        self._applied = True
        try:
            yield
        finally:
            self._swap(model)
            self._applied = False

    @torch.no_grad()
    def _swap(self, model: nn.Module) -> None:
        for average, value in self._pairs(model):
            own = value.clone()
            value.copy_(average)
            average.copy_(own)
