"""Backward of triangle attention on Hopper: workspace and launches.

Two independent passes share one preparation (``kernels/tri_attn_prep_*.cu``): key-stationary dK and
dV, and query-stationary dQ and dbias. No partial of dQ, dK or dV exists, dbias is summed over the
slices in FP32 copies of its rows, one writer each, and all sums have a fixed order.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tpf.kernels import tri_attn
from tpf.kernels import tri_attn_bwd_plan as plans
from tpf.kernels.tri_attn_bwd_params import MainParams, PairParams, RowParams, StripParams

LOG2E = math.log2(math.e)
SMALLEST_SCALE = 1e-20
"""Stands in for a scale of zero where the kernels divide by it."""


class Inputs(NamedTuple):
    """The tensors of a backward call, as in kernels/README.md."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor
    mask: Tensor | None
    out: Tensor
    lse: Tensor
    residual: Tensor
    dout: Tensor


def workspace(size: int, device: torch.device) -> Tensor:
    """Allocate bytes."""
    return torch.empty(size, dtype=torch.uint8, device=device)


def target(like: Tensor, gradient: plans.Gradient) -> tuple[Tensor, Tensor]:
    """Return (gradient, tensor that the copy engine writes); they differ if it needs padding."""
    result = like.new_empty_strided(like.shape, gradient.strides)
    if gradient.direct:
        return result, result
    b, o, h, n, d = like.shape
    return result, like.new_empty((b, o, n, h, d + -d % 8)).transpose(2, 3)


def filled(gradient: Tensor, written: Tensor) -> Tensor:
    """Return a gradient with what the copy engine wrote."""
    return gradient if gradient is written else gradient.copy_(written[..., : gradient.shape[-1]])


class Call:
    """One backward call: its plan, stream, operands for the copy engine, workspace and scale.

    Kernels copy their parameters when launched, and every call fills its own.
    """

    def __init__(self, x: Inputs, scale: float) -> None:
        self.inputs = x
        index = tri_attn.device_index(x.q)
        layout = plans.Layout(
            x.q.stride(), x.k.stride(), x.v.stride(), x.bias.stride(),
            () if x.mask is None else x.mask.stride(), x.out.stride(), x.dout.stride(),
        )  # fmt: skip
        rows = x.out.data_ptr() | x.residual.data_ptr() | x.dout.data_ptr()
        wide = x.bias.dtype == torch.float32
        self.plan = plans.plan(x.q.shape, wide, index, rows % 16 == 0, layout)
        self.stream = tri_attn.raw_stream(index)
        self.operands = [self.plan.operand(operand) for operand in (x.q, x.k, x.v, x.dout)]
        self.scale = scale
        self.scale2 = math.copysign(max(abs(scale * LOG2E), SMALLEST_SCALE), scale)
        self.workspace = workspace(self.plan.workspace_bytes, x.q.device)
        self.address: dict[str, int] = {}
        self._place(self.workspace, self.plan.offsets)

    def _place(self, room: Tensor, offsets: dict[str, int]) -> None:
        base = room.data_ptr()
        self.address |= {name: base + at for name, at in offsets.items()}

    def place_early(self, dk: Tensor | None) -> None:
        """Place what only dQ and dbias need: where dK will come, if it is written after them."""
        size = self.plan.early_bytes
        if dk is None or dk.numel() * dk.element_size() < size or dk.data_ptr() % 16:
            dk = self._early = workspace(size, self.inputs.q.device)
        self._place(dk, self.plan.early_offsets)

    def prepare(self) -> None:
        """Write the folds of queries and keys and the bias fragments."""
        x, address = self.inputs, self.address
        rows = RowParams.from_buffer_copy(self.plan.rows)
        rows.dout, rows.out, rows.lse = x.dout.data_ptr(), x.out.data_ptr(), x.lse.data_ptr()
        rows.residual = x.residual.data_ptr() if x.residual.numel() else None
        rows.row_fold, rows.scale2 = address["row_fold"], self.scale2
        self.plan.launch(plans.PREP_ROWS, rows, self.stream)
        pair = PairParams.from_buffer_copy(self.plan.pair)
        pair.bias, pair.mask = x.bias.data_ptr(), None if x.mask is None else x.mask.data_ptr()
        pair.bias_s, pair.bias_st = address["bias_s"], address["bias_st"]
        pair.key_fold, pair.dropped_rows = address["key_fold"], address["dropped_rows"]
        pair.scale2 = self.scale2
        self.plan.launch(plans.PREP_PAIR, pair, self.stream)

    def main_params(self, dq: Tensor, dk: Tensor, dv: Tensor) -> MainParams:
        """Return the parameters of the main kernels, which write dq, dk and dv."""
        address, encode = self.address, self.plan.encode
        params = MainParams.from_buffer_copy(self.plan.main)
        params.q, params.k, params.v, params.dout = (found for _, found in self.operands)
        params.dq, params.dk, params.dv = encode(dq), encode(dk), encode(dv)
        params.row_fold, params.key_fold = address["row_fold"], address["key_fold"]
        params.bias_s, params.bias_st = address["bias_s"], address["bias_st"]
        params.dbias_partial = address["dbias_partial"]
        params.scale, params.scale2 = self.scale, self.scale2
        return params

    def sum_strips(self, dbias: Tensor) -> None:
        """Add the copies of the strips of dbias that the dQ kernel left."""
        strips = StripParams.from_buffer_copy(self.plan.strips)
        strips.partial, strips.dbias = self.address["dbias_partial"], dbias.data_ptr()
        self.plan.launch(plans.STRIPS, strips, self.stream)


def tri_attn_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    scale: float,
    out: Tensor,
    lse: Tensor,
    residual: Tensor,
    dout: Tensor,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv, dbias) of triangle attention.

    Shapes and dtypes as in kernels/README.md; residual is empty when it was not saved, and the
    softmax correction then uses the rounded output alone. dq, dk and dv are written to the tensors
    ``into``, if given: of the shapes of q, k, v, as ``tma.mappable`` asks. Deterministic.
    """
    call = Call(Inputs(q, k, v, bias, mask, out, lse, residual, dout), scale)
    plan = call.plan
    dbias = bias.new_empty_strided(bias.shape, plan.dbias.strides)
    if into is None:
        dq, dk, dv = (target(x, g) for x, g in zip((q, k, v), plan.gradients, strict=True))
        call.place_early(dk[1])
    else:
        dq, dk, dv = ((x, x) for x in into)
        call.place_early(None)
    call.prepare()
    params = call.main_params(dq[1], dk[1], dv[1])
    params.order = plan.order(q.device).data_ptr()
    params.groups, params.jobs = plan.work[plans.Q_BIAS]
    plan.launch(plans.Q_BIAS, params, call.stream)
    call.sum_strips(dbias)  # the last that reads what lies where dK comes
    params.groups, params.jobs = plan.work[plans.KV]
    plan.launch(plans.KV, params, call.stream)
    return filled(*dq), filled(*dk), filled(*dv), dbias
