"""What the tests of the studies share."""

from __future__ import annotations

import torch
from torch import Tensor

from tpf.bench.cases import Settings
from tpf.bench.record import Record, Row


class TooLarge(torch.autograd.Function):
    """The identity with a gradient that is 6 % too large."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad * 1.06


def run(study: object, chosen: Settings) -> Record:
    record = Record("test")
    study(chosen, record)  # type: ignore[operator]
    record.finish()
    return record


def pick(record: Record, **wanted: object) -> list[Row]:
    return [r for r in record.rows if all(r.get(k) == v for k, v in wanted.items())]
