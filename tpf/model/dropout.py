"""Draws of dropout factors, which a CUDA graph takes from outside (``tpf.model.graphs``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Draw(NamedTuple):
    """One draw of factors."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    rate: float


_noted: ContextVar[list[Draw] | None] = ContextVar("_noted", default=None)
_given: ContextVar[Iterator[Tensor] | None] = ContextVar("_given", default=None)


def dropout_factors(like: Tensor, shape: Sequence[int], rate: float) -> Tensor:
    """Draw factors 0 or 1 / (1 - rate) of a shape, with the dtype and device of ``like``."""
    if (given := _given.get()) is not None:
        return next(given)
    if (noted := _noted.get()) is not None:
        noted.append(Draw(tuple(shape), like.dtype, rate))
    return F.dropout(like.new_ones(shape), rate)


@contextmanager
def noting() -> Iterator[list[Draw]]:
    """List the draws inside the block."""
    noted: list[Draw] = []
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


@contextmanager
def giving(factors: Sequence[Tensor]) -> Iterator[None]:
    """Hand out these factors, in order, instead of drawing inside the block."""
    token = _given.set(iter(factors))
    try:
        yield
    finally:
        _given.reset(token)
