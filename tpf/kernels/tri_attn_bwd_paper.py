"""The backward of the TurboPairFormer paper, kept as the baseline: partials of dQ and dbias.

One thread block owns a key tile in four slices and visits all query tiles; dQ leaves as one BF16
partial per key tile, dbias as one per group of slices, and both are added in ascending order in
FP32. The partials of dbias are reused within a call as in Table 2 of the paper. ``Atomic`` replaces
either by FP32 atomics, for the ablation of Table 12.
"""

from __future__ import annotations

import ctypes
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tpf.kernels import jit, launch
from tpf.kernels.launch import Launch
from tpf.kernels.tri_attn_bwd import Call, Inputs, filled, target, workspace
from tpf.kernels.tri_attn_bwd_plan import FOLD_BYTES, SHARED_LIMIT, TILE, Problem

GROUP = {16: 4, 32: 4, 64: 2}
"""Slices of a thread block, by padded head width."""
MAIN, SUM_DQ, SUM_DBIAS = "tri_attn_bwd_paper", "tri_attn_bwd_paper_dq", "tri_attn_bwd_paper_dbias"
KEEP_ALL_BYTES, REUSE_BYTES = 512 << 20, 256 << 20
"""Partials of dbias up to the first size are all kept; beyond, the second bounds them."""


class Atomic(NamedTuple):
    """Which sums take atomics instead of ordered partials; the results are then not repeatable."""

    dq: Literal["no", "element", "bulk"] = "no"
    dbias: bool = False


ORDERED = Atomic()


class _SumDqParams(ctypes.Structure):
    """``Params`` of tri_attn_bwd_paper_dq.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("partial", "dq")),
        ("stride", ctypes.c_int64 * 4),
        ("rows", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("tokens", "heads", "outer")),
        *((name, ctypes.c_int) for name in ("head_dim", "channels", "key_tiles")),
        ("scale", ctypes.c_float),
    ]


class _SumDbiasParams(ctypes.Structure):
    """``Params`` of tri_attn_bwd_paper_dbias.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("partial", "sums", "dbias")),
        ("stride", ctypes.c_int64 * 4),
        *((name, ctypes.c_int) for name in ("tokens", "tiles", "heads", "batch", "groups")),
        *((name, ctypes.c_int) for name in ("first", "last")),
    ]


