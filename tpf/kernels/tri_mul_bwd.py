"""Backward of the triangle multiplicative update on Hopper: workspace and launches.

The output side gives dx and the output gate's part of dz; cuBLAS gives da and db; passes over z,
128 channels of [a; b] each, add the rest of dz; a last kernel sums the partial weight gradients.
Nothing is atomic but a counter, and every sum has a fixed order.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from tpf.kernels import launch, tma, tri_attn, tri_mul
from tpf.kernels.launch import Launch
from tpf.kernels.reference import Direction, TriMulWeights
from tpf.kernels.tma import TensorMap
from tpf.kernels.tri_mul import BACKWARD_CONSUMERS, Variant, in_kernel_order
from tpf.kernels.tri_mul_layout import TILE_BYTES, Grid, Saved, Shape, Sizes

BWD_IN, BWD_OUT, GRADS = "tri_mul_bwd_in", "tri_mul_bwd_out", "tri_mul_grads"
GRADS_THREADS = 288

_I32, _POINTER = ctypes.c_int32, ctypes.c_void_p
_BwdOutParams = tma.params_type(
    "_BwdOutParams",
    [
        *((name, TensorMap) for name in ("z", "x", "dout", "dx", "carry")),
        *((name, _POINTER) for name in ("packed", "z_stats", "x_stats", "partial", "ticket")),
        ("grid", Grid),
    ],
)
_BwdInParams = tma.params_type(
    "_BwdInParams",
    [
        *((name, TensorMap) for name in ("z", "d", "carry")),
        *((name, _POINTER) for name in ("packed", "stats", "partial")),
        ("grid", Grid),
        ("unit", _I32),
    ],
)
_GradsParams = tma.params_type(
    "_GradsParams",
    [
        *((name, _POINTER) for name in ("in_partial", "out_partial")),
        *((name, _POINTER * 10) for name in ("weights", "gradients")),  # as in_kernel_order
        *((name, _POINTER) for name in ("in_shares", "out_shares", "ticket")),
        *((name, _I32) for name in ("in_slots", "out_slots")),
    ],
)


@functools.cache
def backward_variants(sizes: Sizes, train_weights: bool = True) -> dict[str, Variant]:
    """Return the kernels of the backward; the last pass over z also completes dz."""
    c, hidden = sizes.c_tiles, sizes.hidden_tiles
    threads = 128 * (BACKWARD_CONSUMERS + 1)
    shared = {"CZ": sizes.c, "CH": sizes.hidden}
    sums = shared | {"SUMS": int(train_weights)}
    fixed = sizes.out_weights + c * 64 * 16
    stage = (hidden + 2 * c + max(hidden, c)) * TILE_BYTES + 5 * 1024
    stages, size = tri_mul.fit_stages(fixed, stage, 48, BACKWARD_CONSUMERS // c)
    defines = sums | {"STAGES": stages, "SHARED_BYTES": size}
    found = {BWD_OUT: Variant(BWD_OUT, defines, threads, size)}
    fixed = sizes.team * (2 * c * TILE_BYTES + 64 * 16)
    stage = 2 * (c + sizes.team) * TILE_BYTES + 3 * 1024
    stages, size = tri_mul.fit_stages(fixed, stage, 48, BACKWARD_CONSUMERS // sizes.team)
    for last in (0, 1):
        defines = sums | {"STAGES": stages, "LAST": last, "SHARED_BYTES": size}
        found[f"{BWD_IN}_{last}"] = Variant(BWD_IN, defines, threads, size)
    found[GRADS] = Variant(GRADS, shared, GRADS_THREADS, 0)
    return found


class Workspace:
    """Room of a backward call in one BF16 tensor; offsets in bytes.

    da and db; dx, later the partial weight gradients of the passes over z; those of the output
    side; what the blocks share. Partials are FP32, one slot for each team of a block.
    """

    def __init__(self, shape: Shape, blocks: int) -> None:
        sizes = shape.sizes
        c, hidden = sizes.c_tiles, sizes.hidden_tiles
        self.in_slots = blocks * (BACKWARD_CONSUMERS // sizes.team)
        self.out_slots = blocks * (BACKWARD_CONSUMERS // c)
        self.in_pass = 4 * self.in_slots * sizes.team * 64 * (2 * c * 64 + 8)
        dx, partials = 2 * shape.hidden_elements, self.in_pass * sizes.passes
        parts = {
            "dab": 2 * dx,
            "dx": max(dx, partials),
            "out_partial": 4 * self.out_slots * c * 64 * ((hidden + c) * 64 + 8),
            "in_shares": 4 * 2 * (2 * sizes.hidden + sizes.c) * sizes.c,
            "out_shares": 4 * 2 * sizes.c * sizes.hidden,
            "ticket": 4,
        }
        offsets, size = launch.lay_out(parts)
        self.elements = size // 2
        self.dx = self.in_partial = offsets["dx"]
        self.out_partial, self.ticket = offsets["out_partial"], offsets["ticket"]
        self.in_shares, self.out_shares = offsets["in_shares"], offsets["out_shares"]
        self.views = [shape.matrices(byte) for byte in (0, dx, self.dx)]
        """Of da, db and dx."""


class _Backward:
    """Launches and sizes of the backward."""

    def __init__(
        self,
        shape: Shape,
        strides: tuple[int, ...],
        dout_strides: tuple[int, ...],
        train_weights: bool,
        device: int,
    ) -> None:
        sizes, grid, blocks = shape.sizes, shape.grid, shape.blocks(device)
        variants = backward_variants(sizes, train_weights)
        self.saved, self.work = Saved(shape), Workspace(shape, blocks)
        z, carry = shape.positions(strides), shape.positions()
        x, dout = shape.channels(), shape.positions(dout_strides)
        maps = {"z": z, "x": x, "dout": dout, "dx": x, "carry": carry}
        pointers = ["packed", "z_stats", "x_stats", "partial", "ticket"]
        params = _BwdOutParams(grid=grid)
        self.out = variants[BWD_OUT].prepare(device, blocks, params, pointers, maps)
        maps = {"z": z, "d": shape.branches(), "carry": carry}
        pointers = ["packed", "stats", "partial"]
        self.passes = []
        for index in range(sizes.passes):
            variant = variants[f"{BWD_IN}_{int(index == sizes.passes - 1)}"]
            params = _BwdInParams(grid=grid, unit=index * sizes.team)
            self.passes.append(variant.prepare(device, blocks, params, pointers, maps))
        self.grads = self._gradients(shape, variants[GRADS], device) if train_weights else None

    def _gradients(self, shape: Shape, variant: Variant, device: int) -> Launch:
        """Prepare the last sums of the weight gradients."""
        params = _GradsParams(in_slots=self.work.in_slots, out_slots=self.work.out_slots)
        pointers = ["in_partial", "out_partial", "weights", "gradients"]
        pointers += ["in_shares", "out_shares", "ticket"]
        rows = 2 * shape.sizes.hidden + shape.sizes.c
        return variant.prepare(device, rows, params, pointers)


@launch.plan
def _backward(
    shape: tuple[int, ...], strides: tuple[int, ...], dout_strides: tuple[int, ...],
    hidden: int, train_weights: bool, device: int,
) -> _Backward:  # fmt: skip
    batch, n, _, c = shape
    sizes = Sizes(c, hidden)
    return _Backward(Shape(batch, n, sizes), strides, dout_strides, train_weights, device)


def _branch_gradients(plan: _Backward, saved: Tensor, room: Tensor, direction: Direction) -> None:
    """Write da and db of the contraction."""
    a, b = [view.of(saved) for view in plan.saved.views[:2]]
    da, db, dx = [view.of(room) for view in plan.work.views]
    if direction == "outgoing":
        torch.bmm(dx, b, out=da)
        torch.bmm(dx.mT, a, out=db)
    else:
        torch.bmm(b, dx.mT, out=da)
        torch.bmm(a, dx, out=db)


def tri_mul_bwd(
    dout: Tensor,
    z: Tensor,
    weights: TriMulWeights,
    direction: Direction,
    saved: Tensor,
    train_weights: bool = True,
) -> tuple[Tensor, Sequence[Tensor]]:
    """Launch the backward kernels; saved is what the forward of the same z and weights saved.

    Returns dz bf16 [B, N, N, C] and, with train_weights, the gradients of the weights in their
    dtypes. Deterministic.
    """
    z, dout, wide = tri_mul.readable(z), tri_mul.readable(dout), tri_mul.float_weights(weights)
    saved = saved if saved.storage_offset() == 0 else saved.clone()
    device = tri_attn.device_index(z)
    hidden = wide.linear_a_p.shape[0]
    plan = _backward(z.shape, z.stride(), dout.stride(), hidden, train_weights, device)
    kept, work, stream = plan.saved, plan.work, tri_attn.raw_stream(device)
    dz = torch.empty_like(z, memory_format=torch.contiguous_format)
    room = z.new_empty(work.elements)
    at, saved_at, z_at, dz_at = room.data_ptr(), saved.data_ptr(), z.data_ptr(), dz.data_ptr()
    packed, z_stats, ticket = saved_at + kept.packed, saved_at + kept.z_stats, at + work.ticket
    out_partial, in_partial = at + work.out_partial, at + work.in_partial
    maps = z_at, saved_at + kept.x, dout.data_ptr(), at + work.dx, dz_at
    plan.out(stream, maps, (packed, z_stats, saved_at + kept.x_stats, out_partial, ticket))
    _branch_gradients(plan, saved, room, direction)
    for index, pass_over_z in enumerate(plan.passes):
        partial = in_partial + index * work.in_pass
        pass_over_z(stream, (z_at, at, dz_at), (packed, z_stats, partial))
    if plan.grads is None:
        return dz, []
    grads = TriMulWeights._make([torch.empty_like(w) for w in wide])
    weights_at = [w.data_ptr() for w in in_kernel_order(wide)]
    grads_at = [g.data_ptr() for g in in_kernel_order(grads)]
    shares = at + work.in_shares, at + work.out_shares, ticket
    plan.grads(stream, (), (in_partial, out_partial, *weights_at, *grads_at, *shares))
    if wide is not weights:
        grads = TriMulWeights._make(g.to(w.dtype) for g, w in zip(grads, weights, strict=True))
    return dz, grads
