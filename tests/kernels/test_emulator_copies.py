"""The emulator's bulk copies: each thing that they need and a kernel leaves out shows."""

from __future__ import annotations

import ctypes
import shutil

import pytest
import torch
from torch import Tensor

from tests.kernels import emulate

FAULTS = {"none": 0, "fence": 1, "wait for reads": 2, "wait for additions": 3, "last wait": 4}
THREADS = 64


def run(fault: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Return the sums of ``copies_check.cu``, [2, 64]."""
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++")
    monkeypatch.setattr(emulate, "SEED", seed)
    sums = torch.zeros(2, THREADS)
    params = ctypes.c_void_p(sums.data_ptr())
    arguments = ctypes.c_void_p(ctypes.addressof(params))
    kernel = emulate.EmulatedKernel("copies_check", {"FAULT": FAULTS[fault]})
    kernel.launch((1, 1, 1, THREADS, 1, 1, 0), ctypes.addressof(arguments), 0)
    return sums


@pytest.mark.parametrize("seed", range(4))
def test_ordered_copies_arrive_in_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sums = run("none", seed, monkeypatch)
    assert sums[0].eq(3).all()
    assert sums[1].eq(0).all()  # 1e8 + 1 - 1e8 in this order


@pytest.mark.parametrize("fault", ["wait for reads", "wait for additions"])
def test_a_missing_wait_changes_the_result(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = run("none", 0, monkeypatch)
    assert not torch.equal(run(fault, 0, monkeypatch), right)


@pytest.mark.parametrize(
    ("fault", "message"), [("fence", "without a fence"), ("last wait", "ends before a bulk copy")]
)
def test_what_no_result_shows_is_reported(
    fault: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match=message):
        run(fault, 0, monkeypatch)
