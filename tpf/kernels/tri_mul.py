"""Host side of the triangle multiplicative update on Hopper: sizes, packed weights, forward.

Four launches: weights to bf16 tiles, z to a and b (channel-major), the contraction by cuBLAS, and
the output. Layouts and kernels are described in ``kernels/README.md``.
"""

from __future__ import annotations

import ctypes
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tpf.kernels import jit, launch, tma, tri_attn
from tpf.kernels.launch import Launch
from tpf.kernels.reference import Direction, TriMulWeights
from tpf.kernels.tma import MapLayout, TensorMap

ROWS = 64
"""Positions of one work item."""
TILE_BYTES = 8192
"""64 positions or channels x 64 channels or positions in bf16."""
FORWARD_CONSUMERS = 3
BACKWARD_CONSUMERS = 2
MAX_STAGES = 4
PACK_ROWS = 32
"""Weight rows of one block of tri_mul_pack."""

IN, OUT, PACK = "tri_mul_in", "tri_mul_out", "tri_mul_pack"

_I32, _POINTER = ctypes.c_int32, ctypes.c_void_p


class Grid(ctypes.Structure):
    """``Grid`` of tri_mul.cuh."""

    _fields_ = [(name, _I32) for name in ("n", "pitch", "row_tiles", "tiles")]


MaskLayout = tuple[int, tuple[int, ...]]
"""Kind and strides of a mask."""


class Mask(ctypes.Structure):
    """``Mask`` of tri_mul.cuh."""

    _fields_ = [("values", _POINTER), ("stride", ctypes.c_int64 * 3), ("kind", _I32)]


MASK_KINDS = {torch.bool: 1, torch.float32: 2, torch.bfloat16: 3}
NO_MASK: MaskLayout = 0, (0, 0, 0)

# The weights are in the order of ``in_kernel_order``.
_PackParams = tma.params_type("_PackParams", [("weights", _POINTER * 10), ("packed", _POINTER)])
_InParams = tma.params_type(
    "_InParams",
    [
        ("z", TensorMap), ("ab", TensorMap), ("packed", _POINTER), ("stats", _POINTER),
        ("mask", Mask), ("grid", Grid),
    ],
)  # fmt: skip
_OutParams = tma.params_type(
    "_OutParams",
    [
        *((name, TensorMap) for name in ("z", "x", "out")),
        *((name, _POINTER) for name in ("packed", "z_stats", "x_stats")),
        ("grid", Grid),
    ],
)


