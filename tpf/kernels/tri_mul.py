"""Host side of the triangle multiplicative update on Hopper: sizes, packed weights, forward.

Four launches: weights to bf16 tiles, z to a and b (channel-major), the contraction by cuBLAS, and
the output. Layouts and kernels are described in ``kernels/README.md``.
"""

from __future__ import annotations

import ctypes
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tpf.kernels import jit, launch, tma, tri_attn
from tpf.kernels.launch import Launch
from tpf.kernels.reference import Direction, TriMulWeights
from tpf.kernels.tma import MapLayout, TensorMap
from tpf.kernels.tri_mul_layout import TILE_BYTES, Grid, Saved, Shape, Sizes

FORWARD_CONSUMERS = 3
BACKWARD_CONSUMERS = 2
MAX_STAGES = 4
PACK_ROWS = 32
"""Weight rows of one block of tri_mul_pack."""

IN, OUT, PACK = "tri_mul_in", "tri_mul_out", "tri_mul_pack"

_I32, _POINTER = ctypes.c_int32, ctypes.c_void_p


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


def fit_stages(fixed: int, stage: int, barrier_bytes: int, users: int) -> tuple[int, int]:
    """Return (stages, bytes of shared memory) that fit beside the fixed part; 0 stages if none.

    users take items in turn. The stages are a multiple of them, so that a stage serves one user and
    its laps are waited for one by one: waiting by parity for any other lap could take the one
    before for it.
    """
    most = min(MAX_STAGES, (tri_attn.MAX_SHARED - fixed - 8) // (stage + barrier_bytes))
    stages = max(most // users * users, 0)
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
    c, hidden = sizes.c_tiles, sizes.hidden_tiles
    shared = {"CZ": sizes.c, "CH": sizes.hidden}
    of_in, of_out = Unit(2 * c, 2, sizes.c, 32), Unit(c + hidden, 0, sizes.hidden, 0)
    return {
        PACK: Variant(PACK, shared, 256, 0),
        IN: _forward_variant(IN, shared, of_in, in_slices(sizes), c),
        OUT: _forward_variant(OUT, shared, of_out, out_slices(sizes), c + hidden),
    }


class Unit(NamedTuple):
    """What a forward kernel needs for 64 channels of its result."""

    weight_tiles: int
    outputs: int
    """Output tiles of a consumer; 0: one for each unit of its block."""
    operand: int
    """Channels of the operand in registers."""
    barriers: int
    """Bytes of the barriers of a consumer."""


def in_slices(sizes: Sizes) -> tuple[int, ...]:
    """Return the units that a block of tri_mul_in may do, best first."""
    return sizes.units, 2, 1


def out_slices(sizes: Sizes) -> tuple[int, ...]:
    """Return the units that a block of tri_mul_out may do, best first: divisors of all."""
    return tuple(n for n in range(sizes.c_tiles, 0, -1) if sizes.c_tiles % n == 0)


def _forward_variant(
    name: str, shared: dict[str, int], unit: Unit, slices: Sequence[int], stage_tiles: int
) -> Variant:
    """Return the kernel for the first slice that fits, with three consumers if they fit."""
    for units in slices:
        fixed = units * (unit.weight_tiles * TILE_BYTES + 64 * 16)
        for consumers in (FORWARD_CONSUMERS, 2) if unit.operand <= 128 else (2,):
            own = (unit.outputs or units) * TILE_BYTES + unit.barriers
            fixed_here = fixed + consumers * own
            stages, size = fit_stages(fixed_here, stage_tiles * TILE_BYTES, 16, consumers)
            if stages:
                found = {"SLICE": units, "CONSUMERS": consumers, "STAGES": stages}
                defines = shared | found | {"SHARED_BYTES": size}
                return Variant(name, defines, 128 * (consumers + 1), size)
    raise AssertionError(f"{name} fits no slice for {shared}")


def readable(x: Tensor) -> Tensor:
    """Return x [..., C], or a dense copy of it if the kernels cannot read it.

    With C no multiple of 64 it must be dense: at 96 channels single rows were read wrongly from
    other strides (``kernels/README.md``, "Rows that change at C = 96").
    """
    fits = x.is_contiguous() or x.shape[-1] % 64 == 0
    return x if fits and tma.mappable(x) else x.clone(memory_format=torch.contiguous_format)


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


class _Forward:
    """Launches and sizes of the forward."""

    def __init__(
        self, shape: Shape, strides: tuple[int, ...], mask: MaskLayout, device: int
    ) -> None:
        sizes, kind = shape.sizes, mask[0]
        variants = forward_variants(sizes)
        of_in = -(-sizes.units // variants[IN].defines["SLICE"])
        of_out = sizes.c_tiles // variants[OUT].defines["SLICE"]
        self.saved = Saved(shape)
        pack_blocks, pointers = sizes.packed_rows // PACK_ROWS, ["weights", "packed"]
        self.pack = variants[PACK].prepare(device, pack_blocks, _PackParams(), pointers)
        params = _InParams(grid=shape.grid, mask=Mask(None, mask[1], kind))
        z = shape.positions(strides)
        maps, pointers = {"z": z, "ab": shape.branches()}, ["packed", "stats", "mask"]
        blocks = shape.blocks(device, of_in)
        self.in_ = variants[IN].prepare(device, blocks, params, pointers, maps)
        maps = {"z": z, "x": shape.channels(), "out": shape.positions()}
        pointers = ["packed", "z_stats", "x_stats"]
        params, blocks = _OutParams(grid=shape.grid), shape.blocks(device, of_out)
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
    a, b, x = [view.of(saved) for view in parts.views]
    left, right = (a, b.mT) if direction == "outgoing" else (a.mT, b)
    torch.bmm(left, right, out=x)
    maps = z_at, at + parts.x, out.data_ptr()
    plan.out(stream, maps, (packed, z_stats, at + parts.x_stats))
    return out, saved
