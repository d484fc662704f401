"""Optimiser, learning-rate schedule, gradients clipped per sample, and weight averages.

The recipe is that of AF3 SI 5.4 as OpenFold3 trains it (spec model.md section 7).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from tpf.config import TrainConfig
from tpf.errors import TpfError, UsageError
from tpf.flat import FlatParameters


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

    For each sample: ``backward()``, then ``add()``. After the last one: ``reduce()``,
    ``average(counts)`` with the counts of ``counted()``, the optimiser's step, ``reset()``.
    ``buffer`` is one FP32 vector of all gradients (``sums``) followed by, for each parameter, the
    number of samples that reached it (whose gradient was not None), and by ``flags``. Sums run in
    a fixed order. Nothing waits for the device but ``counted``.
    """

    def __init__(self, flat: FlatParameters, clip: float, flags: int = 0) -> None:
        """Make an empty sum; clip is the largest norm of a sample's gradient."""
        self.clip = clip
        self._flat = flat
        count = len(flat.parameters)
        self.buffer = flat.vector.new_zeros(flat.length + count + flags)
        self.sums, self._tail = self.buffer[: flat.length], self.buffer[flat.length :]
        self.own = self.sums[flat.part]
        """Of the parameters that this rank updates."""
        self._sums = flat.views(self.sums)
        self._counts = list(self._tail[:count].unbind())
        self.flags = self._tail[count:]
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
        parameters = self._flat.parameters
        taking_part = [k for k, p in enumerate(parameters) if p.grad is not None]
        gradients = [g.float() for p in parameters if (g := p.grad) is not None]
        self._clear()
        if not gradients:
            return self.buffer.new_zeros(())
        norm: Tensor = torch.stack(torch._foreach_norm(gradients)).norm()
        scale = torch.where(norm > self.clip, self.clip / norm, 1.0)
        torch._foreach_mul_(gradients, scale)
        torch._foreach_add_([self._sums[k] for k in taking_part], gradients)
        torch._foreach_add_([self._counts[k] for k in taking_part], 1.0)
        return norm

    def reduce(self) -> None:
        """Sum over the processes; of the gradients each needs ``own`` only."""
        self._flat.sum_(self.buffer)

    def counted(self) -> tuple[list[float], list[float]]:
        """Return the samples that reached each parameter, and the flags; waits for the device."""
        values: list[float] = self._tail.tolist()
        return values[: len(self._counts)], values[len(self._counts) :]

    def average(self, counts: list[float]) -> None:
        """Divide ``own`` by the number of samples that reached each parameter, if any did."""
        for k, run in self._flat.runs(counts):
            if counts[k] > 1:
                self.own[run].div_(counts[k])
        self._averaged = True

    def reset(self) -> None:
        """Clear the sum and the parameters' gradients."""
        self._clear()
        self.buffer.zero_()
        self._averaged = False

    def _clear(self) -> None:
        for parameter in self._flat.parameters:
            parameter.grad = None


