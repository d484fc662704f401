"""Backward of the triangle multiplicative update on Hopper: workspace and launches.

The output side gives dx and the output gate's part of dz; cuBLAS gives da and db; passes over z,
128 channels of [a; b] each, add the rest of dz; a last kernel sums the partial weight gradients.
Nothing is atomic but a counter, and every sum has a fixed order.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from tpf.kernels import tma, tri_attn, tri_mul
from tpf.kernels.reference import Direction, TriMulWeights
from tpf.kernels.tma import TensorMap
from tpf.kernels.tri_mul import BACKWARD_CONSUMERS, TILE_BYTES, Grid, Saved, Sizes, Variant

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
        *((name, _POINTER) for name in ("a_p", "b_p", "a_g", "b_g", "z", "g")),
        *((name, _POINTER) for name in ("in_weight", "in_bias", "out_weight", "out_bias")),
        *((f"d_{name}", _POINTER) for name in ("a_p", "b_p", "a_g", "b_g", "z", "g")),
        *((f"d_{name}", _POINTER) for name in ("in_weight", "in_bias", "out_weight", "out_bias")),
        *((name, _POINTER) for name in ("in_shares", "out_shares", "ticket")),
        *((name, _I32) for name in ("in_slots", "out_slots")),
    ],
)


@functools.cache
def backward_variants(sizes: Sizes) -> dict[str, Variant]:
    """Return the kernels of the backward; the last pass over z also completes dz."""
    c, hidden = sizes.c_tiles, sizes.hidden_tiles
    threads = 128 * (BACKWARD_CONSUMERS + 1)
    shared = {"CZ": sizes.c, "CH": sizes.hidden}
    fixed = sizes.out_weights + c * 64 * 16
    stage = (hidden + 2 * c + max(hidden, c)) * TILE_BYTES + 5 * 1024
    stages, size = tri_mul.fit_stages(fixed, stage, 24, BACKWARD_CONSUMERS // c)
    defines = shared | {"STAGES": stages, "SHARED_BYTES": size}
    found = {BWD_OUT: Variant(BWD_OUT, defines, threads, size)}
    fixed = sizes.team * (2 * c * TILE_BYTES + 64 * 16)
    stage = 2 * (c + sizes.team) * TILE_BYTES + 3 * 1024
    stages, size = tri_mul.fit_stages(fixed, stage, 24, BACKWARD_CONSUMERS // sizes.team)
    for last in (0, 1):
        defines = shared | {"STAGES": stages, "LAST": last, "SHARED_BYTES": size}
        found[f"{BWD_IN}_{last}"] = Variant(BWD_IN, defines, threads, size)
    found[GRADS] = Variant(GRADS, shared, GRADS_THREADS, 0)
    return found


class Workspace:
    """Partial weight gradients: sizes in floats of what the blocks leave behind."""

    def __init__(self, sizes: Sizes, blocks: int) -> None:
        c, hidden = sizes.c_tiles, sizes.hidden_tiles
        self.in_slots = blocks * (BACKWARD_CONSUMERS // sizes.team)
        self.out_slots = blocks * (BACKWARD_CONSUMERS // c)
        self.in_pass = self.in_slots * sizes.team * 64 * (2 * c * 64 + 8)
        self.out_partial = self.out_slots * c * 64 * ((hidden + c) * 64 + 8)
        self.in_shares = 2 * (2 * sizes.hidden + sizes.c) * sizes.c
        self.out_shares = 2 * sizes.c * sizes.hidden
        self.common = self.out_partial + self.in_shares + self.out_shares + 4


def branch_gradients(dx: Tensor, ab: Tensor, direction: Direction) -> Tensor:
    """Return da and db [2, B, H, N, pitch] of the contraction."""
    dab = torch.empty_like(ab)
    dx, a, b = (tri_mul.matrices(t) for t in (dx, ab[0], ab[1]))
    da, db = tri_mul.matrices(dab[0]), tri_mul.matrices(dab[1])
    if direction == "outgoing":
        torch.bmm(dx, b, out=da)
        torch.bmm(dx.mT, a, out=db)
    else:
        torch.bmm(b, dx.mT, out=da)
        torch.bmm(a, dx, out=db)
    return dab


def _kernel_order(w: TriMulWeights) -> tuple[Tensor, ...]:
    return (
        w.linear_a_p, w.linear_b_p, w.linear_a_g, w.linear_b_g, w.linear_z, w.linear_g,
        w.layer_norm_in_weight, w.layer_norm_in_bias, w.layer_norm_out_weight,
        w.layer_norm_out_bias,
    )  # fmt: skip


def tri_mul_bwd(
    dout: Tensor, z: Tensor, weights: TriMulWeights, direction: Direction, saved: Saved
) -> tuple[Tensor, TriMulWeights]:
    """Launch the backward kernels; saved is what the forward of the same z and weights saved.

    Returns dz bf16 [B, N, N, C] and the gradients of the weights in their dtypes. Deterministic.
    """
    device = tri_attn.device_index(z)
    z, dout, grid = tri_mul.readable(z), tri_mul.readable(dout), tri_mul.grid_of(z)
    wide = tri_mul.float_weights(weights)
    sizes = Sizes(z.shape[-1], wide.linear_a_p.shape[0])
    variants = backward_variants(sizes)
    blocks = min(grid.tiles, tri_attn.processors(device))
    work = Workspace(sizes, blocks)
    common = torch.empty(work.common, dtype=torch.float32, device=z.device)
    in_shares = common.data_ptr() + 4 * work.out_partial
    out_shares = in_shares + 4 * work.in_shares
    ticket = out_shares + 4 * work.out_shares
    dz, dx = z.new_empty(z.shape), torch.empty_like(saved.x)
    z_map, carry = tri_mul.positions_map(z), tri_mul.positions_map(dz)
    packed, stats = saved.packed.data_ptr(), tri_mul.stats_pointers(saved)
    params = _BwdOutParams(
        z_map, tri_mul.channels_map(saved.x), tri_mul.positions_map(dout),
        tri_mul.channels_map(dx), carry, packed, *stats, common.data_ptr(), ticket, grid,
    )  # fmt: skip
    variants[BWD_OUT].launch(blocks, params, device)
    dab = branch_gradients(dx, saved.ab, direction)
    del dx  # its room serves for the partials
    partial = torch.empty(work.in_pass * sizes.passes, dtype=torch.float32, device=z.device)
    d_map = tri_mul.branches_map(dab, sizes.box)
    for index in range(sizes.passes):
        params = _BwdInParams(
            z_map, d_map, carry, packed, stats[0], partial.data_ptr() + 4 * work.in_pass * index,
            grid, index * sizes.team,
        )  # fmt: skip
        last = int(index == sizes.passes - 1)
        variants[f"{BWD_IN}_{last}"].launch(blocks, params, device)
    grads = TriMulWeights._make(torch.empty_like(w) for w in wide)
    params = _GradsParams(
        partial.data_ptr(), common.data_ptr(), *(w.data_ptr() for w in _kernel_order(wide)),
        *(g.data_ptr() for g in _kernel_order(grads)), in_shares, out_shares, ticket,
        work.in_slots, work.out_slots,
    )  # fmt: skip
    variants[GRADS].launch(2 * sizes.hidden + sizes.c, params, device)
    if wide is not weights:
        grads = TriMulWeights._make(g.to(w.dtype) for g, w in zip(grads, weights, strict=True))
    return dz, grads
