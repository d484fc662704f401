"""Sizes, tile choice, parameter structures and plans of the attention backward."""

from __future__ import annotations

import ctypes
import functools
import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tpf.kernels import jit, tma, tri_attn
from tpf.kernels.tma import TensorMap

TILE = 64
BLOCK = 128
BLOCK_BYTES = BLOCK * BLOCK * 4
"""Size of one partial of dbias: 128 x 128 FP32."""
THREADS = 384
FOLD_BYTES = 16
SHARED_LIMIT = 232448
MAX_STAGES = 4
MAX_PAIR_STAGES = 8  # in the two-pass dQ kernel a stage holds one step of both warpgroups
PARTIAL_SLOTS = 768
"""Most partials of dbias (48 MiB)."""
MAPS_KEPT = 4096
"""Tensor maps that a plan remembers."""

KV, Q, BIAS = "tri_attn_bwd_kv", "tri_attn_bwd_q", "tri_attn_bwd_bias"
Q_BIAS = "tri_attn_bwd_q_bias"
PREP_ROWS, PREP_PAIR = "tri_attn_prep_rows", "tri_attn_prep_pair"
REDUCE, STRIPS = "tri_attn_bwd_reduce", "tri_attn_bwd_strips"

PASSES = 2
"""2: dbias is summed where dQ is; 3: in a pass of its own."""


class Tuning(NamedTuple):
    """How a main kernel runs.

    A warpgroup takes that many slices at a time; split keeps the low bits of dS; ahead computes the
    scores of the next step under the exponentials of this one (always in the three-pass dQ kernel).
    """

    slices: int
    split: bool
    ahead: bool = False


TUNING = {
    (KV, 16): Tuning(2, False, True), (KV, 32): Tuning(2, False, True),
    (KV, 64): Tuning(1, False, True),
    (Q, 16): Tuning(4, True), (Q, 32): Tuning(2, True), (Q, 64): Tuning(1, True),
    (Q_BIAS, 16): Tuning(4, False, True), (Q_BIAS, 32): Tuning(4, False),
    (Q_BIAS, 64): Tuning(2, True),
    (BIAS, 16): Tuning(1, False), (BIAS, 32): Tuning(1, False), (BIAS, 64): Tuning(1, False),
}  # fmt: skip
"""By kernel and padded head width. A kernel has 240 registers a thread to spend on these."""


class MainParams(ctypes.Structure):
    """``Params`` of tri_attn_bwd.cuh."""

    _fields_ = [
        *((name, TensorMap) for name in ("q", "k", "v", "dout", "dq", "dk", "dv")),
        *((name, ctypes.c_void_p) for name in ("row_fold", "key_fold", "bias_s", "bias_st")),
        *((name, ctypes.c_void_p) for name in ("dbias_partial", "dq_sum", "order")),
        *((name, ctypes.c_int) for name in ("tokens", "tiles", "blocks", "heads", "outer")),
        *((name, ctypes.c_int) for name in ("batch", "groups", "group", "jobs", "first_group")),
        *((name, ctypes.c_int) for name in ("whole_tiles", "key_fold_stride")),
        *((name, ctypes.c_float) for name in ("scale", "scale2")),
        ("padding", ctypes.c_uint32 * 4),
    ]


class RowParams(ctypes.Structure):
    """``Params`` of tri_attn_prep_rows.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("dout", "out", "residual", "lse", "row_fold")),
        ("dout_stride", ctypes.c_int64 * 4),
        ("out_stride", ctypes.c_int64 * 4),
        *((name, ctypes.c_int) for name in ("tokens", "padded", "heads", "outer", "head_dim")),
        ("slice_blocks", ctypes.c_int),
        ("scale2", ctypes.c_float),
    ]


class PairParams(ctypes.Structure):
    """``Params`` of tri_attn_prep_pair.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("bias", "mask", "bias_s", "bias_st", "key_fold")),
        ("dropped_rows", ctypes.c_void_p),
        ("bias_stride", ctypes.c_int64 * 4),
        ("mask_stride", ctypes.c_int64 * 3),
        *((name, ctypes.c_int) for name in ("tokens", "tiles", "heads", "batch")),
        *((name, ctypes.c_int) for name in ("outer", "slices")),
        ("scale2", ctypes.c_float),
    ]


class ReduceParams(ctypes.Structure):
    """``Params`` of tri_attn_bwd_reduce.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("partial", "dbias")),
        ("stride", ctypes.c_int64 * 4),
        *((name, ctypes.c_int) for name in ("tokens", "tiles", "heads")),
        *((name, ctypes.c_int) for name in ("whole_tiles", "rest_tiles", "chunks")),
    ]


class StripParams(ctypes.Structure):
    """``Params`` of tri_attn_bwd_strips.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("partial", "dbias")),
        ("stride", ctypes.c_int64 * 4),
        *((name, ctypes.c_int) for name in ("tokens", "tiles", "heads")),
        *((name, ctypes.c_int) for name in ("groups", "jobs", "blocks")),
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


