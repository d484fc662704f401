"""Sizes, tile choice and plans of the attention backward."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tpf.kernels import jit, launch, tma, tri_attn
from tpf.kernels.launch import Launch
from tpf.kernels.reference import empty_dense_like
from tpf.kernels.tma import MapLayout
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
LOG2E = math.log2(math.e)
SMALLEST_SCALE = 1e-20
"""Stands in for a scale of zero where the kernels divide by it."""

KV, Q_BIAS, STRIPS = "tri_attn_bwd_kv", "tri_attn_bwd_q_bias", "tri_attn_bwd_strips"
PREP_ROWS, PREP_PAIR = "tri_attn_prep_rows", "tri_attn_prep_pair"
MAIN = (Q_BIAS, KV)
"""The main kernels in the order in which they run."""
MAIN_POINTERS = (
    "row_fold", "key_fold", "bias_s", "bias_st", "dbias_partial", "dq_sum", "order",
)  # fmt: skip


class Tuning(NamedTuple):
    """How a main kernel runs.

    A warpgroup takes that many slices at a time; split keeps the low bits of dS; ahead computes the
    scores of the next step early, for which a second score tile needs registers.
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
    way = tuning(kernel, problem)
    slices = way.slices
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
        way = tuning(name, problem)
        found[name] = {
            **shared,
            "TPF_G": way.slices,
            "TPF_SPLIT": int(way.split),
            "TPF_AHEAD": int(way.ahead),
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
    into: tuple[tuple[int, ...], ...] = ()
    """Of dq, dk and dv, if the caller gives them."""


class Signature(NamedTuple):
    """What the plan of a call depends on."""

    shape: tuple[int, ...]
    """Of q."""
    wide_bias: bool
    scale: float
    device: int
    aligned_rows: bool
    """out, its residual and dout begin at multiples of 16 bytes."""
    aligned_operands: bool
    """q, k, v and dout do."""
    layout: Layout
    shares_dk: bool
    """What only dQ and dbias need may lie where dK comes, which is written after them.

    Never if the caller gives dK: other tensors may lie between its rows.
    """


class Gradient(NamedTuple):
    """Strides of a gradient, and what the copy engine writes: the same tensor if it is direct."""

    strides: tuple[int, ...]
    written_shape: tuple[int, ...]
    written_strides: tuple[int, ...]
    direct: bool


def _dense_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of the gradient of a tensor."""
    x = torch.empty(1, dtype=torch.bfloat16, device="meta").as_strided(shape, strides)
    return empty_dense_like(x).stride()


def _gradient(shape: tuple[int, ...], strides: tuple[int, ...]) -> Gradient:
    dense = _dense_strides(shape, strides)
    if tma.mappable_layout(shape, dense):
        return Gradient(dense, shape, dense, True)
    b, o, h, n, d = shape
    room = d + -d % 8
    return Gradient(dense, (b, o, h, n, room), tri_attn.output_strides(o, h, n, room), False)


class Plan:
    """What calls of the same signature share: launches, workspace, gradients."""

    def __init__(self, x: Signature) -> None:
        b, o, h, n, d = x.shape
        self.problem = p = Problem(b, o, h, n, d, x.wide_bias)
        self.device, self.layout = x.device, x.layout
        self.scale2 = math.copysign(max(abs(x.scale * LOG2E), SMALLEST_SCALE), x.scale)
        self.scale = x.scale
        self.masked = x.layout.mask != ()
        self.multiprocessors = tri_attn.processors(x.device)
        self.walk = walk(p, self.multiprocessors)
        self.gradients = [_gradient(x.shape, strides) for strides in x.layout[:3]]
        if x.layout.into:
            self.gradients = [Gradient(g, x.shape, g, True) for g in x.layout.into]
        self.dbias_strides = _dense_strides((b, h, n, n), x.layout.bias)
        self._lay_out(x.shares_dk and not x.layout.into)
        self._order: Tensor | None = None
        strides = *x.layout[:3], x.layout.dout
        self.copied = [
            not (x.aligned_operands and tma.mappable_layout(x.shape, s)) for s in strides
        ]
        copy = tri_attn.copy_strides(x.shape)
        self.operands = [
            self.map(x.shape, copy if copied else s)
            for s, copied in zip(strides, self.copied, strict=True)
        ]
        rows = x.layout.out, x.layout.dout
        vector = x.aligned_rows and d == p.width
        vector = vector and all(tma.mappable_layout(x.shape, strides) for strides in rows)
        self._set_launches(variants(p, vector))

    def map(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> MapLayout:
        """Return the tensor map of rows, one box a 64-token tile of one head."""
        return MapLayout(
            shape, strides, (1, 1, 1, TILE, self.problem.width), self.problem.width * 2
        )

    def _lay_out(self, shares_dk: bool) -> None:
        """Place what all passes need, and before or in dK what only dQ and dbias need."""
        p = self.problem
        self.offsets, size = launch.lay_out({
            "row_fold": p.rows * FOLD_BYTES,
            "dropped_rows": TILE * FOLD_BYTES,
            "key_fold": (p.batch * p.outer if self.masked else 1) * p.padded * FOLD_BYTES,
            "bias_st": p.bias_bytes(p.wide_bias),
        })  # fmt: skip
        strips = self.walk.slots * p.used_tiles * TILE * TILE * 4
        early, early_bytes = launch.lay_out({"bias_s": p.bias_bytes(True), "dbias_partial": strips})
        self.early_in_dk = shares_dk and 2 * math.prod(self.gradients[1][1]) >= early_bytes
        start = 0 if self.early_in_dk else size
        self.bias_s, self.dbias_partial = start, start + early["dbias_partial"]
        self.workspace_bytes = size + (0 if self.early_in_dk else early_bytes)

    def _set_launches(self, constants: dict[str, dict[str, int]]) -> None:
        p, layout = self.problem, self.layout

        def load(name: str) -> jit.Kernel:
            shared = shared_bytes(name, p)[1] if name in MAIN else 0
            return jit.load(name, constants[name], self.device, shared)

        slice_blocks = -(-p.padded * p.heads * p.width // (8 * SMALL_THREADS))
        rows = RowParams(
            dout_stride=layout.dout[:4], out_stride=layout.out[:4], tokens=p.tokens,
            padded=p.padded, heads=p.heads, outer=p.outer, head_dim=p.head_dim,
            slice_blocks=slice_blocks, scale2=self.scale2,
        )  # fmt: skip
        self.prep_rows = Launch(
            load(PREP_ROWS), p.batch * p.outer * slice_blocks, SMALL_THREADS, rows,
            pointers=("dout", "out", "residual", "lse", "row_fold"),
        )  # fmt: skip
        slices = p.batch * p.outer if self.masked else 1
        pair = PairParams(
            bias_stride=layout.bias, mask_stride=layout.mask, tokens=p.tokens, tiles=p.tiles,
            heads=p.heads, batch=p.batch, outer=p.outer, slices=slices, scale2=self.scale2,
        )  # fmt: skip
        blocks = p.batch * p.heads * p.tiles**2 + -(-slices * p.padded // SMALL_THREADS)
        self.prep_pair = Launch(
            load(PREP_PAIR), blocks, SMALL_THREADS, pair,
            pointers=("bias", "mask", "bias_s", "bias_st", "key_fold", "dropped_rows"),
        )  # fmt: skip
        dq, dk, dv = (self.map(g.written_shape, g.written_strides) for g in self.gradients)
        q_bias = self.main_params(self.walk.groups, self.walk.items)
        self.q_bias = self.main(load(Q_BIAS), self.walk.blocks, q_bias, {"dq": dq})
        groups = -(-p.outer // tuning(KV, p).slices)
        jobs = p.batch * groups * p.heads * p.blocks
        kv = self.main_params(groups, jobs)
        blocks = min(jobs, self.multiprocessors)
        self.kv = self.main(load(KV), blocks, kv, {"dk": dk, "dv": dv})
        strips = StripParams(
            stride=self.dbias_strides, tokens=p.tokens, tiles=p.used_tiles, heads=p.heads,
            groups=self.walk.groups, jobs=self.walk.items, blocks=self.walk.blocks,
        )  # fmt: skip
        blocks, pointers = self.walk.strips * p.used_tiles, ("partial", "dbias")
        self.strips = Launch(load(STRIPS), blocks, SMALL_THREADS, strips, pointers=pointers)

    def main_params(self, groups: int, jobs: int) -> MainParams:
        """Return the parameters of a main kernel, but for addresses and maps."""
        p = self.problem
        return MainParams(
            tokens=p.tokens, tiles=p.tiles, blocks=p.blocks, heads=p.heads, outer=p.outer,
            batch=p.batch, groups=groups, jobs=jobs, scale=self.scale, scale2=self.scale2,
            key_fold_stride=p.padded if self.masked else 0,
        )  # fmt: skip

    def main(
        self, kernel: jit.Kernel, blocks: int, params: MainParams, results: dict[str, MapLayout]
    ) -> Launch:
        """Return the launch of a main kernel that writes these gradients."""
        maps = dict(zip(("q", "k", "v", "dout"), self.operands, strict=True)) | results
        return Launch(kernel, blocks, THREADS, params, maps=maps, pointers=MAIN_POINTERS)

    def order(self, device: torch.device) -> int:
        """Return the address of the order of the walk on the device."""
        if self._order is None:
            self._order = _order(self.walk, device)
        return self._order.data_ptr()


@functools.cache  # never dropped: captured graphs keep its address
def _order(walk: Walk, device: torch.device) -> Tensor:
    return torch.tensor(walk.order(), dtype=torch.int32, device=device)


plan = launch.plan(Plan)