class Adam:
    """Adam without weight decay over the part of the parameters that this rank updates.

    A parameter that no sample reached keeps its weights, moments and count of steps.
    """

    def __init__(self, flat: FlatParameters, cfg: TrainConfig) -> None:
        self._flat, self._cfg = flat, cfg
        self.mean, self.square = torch.zeros_like(flat.own), torch.zeros_like(flat.own)
        """Running averages of the gradient and of its square."""
        self.steps = [0] * len(flat.names)

    @torch.no_grad()
    def step(self, gradient: Tensor, counts: list[float], rate: float) -> None:
        """Do one step at a learning rate; ``counts`` are the samples behind each mean gradient."""
        weights, cfg = self._flat.own, self._cfg
        for k, run in self._flat.runs(list(zip(counts, self.steps, strict=True))):
            if not counts[k]:
                continue
            step = torch.full((), float(self.steps[k]), device=weights.device)
            adam(
                [weights[run]], [gradient[run]], [self.mean[run]], [self.square[run]], [], [step],
                fused=True, amsgrad=False, maximize=False, weight_decay=0.0,
                lr=rate, beta1=cfg.beta1, beta2=cfg.beta2, eps=cfg.eps,
            )  # fmt: skip
        self.steps = [s + (c > 0) for s, c in zip(self.steps, counts, strict=True)]

    def state_dict(self, mean: Tensor, square: Tensor) -> dict[str, Tensor]:
        """Return the state by entry and parameter, of vectors of the whole layout (no copies)."""
        state: dict[str, Tensor] = {}
        means, squares = self._flat.views(mean), self._flat.views(square)
        for name, steps, m, v in zip(self._flat.names, self.steps, means, squares, strict=True):
            if steps:
                step = torch.tensor(float(steps))
                state |= {f"step.{name}": step, f"exp_avg.{name}": m, f"exp_avg_sq.{name}": v}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over the state that ``state_dict`` gave."""
        for key, into in (("exp_avg", self.mean), ("exp_avg_sq", self.square)):
            into.zero_()
            named = {n: state[f"{key}.{n}"] for n in self._flat.names if f"{key}.{n}" in state}
            self._flat.read(named, into)
        self.steps = [int(state.get(f"step.{name}", 0)) for name in self._flat.names]


class Ema:
    """Exponential moving average of a model's whole state dict, of parameters this rank's part.

    Floating tensors are averaged, others copied. ``decay`` is the configured one: it is not
    read from a stored state.
    """

    def __init__(self, model: nn.Module, flat: FlatParameters, decay: float) -> None:
        """Start from the present state of model."""
        if not 0.0 <= decay < 1.0:
            raise UsageError(f"the decay of the weight average is {decay}; give one in [0, 1)")
        self.decay = decay
        self._flat = flat
        self.average = flat.own.clone()
        state, trained = model.state_dict(), set(flat.names)
        self._others = {n: (x.clone(), x) for n, x in state.items() if n not in trained}
        """Average and present value of what is not trained, by name."""
        self._shapes = {name: x.shape for name, x in state.items()}
        self._applied = False

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the present state of the model: once per optimiser step."""
        if self._applied:
            raise RuntimeError("the average is applied to the model; it cannot be updated now")
        self.average.lerp_(self._flat.own, 1.0 - self.decay)
        for average, value in self._others.values():
            if value.is_floating_point():
                average.lerp_(value, 1.0 - self.decay)
            else:
                average.copy_(value)

    @torch.no_grad()
    def restart(self) -> None:
        """Start anew from the present state of the model."""
        self.average.copy_(self._flat.own)
        for average, value in self._others.values():
            average.copy_(value)

    def state_dict(self, average: Tensor) -> dict[str, Tensor]:
        """Return the averaged state, of a vector of the whole layout (no copies)."""
        return self._flat.named(average) | {name: x for name, (x, _) in self._others.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over a stored average; raise ``TpfError`` if names or shapes differ."""
        for name in sorted(state.keys() ^ self._shapes.keys()):
            where = "the stored average" if name in state else "the model"
            raise TpfError(f"weight average: {name} is in {where} only; load one of this model")
        for name, shape in self._shapes.items():
            if state[name].shape != shape:
                raise TpfError(
                    f"weight average: {name} has shape {tuple(state[name].shape)}, the model has "
                    f"{tuple(shape)}; load one of this model"
                )
        self._flat.read(state, self.average)
        for name, (average, _) in self._others.items():
            average.copy_(state[name])

    @contextmanager
    def applied(self, spare: Tensor) -> Iterator[None]:
        """Give the model the averaged state inside the block, and its own again after it.

        All ranks enter together. Own weights wait in ``spare``, a vector of the whole layout which
        is 0 after the block.
        """
        with torch.no_grad():
            spare.copy_(self._flat.vector)
            self._flat.own.copy_(self.average)
            self._flat.join_(self._flat.vector)
            self._swap_others()
        self._applied = True
        try:
            yield
        finally:
            with torch.no_grad():
                self._flat.vector.copy_(spare)
                spare.zero_()
                self._swap_others()
            self._applied = False

    def _swap_others(self) -> None:
        for average, value in self._others.values():
            own = value.clone()
            value.copy_(average)
            average.copy_(own)