class Walk(NamedTuple):
    """How the two-pass dQ kernel divides its items, (64 queries, group of slices), among blocks.

    A strip is all groups of the same queries; items are numbered strip by strip. Block x takes as
    many as lie between x * items // blocks and the same for x + 1.
    """

    strips: int
    groups: int
    blocks: int

    @property
    def items(self) -> int:
        """Items of all strips."""
        return self.strips * self.groups

    @property
    def slots(self) -> int:
        """Partials of dbias, one for each strip of a block: strip s of block x in slot x + s."""
        return self.blocks + self.strips - 1

    def order(self) -> list[int]:
        """Return the items of block 0, block 1 and so on: 2 * item + (1 at a new strip).

        The blocks of a strip deal its groups evenly, and each block walks all its strips at once
        in ascending order of the groups. So all blocks work on about the same slices at any time
        and find their keys and values in L2.
        """
        starts = [block * self.items // self.blocks for block in range(self.blocks + 1)]
        shares: list[list[tuple[int, int]]] = [[] for _ in range(self.strips)]
        for block, (first, end) in enumerate(itertools.pairwise(starts)):
            for strip in range(first // self.groups, -(-end // self.groups)):
                low, high = strip * self.groups, (strip + 1) * self.groups
                shares[strip].append((block, min(end, high) - max(first, low)))
        walks: list[list[tuple[int, int]]] = [[] for _ in range(self.blocks)]
        for strip, parts in enumerate(shares):
            turns = sorted(((2 * i + 1) / n, block) for block, n in parts for i in range(n))
            for group, (_, block) in enumerate(turns):
                walks[block].append((group, strip))
        order = []
        for walk_of_block in walks:
            known: set[int] = set()
            for group, strip in sorted(walk_of_block):
                order.append(2 * (strip * self.groups + group) + (strip not in known))
                known.add(strip)
        return order


def walk(problem: Problem, multiprocessors: int) -> Walk:
    """Return the walk of a problem."""
    strips = problem.batch * problem.heads * problem.used_tiles
    groups = -(-problem.outer // (2 * TUNING[Q_BIAS, problem.width].slices))
    return Walk(strips, groups, min(strips * groups, multiprocessors))


def shared_bytes(kernel: str, problem: Problem) -> tuple[int, int]:
    """Return (stages, bytes of shared memory) of a main kernel; its source has the same sum."""
    tuning = TUNING[kernel, problem.width]
    slices = tuning.slices
    operand = TILE * problem.width * 2
    slice_bytes = 2 * operand + TILE * FOLD_BYTES
    fixed = 1024 + TILE * FOLD_BYTES + 16 * (MAX_STAGES + 2)
    if kernel == Q_BIAS:
        tile, staged = TILE * TILE * 4, 1 if problem.width == 64 else 2
        pair = 2 * slice_bytes
        fixed += slices * pair + 2 * staged * operand + (2 if problem.width == 64 else 3) * tile
        fixed += TILE * FOLD_BYTES + 16 * (slices + 8)
        stages = min(MAX_PAIR_STAGES, (SHARED_LIMIT - fixed) // pair)
        return stages, fixed + stages * pair
    if kernel == BIAS:
        stage = 4 * slice_bytes
        fixed += 4 * TILE * TILE * 4 if problem.wide_bias else 0
    else:
        stage = 2 * TILE * TILE * (4 if problem.wide_bias else 2) + slices * slice_bytes
        fixed += 4 * slices * slice_bytes + (TILE * FOLD_BYTES if kernel == KV else 0)
    stages = min(MAX_STAGES, (SHARED_LIMIT - fixed) // stage)
    return stages, fixed + stages * stage


def main_shared_bytes(kernel: str, problem: Problem) -> int:
    """Return the dynamic shared memory of any kernel; only the main ones have some."""
    return shared_bytes(kernel, problem)[1] if kernel in (KV, Q, BIAS, Q_BIAS) else 0


def passes() -> tuple[str, ...]:
    """Return the main kernels in the order in which they run."""
    return (KV, Q_BIAS) if PASSES == 2 else (KV, Q, BIAS)


def variants(problem: Problem, vector: bool = True) -> dict[str, dict[str, int]]:
    """Return the kernels of a problem with their compile-time constants.

    vector tells whether the rows of out and dout can be read 16 bytes at a time.
    """
    wide = int(problem.wide_bias)
    shared = {"TPF_D": problem.width, "TPF_G": 1, "TPF_WIDE_BIAS": wide}
    found = {
        PREP_ROWS: {**shared, "TPF_VECTOR": int(vector)},
        PREP_PAIR: {**shared, "TPF_WIDE_S": int(wide or PASSES == 2)},
        (STRIPS if PASSES == 2 else REDUCE): shared,
    }
    for name in passes():
        tuning = TUNING[name, problem.width]
        found[name] = {
            **shared,
            "TPF_G": tuning.slices,
            "TPF_SPLIT": int(tuning.split),
            "TPF_AHEAD": int(tuning.ahead),
            "TPF_STAGES": shared_bytes(name, problem)[0],
        }
    if PASSES == 2:
        found[Q_BIAS]["TPF_WIDE_BIAS"] = 1
    return found


class Plan:
    """Everything about a call that depends only on its sizes and device; kept for the next call.

    vector: rows of out and dout can be read 16 bytes at a time; masked: keys can be dropped.
    """

    def __init__(self, problem: Problem, device: int, vector: bool, masked: bool) -> None:
        self.problem = problem
        self.device = device
        self.masked = masked
        self.box = (1, 1, 1, TILE, problem.width)
        self.multiprocessors = tri_attn.processors(device)
        self.kernels = {
            name: jit.load(name, constants, device, main_shared_bytes(name, problem))
            for name, constants in variants(problem, vector).items()
        }
        tiles = problem.batch * problem.heads * problem.blocks**2
        self.cut = cut_dbias(tiles, problem.outer, self.multiprocessors)
        self.walk = walk(problem, self.multiprocessors)
        self.offsets, self.workspace_bytes = self._lay_out()
        self._maps: dict[tuple[object, ...], TensorMap] = {}
        self._order: Tensor | None = None

    def _lay_out(self) -> tuple[dict[str, int], int]:
        """Place the workspace; the dbias partials come when bias_st is no longer needed."""
        p = self.problem
        slices = p.batch * p.outer
        two = PASSES == 2
        strip_bytes = p.used_tiles * TILE * TILE * 4
        partials = self.walk.slots * strip_bytes if two else self.cut.jobs * BLOCK_BYTES
        sizes = {
            "row_fold": p.rows * FOLD_BYTES,
            "dropped_rows": TILE * FOLD_BYTES,
            "key_fold": (slices if self.masked else 1) * p.padded * FOLD_BYTES,
            "bias_s": p.bias_bytes(p.wide_bias or two),
            "bias_st": max(p.bias_bytes(p.wide_bias), partials),
        }
        offsets, end = {}, 0
        for name, size in sizes.items():
            offsets[name] = end
            end += -(-size // 1024) * 1024
        return {**offsets, "dbias_partial": offsets["bias_st"]}, end

    def order(self, device: torch.device) -> Tensor:
        """Return the order of the walk on the device."""
        if self._order is None:
            self._order = torch.tensor(self.walk.order(), dtype=torch.int32, device=device)
        return self._order

    def launch(self, name: str, blocks: int, params: ctypes.Structure, stream: int) -> None:
        """Launch a kernel of 384 threads (main) or 256 (preparation and reduction)."""
        threads = THREADS if isinstance(params, MainParams) else 256
        self.kernels[name].launch((blocks, 1, 1), threads, params, stream)

    def launch_main(self, name: str, params: MainParams, stream: int) -> None:
        """Launch a main kernel over its jobs with a persistent grid."""
        p = self.problem
        if name == Q_BIAS:
            params.groups, params.jobs = self.walk.groups, self.walk.items
        elif name == BIAS:
            params.groups, params.group = max(self.cut.rest, 1), self.cut.chunk
            params.jobs, params.whole_tiles = self.cut.jobs, self.cut.whole
        else:
            params.group = TUNING[name, p.width].slices
            params.groups = -(-p.outer // params.group)
            params.jobs = p.batch * params.groups * p.heads * p.blocks
        self.launch(name, min(params.jobs, self.multiprocessors), params, stream)

    def encode(self, x: Tensor) -> TensorMap:
        """Return the tensor map of an operand, one box a 64-token tile of one head."""
        key = (x.data_ptr(), x.shape, x.stride())
        if (found := self._maps.get(key)) is None:
            if len(self._maps) >= MAPS_KEPT:
                self._maps.clear()
            found = self._maps[key] = tma.tensor_map(x, self.box, self.problem.width * 2)
        return found


@functools.lru_cache(maxsize=256)
def plan(problem: Problem, device: int, vector: bool, masked: bool) -> Plan:
    """Return the plan of these sizes, compiling its kernels the first time."""
    return Plan(problem, device, vector, masked)