def bias_groups(problem: Problem) -> int:
    """Return how many groups of slices have a dbias partial at a time (Table 2)."""
    groups = -(-problem.outer // GROUP[problem.width])
    partial = problem.batch * problem.heads * problem.tokens**2 * 2
    if groups * partial <= KEEP_ALL_BYTES:
        return groups
    return max(1, REUSE_BYTES // partial)


def shared_bytes(problem: Problem, atomic: Atomic = ORDERED) -> tuple[int, int]:
    """Return (stages, bytes of shared memory) of the main kernel; its source has the same sum."""
    operand = TILE * problem.width * 2
    stage = TILE * TILE * (4 if problem.wide_bias else 2)
    stage += GROUP[problem.width] * (2 * operand + TILE * FOLD_BYTES)
    scratch = TILE * TILE * 2 + operand * (2 if atomic.dq == "bulk" else 1) + TILE * TILE * 4
    fixed = 2 * GROUP[problem.width] * operand + 2 * scratch + 16 * 3 + 1024
    stages = min(2, (SHARED_LIMIT - fixed) // stage)
    return stages, fixed + stages * stage


def variants(problem: Problem, vector: bool, atomic: Atomic = ORDERED) -> dict[str, dict[str, int]]:
    """Return the kernels with their compile-time constants; vector: dq takes 16-byte stores."""
    shared = {"TPF_D": problem.width, "TPF_WIDE_BIAS": int(problem.wide_bias)}
    main = {
        "TPF_G": GROUP[problem.width],
        "TPF_STAGES": shared_bytes(problem, atomic)[0],
        "TPF_ATOMIC_DQ": ("no", "element", "bulk").index(atomic.dq),
        "TPF_ATOMIC_DBIAS": int(atomic.dbias),
    }
    wide = int(atomic.dq != "no")
    return {
        MAIN: {**shared, **main},
        SUM_DQ: {**shared, "TPF_VECTOR": int(vector), "TPF_WIDE_PARTIAL": wide},
        SUM_DBIAS: shared,
    }


@launch.plan
def _kernels(problem: Problem, device: int, vector: bool, atomic: Atomic) -> dict[str, jit.Kernel]:
    shared = {MAIN: shared_bytes(problem, atomic)[1]}
    defines = variants(problem, vector, atomic)
    return {name: jit.load(name, d, device, shared.get(name, 0)) for name, d in defines.items()}


def _sum_dq(call: Call, kernel: jit.Kernel, partial: Tensor, dq: Tensor) -> None:
    p = call.plan.problem
    rows, channels = dq.numel() // p.head_dim, partial.shape[-1]
    params = _SumDqParams(
        partial.data_ptr(), dq.data_ptr(), dq.stride()[:4], rows, p.tokens, p.heads, p.outer,
        p.head_dim, channels, partial.shape[0] // p.batch, call.plan.scale,
    )  # fmt: skip
    Launch(kernel, -(-rows * channels // (8 * 256)), 256, params)(call.stream)


def _sum_dbias(
    call: Call, kernel: jit.Kernel, partial: Tensor, sums: Tensor, dbias: Tensor,
    groups: int, first: bool, last: bool,
) -> None:  # fmt: skip
    p = call.plan.problem
    params = _SumDbiasParams(
        partial.data_ptr(), sums.data_ptr(), dbias.data_ptr(), dbias.stride(),
        p.tokens, p.tiles, p.heads, p.batch, groups, int(first), int(last),
    )  # fmt: skip
    Launch(kernel, p.batch * p.heads * p.tiles**2, 256, params)(call.stream)


def _main(
    call: Call, kernels: dict[str, jit.Kernel], pointers: tuple[int, ...],
    gradients: dict[str, Tensor], dbias: Tensor, atomic: Atomic,
) -> None:  # fmt: skip
    """Launch the main kernel and the sum of its dbias partials chunk by chunk of groups.

    pointers: of the main kernel, but for its partial sums of dbias, which are allocated here;
    gradients: what the copy engine writes, by name.
    """
    plan, p = call.plan, call.plan.problem
    groups = -(-p.outer // GROUP[p.width])
    kept = groups if atomic.dbias else bias_groups(p)
    tile_bytes = p.batch * p.heads * p.padded**2 * 4
    partial = workspace(0 if atomic.dbias else kept * tile_bytes // 2, dbias.device)
    sums = workspace(tile_bytes if atomic.dbias or kept < groups else 0, dbias.device)
    if atomic.dbias:
        sums.zero_()
    dbias_at = sums.data_ptr() if atomic.dbias else partial.data_ptr()
    pointers = *pointers[:4], dbias_at, *pointers[5:]
    maps = {name: plan.map(x.shape, x.stride()) for name, x in gradients.items()}
    addresses = *call.addresses, *(x.data_ptr() for x in gradients.values())
    blocks = -(-p.tokens // TILE)
    for first in range(0, groups, kept):
        count = min(kept, groups - first)
        params = plan.main_params(count, p.batch * count * p.heads * blocks)
        params.first_group, params.blocks = first, blocks
        grid = min(params.jobs, plan.multiprocessors)
        plan.main(kernels[MAIN], grid, params, maps)(call.stream, addresses, pointers)
        added = 0 if atomic.dbias else count
        start, end = first == 0 and not atomic.dbias, first + kept >= groups
        _sum_dbias(call, kernels[SUM_DBIAS], partial, sums, dbias, added, start, end)


def tri_attn_bwd_paper(
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
    atomic: Atomic = ORDERED,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv, dbias) by the paper's algorithm; arguments as ``tri_attn_bwd``."""
    b, o, h, n, d = q.shape
    inputs = Inputs(q, k, v, bias, mask, out, lse, residual, dout)
    call = Call(inputs, scale, shares_dk=False)
    plan = call.plan
    dq = q.new_empty_strided(q.shape, plan.gradients[0].strides)
    dk, dv = (target(x, g) for x, g in zip((k, v), plan.gradients[1:], strict=True))
    dbias = bias.new_empty_strided(bias.shape, plan.dbias_strides)
    vector = d % 8 == 0 and plan.gradients[0].direct
    kernels = _kernels(plan.problem, plan.device, vector, atomic)
    pointers = call.prepare(dk[1])
    if atomic.dq == "no":
        partial = store = q.new_empty((-(-n // TILE) * b, o, h, n, d + -d % 8))
    else:
        partial = q.new_zeros((b, o, h, n, plan.problem.width), dtype=torch.float32)
        store = call.operands[0]  # not written: dQ has no map
    written = {"dq": store, "dk": dk[1], "dv": dv[1]}
    pointers = *pointers[:5], partial.data_ptr(), *pointers[6:]
    _main(call, kernels, pointers, written, dbias, atomic)
    _sum_dq(call, kernels[SUM_DQ], partial, dq)
    return dq, filled(*dk), filled(*dv), dbias
