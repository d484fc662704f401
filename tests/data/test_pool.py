"""Work in several processes: order, limits, and what a crash or a hang costs."""

from __future__ import annotations

import os
import time

import pool_jobs
import pytest

from tpf.data.pool import map_files


def told(file: str, why: str) -> str:
    return f"{file}: {why}"


def test_one_worker_without_limits_is_this_process() -> None:
    assert set(map_files(pool_jobs.process, ["a", "b"], 1, told)) == {str(os.getpid())}
    found = list(map_files(pool_jobs.process, ["a", "b"], 1, told, seconds=60))
    assert len(set(found)) == 1 and found[0] != str(os.getpid())
    assert list(map_files(pool_jobs.process, [], 4, told, seconds=60)) == []


def test_memory_is_bounded() -> None:
    found = list(map_files(pool_jobs.hungry, ["a", "b"], 1, told, memory=0.25))
    assert found == ["too much", "too much"]


def test_a_crash_and_a_hang_cost_one_file_each() -> None:
    files = [str(k) for k in range(12)]
    begin = time.monotonic()
    found = list(map_files(pool_jobs.mortal, files, 2, told, seconds=2))
    assert found[3] == "3: the process that worked on it died"
    assert found[5] == "5: it takes longer than 2 seconds"
    assert [found[k] for k in range(12) if k not in (3, 5)] == [
        file for file in files if file not in "35"
    ]
    assert time.monotonic() - begin < 60


def test_an_error_of_the_function_is_raised() -> None:
    with pytest.raises(FileNotFoundError, match="a") as caught:
        list(map_files(pool_jobs.failing, ["a", "b"], 2, told))
    assert "pool_jobs.py" in "".join(caught.value.__notes__)


def test_a_caller_that_stops_leaves_no_process() -> None:
    results = map_files(pool_jobs.process, [str(k) for k in range(9)], 1, told, seconds=60)
    worker = int(next(results))
    results.close()
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)
