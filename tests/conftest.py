"""Fixtures shared by all tests: seeds, the GPU marker, and the folder of real structures."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


def _gpu_reason() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.cuda.get_device_capability() != (9, 0):
        return f"needs compute capability 9.0, found {torch.cuda.get_device_capability()}"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _gpu_reason()
    if reason is None:
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    np.random.seed(0)


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """End the processes of a test that failed before it ended them."""
    yield
    for process in multiprocessing.active_children():
        process.kill()
        process.join()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real PDB entries beside the repository; tests that need it skip without it."""
    if not SHARED.is_dir():
        pytest.skip("the folder shared/data is not beside the repository")
    return SHARED
