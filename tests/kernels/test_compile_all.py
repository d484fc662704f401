"""Every variant of the kernels compiles for Hopper without spills and fits into the chip."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tpf.errors import HardwareError
from tpf.kernels import jit, tri_attn

REASON = jit.compiler_available()
needs_compiler = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPF_CACHE", str(folder))
        yield folder


def check(binary: jit.Binary, registers: int) -> None:
    assert binary.spill_bytes == 0, binary.log
    assert 0 < binary.registers <= registers, binary.log
    assert not [w for w in binary.warnings if "serializ" in w.lower()], binary.log


def forward_variants() -> list[Any]:
    """Return every variant; the usual ones (16 and 32 wide, residual saved) are the quick ones."""
    every = itertools.product((16, 24, 32, 64), *[(False, True)] * 3)
    return [
        pytest.param(*v, marks=[] if v[0] in (16, 32) and v[3] else pytest.mark.slow) for v in every
    ]


@needs_compiler
@pytest.mark.parametrize(("d", "masked", "fp32_bias", "residual"), forward_variants())
def test_forward(d: int, masked: bool, fp32_bias: bool, residual: bool) -> None:
    defines = tri_attn.forward_defines(d, fp32_bias, masked, residual)
    for stream in (0, 1):
        binary = jit.build("tri_attn_fwd", defines | {"STREAM": stream})
        check(binary, 65536 // tri_attn.FORWARD_THREADS)
    assert tri_attn.forward_shared_bytes(defines, key_tiles=32) <= tri_attn.MAX_SHARED


@needs_compiler
@pytest.mark.parametrize("fp32_bias", [False, True])
def test_pack(fp32_bias: bool) -> None:
    check(jit.build("tri_attn_pack", {"BIAS_F32": int(fp32_bias)}), 128)


@needs_compiler
def test_cache_keeps_source_binary_and_log(cache: Path) -> None:
    defines = {"BIAS_F32": 0}
    first = jit.build("tri_attn_pack", defines)
    (entry,) = [f for f in cache.iterdir() if (f / "kernel.cubin").read_bytes() == first.cubin]
    assert (entry / "log.txt").read_text() == first.log
    assert "tri_attn_pack" in (entry / "kernel.cu").read_text()
    (entry / "log.txt").write_text("from the cache")
    assert jit.build("tri_attn_pack", defines).log == "from the cache"
    (entry / "log.txt").write_text(first.log)


@needs_compiler
def test_compile_error_shows_the_log(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "broken.cu").write_text("int f() { return missing; }")
    monkeypatch.setattr(jit, "source_folder", lambda: cache)
    with pytest.raises(jit.CompileError, match="missing"):
        jit.build("broken", {})


def test_ptxas_report_is_read() -> None:
    log = (
        "ptxas . 8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info : Used 168 registers, used 1 barriers\nptxas warning : (C7510) serialized"
    )
    binary = jit.Binary("x", b"", log)
    assert (binary.registers, binary.spill_bytes, len(binary.warnings)) == (168, 24, 1)


def test_missing_compiler_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    real = builtins.__import__

    def without_bindings(name: str, *args: object, **kwargs: object) -> object:
        if name.startswith("cuda"):
            raise ImportError("no cuda here")
        return real(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without_bindings)
    jit._bindings.cache_clear()
    with pytest.raises(HardwareError, match="cuda-bindings and nvidia-cuda-nvrtc"):
        jit._bindings()
    assert jit.compiler_available() is not None
