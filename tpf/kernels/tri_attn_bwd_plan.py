"""Sizes, tile choice and plans of the attention backward."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tpf.kernels import jit, tma, tri_attn
from tpf.kernels.reference import empty_dense_like
from tpf.kernels.tma import TensorMap
from tpf.kernels.tri_attn_bwd_params import MainParams, PairParams, RowParams, StripParams
from tpf.kernels.tri_attn_bwd_walk import Walk

TILE = 64
BLOCK = 128
THREADS = 384
"""Threads of a main kernel."""
SMALL_THREADS = 256
"""Threads of the other kernels."""
FOLD_BYTES = 16
SHARED_LIMIT = 232448
MAX_STAGES = 4
MAX_PAIR_STAGES = 8  # in the dQ kernel a stage holds one step of both warpgroups
MAPS_KEPT = 4096
"""Tensor maps that a plan remembers."""

KV, Q_BIAS, STRIPS = "tri_attn_bwd_kv", "tri_attn_bwd_q_bias", "tri_attn_bwd_strips"
PREP_ROWS, PREP_PAIR = "tri_attn_prep_rows", "tri_attn_prep_pair"
MAIN = (Q_BIAS, KV)
"""The main kernels in the order in which they run."""


class Tuning(NamedTuple):
    """How a main kernel runs.

    A warpgroup takes that many slices at a time; split keeps the low bits of dS; ahead computes the
    scores of the next step under the exponentials of this one.
    """

    slices: int
    split: bool
    ahead: bool = False


TUNING = {
    (KV, 16): Tuning(4, False, True), (KV, 32): Tuning(2, False, True),
    (KV, 64): Tuning(1, False, True),
    (Q_BIAS, 16): Tuning(4, False, True), (Q_BIAS, 32): Tuning(4, False),
    (Q_BIAS, 64): Tuning(2, True),
}  # fmt: skip
"""By kernel and padded head width. A kernel has 240 registers a thread to spend on these."""
FP32_BIAS_TUNING = {(KV, 16): Tuning(2, False, True)}
"""Exceptions for an FP32 bias, whose tiles would leave too few stages."""


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

    @functools.cached_property
    def padded(self) -> int:
        """Tokens in whole blocks."""
        return self.blocks * BLOCK

    @functools.cached_property
    def tiles(self) -> int:
        """Tiles of 64 tokens."""
        return self.padded // TILE

    @property
    def used_tiles(self) -> int:
        """Tiles with a token."""
        return -(-self.tokens // TILE)

    @property
    def rows(self) -> int:
        """Rows of all operands, with padding."""
        return self.batch * self.outer * self.heads * self.padded

    def bias_bytes(self, wide: bool) -> int:
        """Bytes of the bias in fragment order, in FP32 (wide) or BF16."""
        return self.batch * self.heads * self.padded**2 * (4 if wide else 2)


def tuning(kernel: str, problem: Problem) -> Tuning:
    """Return how a main kernel runs a problem."""
    key = kernel, problem.width
    exceptions = FP32_BIAS_TUNING if problem.wide_bias else {}
    return exceptions.get(key) or TUNING[key]


def walk(problem: Problem, multiprocessors: int) -> Walk:
    """Return the walk of a problem."""
    strips = problem.batch * problem.heads * problem.used_tiles
    groups = -(-problem.outer // (2 * tuning(Q_BIAS, problem).slices))
    return Walk(strips, groups, min(strips * groups, multiprocessors))


def shared_bytes(kernel: str, problem: Problem) -> tuple[int, int]:
    """Return (stages, bytes of shared memory) of a main kernel; its source has the same sum."""
    slices = tuning(kernel, problem).slices
    operand = TILE * problem.width * 2
    slice_bytes = 2 * operand + TILE * FOLD_BYTES
    fixed = 1024 + TILE * FOLD_BYTES + 16 * (MAX_STAGES + 2)
    if kernel == Q_BIAS:
        tile, staged = TILE * TILE * 4, 1 if problem.width == 64 else 2
        pair = 2 * slice_bytes
        fixed += slices * pair + 2 * staged * operand + 2 * tile
        fixed += TILE * FOLD_BYTES + 16 * (slices + 8)
        stages = min(MAX_PAIR_STAGES, (SHARED_LIMIT - fixed) // pair)
        return stages, fixed + stages * pair
    stage = 2 * TILE * TILE * (4 if problem.wide_bias else 2) + slices * slice_bytes
    fixed += 4 * slices * slice_bytes + TILE * FOLD_BYTES
    stages = min(MAX_STAGES, (SHARED_LIMIT - fixed) // stage)
    return stages, fixed + stages * stage


def variants(problem: Problem, vector: bool = True) -> dict[str, dict[str, int]]:
    """Return the kernels of a problem with their compile-time constants.

    vector tells whether the rows of out and dout can be read 16 bytes at a time.
    """
    shared = {"TPF_D": problem.width, "TPF_G": 1, "TPF_WIDE_BIAS": int(problem.wide_bias)}
    found = {
        PREP_ROWS: {**shared, "TPF_VECTOR": int(vector)},
        PREP_PAIR: shared,
        STRIPS: shared,
    }
    for name in MAIN:
        slices, split, ahead = tuning(name, problem)
        found[name] = {
            **shared,
            "TPF_G": slices,
            "TPF_SPLIT": int(split),
            "TPF_AHEAD": int(ahead),
            "TPF_STAGES": shared_bytes(name, problem)[0],
        }
    found[Q_BIAS]["TPF_WIDE_BIAS"] = 1
    return found


class Layout(NamedTuple):
    """Strides of the tensors of a call in elements; the mask has none if there is none."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    bias: tuple[int, ...]
    mask: tuple[int, ...]
    out: tuple[int, ...]
    dout: tuple[int, ...]


