"""Prepared launches: all but addresses is fixed when a call of new sizes and strides comes first.

A plan of an operator holds its launches and sizes; ``plan`` keeps those of the last signatures.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, cast

from tpf.kernels import jit, tma
from tpf.kernels.tma import MapLayout

P = ParamSpec("P")
R = TypeVar("R")

PLANS = 512
"""Signatures of one operator whose plans are kept."""
PART_BYTES = 1024
"""Alignment of the parts of a workspace."""

_caches: list[Any] = []


def plan(build: Callable[P, R]) -> Callable[P, R]:
    """Keep the last results of ``build``, a function of sizes, strides, dtypes and a device index.

    A plan holds no tensor that a caller has seen, and its launches serve any thread and stream.
    """
    kept: Any = functools.lru_cache(maxsize=PLANS)(build)
    _caches.append(kept)
    return cast(Callable[P, R], kept)


def forget_plans() -> None:
    """Drop all plans, for a change of what they are made of."""
    for kept in _caches:
        kept.cache_clear()


def lay_out(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Return the offset of each part of a workspace and the bytes of all."""
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += -(-size // PART_BYTES) * PART_BYTES
    return offsets, end


class Launch:
    """A kernel with its blocks and parameters, in which a call sets addresses alone.

    maps: by field of ``params``, the tensor maps; pointers: the fields with the other addresses (a
    pointer, an array of them, or a structure that begins with one). Both in the order of a call.
    The driver copies the parameters at the launch; the lock keeps threads apart until then.
    """

    def __init__(
        self,
        kernel: jit.Kernel,
        blocks: int,
        threads: int,
        params: ctypes.Structure,
        *,
        maps: Mapping[str, MapLayout] | None = None,
        pointers: Sequence[str] = (),
        shared_bytes: int | None = None,
    ) -> None:
        shared = kernel.shared_bytes if shared_bytes is None else shared_bytes
        self._launch, self._sizes = kernel.launch, (blocks, 1, 1, threads, 1, 1, shared)
        kind, size = type(params), ctypes.sizeof(params)
        self._memory = ctypes.create_string_buffer(size + 64)
        start = -ctypes.addressof(self._memory) % 64  # as tensor maps ask
        at = ctypes.addressof(self._memory) + start
        ctypes.memmove(at, ctypes.addressof(params), size)
        self._layouts = tuple((maps or {}).values())
        self._maps = tuple(at + getattr(kind, name).offset for name in maps or {})
        self._runs = [
            (struct.Struct(f"{part.stop - part.start}Q").pack_into, start + offset, part)
            for offset, part in _runs(kind, pointers)
        ]
        self._address = ctypes.c_void_p(at)
        self._arguments = ctypes.addressof(self._address)
        self._move: Callable[[int, int], int] | None = None if maps else _no_map
        self._lock = threading.Lock()

    def __call__(self, stream: int, maps: Sequence[int] = (), pointers: Sequence[int] = ()) -> None:
        """Launch on a raw stream with the addresses of the tensor maps and of the pointers."""
        with self._lock:
            if (move := self._move) is None:
                self._encode(maps)
            else:
                for at, address in zip(self._maps, maps, strict=True):
                    if move(at, address):
                        tma.move(at, address)
            for pack, offset, part in self._runs:
                pack(self._memory, offset, *pointers[part])
            self._launch(self._sizes, self._arguments, stream)

    def _encode(self, addresses: Sequence[int]) -> None:
        """Encode the tensor maps; their addresses alone change afterwards."""
        for at, layout, address in zip(self._maps, self._layouts, addresses, strict=True):
            ctypes.memmove(at, layout.encode(address), tma.MAP_BYTES)
        self._move = tma.mover()


def _no_map(at: int, address: int) -> int:
    """Stand for ``tma.mover`` where there is no map."""
    return 0


def _runs(kind: type[ctypes.Structure], names: Sequence[str]) -> list[tuple[int, slice]]:
    """Return the offset of each run of adjacent pointers, and which of the pointers it takes."""
    types: dict[str, Any] = {field[0]: field[1] for field in kind._fields_}
    offsets: list[int] = []
    for name in names:
        first = getattr(kind, name).offset
        count = types[name]._length_ if issubclass(types[name], ctypes.Array) else 1
        offsets += range(first, first + 8 * count, 8)
    breaks = [i for i in range(1, len(offsets)) if offsets[i] != offsets[i - 1] + 8]
    edges = itertools.pairwise([0, *breaks, len(offsets)])
    return [(offsets[first], slice(first, end)) for first, end in edges if first < end]
