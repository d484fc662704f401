"""Tensor maps for the Hopper copy engine, encoded into 64-byte-aligned memory of our own."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from tpf.errors import HardwareError
from tpf.kernels import jit

MAP_BYTES = 128
_DATA_TYPES = {torch.bfloat16: (9, 2), torch.float32: (7, 4)}
"""CUtensorMapDataType and element bytes."""
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
"""Swizzle width in bytes to CUtensorMapSwizzle."""
_L2_PROMOTION_128B = 2


class TensorMap(ctypes.Structure):
    """The 128 bytes of a CUtensorMap, as a field of a kernel's parameter structure."""

    _fields_ = [("opaque", ctypes.c_uint64 * 16)]


def params_type(name: str, fields: list[tuple[str, type]]) -> type[ctypes.Structure]:
    """Return the structure of a kernel's parameters; tensor maps come first.

    The size is rounded up to 64 bytes, the alignment that a tensor map gives the structure in CUDA.
    """
    size = ctypes.sizeof(type(name, (ctypes.Structure,), {"_fields_": fields}))
    padded = [*fields, ("padding", ctypes.c_char * (-size % 64))] if size % 64 else fields
    return type(name, (ctypes.Structure,), {"_fields_": padded})


@functools.cache
def _encoder() -> ctypes._NamedFuncPointer:
    try:
        encode = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    except (OSError, AttributeError) as error:
        raise HardwareError(f"the NVIDIA driver has no tensor maps ({error}); update it") from error
    encode.restype = ctypes.c_int
    return encode


def _encode(
    pointer: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
) -> bytes:
    """Encode a map; shape, strides (bytes, without the innermost) and box are innermost first."""
    rank = len(shape)
    storage = ctypes.create_string_buffer(MAP_BYTES + 64)
    aligned = (ctypes.addressof(storage) + 63) & ~63
    arguments = (
        ctypes.c_void_p(aligned),
        ctypes.c_int(_DATA_TYPES[dtype][0]),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(pointer),
        (ctypes.c_uint64 * rank)(*shape),
        (ctypes.c_uint64 * max(rank - 1, 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*([1] * rank)),
        ctypes.c_int(0),
        ctypes.c_int(_SWIZZLES[swizzle]),
        ctypes.c_int(_L2_PROMOTION_128B),
        ctypes.c_int(0),
    )
    result = _encoder()(*arguments)
    if result == jit.NO_CONTEXT:
        jit.make_current(torch.cuda.current_device())
        result = _encoder()(*arguments)
    if result != 0:
        raise HardwareError(
            f"cuTensorMapEncodeTiled returned {result} for pointer {pointer:#x}, shape {shape}, "
            f"strides {strides} bytes, box {box}, swizzle {swizzle} (innermost first)"
        )
    return ctypes.string_at(aligned, MAP_BYTES)


@functools.lru_cache(maxsize=4096)
def _map(
    pointer: int,
    dtype: torch.dtype,
    shape: torch.Size,
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
) -> TensorMap:
    """Return the map of a tensor; shape, strides (elements) and box in the tensor's axis order."""
    size = _DATA_TYPES[dtype][1]
    inner_first = tuple(reversed(shape))
    steps = tuple(
        s * size if n > 1 else 16 for s, n in zip(strides[-2::-1], inner_first[1:], strict=True)
    )
    encoded = _encode(pointer, dtype, inner_first, steps, tuple(reversed(box)), swizzle)
    return TensorMap.from_buffer_copy(encoded)


def tensor_map(x: Tensor, box: tuple[int, ...], swizzle: int) -> TensorMap:
    """Return the map of x (its own strides) with a box in the axis order of x.

    Reads outside x give zeros. The last axis must have stride 1, the other strides and the address
    must be multiples of 16 bytes (``mappable``). swizzle is 0, 32, 64 or 128 bytes, at least the
    width of the box.
    """
    return _map(x.data_ptr(), x.dtype, x.shape, x.stride(), box, swizzle)


@functools.lru_cache(maxsize=4096)
def _mappable(shape: torch.Size, strides: tuple[int, ...], size: int) -> bool:
    if shape[-1] > 1 and strides[-1] != 1:
        return False
    return all(
        n <= 1 or (s > 0 and s * size % 16 == 0)
        for n, s in zip(shape[:-1], strides[:-1], strict=True)
    )


def mappable(x: Tensor) -> bool:
    """Return whether the copy engine can read x in place."""
    return x.data_ptr() % 16 == 0 and _mappable(x.shape, x.stride(), x.element_size())
