"""Host side of the triangle attention kernels: tile choice, packed inputs, forward launch."""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tpf.kernels import jit, tma
from tpf.kernels.reference import empty_output
from tpf.kernels.tma import TensorMap

TILE = 64
"""Queries and keys of one score tile."""
QUERIES = 128
"""Queries of one forward work item: two warpgroups of 64."""
MAX_SHARED = 232448
"""Dynamic shared memory that one thread block of Hopper may have, in bytes."""


class ForwardTile(NamedTuple):
    """Tile of the forward kernel: outer slices that share a bias tile, and ring stages."""

    group: int
    stages: int


FORWARD_THREADS = 384
"""One producer warpgroup and two consumers."""

STREAM = True
"""Start a block's next work item while the last one ends (off: Table 9's core dataflow)."""

FORWARD_TILES = {
    (16, False): ForwardTile(4, 4),
    (16, True): ForwardTile(2, 4),
    (32, False): ForwardTile(2, 4),
    (32, True): ForwardTile(2, 4),
    (64, False): ForwardTile(1, 4),
    (64, True): ForwardTile(1, 4),
}
"""By (head width, masked)."""
FP32_BIAS_STAGES = {16: 3, 32: 3, 64: 4}
"""Ring stages by head width when the bias tiles are FP32 and twice as large."""

_I32, _I64, _F32, _POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_PackParams = tma.params_type(
    "_PackParams",
    [
        *((name, _POINTER) for name in ("bias", "tiles", "mask", "words")),
        *((f"bias_{axis}", _I64) for axis in "bhqk"),
        *((f"mask_{axis}", _I64) for axis in "bon"),
        *((name, _I32) for name in ("n", "heads", "outer", "key_tiles", "query_tiles")),
        *((name, _I32) for name in ("bias_blocks", "word_count")),
    ],
)
_ForwardParams = tma.params_type(
    "_ForwardParams",
    [
        *((name, TensorMap) for name in "qkv"),
        *((name, _POINTER) for name in ("bias_tiles", "words", "out", "residual", "lse")),
        ("bias_batch", _I64),
        *((name, _I32) for name in ("outer", "heads", "n", "d")),
        *((name, _I32) for name in ("key_tiles", "bias_key_tiles", "query_tiles")),
        *((name, _I32) for name in ("query_blocks", "groups", "items")),
        ("scale", _F32),
    ],
)


def head_width(d: int) -> int:
    """Return the padded head width of the kernels (16, 32 or 64)."""
    return 16 if d <= 16 else 32 if d <= 32 else 64


@functools.cache
def processors(device: int) -> int:
    """Return the number of multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def device_index(x: Tensor) -> int:
    """Return the index of the GPU that holds x."""
    return x.device.index if x.device.index is not None else torch.cuda.current_device()


def raw_stream(device: int) -> int:
    """Return the handle of PyTorch's current stream on a device."""
    return int(torch._C._cuda_getCurrentRawStream(device))  # ten times faster than the public way


def mapped(x: Tensor) -> Tensor:
    """Return x, or a copy of it that the copy engine can read (16-byte strides, unit D stride)."""
    if tma.mappable(x):
        return x
    return F.pad(x, (0, -x.shape[-1] % 8)).contiguous()[..., : x.shape[-1]]


def forward_defines(d: int, fp32_bias: bool, masked: bool, save_residual: bool) -> dict[str, int]:
    """Return the constants of the variant of the forward kernel for head width d."""
    width = head_width(d)
    tile = FORWARD_TILES[width, masked]
    return {
        "HEAD_DIM": width,
        "GROUP": tile.group,
        "STAGES": FP32_BIAS_STAGES[width] if fp32_bias else tile.stages,
        "BIAS_F32": int(fp32_bias),
        "HAS_MASK": int(masked),
        "SAVE_RESIDUAL": int(save_residual),
        "WHOLE_ROWS": int(d == width),
        "STREAM": int(STREAM),
    }


def forward_shared_bytes(defines: dict[str, int], key_tiles: int) -> int:
    """Return the dynamic shared memory of a variant: stages, two Q buffers, barriers, words."""
    row, group, stages = 2 * defines["HEAD_DIM"], defines["GROUP"], defines["STAGES"]
    stage = 2 * group * TILE * row + 2 * TILE * TILE * (4 if defines["BIAS_F32"] else 2)
    words = 2 * group * key_tiles * 8 if defines["HAS_MASK"] else 0
    return stages * stage + 2 * group * QUERIES * row + 16 * stages + 64 + words


