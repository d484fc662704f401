"""Backward of triangle attention on Hopper: workspace and launches.

Three independent passes share one preparation (``kernels/tri_attn_prep_*.cu``): key-stationary dK
and dV, query-stationary dQ, and dbias summed over the slices in registers. No partial of dQ, dK or
dV exists, all sums are FP32 in a fixed order, and nothing is atomic.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from tpf.kernels import tri_attn
from tpf.kernels import tri_attn_bwd_plan as plans
from tpf.kernels.reference import empty_dense_like
from tpf.kernels.tma import TensorMap, mappable
from tpf.kernels.tri_attn_bwd_plan import (
    PREP_PAIR,
    PREP_ROWS,
    REDUCE,
    STRIPS,
    MainParams,
    PairParams,
    Problem,
    ReduceParams,
    RowParams,
    StripParams,
    plan,
)

LOG2E = math.log2(math.e)
SMALLEST_SCALE = 1e-20
"""Stands in for a scale of zero where the kernels divide by it."""


@functools.lru_cache(maxsize=1024)
def _layout_fits(shape: torch.Size, strides: tuple[int, ...], remainder: int) -> bool:
    storage = torch.empty(1, dtype=torch.bfloat16, device="meta")
    return remainder == 0 and mappable(storage.as_strided(shape, strides))


def in_place(x: Tensor) -> bool:
    """Return whether the copy engine can use x [B, O, H, N, D] as it lies in memory."""
    return _layout_fits(x.shape, x.stride(), x.data_ptr() % 16)


@functools.lru_cache(maxsize=1024)
def _dense_strides(shape: torch.Size, strides: tuple[int, ...]) -> tuple[int, ...]:
    storage = torch.empty(1, device="meta")
    return empty_dense_like(storage.as_strided(shape, strides)).stride()


def gradient_like(x: Tensor) -> Tensor:
    """Allocate the gradient of x: dense, in the memory order of x."""
    return x.new_empty_strided(x.shape, _dense_strides(x.shape, x.stride()))


def target(like: Tensor) -> tuple[Tensor, Tensor]:
    """Return (gradient, tensor that the copy engine writes); they differ if it needs padding."""
    gradient = gradient_like(like)
    if in_place(gradient):
        return gradient, gradient
    b, o, h, n, d = like.shape
    return gradient, like.new_empty((b, o, n, h, d + -d % 8)).transpose(2, 3)


def workspace(size: int, device: torch.device) -> Tensor:
    """Allocate bytes."""
    return torch.empty(size, dtype=torch.uint8, device=device)


class Call:
    """One backward call: its plan, workspace, parameters and launches."""

    def __init__(
        self, q: Tensor, bias: Tensor, scale: float, *, vector: bool, masked: bool
    ) -> None:
        b, o, h, n, d = q.shape
        problem = Problem(b, o, h, n, d, bias.dtype == torch.float32)
        index = tri_attn.device_index(q)
        self.plan = plan(problem, index, vector, masked)
        self.stream = tri_attn.raw_stream(index)
        self.scale = scale
        self.scale2 = math.copysign(max(abs(scale * LOG2E), SMALLEST_SCALE), scale)
        self.workspace = workspace(self.plan.workspace_bytes, q.device)
        base = self.workspace.data_ptr()
        self.address = {name: base + at for name, at in self.plan.offsets.items()}

    def prepare(
        self,
        bias: Tensor,
        mask: Tensor | None,
        saved: tuple[Tensor, Tensor, Tensor],
        dout: Tensor,
    ) -> None:
        """Write the folds of queries and keys and the bias fragments; saved: out, lse, residual."""
        p, address = self.plan.problem, self.address
        out, lse, residual = saved
        slice_blocks = -(-p.padded * p.heads * p.width // (8 * 256))
        rows = RowParams(
            dout.data_ptr(), out.data_ptr(), residual.data_ptr() if residual.numel() else None,
            lse.data_ptr(), address["row_fold"], dout.stride()[:4], out.stride()[:4],
            p.tokens, p.padded, p.heads, p.outer, p.head_dim, slice_blocks, self.scale2,
        )  # fmt: skip
        self.plan.launch(PREP_ROWS, p.batch * p.outer * slice_blocks, rows, self.stream)
        slices = 1 if mask is None else p.batch * p.outer
        pair = PairParams(
            bias.data_ptr(), None if mask is None else mask.data_ptr(),
            address["bias_s"], address["bias_st"], address["key_fold"], address["dropped_rows"],
            bias.stride(), (0, 0, 0) if mask is None else mask.stride(),
            p.tokens, p.tiles, p.heads, p.batch, p.outer, slices, self.scale2,
        )  # fmt: skip
        blocks = p.batch * p.heads * p.tiles**2 + -(-slices * p.padded // 256)
        self.plan.launch(PREP_PAIR, blocks, pair, self.stream)

    def main_params(self, maps: list[TensorMap]) -> MainParams:
        """Return the parameters that all main kernels share."""
        p = self.plan.problem
        params = MainParams(*maps)
        for name in ("row_fold", "key_fold", "bias_s", "bias_st", "dbias_partial"):
            setattr(params, name, self.address[name])
        params.tokens, params.tiles, params.blocks = p.tokens, p.tiles, p.blocks
        params.heads, params.outer, params.batch = p.heads, p.outer, p.batch
        params.key_fold_stride = p.padded if self.plan.masked else 0
        params.scale, params.scale2 = self.scale, self.scale2
        return params

    def sum_dbias(self, dbias: Tensor) -> None:
        """Add the partials of dbias that the last pass left."""
        p, cut, walk = self.plan.problem, self.plan.cut, self.plan.walk
        partial = self.address["dbias_partial"]
        if plans.PASSES == 2:
            strips = StripParams(
                partial, dbias.data_ptr(), dbias.stride(),
                p.tokens, p.used_tiles, p.heads, walk.groups, walk.items, walk.blocks,
            )  # fmt: skip
            self.plan.launch(STRIPS, walk.strips * p.used_tiles, strips, self.stream)
            return
        params = ReduceParams(
            partial, dbias.data_ptr(), dbias.stride(),
            p.tokens, p.tiles, p.heads, cut.whole, cut.rest, cut.chunks,
        )  # fmt: skip
        self.plan.launch(REDUCE, p.batch * p.heads * p.tiles**2, params, self.stream)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv, dbias) of triangle attention.

    Shapes and dtypes as in kernels/README.md; residual is empty when it was not saved, and the
    softmax correction then uses the rounded output alone. Deterministic.
    """
    dim = q.shape[-1]
    vector = dim in (16, 32, 64) and in_place(dout) and in_place(out)
    call = Call(q, bias, scale, vector=vector, masked=mask is not None)
    call.prepare(bias, mask, (out, lse, residual), dout)
    inputs = [x if in_place(x) else tri_attn.mapped(x) for x in (q, k, v, dout)]
    targets = [target(x) for x in (q, k, v)]
    dbias = gradient_like(bias)
    maps = [call.plan.encode(x) for x in (*inputs, *(written for _, written in targets))]
    params = call.main_params(maps)
    params.order = call.plan.order(q.device).data_ptr()
    for name in plans.passes():
        call.plan.launch_main(name, params, call.stream)
    call.sum_dbias(dbias)
    dq, dk, dv = (
        gradient if gradient is written else gradient.copy_(written[..., :dim])
        for gradient, written in targets
    )
    return dq, dk, dv, dbias
