"""Backward of triangle attention on Hopper: tile choice, workspace and launches.

Three independent passes share one preparation (``kernels/tri_attn_prep_*.cu``): key-stationary dK
and dV, query-stationary dQ, and dbias summed over the slices in registers. No partial of dQ, dK or
dV exists, all sums are FP32 in a fixed order, and nothing is atomic.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tpf.kernels import jit, tma, tri_attn
from tpf.kernels.reference import empty_dense_like
from tpf.kernels.tma import TensorMap, mappable

TILE = 64
BLOCK = 128
BLOCK_BYTES = BLOCK * BLOCK * 4
"""Size of one partial of dbias: 128 x 128 FP32."""
THREADS = 384
FOLD_BYTES = 16
SHARED_LIMIT = 232448
MAX_STAGES = 4
LOG2E = math.log2(math.e)
SMALLEST_SCALE = 1e-20
"""Stands in for a scale of zero where the kernels divide by it."""
PARTIAL_SLOTS = 768
"""Most partials of dbias (48 MiB)."""

KV, Q, BIAS = "tri_attn_bwd_kv", "tri_attn_bwd_q", "tri_attn_bwd_bias"
PREP_ROWS, PREP_PAIR, REDUCE = "tri_attn_prep_rows", "tri_attn_prep_pair", "tri_attn_bwd_reduce"


class Tuning(NamedTuple):
    """How a main kernel runs: slices that share a bias tile, and whether dS keeps its low bits."""

    slices: int
    split: bool


TUNING = {
    (KV, 16): Tuning(2, False), (KV, 32): Tuning(2, False), (KV, 64): Tuning(1, False),
    (Q, 16): Tuning(4, True), (Q, 32): Tuning(2, True), (Q, 64): Tuning(1, True),
    (BIAS, 16): Tuning(1, False), (BIAS, 32): Tuning(1, False), (BIAS, 64): Tuning(1, False),
}  # fmt: skip
"""By kernel and padded head width. A kernel has 240 registers a thread to spend on these."""


class MainParams(ctypes.Structure):
    """``Params`` of tri_attn_bwd.cuh."""

    _fields_ = [
        *((name, TensorMap) for name in ("q", "k", "v", "dout", "dq", "dk", "dv")),
        *((name, ctypes.c_void_p) for name in ("row_fold", "key_fold", "bias_s", "bias_st")),
        ("dbias_partial", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("tokens", "tiles", "blocks", "heads", "outer")),
        *((name, ctypes.c_int) for name in ("batch", "groups", "group", "jobs", "first_group")),
        *((name, ctypes.c_int) for name in ("whole_tiles", "key_fold_stride")),
        *((name, ctypes.c_float) for name in ("scale", "scale2")),
        ("padding", ctypes.c_uint32 * 8),
    ]


class _RowParams(ctypes.Structure):
    """``RowParams`` of tri_attn_prep_rows.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("dout", "out", "residual", "lse", "row_fold")),
        ("dout_stride", ctypes.c_int64 * 4),
        ("out_stride", ctypes.c_int64 * 4),
        *((name, ctypes.c_int) for name in ("tokens", "padded", "heads", "outer", "head_dim")),
        ("slice_blocks", ctypes.c_int),
        ("scale2", ctypes.c_float),
    ]


class _PairParams(ctypes.Structure):
    """``PairParams`` of tri_attn_prep_pair.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("bias", "mask", "bias_s", "bias_st", "key_fold")),
        ("bias_stride", ctypes.c_int64 * 4),
        ("mask_stride", ctypes.c_int64 * 3),
        *((name, ctypes.c_int) for name in ("tokens", "tiles", "heads", "batch")),
        *((name, ctypes.c_int) for name in ("outer", "slices")),
        ("scale2", ctypes.c_float),
    ]


class _ReduceParams(ctypes.Structure):
    """``ReduceParams`` of tri_attn_bwd_reduce.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("partial", "dbias")),
        ("stride", ctypes.c_int64 * 4),
        *((name, ctypes.c_int) for name in ("tokens", "tiles", "heads")),
        *((name, ctypes.c_int) for name in ("whole_tiles", "rest_tiles", "chunks")),
    ]


