"""Launches of the transition kernels, ``kernels/pair_transition_*.cu``: products with activation.

They take 64 or 128 channels and a hidden layer of whole slices of 64 units (``fits``).
"""

from __future__ import annotations

import ctypes

from torch import Tensor

from tpf.kernels import jit, launch, tma, tri_attn
from tpf.kernels.launch import Launch
from tpf.kernels.tma import MapLayout, TensorMap

TILE = 64
"""Rows of a warpgroup, units of a slice, channels of a swizzle atom."""
BLOCK_ROWS = 2 * TILE
THREADS = 384
TILE_BYTES = 128 * TILE
CHANNELS = (64, 128)

_I32, _POINTER = ctypes.c_int32, ctypes.c_void_p
_SIZES = [(name, _I32) for name in ("count", "slices", "tiles")]
_ForwardParams = tma.params_type(
    "_ForwardParams",
    [
        *((name, TensorMap) for name in ("rows", "w_in", "w_out")),
        *((name, _POINTER) for name in ("x", "keep", "out")),
        *_SIZES,
    ],
)
_BackwardParams = tma.params_type(
    "_BackwardParams",
    [
        *((name, TensorMap) for name in ("rows", "dout", "w_in", "w_out", "dhidden", "product")),
        *((name, _POINTER) for name in ("keep", "drows")),
        *_SIZES,
    ],
)


def fits(channels: int, expanded: int) -> bool:
    """Return whether the kernels take this many channels and hidden units."""
    return channels in CHANNELS and expanded > 0 and expanded % TILE == 0


def defines(channels: int, backward: bool) -> dict[str, int]:
    """Return the constants of a variant: ring lengths, tiles in shared memory, its size."""
    blocks = channels // TILE
    stages, buffers, sources, staging = (2, 1, 2, 3) if backward else (3, 2, 1, 0)
    if blocks == 1:
        stages, buffers = 2 * stages, 2
    tiles = stages * 3 * blocks + 2 * (buffers * sources * blocks + staging)
    return {
        "TPF_CHANNELS": channels,
        "TPF_STAGES": stages,
        "TPF_BUFFERS": buffers,
        "TPF_SOURCES": sources,
        "TPF_STAGING": staging,
        "TPF_SHARED": 1024 + tiles * TILE_BYTES + 16 * (stages + 2 * buffers),
    }


def _map(rows: int, columns: int, box: int = TILE) -> MapLayout:
    """Return the map of a dense matrix, boxes of 64 columns."""
    return MapLayout((rows, columns), (columns, 1), (box, TILE), 2 * TILE)


@launch.plan
def _prepare(backward: bool, count: int, channels: int, expanded: int, device: int) -> Launch:
    name = "pair_transition_bwd" if backward else "pair_transition_fwd"
    variant, tiles = defines(channels, backward), -(-count // BLOCK_ROWS)
    kernel = jit.load(name, variant, device, variant["TPF_SHARED"])
    kind = _BackwardParams if backward else _ForwardParams
    params = kind(count=count, slices=expanded // TILE, tiles=tiles)
    rows = _map(count, channels)
    weights = {"w_in": _map(2 * expanded, channels), "w_out": _map(channels, expanded, channels)}
    maps, pointers = {"rows": rows} | weights, ["x", "keep", "out"]
    if backward:
        results = {"dhidden": _map(count, 2 * expanded), "product": _map(count, expanded)}
        maps, pointers = {"rows": rows, "dout": rows} | weights | results, ["keep", "drows"]
    blocks = min(tiles, tri_attn.processors(device))
    return Launch(kernel, blocks, THREADS, params, maps=maps, pointers=pointers)


def transition_forward(
    x: Tensor, normed: Tensor, keep: Tensor, w_in: Tensor, w_out: Tensor, out: Tensor
) -> None:
    """Write out = x + keep * (silu(normed w_a^T) * normed w_b^T) w_out^T.

    x, normed, out [M, C], keep bool [M], w_in [2 E, C] = [w_a; w_b], w_out [C, E]; all dense BF16.
    """
    device, (count, channels) = tri_attn.device_index(x), x.shape
    prepared = _prepare(False, count, channels, w_out.shape[1], device)
    maps = [t.data_ptr() for t in (normed, w_in, w_out)]
    addresses = x.data_ptr(), keep.data_ptr(), out.data_ptr()
    prepared(tri_attn.raw_stream(device), maps, addresses)


def transition_backward(
    normed: Tensor, dout: Tensor, keep: Tensor, w_in: Tensor, w_out: Tensor,
    dhidden: Tensor, product: Tensor, dnormed: Tensor,
) -> None:  # fmt: skip
    """Write the gradients of [a | b] [M, 2 E] and of ``normed``, and keep * silu(a) b [M, E].

    Operands as in ``transition_forward``; all dense BF16.
    """
    device, (count, channels) = tri_attn.device_index(normed), normed.shape
    prepared = _prepare(True, count, channels, w_out.shape[1], device)
    maps = [t.data_ptr() for t in (normed, dout, w_in, w_out, dhidden, product)]
    prepared(tri_attn.raw_stream(device), maps, (keep.data_ptr(), dnormed.data_ptr()))