class Sizes(NamedTuple):
    """Channels of z and hidden channels, and what follows for the kernels."""

    c: int
    hidden: int

    @property
    def c_tiles(self) -> int:
        """64-channel tiles of z."""
        return -(-self.c // 64)

    @property
    def hidden_tiles(self) -> int:
        """64-channel tiles of a, b or x."""
        return -(-self.hidden // 64)

    @property
    def units(self) -> int:
        """64-channel units of [a; b]."""
        return -(-2 * self.hidden // 64)

    @property
    def team(self) -> int:
        """Units that one pass of the backward takes."""
        return min(self.units, 2)

    @property
    def passes(self) -> int:
        """Passes of the backward over z."""
        return -(-self.units // self.team)

    @property
    def box(self) -> int:
        """Channels of one bulk copy of a or b."""
        return math.gcd(self.hidden, 64)

    @property
    def in_weights(self) -> int:
        """Bytes of the packed input weights."""
        return self.passes * self.team * 2 * self.c_tiles * TILE_BYTES

    @property
    def out_weights(self) -> int:
        """Bytes of the packed output weights."""
        return self.c_tiles * (self.hidden_tiles + self.c_tiles) * TILE_BYTES

    @property
    def packed_rows(self) -> int:
        """Rows of the packed weights."""
        return 2 * (self.passes * self.team + self.c_tiles) * 64

    @property
    def packed(self) -> int:
        """Bytes of the packed weights and their row sums."""
        return self.in_weights + self.out_weights + self.packed_rows * 8


def fit_stages(fixed: int, stage: int, barrier_bytes: int, users: int) -> tuple[int, int]:
    """Return (stages, bytes of shared memory) that fit beside the fixed part; 0 stages if none.

    users take items in turn. The stages are a multiple of them, so that a stage serves one user and
    its laps are waited for one by one: waiting by parity for any other lap could take the one
    before for it.
    """
    most = min(MAX_STAGES, (tri_attn.MAX_SHARED - fixed - 8) // (stage + barrier_bytes))
    stages = most // users * users
    return stages, fixed + 8 + stages * (stage + barrier_bytes)


class Variant(NamedTuple):
    """A kernel with its constants, threads and dynamic shared memory."""

    name: str
    defines: dict[str, int]
    threads: int
    shared: int

    def prepare(
        self,
        device: int,
        blocks: int,
        params: ctypes.Structure,
        pointers: Sequence[str],
        maps: Mapping[str, MapLayout] | None = None,
    ) -> Launch:
        """Return the launch on a device with these blocks."""
        kernel = jit.load(self.name, self.defines, device, self.shared)
        return Launch(kernel, blocks, self.threads, params, maps=maps, pointers=pointers)


@functools.cache
def forward_variants(sizes: Sizes) -> dict[str, Variant]:
    """Return the kernels of the forward for these sizes."""
    shared = {"CZ": sizes.c, "CH": sizes.hidden}
    in_fixed = sizes.units * (2 * sizes.c_tiles * TILE_BYTES + 64 * 16)
    out_fixed = sizes.out_weights + sizes.c_tiles * 64 * 16
    out_stage = (sizes.c_tiles + sizes.hidden_tiles) * TILE_BYTES
    return {
        PACK: Variant(PACK, shared, 256, 0),
        IN: _forward_variant(IN, shared, in_fixed, 2, sizes.c_tiles * TILE_BYTES),
        OUT: _forward_variant(OUT, shared, out_fixed, sizes.c_tiles, out_stage),
    }


def _forward_variant(
    name: str, shared: dict[str, int], fixed: int, outputs: int, stage: int
) -> Variant:
    """Return the kernel with three consumers, or two if three stages do not fit.

    fixed: bytes of the weights; outputs: output tiles of a consumer.
    """
    for consumers in (FORWARD_CONSUMERS, 2):
        tiles = consumers * outputs * TILE_BYTES
        stages, size = fit_stages(fixed + tiles, stage, 16, consumers)
        if stages:
            break
    found = shared | {"CONSUMERS": consumers, "STAGES": stages, "SHARED_BYTES": size}
    return Variant(name, found, 128 * (consumers + 1), size)


def readable(x: Tensor) -> Tensor:
    """Return x, or a copy of it that the copy engine can read."""
    return x if tma.mappable(x) else x.clone(memory_format=torch.contiguous_format)


def float_weights(weights: TriMulWeights) -> TriMulWeights:
    """Return the weights as dense FP32; the same tuple if they are."""
    for w in weights:
        if w.dtype is not torch.float32 or not w.is_contiguous():
            return TriMulWeights._make(w.float().contiguous() for w in weights)
    return weights


in_kernel_order: Callable[[TriMulWeights], tuple[Tensor, ...]] = operator.attrgetter(
    "linear_a_p", "linear_b_p", "linear_a_g", "linear_b_g", "linear_z", "linear_g",
    "layer_norm_in_weight", "layer_norm_in_bias", "layer_norm_out_weight", "layer_norm_out_bias",
)  # fmt: skip
"""The weights as the kernels' parameters list them."""


class View(NamedTuple):
    """A batch of matrices in a BF16 workspace; strides and offset in elements."""

    size: tuple[int, int, int]
    strides: tuple[int, int, int]
    offset: int

    def of(self, room: Tensor) -> Tensor:
        """Return the view of a workspace, which begins its storage."""
        return room.as_strided(self.size, self.strides, self.offset)


class Shape(NamedTuple):
    """Sizes of a call: z is [B, N, N, C]."""

    batch: int
    n: int
    sizes: Sizes

    @property
    def pitch(self) -> int:
        """Elements from one row of a, b or x to the next."""
        return (self.n + 7) // 8 * 8

    @property
    def hidden_elements(self) -> int:
        """Elements of x, and of a or b."""
        return self.batch * self.sizes.hidden * self.n * self.pitch

    @property
    def grid(self) -> Grid:
        """Work items."""
        row_tiles = -(-self.n // ROWS)
        return Grid(self.n, self.pitch, row_tiles, self.batch * self.n * row_tiles)

    def blocks(self, device: int) -> int:
        """Return the thread blocks of the kernels that walk the items."""
        row_tiles = -(-self.n // ROWS)
        return min(self.batch * self.n * row_tiles, tri_attn.processors(device))

    def positions(self, strides: tuple[int, ...] | None = None) -> MapLayout:
        """Return the map of [B, N, N, C], dense without strides: 64 positions x 64 channels."""
        b, n, c = self.batch, self.n, self.sizes.c
        dense = n * n * c, n * c, c, 1
        return MapLayout((b, n, n, c), strides or dense, (1, 1, ROWS, 64), 128)

    def channels(self) -> MapLayout:
        """Return the map of x [B, H, N, pitch]: boxes of 64 channels x 64 positions."""
        b, n, hidden, matrix = self.batch, self.n, self.sizes.hidden, self.n * self.pitch
        strides = hidden * matrix, matrix, self.pitch, 1
        return MapLayout((b, hidden, n, n), strides, (1, 64, 1, ROWS), 128)

    def branches(self) -> MapLayout:
        """Return the map of [a; b] [2, B, H, N, pitch]: boxes of channels x 64 positions."""
        x = self.channels()
        box = 1, 1, self.sizes.box, 1, ROWS
        return MapLayout((2, *x.shape), (self.hidden_elements, *x.strides), box, 128)

    def matrices(self, byte: int) -> View:
        """Return [B H, N, N] of a, b or x at a byte of a workspace."""
        size = self.batch * self.sizes.hidden, self.n, self.n
        return View(size, (self.n * self.pitch, self.pitch, 1), byte // 2)


class Saved:
    """What the backward needs beside z and the weights, in one BF16 tensor; offsets in bytes.

    a and b [2, B, H, N, pitch], their contraction x [B, H, N, pitch], FP32 statistics (of every
    position of z four, then of every position of x two) and the weights of the kernels.
    """

    def __init__(self, shape: Shape) -> None:
        positions = shape.batch * shape.n * shape.pitch
        parts = {
            "ab": 4 * shape.hidden_elements, "x": 2 * shape.hidden_elements,
            "z_stats": 16 * positions, "x_stats": 8 * positions, "packed": shape.sizes.packed,
        }  # fmt: skip
        offsets, size = launch.lay_out(parts)
        self.elements = size // 2
        self.x, self.packed = offsets["x"], offsets["packed"]
        self.z_stats, self.x_stats = offsets["z_stats"], offsets["x_stats"]
        self.a_view = shape.matrices(0)
        self.b_view = shape.matrices(2 * shape.hidden_elements)
        self.x_view = shape.matrices(self.x)


class _Forward:
    """Launches and sizes of the forward."""

    def __init__(
        self, shape: Shape, strides: tuple[int, ...], mask: MaskLayout, device: int
    ) -> None:
        sizes, blocks = shape.sizes, shape.blocks(device)
        variants, kind = forward_variants(sizes), mask[0]
        self.saved = Saved(shape)
        pack_blocks, pointers = sizes.packed_rows // PACK_ROWS, ["weights", "packed"]
        self.pack = variants[PACK].prepare(device, pack_blocks, _PackParams(), pointers)
        params = _InParams(grid=shape.grid, mask=Mask(None, mask[1], kind))
        z = shape.positions(strides)
        self.in_ = variants[IN].prepare(
            device, blocks, params, ("packed", "stats", "mask"), {"z": z, "ab": shape.branches()}
        )
        maps = {"z": z, "x": shape.channels(), "out": shape.positions()}
        pointers = ["packed", "z_stats", "x_stats"]
        params = _OutParams(grid=shape.grid)
        self.out = variants[OUT].prepare(device, blocks, params, pointers, maps)


@launch.plan
def _forward(
    shape: tuple[int, ...], strides: tuple[int, ...], hidden: int,
    mask: MaskLayout, device: int,
) -> _Forward:  # fmt: skip
    batch, n, _, c = shape
    return _Forward(Shape(batch, n, Sizes(c, hidden)), strides, mask, device)


def tri_mul_fwd(
    z: Tensor, mask: Tensor | None, weights: TriMulWeights, direction: Direction
) -> tuple[Tensor, Tensor]:
    """Launch the forward kernels: z bf16 [B, N, N, C], mask [B, N, N] or None, any weights' dtype.

    Returns the update [B, N, N, C] and what the backward needs, a tensor laid out by ``Saved``.
    """
    z, weights = readable(z), float_weights(weights)
    if mask is not None and mask.dtype not in MASK_KINDS:
        mask = mask.float()
    kind, mask_at = NO_MASK, 0
    if mask is not None:
        kind, mask_at = (MASK_KINDS[mask.dtype], mask.stride()), mask.data_ptr()
    device = tri_attn.device_index(z)
    plan = _forward(z.shape, z.stride(), weights.linear_a_p.shape[0], kind, device)
    parts, stream = plan.saved, tri_attn.raw_stream(device)
    out = torch.empty_like(z, memory_format=torch.contiguous_format)
    saved = z.new_empty(parts.elements)
    at, z_at = saved.data_ptr(), z.data_ptr()
    packed, z_stats = at + parts.packed, at + parts.z_stats
    weights_at = [w.data_ptr() for w in in_kernel_order(weights)]
    plan.pack(stream, (), (*weights_at, packed))
    plan.in_(stream, (z_at, at), (packed, z_stats, mask_at))
    a, b, x = parts.a_view.of(saved), parts.b_view.of(saved), parts.x_view.of(saved)
    left, right = (a, b.mT) if direction == "outgoing" else (a.mT, b)
    torch.bmm(left, right, out=x)
    maps = z_at, at + parts.x, out.data_ptr()
    plan.out(stream, maps, (packed, z_stats, at + parts.x_stats))
    return out, saved
