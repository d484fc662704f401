"""Run the CUDA kernels on the CPU: g++ compiles them against a stand-in for ptx.cuh.

The whole host path runs too (checks, packing, tensor maps, launch parameters); only compiling,
encoding maps and launching are replaced.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tpf.kernels import jit, launch, tma, tri_attn

EMULATOR = Path(__file__).parent / "emulator"
COMPILE = ("g++", "-std=c++20", "-O1", "-fPIC", "-w")
KEPT = 8
"""States of the sources whose libraries stay on the disk."""
SEED = int(os.environ.get("TPF_EMULATOR_SEED", "0"))
"""Above 0, warps stand still at random, each seed in its own way."""
PROCESSORS = 3
"""Multiprocessors of the pretended GPU: few, so that a block walks several work items."""


@functools.cache
def _tree() -> Path:
    """Return the folder of the sources as g++ takes them, with ``ptx.cuh`` precompiled.

    It is named after all that goes into a library, so all processes and later runs share it.
    """
    texts = {}
    for source in sorted((*jit.source_folder().glob("*.cu*"), *EMULATOR.iterdir())):
        if source.name != "ptx.cuh" or source.parent == EMULATOR:
            text = source.read_text().replace("extern __shared__", "extern")
            texts[source.name] = text.replace("__shared__", "static")
    version = subprocess.run(["g++", "-v"], check=True, capture_output=True, text=True).stderr
    key = hashlib.sha256(repr((texts, version, COMPILE)).encode()).hexdigest()[:24]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tpf" / "emulator"
    tree = cache / key
    if tree.is_dir():
        os.utime(tree)
        return tree
    cache.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"{key}.", dir=cache))
    for name, text in texts.items():
        (scratch / name).write_text(text)
    header = [*COMPILE, "-x", "c++-header", "ptx.cuh", "-o", "ptx.cuh.gch"]
    subprocess.run(header, check=True, capture_output=True, text=True, cwd=scratch)
    try:
        scratch.rename(tree)
    except OSError:  # another process was first
        shutil.rmtree(scratch, ignore_errors=True)
    with suppress(OSError):  # another process tidies up
        for old in sorted(cache.iterdir(), key=os.path.getmtime)[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    return tree


@functools.cache
def _library(name: str, defines: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    """Compile one variant of a kernel for the CPU, or take it from the disk."""
    tree = _tree()
    library = tree / f"{name}-{hashlib.sha256(repr(defines).encode()).hexdigest()[:16]}.so"
    if not library.is_file():
        handle, scratch = tempfile.mkstemp(dir=tree)
        os.close(handle)
        command = [
            *COMPILE, "-shared", "-o", scratch, "-include", "ptx.cuh", "run.cpp",
            f"-DKERNEL={name}", f'-DKERNEL_SOURCE="{name}.cu"',
            *(f"-D{key}={value}" for key, value in defines),
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, text=True, cwd=tree)
        os.replace(scratch, library)
    loaded = ctypes.CDLL(str(library))
    loaded.emulate.restype = ctypes.c_char_p
    return loaded


class EmulatedKernel:
    """Stands for ``jit.Kernel``."""

    def __init__(self, name: str, defines: dict[str, int]) -> None:
        self._library = _library(name, tuple(sorted(defines.items())))
        self.name, self.shared_bytes = name, 0

    def launch(self, sizes: jit.Sizes, arguments: int, stream: int) -> None:
        params = ctypes.c_void_p.from_address(arguments)
        problem = self._library.emulate(params, sizes[0], sizes[3], SEED)
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


def _move(at: int, address: int) -> int:
    """Change the address of a tensor map for the emulator."""
    ctypes.c_uint64.from_address(at).value = address
    return 0


def _load(name: str, defines: Any, device: int, shared_bytes: int = 0) -> EmulatedKernel:
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++")
    return EmulatedKernel(name, dict(defines))


@contextmanager
def emulated(load: Callable[..., Any] = _load) -> Iterator[None]:
    """Let the host code run on CPU tensors with kernels of ``load``; skips the test without g++."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit, "load", load)
        patch.setattr(tma, "_encode", _encode)
        patch.setattr(tma, "mover", lambda: _move)
        patch.setattr(tri_attn, "device_index", lambda x: 0)
        patch.setattr(tri_attn, "raw_stream", lambda device: 0)
        patch.setattr(tri_attn, "processors", lambda device: PROCESSORS)
        launch.forget_plans()
        yield
    launch.forget_plans()