def blocks_for(items: int, key_tiles: int, device: int) -> int:
    """Return the number of persistent thread blocks of the forward kernel.

    With STREAM and one or two key tiles the kernel's pipeline spans three work items, but it has
    two Q buffers: a block then takes at most two items.
    """
    blocks = min(items, processors(device))
    return max(blocks, (items + 1) // 2) if STREAM and key_tiles <= 2 else blocks


class _Plan(NamedTuple):
    """What a forward call takes from its sizes alone (layouts: kernels/README.md)."""

    pack: jit.Kernel
    kernel: jit.Kernel
    shared_bytes: int
    bias_bytes: int
    """Bytes of the bias tiles."""
    batch_bytes: int
    """Bytes between the bias tiles of two batch entries; 0 if all share one bias."""
    bias_blocks: int
    words: int
    """Mask words."""
    pack_sizes: tuple[int, ...]
    sizes: tuple[int, ...]
    items: int
    key_tiles: int


@functools.lru_cache(maxsize=256)
def _plan(
    shape: torch.Size, batches: int, fp32_bias: bool, masked: bool, save: bool, device: int,
    tile: ForwardTile, stream: bool,
) -> _Plan:  # fmt: skip
    """Plan the calls with q of this shape and ``batches`` biases; tile, stream: variant."""
    b, o, h, n, d = shape
    tiles = (n + 2 * TILE - 1) // (2 * TILE) * 2
    tile_bytes = TILE * TILE * (4 if fp32_bias else 2)
    defines = forward_defines(d, fp32_bias, masked, save)
    key_tiles = tiles if tile.group == 1 else (n + TILE - 1) // TILE
    query_blocks, groups = (n + QUERIES - 1) // QUERIES, (o + tile.group - 1) // tile.group
    items = b * groups * h * query_blocks
    bias_blocks, words = batches * h * tiles * tiles, b * o * tiles if masked else 0
    return _Plan(
        pack=jit.load("tri_attn_pack", {"BIAS_F32": int(fp32_bias)}, device),
        kernel=jit.load("tri_attn_fwd", defines, device, MAX_SHARED),
        shared_bytes=forward_shared_bytes(defines, tiles),
        bias_bytes=bias_blocks * tile_bytes,
        batch_bytes=0 if batches == 1 else h * tiles * tiles * tile_bytes,
        bias_blocks=bias_blocks,
        words=words,
        pack_sizes=(n, h, o, tiles, tiles, bias_blocks, words),
        sizes=(o, h, n, d, key_tiles, tiles, tiles, query_blocks, groups, items),
        items=items,
        key_tiles=key_tiles,
    )


def _pack(plan: _Plan, bias: Tensor, mask: Tensor | None, stream: int) -> tuple[Tensor, int]:
    """Write the bias as tiles in fragment order, then the mask as 64-bit words.

    Returns the buffer and the address of the words (0 without a mask).
    """
    packed = bias.new_empty(plan.bias_bytes + 8 * plan.words, dtype=torch.uint8)
    tiles = packed.data_ptr()
    words = 0 if mask is None else tiles + plan.bias_bytes
    pointer, strides = (0, (0, 0, 0)) if mask is None else (mask.data_ptr(), mask.stride())
    params = _PackParams(
        bias.data_ptr(), tiles, pointer, words, *bias.stride(), *strides, *plan.pack_sizes
    )
    plan.pack.launch((plan.bias_blocks + (plan.words + 3) // 4, 1, 1), 128, params, stream)
    return packed, words


def tri_attn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    scale: float,
    save_residual: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the forward kernels; tensors as in kernels/README.md, checked by the caller.

    Returns out [B, O, H, N, D] bf16, lse [B, O, H, N] fp32 (base 2) and the residual of out.
    """
    device, shape, masked = device_index(q), q.shape, mask is not None
    width = head_width(shape[-1])
    tile = FORWARD_TILES[width, masked]
    batches = 1 if bias.stride(0) == 0 else bias.shape[0]
    fp32 = bias.dtype == torch.float32
    plan = _plan(shape, batches, fp32, masked, save_residual, device, tile, STREAM)
    stream = raw_stream(device)
    out = empty_output(q)
    residual = empty_output(q) if save_residual else q.new_empty(0)
    lse = q.new_empty(shape[:-1], dtype=torch.float32)
    packed, words = _pack(plan, bias, mask, stream)
    q, k, v = mapped(q), mapped(k), mapped(v)
    rows = ((q, QUERIES), (k, TILE), (v, TILE))
    maps = [tma.tensor_map(x, (1, tile.group, 1, box, width), 2 * width) for x, box in rows]
    params = _ForwardParams(
        *maps, packed.data_ptr(), words, out.data_ptr(),
        residual.data_ptr() if save_residual else 0, lse.data_ptr(), plan.batch_bytes, *plan.sizes,
        scale,
    )  # fmt: skip
    blocks = blocks_for(plan.items, plan.key_tiles, device)
    plan.kernel.launch((blocks, 1, 1), FORWARD_THREADS, params, stream, plan.shared_bytes)
    return out, lse, residual
