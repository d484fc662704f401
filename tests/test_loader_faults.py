"""A loader process that raises, hangs or is killed, and signals while data are made."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from tpf.data.dataset import CropDataset, Loader
from tpf.errors import DataError, TpfError


class Faulty:
    """A data set whose samples misbehave."""

    def __init__(self, fault: Callable[[], object]) -> None:
        self.fault = fault

    def __getitem__(self, position: int) -> dict[str, Any]:
        self.fault()
        return {"position": position, "skipped": [], "id": "1abc"}

    def entry(self, position: int) -> str:
        return "1abc"


def first(fault: Callable[[], object], workers: int = 1, limit: float = 0.0) -> object:
    dataset = cast(CropDataset, Faulty(fault))
    return next(iter(Loader(dataset, stop_step=3, workers=workers, limit=limit)))


def broken_entry() -> None:
    try:
        raise KeyError("CA")
    except KeyError as error:
        raise DataError("1abc", "features", "no CA") from error


def test_a_failing_entry_brings_its_traceback() -> None:
    with pytest.raises(DataError, match="1abc: features: no CA") as caught:
        first(broken_entry)
    notes = "".join(caught.value.__notes__)
    assert "KeyError: 'CA'" in notes and "in broken_entry" in notes


def test_an_unforeseen_error_brings_the_workers_traceback() -> None:
    with pytest.raises(
        ZeroDivisionError, match="(?s)DataLoader worker process 0.*in <lambda>"
    ) as caught:
        first(lambda: 1 / 0)
    assert "In sample 0, entry 1abc" in caught.value.__notes__


def test_a_worker_that_hangs_is_named() -> None:
    begin = time.monotonic()
    with pytest.raises(TpfError, match="sample 0, entry 1abc: a loader process hangs .*timed out"):
        first(lambda: time.sleep(600), limit=1.0)
    assert time.monotonic() - begin < 60


def test_a_worker_that_is_killed_is_named() -> None:
    with pytest.raises(TpfError, match="sample 0, entry 1abc: a loader process (died|was killed)"):
        first(lambda: os.kill(os.getpid(), signal.SIGKILL))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_is_finished_before_ctrl_c_is_heard(workers: int) -> None:
    """Libraries that catch SIGINT themselves would cut their work short and lose the signal."""
    came: list[str] = []

    def interrupt() -> None:
        before = signal.signal(signal.SIGINT, lambda *_: came.append("in the sample"))
        signal.raise_signal(signal.SIGINT)
        signal.signal(signal.SIGINT, before)
        assert not came

    before = signal.signal(signal.SIGINT, lambda *_: came.append("after it"))
    try:
        assert first(interrupt, workers)
    finally:
        signal.signal(signal.SIGINT, before)
    assert came == (["after it"] if workers == 0 else [])
