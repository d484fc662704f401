"""The trainable parameters of a model as one vector, and the part of it that a rank updates.

Every vector of the same numbers (gradients, moments, averages) has the same layout, so that a step
over all parameters is a few calls, and parts of equal length go to the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tpf.dist import World

ALIGN = 64
"""Every parameter and every part begins at a multiple of this many numbers: 256 bytes, enough for
any kernel. No number is then left over by vector instructions, which may differ in the last bit."""


class FlatParameters:
    """Makes the trainable parameters of a model views of ``vector``, in FP32.

    Numbers between parameters are 0. ``part`` is what this rank updates: an equal share when the
    ranks share the work (ZeRO: Rajbhandari et al., arXiv 1910.02054), else all.
    """

    def __init__(self, model: nn.Module, world: World, *, shard: bool) -> None:
        """Move the parameters; raises ``ValueError`` for one that is not FP32 or has two names."""
        once = dict(model.named_parameters())
        for name, _ in model.named_parameters(remove_duplicate=False):
            if name not in once:
                raise ValueError(f"{name} is a second name of a parameter; it would be kept twice")
        named = {n: p for n, p in once.items() if p.requires_grad}
        if wrong := [name for name, p in named.items() if p.dtype != torch.float32]:
            raise ValueError(f"{wrong[0]} is {named[wrong[0]].dtype}; parameters are kept in FP32")
        self._world = world
        self.names, self.parameters = list(named), list(named.values())
        self.sharded = shard and world.size > 1
        self._begins = [0]
        for parameter in self.parameters:
            self._begins.append(self._begins[-1] + _round_up(parameter.numel(), ALIGN))
        self.length = _round_up(self._begins[-1], ALIGN * world.size)
        share = self.length // world.size
        own = slice(world.rank * share, (world.rank + 1) * share)
        self.part = own if self.sharded else slice(0, self.length)
        self.vector = torch.zeros(self.length, device=world.device)
        for view, parameter in zip(self.views(self.vector), self.parameters, strict=True):
            view.copy_(parameter.detach())
            parameter.data = view

    @property
    def own(self) -> Tensor:
        """The weights that this rank updates."""
        return self.vector[self.part]

    def views(self, vector: Tensor) -> list[Tensor]:
        """Return each parameter's tensor in a vector of the whole layout."""
        pairs = zip(self._begins, self.parameters, strict=False)
        return [vector[begin : begin + p.numel()].view(p.shape) for begin, p in pairs]

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """Return ``views`` by name."""
        return dict(zip(self.names, self.views(vector), strict=True))

    def runs(self, keys: Sequence[Any]) -> Iterator[tuple[int, slice]]:
        """Yield stretches of this rank's part whose parameters have equal keys.

        With each comes the number of its first parameter; slices count from where the part begins.
        """
        start, size, first = self.part.start, self.part.stop - self.part.start, 0
        for k in range(1, len(keys) + 1):
            if k < len(keys) and keys[k] == keys[first]:
                continue
            begin, end = (min(max(0, self._begins[i] - start), size) for i in (first, k))
            if begin < end:
                yield first, slice(begin, end)
            first = k

    def read(self, named: Mapping[str, Tensor], into: Tensor) -> None:
        """Copy what lies in this rank's part of named tensors; those without a name stay."""
        for begin, name in zip(self._begins, self.names, strict=False):
            if name not in named:
                continue
            source = named[name].reshape(-1)
            start, stop = self.part.start - begin, self.part.stop - begin
            piece = source[max(0, start) : max(0, stop)]
            if len(piece):
                place = max(0, -start)
                into[place : place + len(piece)].copy_(piece)

    def sum_(self, buffer: Tensor) -> None:
        """Add a vector over all ranks in place, with what lies behind it in ``buffer``.

        When the work is shared each rank gets the sum of its own part of the vector only. The order
        of the sums is the same in both cases.
        """
        vector, rest = buffer[: self.length], buffer[self.length :]
        self._world.sum_(rest)
        self._world.sum_parts_(vector)
        if not self.sharded:
            self._world.join_parts_(vector)

    def join_(self, vector: Tensor) -> None:
        """Give every rank the parts of all, of which each has its own."""
        if self.sharded:
            self._world.join_parts_(vector)

    def whole(self, part: Tensor, spare: Tensor) -> Tensor:
        """Return the vector of which every rank has its part; ``spare`` is overwritten."""
        if not self.sharded:
            return part
        spare[self.part].copy_(part)
        self.join_(spare)
        return spare


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
