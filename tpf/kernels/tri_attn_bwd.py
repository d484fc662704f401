"""Backward of triangle attention on Hopper: workspace, tile choice and launches.

Three independent passes share one preparation (``kernels/tri_attn_prep_*.cu``): key-stationary dK
and dV, query-stationary dQ, and dbias summed over the slices in registers. No partial of dQ, dK or
dV exists, all sums are FP32 in a fixed order, and nothing is atomic.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tpf.kernels import jit
from tpf.kernels.reference import empty_dense_like
from tpf.kernels.tma import TensorMap, mappable, tensor_map

TILE = 64
BLOCK = 128
THREADS = 384
FOLD_BYTES = 16
SHARED_LIMIT = 232448
MAX_STAGES = 4
SLICES = {16: 4, 32: 2, 64: 1}
"""Slices that share a bias tile, by padded head width."""
PARTIAL_BYTES = 128 << 20
"""Most bytes of dbias partials."""
LOG2E = math.log2(math.e)
SMALLEST_SCALE = 1e-20
"""Stands in for a scale of zero where the kernels divide by it."""


class _MainParams(ctypes.Structure):
    """``Params`` of tri_attn_bwd.cuh."""

    _fields_ = [
        *((name, TensorMap) for name in ("q", "k", "v", "dout", "dq", "dk", "dv")),
        *((name, ctypes.c_void_p) for name in ("row_fold", "key_fold", "bias_s", "bias_st")),
        ("dbias_partial", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("tokens", "tiles", "blocks", "heads", "outer")),
        *((name, ctypes.c_int) for name in ("batch", "groups", "group", "jobs", "first_group")),
        *((name, ctypes.c_float) for name in ("scale", "scale2")),
        ("reserved", ctypes.c_uint32 * 10),
    ]


class _RowParams(ctypes.Structure):
    """``RowParams`` of tri_attn_prep_rows.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("dout", "out", "residual", "lse", "row_fold")),
        ("dout_stride", ctypes.c_int64 * 4),
        ("out_stride", ctypes.c_int64 * 4),
        *((name, ctypes.c_int) for name in ("tokens", "padded", "heads", "outer", "head_dim")),
        ("scale2", ctypes.c_float),
    ]


