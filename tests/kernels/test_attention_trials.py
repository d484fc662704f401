"""Trials of the attention forward kernel (``tri_attn.LEAN``): right in the emulator, no spills."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from test_compile_all import check as check_binary  # noqa: E402
from test_compile_all import needs_compiler  # noqa: E402
from test_emulated import check_forward, inputs, make_mask  # noqa: E402

from tpf.kernels import jit, tri_attn  # noqa: E402
from tpf.kernels.tri_attn import Lean  # noqa: E402

slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("products", "d", "n", "kind", "shift"),
    [
        (True, 16, 130, "rows", 0.0),
        (True, 32, 70, None, -40.0),  # no maximum is found by integers
        (False, 32, 130, "tail", 0.0),
        pytest.param(True, 24, 200, "random", 0.0, marks=slow),
        pytest.param(True, 64, 257, "rows", -3.0, marks=slow),
        pytest.param(True, 16, 1, None, 0.0, marks=slow),
        pytest.param(False, 16, 200, None, -3.0, marks=slow),
        pytest.param(False, 64, 130, "rows", 0.0, marks=slow),
    ],
)
@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, pytest.param(torch.float32, marks=slow)])
def test_forward(
    products: bool,
    d: int,
    n: int,
    kind: str | None,
    shift: float,
    bias_dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tri_attn, "LEAN", Lean(products, early=False))
    q, k, v, bias = inputs(1, 5, 2, n, d, bias_dtype)
    mask = None if kind is None else make_mask(kind, 1, 5, n)
    check_forward(q, k, v, bias + shift, mask)


def test_values_that_bf16_holds() -> None:
    assert [tri_attn.bias_terms(s) for s in (0.25, 0.125, 32**-0.5, 1.0, 1e-4)] == [1, 1, 2, 1, 0]


@needs_compiler
@pytest.mark.parametrize("products", [False, True])
@pytest.mark.parametrize(
    ("d", "masked"),
    [
        pytest.param(d, masked, marks=[] if (d, masked) == (16, False) else slow)
        for d, masked in itertools.product((16, 24, 32, 64), (False, True))
    ],
)
def test_compiles(products: bool, d: int, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for early in (False, True):
        monkeypatch.setattr(tri_attn, "LEAN", Lean(products, early))
        defines = tri_attn.forward_defines(d, False, masked, True)
        check_binary(jit.build("tri_attn_fwd", defines), 65536 // tri_attn.FORWARD_THREADS)
        assert tri_attn.forward_shared_bytes(defines, key_tiles=32) <= tri_attn.MAX_SHARED
