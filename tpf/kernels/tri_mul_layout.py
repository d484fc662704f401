"""Sizes of a triangle multiplicative update, and where its tensors lie in memory.

Shared by forward and backward on Hopper; layouts are described in ``kernels/README.md``.
"""

from __future__ import annotations

import ctypes
import math
from typing import NamedTuple

from torch import Tensor

from tpf.kernels import launch, tri_attn
from tpf.kernels.reference import TriMulWeights
from tpf.kernels.tma import MapLayout

ROWS = 64
"""Positions of one work item."""
TILE_BYTES = 8192
"""64 positions or channels x 64 channels or positions in bf16."""

_I32 = ctypes.c_int32


class Grid(ctypes.Structure):
    """``Grid`` of tri_mul.cuh."""

    _fields_ = [(name, _I32) for name in ("n", "pitch", "row_tiles", "tiles")]


class Sizes(NamedTuple):
    """Channels of z and hidden channels, and what follows for the kernels."""

    c: int
    hidden: int

    @classmethod
    def of(cls, weights: TriMulWeights) -> Sizes:
        """Return the sizes of a layer with these weights."""
        return cls(*weights.linear_z.shape)

    @property
    def fused_backward(self) -> bool:
        """Whether the weight gradients of 64 channels fit into the registers of a warpgroup."""
        return max(self) <= 128

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
    def hidden_strides(self) -> tuple[int, int, int, int]:
        """Strides of a, b or x as [B, H, N, N], in elements."""
        plane = self.n * self.pitch
        return self.sizes.hidden * plane, plane, self.pitch, 1

    @property
    def grid(self) -> Grid:
        """Work items."""
        row_tiles = -(-self.n // ROWS)
        return Grid(self.n, self.pitch, row_tiles, self.batch * self.n * row_tiles)

    def blocks(self, device: int, slices: int = 1) -> int:
        """Return the thread blocks of a kernel that walks the items once for each slice."""
        row_tiles = -(-self.n // ROWS)
        walkers = max(tri_attn.processors(device) // slices, 1)
        return min(self.batch * self.n * row_tiles, walkers) * slices

    def positions(self, strides: tuple[int, ...] | None = None) -> MapLayout:
        """Return the map of [B, N, N, C], dense without strides: 64 positions x 64 channels."""
        b, n, c = self.batch, self.n, self.sizes.c
        dense = n * n * c, n * c, c, 1
        return MapLayout((b, n, n, c), strides or dense, (1, 1, ROWS, 64), 128)

    def channels(self) -> MapLayout:
        """Return the map of x [B, H, N, N]: boxes of 64 channels x 64 positions."""
        shape = self.batch, self.sizes.hidden, self.n, self.n
        return MapLayout(shape, self.hidden_strides, (1, 64, 1, ROWS), 128)

    def branches(self) -> MapLayout:
        """Return the map of [a; b] [2, B, H, N, N]: boxes of channels x 64 positions."""
        x = self.channels()
        box = 1, 1, self.sizes.box, 1, ROWS
        return MapLayout((2, *x.shape), (self.hidden_elements, *x.strides), box, 128)

    def matrices(self, byte: int) -> View:
        """Return a, b or x at a byte of a workspace as a batch of N x N matrices."""
        size = self.batch * self.sizes.hidden, self.n, self.n
        return View(size, self.hidden_strides[1:], byte // 2)


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
        self.b = 2 * shape.hidden_elements
        self.views = [shape.matrices(byte) for byte in (0, self.b, self.x)]
        """Of a, b and x."""
