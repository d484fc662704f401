"""Compile the CUDA sources with NVRTC, keep the binaries on disk, load and launch them.

``build`` needs no GPU; ``load`` makes a launchable kernel of the binary on one device. A cache
entry ``<name>-<sha256>/`` holds ``kernel.cu``, ``kernel.cubin`` and ``log.txt``; its key covers the
source, our headers, the options and the compiler version.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tpf.errors import HardwareError

ARCH = "sm_90a"
NO_CONTEXT = 201
"""CUDA_ERROR_INVALID_CONTEXT: no context is current in the calling thread."""
BASE_OPTIONS = (
    f"--gpu-architecture={ARCH}",
    "--std=c++17",
    "--generate-line-info",
    "--ptxas-options=-v",
)

Defines = Mapping[str, int]
Sizes = tuple[int, int, int, int, int, int, int]
"""Of a launch: blocks and threads along three axes, bytes of dynamic shared memory."""


class CompileError(HardwareError):
    """NVRTC rejected a source; the text is its log."""


@dataclass(frozen=True)
class Binary:
    """One compiled kernel: the cubin and what ptxas reported about it."""

    name: str
    cubin: bytes
    log: str

    def _number(self, pattern: str) -> int:
        return sum(int(x) for x in re.findall(pattern, self.log))

    @property
    def registers(self) -> int:
        """Registers of a thread at launch."""
        return self._number(r"Used (\d+) registers")

    @property
    def spill_bytes(self) -> int:
        """Bytes of local memory stores and loads that ptxas inserted, and of stack frames."""
        return self._number(r"(\d+) bytes (?:stack frame|spill stores|spill loads)")

    @property
    def warnings(self) -> list[str]:
        """Lines in which the compiler warns (serialised matrix products among them)."""
        return [line for line in self.log.splitlines() if re.search("warning|Potential", line)]


@functools.cache
def _bindings() -> tuple[Any, Any]:
    """Return the modules (driver, nvrtc) of cuda.bindings."""
    try:
        from cuda.bindings import driver, nvrtc

        nvrtc.nvrtcVersion()
    except Exception as error:
        raise HardwareError(
            f"the CUDA kernels need cuda-bindings and nvidia-cuda-nvrtc ({error}); "
            "install tpf[cuda] or choose impl='torch'"
        ) from error
    return driver, nvrtc


def _check(result: tuple[Any, ...], what: str) -> Any:  # noqa: ANN401
    """Return the value of a cuda.bindings call, or raise with its error code."""
    if int(result[0]) != 0:
        raise HardwareError(f"{what} failed: {result[0]!r}")
    return result[1] if len(result) == 2 else result[1:]


def compiler_available() -> str | None:
    """Return None if kernels can be compiled here, else the reason."""
    try:
        _bindings()
    except HardwareError as error:
        return str(error)
    return None


def source_folder() -> Path:
    """Return the folder of the CUDA sources, installed or in the repository."""
    installed = Path(__file__).resolve().parents[1] / "cuda_src"
    return installed if installed.is_dir() else Path(__file__).resolve().parents[2] / "kernels"


def cache_folder() -> Path:
    """Return the folder of compiled kernels ($TPF_CACHE, else the user's cache folder)."""
    if own := os.environ.get("TPF_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tpf" / "kernels"


def _headers(source: str) -> dict[str, str]:
    """Return our own headers that a source includes, followed recursively."""
    found: dict[str, str] = {}
    pending = [source]
    while pending:
        for name in re.findall(r'^\s*#include "([^"]+)"', pending.pop(), re.MULTILINE):
            if name not in found:
                found[name] = (source_folder() / name).read_text()
                pending.append(found[name])
    return found


def _nvrtc_text(read_size: Any, read: Any, program: Any) -> bytes:  # noqa: ANN401
    buffer = bytes(_check(read_size(program), read_size.__name__) + 1)
    _check(read(program, buffer), read.__name__)
    return buffer[:-1]


def _compile(name: str, source: str, headers: dict[str, str], options: tuple[str, ...]) -> Binary:
    _, nvrtc = _bindings()
    program = _check(
        nvrtc.nvrtcCreateProgram(
            source.encode(),
            f"{name}.cu".encode(),
            len(headers),
            [text.encode() for text in headers.values()],
            [header.encode() for header in headers],
        ),
        "nvrtcCreateProgram",
    )
    result = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    log = _nvrtc_text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
    text = log.rstrip(b"\0").decode(errors="replace")
    if int(result[0]) != 0:
        raise CompileError(f"{name}.cu with {' '.join(options)}:\n{text}")
    cubin = _nvrtc_text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    nvrtc.nvrtcDestroyProgram(program)
    return Binary(name, cubin, text)


def _store(entry: Path, source: str, binary: Binary) -> None:
    """Write a cache entry so that readers see all of it or none."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"{entry.name}.", dir=entry.parent))
    (scratch / "kernel.cu").write_text(source)
    (scratch / "kernel.cubin").write_bytes(binary.cubin)
    (scratch / "log.txt").write_text(binary.log)
    try:
        scratch.rename(entry)
    except OSError:  # another process stored it first
        shutil.rmtree(scratch, ignore_errors=True)


def build(name: str, defines: Defines) -> Binary:
    """Compile ``<name>.cu`` with -D defines, or take it from the disk cache. Needs no GPU.

    Raises CompileError with NVRTC's log, HardwareError when no compiler is installed.
    """
    source = (source_folder() / f"{name}.cu").read_text()
    headers = _headers(source)
    options = (*BASE_OPTIONS, *(f"-D{key}={value}" for key, value in sorted(defines.items())))
    version = _check(_bindings()[1].nvrtcVersion(), "nvrtcVersion")
    key = repr((source, sorted(headers.items()), options, version))
    entry = cache_folder() / f"{name}-{hashlib.sha256(key.encode()).hexdigest()}"
    if (entry / "kernel.cubin").is_file():
        return Binary(name, (entry / "kernel.cubin").read_bytes(), (entry / "log.txt").read_text())
    binary = _compile(name, source, headers, options)
    _store(entry, source, binary)
    return binary


def make_current(device: int) -> None:
    """Make the primary context of a device current in this thread.

    A thread of autograd may come to a launch before it has called the CUDA runtime.
    """
    driver, _ = _bindings()
    context = _check(driver.cuDevicePrimaryCtxRetain(device), f"the context of GPU {device}")
    _check((*driver.cuCtxSetCurrent(context), None), f"making GPU {device} current")


class Kernel:
    """A kernel on one device; a launch allocates, compiles and synchronises nothing."""

    def __init__(self, binary: Binary, device: int, shared_bytes: int) -> None:
        driver, _ = _bindings()
        self._device, self._start = device, driver.cuLaunchKernel
        self.name = binary.name
        self.shared_bytes = shared_bytes
        self._library = _check(
            driver.cuLibraryLoadData(binary.cubin, [], [], 0, [], [], 0),
            f"loading {binary.name}",
        )
        self._kernel = _check(
            driver.cuLibraryGetKernel(self._library, binary.name.encode()), f"finding {self.name}"
        )
        self._function = driver.CUfunction(int(self._kernel))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(
            (
                *driver.cuKernelSetAttribute(attribute, shared_bytes, self._kernel, device),
                None,
            ),
            f"reserving {shared_bytes} bytes of shared memory for {self.name}",
        )

    def launch(self, sizes: Sizes, arguments: int, stream: int) -> None:
        """Launch on a raw stream; arguments: address of an array with that of the parameter."""
        if torch._C._cuda_getDevice() != self._device:
            with torch.cuda.device(self._device):
                return self.launch(sizes, arguments, stream)
        result = self._start(self._function, *sizes, stream, arguments, 0)
        if result[0] == NO_CONTEXT:
            make_current(self._device)
            result = self._start(self._function, *sizes, stream, arguments, 0)
        if result[0] != 0:
            raise HardwareError(f"launching {self.name} as {sizes} failed: {result[0]!r}")


@functools.cache
def _load(name: str, defines: tuple[tuple[str, int], ...], device: int, shared: int) -> Kernel:
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes the device's context current
        return Kernel(build(name, dict(defines)), device, shared)


def load(name: str, defines: Defines, device: int, shared_bytes: int = 0) -> Kernel:
    """Return the kernel ``<name>`` of ``<name>.cu`` on a device; compiled and loaded once.

    shared_bytes is the most dynamic shared memory that a launch may ask for.
    """
    return _load(name, tuple(sorted(defines.items())), device, shared_bytes)