class _PairParams(ctypes.Structure):
    """``PairParams`` of tri_attn_prep_pair.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("bias", "mask", "bias_s", "bias_st", "key_fold")),
        ("bias_stride", ctypes.c_int64 * 4),
        ("mask_stride", ctypes.c_int64 * 3),
        *((name, ctypes.c_int) for name in ("tokens", "tiles", "heads", "outer", "batch")),
        ("scale2", ctypes.c_float),
    ]


class _ReduceParams(ctypes.Structure):
    """``ReduceParams`` of tri_attn_bwd_reduce.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("partial", "dbias")),
        ("stride", ctypes.c_int64 * 4),
        *((name, ctypes.c_int) for name in ("tokens", "tiles", "heads", "batch", "chunks")),
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

    @property
    def width(self) -> int:
        """Head width padded to 16, 32 or 64."""
        return next(w for w in SLICES if w >= self.head_dim)

    @property
    def slices(self) -> int:
        """Slices of one job of the dQ and dK, dV passes."""
        return SLICES[self.width]

    @property
    def blocks(self) -> int:
        """Blocks of 128 tokens."""
        return -(-self.tokens // BLOCK)

    @property
    def padded(self) -> int:
        """Tokens in whole blocks."""
        return self.blocks * BLOCK

    @property
    def bias_tiles(self) -> int:
        """64 x 64 tiles of the padded bias."""
        return self.batch * self.heads * (self.padded // TILE) ** 2


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


def shared_bytes(kernel: str, problem: Problem) -> tuple[int, int]:
    """Return (stages, bytes of shared memory) of a main kernel; its source has the same sum."""
    operand = TILE * problem.width * 2
    slice_bytes = 2 * operand + TILE * FOLD_BYTES
    fixed = 1024 + TILE * FOLD_BYTES + 16 * (MAX_STAGES + 2)
    if kernel == "tri_attn_bwd_bias":
        stage = 4 * slice_bytes
        fixed += 4 * TILE * TILE * 4
    else:
        stage = 2 * TILE * TILE * (4 if problem.wide_bias else 2) + problem.slices * slice_bytes
        fixed += 4 * problem.slices * (slice_bytes if kernel == "tri_attn_bwd_q" else 2 * operand)
    stages = min(MAX_STAGES, (SHARED_LIMIT - fixed) // stage)
    return stages, fixed + stages * stage


def variants(problem: Problem) -> dict[str, dict[str, int]]:
    """Return the kernels of a problem with their compile-time constants."""
    shared = {
        "TPF_D": problem.width,
        "TPF_G": problem.slices,
        "TPF_WIDE_BIAS": int(problem.wide_bias),
    }
    main = ("tri_attn_bwd_kv", "tri_attn_bwd_q", "tri_attn_bwd_bias")
    found = {
        name: {**shared, "TPF_STAGES": shared_bytes(name, problem)[0], "TPF_SPLIT": 1, "TPF_TURNS": 0, "TPF_FRAGMENTS": int(problem.width < 64)}
        for name in main
    }
    vector = int(problem.head_dim == problem.width)
    return {
        "tri_attn_prep_rows": {**shared, "TPF_VECTOR": vector},
        "tri_attn_prep_pair": shared,
        **found,
        "tri_attn_bwd_reduce": shared,
    }


def choose_chunks(problem: Problem, multiprocessors: int) -> tuple[int, int]:
    """Return (chunks, slices a chunk) of the dbias pass that finish first on that many SMs."""
    jobs = problem.batch * problem.heads * problem.blocks**2
    most = max(1, PARTIAL_BYTES // (problem.bias_tiles * TILE * TILE * 4))
    overhead = 3  # of a job, in units of one slice

    def cost(chunks: int) -> tuple[int, int]:
        waves = -(-jobs * chunks // multiprocessors)
        return waves * (-(-problem.outer // chunks) + overhead), chunks

    best = min(range(1, min(problem.outer, most) + 1), key=cost)
    size = -(-problem.outer // best)
    return -(-problem.outer // size), size


def _operand(x: Tensor) -> Tensor:
    """Return x [B, O, H, N, D] itself if the copy engine can read it, else a padded dense copy."""
    if mappable(x):
        return x
    padded = F.pad(x, (0, -x.shape[-1] % 8))
    return padded.transpose(2, 3).contiguous().transpose(2, 3)


def _target(like: Tensor) -> tuple[Tensor, Tensor]:
    """Return (gradient, tensor that the copy engine writes); they differ if it needs padding."""
    gradient = empty_dense_like(like)
    if mappable(gradient):
        return gradient, gradient
    b, o, h, n, d = like.shape
    return gradient, like.new_empty((b, o, n, h, d + -d % 8)).transpose(2, 3)


class _Call:
    """One backward call: its sizes, workspace and launches."""

    def __init__(self, q: Tensor, bias: Tensor, scale: float) -> None:
        b, o, h, n, d = q.shape
        self.problem = Problem(b, o, h, n, d, bias.dtype == torch.float32)
        self.device = q.device.index or 0
        self.multiprocessors = _multiprocessors(self.device)
        self.stream = _stream(self.device)
        self.variants = variants(self.problem)
        self.scale = scale
        scale2 = scale * LOG2E
        self.scale2 = math.copysign(max(abs(scale2), SMALLEST_SCALE), scale2)
        p = self.problem
        fold = functools.partial(torch.empty, dtype=torch.uint8, device=q.device)
        bias_bytes = p.bias_tiles * TILE * TILE * bias.element_size()
        self.row_fold = fold(b * o * h * p.padded * FOLD_BYTES)
        self.key_fold = fold(b * o * p.padded * FOLD_BYTES)
        self.bias_s, self.bias_st = fold(bias_bytes), fold(bias_bytes)
        self.chunks, self.chunk = choose_chunks(p, self.multiprocessors)
        self.partial = q.new_empty(self.chunks * p.bias_tiles * TILE * TILE, dtype=torch.float32)

    def launch(
        self, name: str, grid: tuple[int, int, int], params: ctypes.Structure, shared: int = 0
    ) -> None:
        kernel = jit.load(name, self.variants[name], self.device, shared)
        kernel.launch(grid, THREADS if shared else 256, params, self.stream)

    def prepare(
        self, bias: Tensor, mask: Tensor | None, saved: tuple[Tensor, Tensor, Tensor], dout: Tensor
    ) -> None:
        """Write the folds and the bias fragments; saved is (out, lse, residual)."""
        p = self.problem
        out, lse, residual = saved
        rows = _RowParams(
            dout.data_ptr(), out.data_ptr(), residual.data_ptr() if residual.numel() else None,
            lse.data_ptr(), self.row_fold.data_ptr(),
            (ctypes.c_int64 * 4)(*dout.stride()[:4]), (ctypes.c_int64 * 4)(*out.stride()[:4]),
            p.tokens, p.padded, p.heads, p.outer, p.head_dim, self.scale2,
        )  # fmt: skip
        if not (mappable(dout) and mappable(out)):
            self.variants["tri_attn_prep_rows"]["TPF_VECTOR"] = 0
        per_slice = p.padded * p.heads * p.width // 8
        self.launch("tri_attn_prep_rows", (p.batch * p.outer, -(-per_slice // 256), 1), rows)
        pair = _PairParams(
            bias.data_ptr(), None if mask is None else mask.data_ptr(),
            self.bias_s.data_ptr(), self.bias_st.data_ptr(), self.key_fold.data_ptr(),
            (ctypes.c_int64 * 4)(*bias.stride()),
            (ctypes.c_int64 * 3)(*((0, 0, 0) if mask is None else mask.stride())),
            p.tokens, p.padded // TILE, p.heads, p.outer, p.batch, self.scale2,
        )  # fmt: skip
        key_blocks = -(-p.batch * p.outer * p.padded // 256)
        self.launch("tri_attn_prep_pair", (p.bias_tiles + key_blocks, 1, 1), pair)

    def main_params(self, maps: list[TensorMap]) -> _MainParams:
        p = self.problem
        return _MainParams(
            *maps, *(x.data_ptr() for x in (self.row_fold, self.key_fold)),
            self.bias_s.data_ptr(), self.bias_st.data_ptr(), self.partial.data_ptr(),
            p.tokens, p.padded // TILE, p.blocks, p.heads, p.outer, p.batch,
            0, 0, 0, 0, self.scale, self.scale2,
        )  # fmt: skip

    def main(self, name: str, params: _MainParams) -> None:
        """Launch a main kernel over its jobs with a persistent grid."""
        p = self.problem
        if name == "tri_attn_bwd_bias":
            params.groups, params.group = self.chunks, self.chunk
            blocks = p.blocks**2
        else:
            params.groups, params.group = -(-p.outer // p.slices), p.slices
            blocks = p.blocks
        params.jobs = p.batch * params.groups * p.heads * blocks
        grid = (min(params.jobs, self.multiprocessors), 1, 1)
        self.launch(name, grid, params, shared_bytes(name, p)[1])

    def reduce(self, dbias: Tensor) -> None:
        """Add the chunks' partials into dbias."""
        p = self.problem
        params = _ReduceParams(
            self.partial.data_ptr(), dbias.data_ptr(), (ctypes.c_int64 * 4)(*dbias.stride()),
            p.tokens, p.padded // TILE, p.heads, p.batch, self.chunks,
        )  # fmt: skip
        self.launch("tri_attn_bwd_reduce", (p.bias_tiles, 1, 1), params)


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
    call = _Call(q, bias, scale)
    call.prepare(bias, mask, (out, lse, residual), dout)
    box = (1, 1, 1, TILE, call.problem.width)
    encode: Callable[[Tensor], TensorMap] = lambda x: tensor_map(x, box, call.problem.width * 2)  # noqa: E731
    inputs = [_operand(x) for x in (q, k, v, dout)]
    targets = [_target(x) for x in (q, k, v)]
    maps = [encode(x) for x in (*inputs, *(written for _, written in targets))]
    params = call.main_params(maps)
    for name in ("tri_attn_bwd_kv", "tri_attn_bwd_q", "tri_attn_bwd_bias"):
        call.main(name, params)
    dbias = empty_dense_like(bias)
    call.reduce(dbias)
    dq, dk, dv = (
        gradient if gradient is written else gradient.copy_(written[..., : q.shape[-1]])
        for gradient, written in targets
    )
    return dq, dk, dv, dbias
