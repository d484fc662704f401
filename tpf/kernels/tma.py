"""Tensor maps for the Hopper copy engine, encoded into 64-byte-aligned memory of our own."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import NamedTuple

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
def _driver() -> tuple[ctypes._NamedFuncPointer, ctypes._NamedFuncPointer]:
    """Return the driver's functions that encode a map and that change its address."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        encode, replace = library.cuTensorMapEncodeTiled, library.cuTensorMapReplaceAddress
    except (OSError, AttributeError) as error:
        raise HardwareError(f"the NVIDIA driver has no tensor maps ({error}); update it") from error
    encode.restype = replace.restype = ctypes.c_int
    replace.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    return encode, replace


def _checked(call: Callable[[], int], what: str) -> None:
    """Call a function of the driver, once more if the thread lacked a context."""
    if (result := call()) == jit.NO_CONTEXT:
        jit.make_current(torch.cuda.current_device())
        result = call()
    if result != 0:
        raise HardwareError(f"{what}: error {result}")


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
    what = f"encoding a tensor map of shape {shape}, strides {strides} bytes, box {box}"
    _checked(lambda: int(_driver()[0](*arguments)), f"{what}, swizzle {swizzle} (innermost first)")
    return ctypes.string_at(aligned, MAP_BYTES)


def mover() -> Callable[[int, int], int]:
    """Return the function that changes the address of the map at its first argument.

    It returns 0, or an error, after which ``move`` tries again or raises.
    """
    return _driver()[1]


def move(at: int, address: int) -> None:
    """Change the address of the map that lies at ``at``."""
    _checked(lambda: int(_driver()[1](at, address)), f"moving a tensor map to {address:#x}")


class MapLayout(NamedTuple):
    """A tensor map but for its address: the tensor, and the box that a copy moves.

    Reads outside the tensor give zeros. The last axis must have stride 1, the other strides and the
    address must be multiples of 16 bytes (``mappable``). swizzle is 0, 32, 64 or 128 bytes, at
    least the width of the box.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements; shape, strides and box have the axis order of the tensor."""
    box: tuple[int, ...]
    swizzle: int
    dtype: torch.dtype = torch.bfloat16

    def encode(self, address: int) -> bytes:
        """Return the map of the tensor at an address."""
        size = _DATA_TYPES[self.dtype][1]
        sizes = self.shape[::-1]
        outer = zip(self.strides[-2::-1], sizes[1:], strict=True)
        steps = [s * size if n > 1 else 16 for s, n in outer]
        return _encode(address, self.dtype, sizes, tuple(steps), self.box[::-1], self.swizzle)


@functools.lru_cache(maxsize=4096)
def mappable_layout(shape: tuple[int, ...], strides: tuple[int, ...], size: int = 2) -> bool:
    """Return whether the copy engine can read elements of ``size`` bytes with these strides."""
    if shape[-1] > 1 and strides[-1] != 1:
        return False
    return all(
        n <= 1 or (s > 0 and s * size % 16 == 0)
        for n, s in zip(shape[:-1], strides[:-1], strict=True)
    )


def mappable(x: Tensor) -> bool:
    """Return whether the copy engine can read x in place."""
    return x.data_ptr() % 16 == 0 and mappable_layout(x.shape, x.stride(), x.element_size())