@dataclass(frozen=True)
class Problem:
    """Sizes of one call; tokens are padded to whole 128-token blocks."""

    batch: int
    outer: int
    heads: int
    tokens: int
    head_dim: int
    wide_bias: bool

    @functools.cached_property
    def width(self) -> int:
        """Head width padded to 16, 32 or 64."""
        return next(w for w in (16, 32, 64) if w >= self.head_dim)

    @functools.cached_property
    def blocks(self) -> int:
        """Blocks of 128 tokens."""
        return -(-self.tokens // BLOCK)

    @property
    def padded(self) -> int:
        """Tokens in whole blocks."""
        return self.blocks * BLOCK

    @property
    def tiles(self) -> int:
        """Tiles of 64 tokens."""
        return self.padded // TILE

    @property
    def bias_bytes(self) -> int:
        """Bytes of the bias in fragment order."""
        return self.batch * self.heads * self.padded**2 * (4 if self.wide_bias else 2)


class Cut(NamedTuple):
    """How the dbias pass divides its 128 x 128 tiles: whole ones first, the rest in chunks."""

    whole: int
    rest: int
    chunks: int
    chunk: int

    @property
    def jobs(self) -> int:
        """Jobs, each with one slot of the partials."""
        return self.whole + self.rest * self.chunks


def cut_dbias(tiles: int, outer: int, multiprocessors: int) -> Cut:
    """Return the cut that finishes first on that many SMs within PARTIAL_SLOTS slots."""
    whole = tiles // multiprocessors * multiprocessors
    rest = tiles - whole
    if rest == 0:
        return Cut(whole, 0, 1, outer)
    most = max(1, min(outer, (PARTIAL_SLOTS - whole) // rest))
    overhead = 3  # of a job, in units of one slice

    def cost(chunks: int) -> tuple[int, int]:
        waves = -(-rest * chunks // multiprocessors)
        return waves * (-(-outer // chunks) + overhead), chunks

    chunk = -(-outer // min(range(1, most + 1), key=cost))
    return Cut(whole, rest, -(-outer // chunk), chunk)


def shared_bytes(kernel: str, problem: Problem) -> tuple[int, int]:
    """Return (stages, bytes of shared memory) of a main kernel; its source has the same sum."""
    slices = TUNING[kernel, problem.width].slices
    operand = TILE * problem.width * 2
    slice_bytes = 2 * operand + TILE * FOLD_BYTES
    fixed = 1024 + TILE * FOLD_BYTES + 16 * (MAX_STAGES + 2)
    if kernel == BIAS:
        stage = 4 * slice_bytes
        fixed += 4 * TILE * TILE * 4
    else:
        stage = 2 * TILE * TILE * (4 if problem.wide_bias else 2) + slices * slice_bytes
        fixed += 4 * slices * (slice_bytes if kernel == Q else 2 * operand)
    stages = min(MAX_STAGES, (SHARED_LIMIT - fixed) // stage)
    return stages, fixed + stages * stage


def variants(problem: Problem, vector: bool = True) -> dict[str, dict[str, int]]:
    """Return the kernels of a problem with their compile-time constants.

    vector tells whether the rows of out and dout can be read 16 bytes at a time.
    """
    shared = {"TPF_D": problem.width, "TPF_G": 1, "TPF_WIDE_BIAS": int(problem.wide_bias)}
    found = {PREP_ROWS: {**shared, "TPF_VECTOR": int(vector)}, PREP_PAIR: shared, REDUCE: shared}
    for name in (KV, Q, BIAS):
        tuning = TUNING[name, problem.width]
        found[name] = {
            **shared,
            "TPF_G": tuning.slices,
            "TPF_SPLIT": int(tuning.split),
            "TPF_STAGES": shared_bytes(name, problem)[0],
        }
    return found


class Plan:
    """Everything about a call that depends only on its sizes and device; kept for the next call."""

    def __init__(self, problem: Problem, device: int, vector: bool) -> None:
        self.problem = problem
        self.device = device
        self.box = (1, 1, 1, TILE, problem.width)
        self.multiprocessors = tri_attn.processors(device)
        defines = variants(problem, vector)
        self.kernels = {
            name: jit.load(
                name,
                constants,
                device,
                shared_bytes(name, problem)[1] if (name, problem.width) in TUNING else 0,
            )
            for name, constants in defines.items()
        }
        tiles = problem.batch * problem.heads * problem.blocks**2
        self.cut = cut_dbias(tiles, problem.outer, self.multiprocessors)

    def launch(self, name: str, blocks: int, params: ctypes.Structure, stream: int) -> None:
        """Launch a kernel of 384 threads (main) or 256 (preparation and reduction)."""
        threads = THREADS if isinstance(params, MainParams) else 256
        self.kernels[name].launch((blocks, 1, 1), threads, params, stream)

    def launch_main(self, name: str, params: MainParams, stream: int) -> None:
        """Launch a main kernel over its jobs with a persistent grid."""
        p = self.problem
        if name == BIAS:
            params.groups, params.group = max(self.cut.rest, 1), self.cut.chunk
            params.jobs, params.whole_tiles = self.cut.jobs, self.cut.whole
        else:
            params.group = TUNING[name, p.width].slices
            params.groups = -(-p.outer // params.group)
            params.jobs = p.batch * params.groups * p.heads * p.blocks
        self.launch(name, min(params.jobs, self.multiprocessors), params, stream)

    def encode(self, x: Tensor) -> TensorMap:
        """Return the tensor map of an operand, one box a 64-token tile of one head."""
        return tma.tensor_map(x, self.box, self.problem.width * 2)


@functools.lru_cache(maxsize=256)
def plan(problem: Problem, device: int, vector: bool) -> Plan:
    """Return the plan of these sizes, compiling its kernels the first time."""
    return Plan(problem, device, vector)


def target(like: Tensor) -> tuple[Tensor, Tensor]:
    """Return (gradient, tensor that the copy engine writes); they differ if it needs padding."""
    gradient = empty_dense_like(like)
    if mappable(gradient):
        return gradient, gradient
    b, o, h, n, d = like.shape
    return gradient, like.new_empty((b, o, n, h, d + -d % 8)).transpose(2, 3)


class Call:
    """One backward call: its plan, the prepared inputs and the launches."""

    def __init__(self, q: Tensor, bias: Tensor, scale: float, vector: bool) -> None:
        b, o, h, n, d = q.shape
        problem = Problem(b, o, h, n, d, bias.dtype == torch.float32)
        self.device = q.device
        index = tri_attn.device_index(q)
        self.plan = plan(problem, index, vector)
        self.stream = tri_attn.raw_stream(index)
        self.scale = scale
        self.scale2 = math.copysign(max(abs(scale * LOG2E), SMALLEST_SCALE), scale)

    def empty(self, size: int) -> Tensor:
        """Allocate bytes."""
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def prepare_rows(self, out: Tensor, lse: Tensor, residual: Tensor, dout: Tensor) -> Tensor:
        """Return the query folds: log-sums and softmax corrections as channels."""
        p = self.plan.problem
        fold = self.empty(p.batch * p.outer * p.heads * p.padded * FOLD_BYTES)
        slice_blocks = -(-p.padded * p.heads * p.width // (8 * 256))
        params = _RowParams(
            dout.data_ptr(), out.data_ptr(), residual.data_ptr() if residual.numel() else None,
            lse.data_ptr(), fold.data_ptr(), dout.stride()[:4], out.stride()[:4],
            p.tokens, p.padded, p.heads, p.outer, p.head_dim, slice_blocks, self.scale2,
        )  # fmt: skip
        self.plan.launch(PREP_ROWS, p.batch * p.outer * slice_blocks, params, self.stream)
        return fold

    def prepare_pair(self, bias: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the bias in fragment order, rows = queries and rows = keys, and the key folds."""
        p = self.plan.problem
        slices = 1 if mask is None else p.batch * p.outer
        rows, columns = self.empty(p.bias_bytes), self.empty(p.bias_bytes)
        fold = self.empty(slices * p.padded * FOLD_BYTES)
        params = _PairParams(
            bias.data_ptr(), None if mask is None else mask.data_ptr(),
            rows.data_ptr(), columns.data_ptr(), fold.data_ptr(),
            bias.stride(), (0, 0, 0) if mask is None else mask.stride(),
            p.tokens, p.tiles, p.heads, p.batch, p.outer, slices, self.scale2,
        )  # fmt: skip
        blocks = p.batch * p.heads * p.tiles**2 + -(-slices * p.padded // 256)
        self.plan.launch(PREP_PAIR, blocks, params, self.stream)
        return rows, columns, fold

    def main_params(
        self, maps: list[TensorMap], row_fold: Tensor, key_fold: Tensor, masked: bool
    ) -> MainParams:
        """Return the parameters that all main kernels share."""
        p = self.plan.problem
        params = MainParams(*maps)
        params.row_fold, params.key_fold = row_fold.data_ptr(), key_fold.data_ptr()
        params.tokens, params.tiles, params.blocks = p.tokens, p.tiles, p.blocks
        params.heads, params.outer, params.batch = p.heads, p.outer, p.batch
        params.key_fold_stride = p.padded if masked else 0
        params.scale, params.scale2 = self.scale, self.scale2
        return params

    def dbias(self, bias: Tensor, params: MainParams) -> Tensor:
        """Run the dbias pass and add its partials."""
        p, cut = self.plan.problem, self.plan.cut
        gradient = empty_dense_like(bias)
        partial = self.empty(cut.jobs * BLOCK_BYTES)
        params.dbias_partial = partial.data_ptr()
        self.plan.launch_main(BIAS, params, self.stream)
        sums = _ReduceParams(
            partial.data_ptr(), gradient.data_ptr(), gradient.stride(),
            p.tokens, p.tiles, p.heads, cut.whole, cut.rest, cut.chunks,
        )  # fmt: skip
        self.plan.launch(REDUCE, p.batch * p.heads * p.tiles**2, sums, self.stream)
        return gradient


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
    vector = dim in (16, 32, 64) and mappable(dout) and mappable(out)
    call = Call(q, bias, scale, vector)
    row_fold = call.prepare_rows(out, lse, residual, dout)
    bias_s, bias_st, key_fold = call.prepare_pair(bias, mask)
    inputs = [tri_attn.mapped(x) for x in (q, k, v, dout)]
    targets = [target(x) for x in (q, k, v)]
    maps = [call.plan.encode(x) for x in (*inputs, *(written for _, written in targets))]
    params = call.main_params(maps, row_fold, key_fold, mask is not None)
    params.bias_s, params.bias_st = bias_s.data_ptr(), bias_st.data_ptr()
    call.plan.launch_main(KV, params, call.stream)
    del bias_st
    call.plan.launch_main(Q, params, call.stream)
    dbias = call.dbias(bias, params)
    dq, dk, dv = (
        gradient if gradient is written else gradient.copy_(written[..., :dim])
        for gradient, written in targets
    )
    return dq, dk, dv, dbias
