"""Backward of triangle attention on Hopper: workspace and launches.

Two independent passes share one preparation (``kernels/tri_attn_prep_*.cu``): key-stationary dK and
dV, and query-stationary dQ and dbias. No partial of dQ, dK or dV exists, dbias is summed over the
slices in FP32 copies of its rows, one writer each, and all sums have a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tpf.kernels import tri_attn
from tpf.kernels import tri_attn_bwd_plan as plans


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
    return result, like.new_empty_strided(gradient.written_shape, gradient.written_strides)


def filled(gradient: Tensor, written: Tensor) -> Tensor:
    """Return a gradient with what the copy engine wrote."""
    return gradient if gradient is written else gradient.copy_(written[..., : gradient.shape[-1]])


class Call:
    """One backward call: its plan, stream, operands for the copy engine, workspace.

    into: the gradients that the caller gives; shares_dk: as in ``plans.Signature``.
    """

    def __init__(
        self, x: Inputs, scale: float, into: Sequence[Tensor] = (), *, shares_dk: bool = True
    ) -> None:
        self.inputs = x
        device = tri_attn.device_index(x.q)
        layout = plans.Layout(
            x.q.stride(), x.k.stride(), x.v.stride(), x.bias.stride(),
            () if x.mask is None else x.mask.stride(), x.out.stride(), x.dout.stride(),
            tuple([g.stride() for g in into]),
        )  # fmt: skip
        self.operands = [x.q, x.k, x.v, x.dout]
        self.addresses = q, k, v, dout = [operand.data_ptr() for operand in self.operands]
        rows = (x.out.data_ptr() | x.residual.data_ptr() | dout) % 16 == 0
        wide, aligned = x.bias.dtype is torch.float32, (q | k | v | dout) % 16 == 0
        self.plan = plan = plans.plan(
            plans.Signature(x.q.shape, wide, scale, device, rows, aligned, layout, shares_dk)
        )
        if any(plan.copied):
            for i, copied in enumerate(plan.copied):
                if copied:
                    self.operands[i] = tri_attn.copy(self.operands[i])
            self.addresses = [operand.data_ptr() for operand in self.operands]
        self.stream = tri_attn.raw_stream(device)
        self._workspace = workspace(plan.workspace_bytes, x.q.device)

    def prepare(self, dk: Tensor) -> tuple[int, ...]:
        """Write the folds of queries and keys and the bias fragments.

        Returns the pointers of the main kernels (``plans.MAIN_POINTERS``).
        """
        x, plan, base = self.inputs, self.plan, self._workspace.data_ptr()
        early = dk.data_ptr() if plan.early_in_dk else base
        bias_s, partial = early + plan.bias_s, early + plan.dbias_partial
        row_fold, dropped_rows, key_fold, bias_st = [base + at for at in plan.offsets.values()]
        rows = [t.data_ptr() for t in (x.dout, x.out, x.residual, x.lse)]
        plan.prep_rows(self.stream, (), (*rows, row_fold))
        mask = 0 if x.mask is None else x.mask.data_ptr()
        pair = x.bias.data_ptr(), mask, bias_s, bias_st, key_fold, dropped_rows
        plan.prep_pair(self.stream, (), pair)
        return row_fold, key_fold, bias_s, bias_st, partial, 0, plan.order(x.q.device)


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
    into: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv, dbias) of triangle attention.

    Shapes and dtypes as in kernels/README.md; residual is empty when it was not saved, and the
    softmax correction then uses the rounded output alone. dq, dk and dv are written to the tensors
    ``into``, if given: of the shapes of q, k, v, as ``tma.mappable`` asks. Deterministic.
    """
    call = Call(Inputs(q, k, v, bias, mask, out, lse, residual, dout), scale, into)
    plan = call.plan
    dbias = bias.new_empty_strided(bias.shape, plan.dbias_strides)
    if not into:
        dq, dk, dv = (target(x, g) for x, g in zip((q, k, v), plan.gradients, strict=True))
    else:
        dq, dk, dv = ((x, x) for x in into)
    pointers = call.prepare(dk[1])
    plan.q_bias(call.stream, (*call.addresses, dq[1].data_ptr()), pointers)
    # The last that reads what may lie where dK comes:
    plan.strips(call.stream, (), (pointers[4], dbias.data_ptr()))
    plan.kv(call.stream, (*call.addresses, dk[1].data_ptr(), dv[1].data_ptr()), pointers)
    return filled(*dq), filled(*dk), filled(*dv), dbias
