"""Host side of the triangle multiplicative update on Hopper: sizes, packed weights, forward.

Four launches: weights to bf16 tiles, z to a and b (channel-major), the contraction by cuBLAS, and
the output. Layouts and kernels are described in ``kernels/README.md``.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from tpf.kernels import jit, tma, tri_attn
from tpf.kernels.reference import Direction, TriMulWeights
from tpf.kernels.tma import TensorMap

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


class Mask(ctypes.Structure):
    """``Mask`` of tri_mul.cuh."""

    _fields_ = [("values", _POINTER), ("stride", ctypes.c_int64 * 3), ("kind", _I32)]


MASK_KINDS = {torch.bool: 1, torch.float32: 2, torch.bfloat16: 3}

_PackParams = tma.params_type(
    "_PackParams",
    [
        *((name, _POINTER) for name in ("a_p", "b_p", "a_g", "b_g", "z", "g")),
        *((name, _POINTER) for name in ("in_weight", "in_bias", "out_weight", "out_bias")),
        ("packed", _POINTER),
    ],
)
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

    def launch(self, blocks: int, params: ctypes.Structure, device: int) -> None:
        """Launch on PyTorch's current stream."""
        kernel = jit.load(self.name, self.defines, device, self.shared)
        kernel.launch((blocks, 1, 1), self.threads, params, tri_attn.raw_stream(device))


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


def grid_of(z: Tensor) -> Grid:
    """Return the work items of z [B, N, N, C]."""
    batch, n = z.shape[:2]
    row_tiles = -(-n // ROWS)
    return Grid(n, -(-n // 8) * 8, row_tiles, batch * n * row_tiles)


def readable(x: Tensor) -> Tensor:
    """Return x, or a copy of it that the copy engine can read."""
    return x if tma.mappable(x) else x.clone(memory_format=torch.contiguous_format)


def positions_map(x: Tensor) -> TensorMap:
    """Return the map of x [B, N, N, C]: boxes of 64 positions x 64 channels."""
    return tma.tensor_map(x, (1, 1, ROWS, 64), 128)


def square(x: Tensor) -> Tensor:
    """Return [.., N, N] of a tensor [.., N, pitch]."""
    n = x.shape[-2]
    return x if x.shape[-1] == n else x[..., :n]


def channels_map(x: Tensor) -> TensorMap:
    """Return the map of x [B, H, N, pitch]: boxes of 64 channels x 64 positions."""
    return tma.tensor_map(square(x), (1, 64, 1, ROWS), 128)


def branches_map(ab: Tensor, box: int) -> TensorMap:
    """Return the map of ab [2, B, H, N, pitch]: boxes of ``box`` channels x 64 positions."""
    return tma.tensor_map(square(ab), (1, 1, box, 1, ROWS), 128)


def matrices(x: Tensor) -> Tensor:
    """Return x [B, H, N, pitch] as a batch of N x N matrices."""
    return square(x.view(-1, *x.shape[-2:]))


def _mask_params(mask: Tensor | None) -> Mask:
    if mask is None:
        return Mask()
    return Mask(mask.data_ptr(), mask.stride(), MASK_KINDS[mask.dtype])


def float_weights(weights: TriMulWeights) -> TriMulWeights:
    """Return the weights as dense FP32; the same tuple if they are."""
    if all(w.dtype == torch.float32 and w.is_contiguous() for w in weights):
        return weights
    return TriMulWeights._make(w.float().contiguous() for w in weights)


class Saved(NamedTuple):
    """What the backward needs beside z and the weights."""

    ab: Tensor
    """a and b, bf16 [2, B, H, N, pitch]; the pitch is N rounded up to 8."""
    x: Tensor
    """Their contraction, bf16 [B, H, N, pitch]."""
    stats: Tensor
    """FP32: of every position of z four, then of every position of x two (tri_mul_*.cu)."""
    packed: Tensor
    """Weights of the kernels, bytes."""


def saved_like(z: Tensor, hidden: int) -> Saved:
    """Allocate what the forward saves for z [B, N, N, C]."""
    batch, n, _, c = z.shape
    pitch = (n + 7) // 8 * 8
    return Saved(
        z.new_empty((2, batch, hidden, n, pitch)),
        z.new_empty((batch, hidden, n, pitch)),
        z.new_empty(6 * batch * n * pitch, dtype=torch.float32),
        z.new_empty(Sizes(c, hidden).packed, dtype=torch.uint8),
    )


def stats_pointers(saved: Saved) -> tuple[int, int]:
    """Return the addresses of the statistics of z and of x."""
    start = saved.stats.data_ptr()
    return start, start + saved.stats.numel() // 6 * 16


def pack_weights(weights: TriMulWeights, packed: Tensor, sizes: Sizes, device: int) -> None:
    """Write the dense FP32 weights as the kernels read them."""
    w = weights
    order = (
        w.linear_a_p, w.linear_b_p, w.linear_a_g, w.linear_b_g, w.linear_z, w.linear_g,
        w.layer_norm_in_weight, w.layer_norm_in_bias, w.layer_norm_out_weight,
        w.layer_norm_out_bias, packed,
    )  # fmt: skip
    params = _PackParams(*(x.data_ptr() for x in order))
    forward_variants(sizes)[PACK].launch(sizes.packed_rows // PACK_ROWS, params, device)


def contract(a: Tensor, b: Tensor, x: Tensor, direction: Direction) -> None:
    """Write the contraction of a and b [B, H, N, pitch] to x."""
    a, b = matrices(a), matrices(b)
    left, right = (a, b.mT) if direction == "outgoing" else (a.mT, b)
    torch.bmm(left, right, out=matrices(x))


def tri_mul_fwd(
    z: Tensor, mask: Tensor | None, weights: TriMulWeights, direction: Direction
) -> tuple[Tensor, Saved]:
    """Launch the forward kernels: z bf16 [B, N, N, C], mask [B, N, N] or None, any weights' dtype.

    Returns the update [B, N, N, C] and what the backward needs.
    """
    device = tri_attn.device_index(z)
    z, grid = readable(z), grid_of(z)
    weights = float_weights(weights)
    sizes = Sizes(z.shape[-1], weights.linear_a_p.shape[0])
    variants = forward_variants(sizes)
    blocks = min(grid.tiles, tri_attn.processors(device))
    out, saved = z.new_empty(z.shape), saved_like(z, sizes.hidden)
    if mask is not None and mask.dtype not in MASK_KINDS:
        mask = mask.float()
    pack_weights(weights, saved.packed, sizes, device)
    z_stats, x_stats = stats_pointers(saved)
    z_map, packed = positions_map(z), saved.packed.data_ptr()
    params = _InParams(
        z_map, branches_map(saved.ab, sizes.box), packed, z_stats, _mask_params(mask), grid
    )
    variants[IN].launch(blocks, params, device)
    contract(saved.ab[0], saved.ab[1], saved.x, direction)
    maps = z_map, channels_map(saved.x), positions_map(out)
    variants[OUT].launch(blocks, _OutParams(*maps, packed, z_stats, x_stats, grid), device)
    return out, saved
