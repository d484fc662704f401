"""Run the CUDA kernels on the CPU: g++ compiles them against a stand-in for ptx.cuh.

The whole host path runs too (checks, packing, tensor maps, launch parameters); only compiling,
encoding maps and launching are replaced.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tpf.kernels import jit, tma, tri_attn

EMULATOR = Path(__file__).parent / "emulator"
SEED = int(os.environ.get("TPF_EMULATOR_SEED", "0"))
"""Above 0, warps stand still at random, each seed in its own way."""
PROCESSORS = 3
"""Multiprocessors of the pretended GPU: few, so that a block walks several work items."""


@functools.cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="tpf-emulator-"))


@functools.cache
def _library(name: str, defines: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    """Compile one variant of a kernel for the CPU."""
    folder = _folder() / f"{name}-{abs(hash(defines)):x}"
    folder.mkdir()
    for source in (*jit.source_folder().glob("*.cu*"), *EMULATOR.iterdir()):
        if source.name == "ptx.cuh" and source.parent != EMULATOR:
            continue
        text = source.read_text().replace("extern __shared__", "extern")
        (folder / source.name).write_text(text.replace("__shared__", "static"))
    command = [
        "g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-w", "-o", str(folder / "kernel.so"),
        str(folder / "run.cpp"), f"-DKERNEL={name}", f'-DKERNEL_SOURCE="{name}.cu"',
        *(f"-D{key}={value}" for key, value in defines),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, text=True)
    library = ctypes.CDLL(str(folder / "kernel.so"))
    library.emulate.restype = ctypes.c_char_p
    return library


class EmulatedKernel:
    """Stands for ``jit.Kernel``."""

    def __init__(self, name: str, defines: dict[str, int]) -> None:
        self._library = _library(name, tuple(sorted(defines.items())))
        self.name = name

    def launch(
        self,
        grid: tuple[int, int, int],
        threads: int,
        params: ctypes.Structure,
        stream: int,
        shared_bytes: int | None = None,
    ) -> None:
        problem = self._library.emulate(ctypes.byref(params), grid[0], threads, SEED)
        if problem:
            raise RuntimeError(f"{self.name}: {problem.decode()}")


def _encode(
    pointer: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
) -> bytes:
    """Encode a tensor map for the emulator."""
    size = torch.empty(0, dtype=dtype).element_size()
    pad = (0,) * 5
    words = (pointer, size, len(shape), swizzle, *(*shape, *pad)[:5], *(*strides, *pad)[:4])
    return struct.pack("<13Q5I4x", *words, *(*box, *pad)[:5])


@contextmanager
def emulated() -> Iterator[None]:
    """Let the host code of the kernels run on CPU tensors; skips the test without g++."""
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++")

    def load(name: str, defines: Any, device: int, shared_bytes: int = 0) -> EmulatedKernel:
        return EmulatedKernel(name, dict(defines))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit, "load", load)
        patch.setattr(tma, "_encode", _encode)
        patch.setattr(tri_attn, "device_index", lambda x: 0)
        patch.setattr(tri_attn, "raw_stream", lambda device: 0)
        patch.setattr(tri_attn, "processors", lambda device: PROCESSORS)
        tma._map.cache_clear()
        yield
    tma._map.cache_clear()