class Gradient(NamedTuple):
    """Strides of a gradient, and whether the copy engine can write it."""

    strides: tuple[int, ...]
    direct: bool


def _abstract(shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """Return a tensor without memory."""
    return torch.empty(1, dtype=torch.bfloat16, device="meta").as_strided(shape, strides)


def _gradient(shape: tuple[int, ...], strides: tuple[int, ...]) -> Gradient:
    dense = empty_dense_like(_abstract(shape, strides))
    return Gradient(dense.stride(), tma.mappable(dense))


class Plan:
    """What calls of the same sizes and strides share: kernels, workspace, gradients, parameters.

    The parameters are patterns without addresses and scale, which a call adds to its own copies.
    vector: rows of out and dout can be read 16 bytes at a time.
    """

    def __init__(self, problem: Problem, device: int, vector: bool, layout: Layout) -> None:
        self.problem = p = problem
        self.device = device
        self.masked = layout.mask != ()
        self.box = (1, 1, 1, TILE, p.width)
        self.multiprocessors = tri_attn.processors(device)
        self.walk = walk(p, self.multiprocessors)
        self.offsets, self.workspace_bytes = self._lay_out(self._kept())
        self.early_offsets, self.early_bytes = self._lay_out(self._early())
        shape = (p.batch, p.outer, p.heads, p.tokens, p.head_dim)
        self.gradients = [_gradient(shape, strides) for strides in layout[:3]]
        self.dbias = _gradient((p.batch, p.heads, p.tokens, p.tokens), layout.bias)
        self._maps: dict[tuple[object, ...], TensorMap] = {}
        self._order: Tensor | None = None
        blocks = self._set_params(layout)
        self._launches = {}
        for name, constants in variants(p, vector).items():
            threads = THREADS if name in MAIN else SMALL_THREADS
            shared = shared_bytes(name, p)[1] if name in MAIN else 0
            kernel = jit.load(name, constants, device, shared)
            self._launches[name] = kernel, (blocks[name], 1, 1), threads

    def _kept(self) -> dict[str, int]:
        """Return the bytes of what all passes need."""
        p = self.problem
        return {
            "row_fold": p.rows * FOLD_BYTES,
            "dropped_rows": TILE * FOLD_BYTES,
            "key_fold": (p.batch * p.outer if self.masked else 1) * p.padded * FOLD_BYTES,
            "bias_st": p.bias_bytes(p.wide_bias),
        }

    def _early(self) -> dict[str, int]:
        """Return the bytes of what only dQ and dbias need, which come before dK and dV."""
        strips = self.walk.slots * self.problem.used_tiles * TILE * TILE * 4
        return {"bias_s": self.problem.bias_bytes(True), "dbias_partial": strips}

    @staticmethod
    def _lay_out(sizes: dict[str, int]) -> tuple[dict[str, int], int]:
        """Return the offset of each part and the bytes of all."""
        offsets, end = {}, 0
        for name, size in sizes.items():
            offsets[name] = end
            end += -(-size // 1024) * 1024
        return offsets, end

    def _set_params(self, layout: Layout) -> dict[str, int]:
        """Set the patterns of the parameters; return the number of blocks of each kernel."""
        p, walk = self.problem, self.walk
        slice_blocks = -(-p.padded * p.heads * p.width // (8 * SMALL_THREADS))
        self.rows = RowParams(
            dout_stride=layout.dout[:4], out_stride=layout.out[:4], tokens=p.tokens,
            padded=p.padded, heads=p.heads, outer=p.outer, head_dim=p.head_dim,
            slice_blocks=slice_blocks,
        )  # fmt: skip
        slices = p.batch * p.outer if self.masked else 1
        self.pair = PairParams(
            bias_stride=layout.bias, mask_stride=layout.mask, tokens=p.tokens, tiles=p.tiles,
            heads=p.heads, batch=p.batch, outer=p.outer, slices=slices,
        )  # fmt: skip
        sizes = {
            "tokens": p.tokens, "tiles": p.tiles, "blocks": p.blocks, "heads": p.heads,
            "outer": p.outer, "batch": p.batch, "key_fold_stride": p.padded if self.masked else 0,
        }  # fmt: skip
        groups = -(-p.outer // tuning(KV, p).slices)
        jobs = p.batch * groups * p.heads * p.blocks
        self.main = MainParams(**sizes)
        self.work = {KV: (groups, jobs), Q_BIAS: (walk.groups, walk.items)}
        self.strips = StripParams(
            stride=self.dbias.strides, tokens=p.tokens, tiles=p.used_tiles, heads=p.heads,
            groups=walk.groups, jobs=walk.items, blocks=walk.blocks,
        )  # fmt: skip
        return {
            PREP_ROWS: p.batch * p.outer * slice_blocks,
            PREP_PAIR: p.batch * p.heads * p.tiles**2 + -(-slices * p.padded // SMALL_THREADS),
            KV: min(jobs, self.multiprocessors),
            Q_BIAS: walk.blocks,
            STRIPS: walk.strips * p.used_tiles,
        }

    def order(self, device: torch.device) -> Tensor:
        """Return the order of the walk on the device."""
        if self._order is None:
            self._order = torch.tensor(self.walk.order(), dtype=torch.int32, device=device)
        return self._order

    def launch(self, name: str, params: ctypes.Structure, stream: int) -> None:
        """Launch a kernel."""
        kernel, grid, threads = self._launches[name]
        kernel.launch(grid, threads, params, stream)

    def encode(self, x: Tensor) -> TensorMap:
        """Return the tensor map of x, one box a 64-token tile of one head."""
        key = (x.data_ptr(), x.shape, x.stride())
        if (found := self._maps.get(key)) is None:
            if len(self._maps) >= MAPS_KEPT:
                self._maps.clear()
            found = self._maps[key] = tma.tensor_map(x, self.box, self.problem.width * 2)
        return found

    def operand(self, x: Tensor) -> tuple[Tensor, TensorMap]:
        """Return x, or a copy of it that the copy engine can read, and its tensor map."""
        found = self._maps.get((x.data_ptr(), x.shape, x.stride()))
        if found is None:
            x = tri_attn.mapped(x)
            found = self.encode(x)
        return x, found


@functools.cache  # never dropped: a captured graph keeps the address of the plan's order
def plan(shape: torch.Size, wide_bias: bool, device: int, aligned: bool, layout: Layout) -> Plan:
    """Return the plan of these sizes, compiling its kernels the first time.

    shape: of q; aligned: out, its residual and dout begin at multiples of 16 bytes.
    """
    b, o, h, n, d = shape
    problem = Problem(b, o, h, n, d, wide_bias)
    rows = (_abstract(shape, layout.out), _abstract(shape, layout.dout))
    vector = aligned and d == problem.width and all(map(tma.mappable, rows))
    return Plan(problem, device, vector, layout)
