"""Host side of the triangle attention kernels: tile choice, packed inputs, forward launch."""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tpf.kernels import jit, launch, tma
from tpf.kernels.launch import Launch
from tpf.kernels.tma import MapLayout, TensorMap

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
        *((name, TensorMap) for name in ("q", "k", "v", "out_rows", "residual_rows")),
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
    return x.get_device()


def raw_stream(device: int) -> int:
    """Return the handle of PyTorch's current stream on a device."""
    return int(torch._C._cuda_getCurrentRawStream(device))  # ten times faster than the public way


def copy(x: Tensor) -> Tensor:
    """Return a row-major copy whose rows the copy engine can read (16-byte strides)."""
    return F.pad(x, (0, -x.shape[-1] % 8)).contiguous()[..., : x.shape[-1]]


def copy_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a copy of a tensor [B, O, H, N, D]."""
    _, o, h, n, d = shape
    room = d + -d % 8
    return o * h * n * room, h * n * room, n * room, room, 1


def output_strides(o: int, h: int, n: int, d: int) -> tuple[int, ...]:
    """Return the strides of [B, O, H, N, D] that is stored as [B, O, N, H, D]."""
    return o * n * h * d, n * h * d, d, h * d, 1


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
        "STAGED": int(d == width < 64),
        "STREAM": int(STREAM),
    }


def forward_shared_bytes(defines: dict[str, int], key_tiles: int) -> int:
    """Return a variant's dynamic shared memory: stages, Q, residual, items, barriers, words."""
    row, group, stages = 2 * defines["HEAD_DIM"], defines["GROUP"], defines["STAGES"]
    stage = 2 * group * TILE * row + 2 * TILE * TILE * (4 if defines["BIAS_F32"] else 2)
    words = 2 * group * key_tiles * 8 if defines["HAS_MASK"] else 0
    staged = QUERIES * row if defines["STAGED"] and defines["SAVE_RESIDUAL"] else 0
    return stages * stage + 2 * group * QUERIES * row + staged + 16 * stages + 96 + words


def blocks_for(items: int, key_tiles: int, device: int) -> int:
    """Return the number of persistent thread blocks of the forward kernel.

    With STREAM and one or two key tiles the kernel's pipeline spans three work items, but it has
    two Q buffers: a block then takes at most two items.
    """
    blocks = min(items, processors(device))
    return max(blocks, (items + 1) // 2) if STREAM and key_tiles <= 2 else blocks


class _Signature(NamedTuple):
    """What the plan of a forward call depends on; without a mask its strides are empty."""

    shape: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    """Of q, k, v, bias and mask, in elements."""
    fp32_bias: bool
    batches: int
    """Biases: 1 if all batch entries share one."""
    save: bool
    scale: float
    device: int
    tile: ForwardTile
    stream: bool


class _Plan:
    """Launches and sizes of the forward calls of a signature (layouts: kernels/README.md)."""

    def __init__(self, x: _Signature) -> None:
        b, o, h, n, d = x.shape
        q, k, v, bias, mask = x.strides
        masked, width = mask != (), head_width(d)
        tiles = (n + 2 * TILE - 1) // (2 * TILE) * 2
        tile_bytes = TILE * TILE * (4 if x.fp32_bias else 2)
        bias_blocks, word_count = x.batches * h * tiles * tiles, b * o * tiles if masked else 0
        self.bias_bytes = bias_blocks * tile_bytes
        self.packed_bytes = self.bias_bytes + 8 * word_count
        self.lse_shape, self.out_strides = x.shape[:-1], output_strides(o, h, n, d)
        self.mappable = all(tma.mappable_layout(x.shape, strides) for strides in (q, k, v))
        params = _PackParams(
            None, None, None, None, *bias, *(mask or (0, 0, 0)),
            n, h, o, tiles, tiles, bias_blocks, word_count,
        )  # fmt: skip
        kernel = jit.load("tri_attn_pack", {"BIAS_F32": int(x.fp32_bias)}, x.device)
        blocks, pointers = bias_blocks + (word_count + 3) // 4, ("bias", "tiles", "mask", "words")
        self.pack = Launch(kernel, blocks, 128, params, pointers=pointers)

        defines = forward_defines(d, x.fp32_bias, masked, x.save)
        key_tiles = tiles if x.tile.group == 1 else (n + TILE - 1) // TILE
        query_blocks, groups = (n + QUERIES - 1) // QUERIES, (o + x.tile.group - 1) // x.tile.group
        items = b * groups * h * query_blocks
        params = _ForwardParams(
            bias_batch=0 if x.batches == 1 else h * tiles * tiles * tile_bytes,
            outer=o, heads=h, n=n, d=d, key_tiles=key_tiles, bias_key_tiles=tiles,
            query_tiles=tiles, query_blocks=query_blocks, groups=groups, items=items, scale=x.scale,
        )  # fmt: skip
        boxes = [(1, x.tile.group, 1, rows, width) for rows in (QUERIES, TILE, TILE)]
        maps = {
            name: MapLayout(x.shape, strides, box, 2 * width)
            for name, strides, box in zip("qkv", (q, k, v), boxes, strict=True)
        }
        self.stores = (1 + x.save) * defines["STAGED"]
        for name in ("out_rows", "residual_rows")[: self.stores]:
            box = (1, 1, 1, 16, width)
            maps[name] = MapLayout(x.shape, self.out_strides, box, 2 * width)
        self.main = Launch(
            jit.load("tri_attn_fwd", defines, x.device, MAX_SHARED),
            blocks_for(items, key_tiles, x.device), FORWARD_THREADS, params,
            maps=maps, pointers=("bias_tiles", "words", "out", "residual", "lse"),
            shared_bytes=forward_shared_bytes(defines, tiles),
        )  # fmt: skip


_plan = launch.plan(_Plan)


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
    device, shape, bias_strides = device_index(q), q.shape, bias.stride()
    mask_strides, mask_at = ((), 0) if mask is None else (mask.stride(), mask.data_ptr())
    strides = q.stride(), k.stride(), v.stride(), bias_strides, mask_strides
    batches = 1 if bias_strides[0] == 0 else bias.shape[0]
    tile = FORWARD_TILES[head_width(shape[-1]), mask is not None]
    wide = bias.dtype is torch.float32
    plan = _plan(
        _Signature(shape, strides, wide, batches, save_residual, scale, device, tile, STREAM)
    )
    q_at, k_at, v_at = q.data_ptr(), k.data_ptr(), v.data_ptr()
    if not plan.mappable or (q_at | k_at | v_at) % 16:
        return tri_attn_fwd(copy(q), copy(k), copy(v), bias, mask, scale, save_residual)
    stream = raw_stream(device)
    out = q.new_empty_strided(shape, plan.out_strides)
    residual = q.new_empty_strided(shape, plan.out_strides) if save_residual else q.new_empty(0)
    lse = q.new_empty(plan.lse_shape, dtype=torch.float32)
    packed = q.new_empty(plan.packed_bytes, dtype=torch.uint8)
    tiles = packed.data_ptr()
    words = tiles + plan.bias_bytes if mask_at else 0
    plan.pack(stream, (), (bias.data_ptr(), tiles, mask_at, words))
    pointers = tiles, words, out.data_ptr(), residual.data_ptr(), lse.data_ptr()
    plan.main(stream, (q_at, k_at, v_at, *pointers[2:4][: plan.stores]), pointers)
    return out, lse, residual
