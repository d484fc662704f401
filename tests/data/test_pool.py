"""Work in several processes: order, limits, and what a crash or a hang costs."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pool_jobs
import pytest

from tpf.data import pool
from tpf.data.pool import map_files
from tpf.errors import TpfError


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


def test_a_crash_and_a_hang_cost_one_file_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "START", 1.0)
    files = [str(k) for k in range(12)]
    begin = time.monotonic()
    found = list(map_files(pool_jobs.mortal, files, 2, told, seconds=2))
    assert found[3] == "3: the process that worked on it died"
    assert found[5] == "5: it takes longer than 2 seconds"
    assert [found[k] for k in range(12) if k not in (3, 5)] == [
        file for file in files if file not in "35"
    ]
    assert time.monotonic() - begin < 60


def job(folder: Path, monkeypatch: pytest.MonkeyPatch, start: str) -> Callable[[str], str]:
    """Return a function of a new module that runs ``start`` when a worker imports it."""
    name = f"job_{folder.name}"
    lines = ["import multiprocessing, os, pathlib, signal", "def same(file): return file"]
    lines += ["if multiprocessing.current_process().name != 'MainProcess':", f"    {start}"]
    (folder / f"{name}.py").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(folder)
    same: Callable[[str], str] = importlib.import_module(name).same
    return same


def test_a_starting_process_takes_no_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal sends Ctrl-C to all; only the caller answers it."""
    same = job(tmp_path, monkeypatch, "os.kill(os.getpid(), signal.SIGINT)")
    assert list(map_files(same, ["a", "b"], 2, told)) == ["a", "b"]


def test_a_process_that_does_not_start_costs_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = tmp_path / "flag"
    once = f"p = pathlib.Path({str(flag)!r}); p.exists() or (p.touch(), os._exit(1))"
    same = job(tmp_path, monkeypatch, once)
    assert list(map_files(same, ["a", "b"], 1, told, seconds=60)) == ["a", "b"] and flag.exists()
    (tmp_path / "never").mkdir()
    never = job(tmp_path / "never", monkeypatch, "os._exit(1)")
    with pytest.raises(TpfError, match="3 processes in a row ended before they began to work"):
        list(map_files(never, ["a", "b"], 2, told))


def test_time_in_which_all_were_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop_all(pipes: list[Connection], left: float | None) -> list[object]:
        if left is None or paused:
            return wait(pipes, left)
        (child,) = multiprocessing.active_children()
        assert child.pid is not None
        os.kill(child.pid, signal.SIGSTOP)
        time.sleep(left + 0.3)
        os.kill(child.pid, signal.SIGCONT)
        paused.append(True)
        return []

    paused: list[bool] = []
    for name, value in (("START", 0.0), ("STOPPED", 0.2), ("wait", stop_all)):
        monkeypatch.setattr(pool, name, value)
    assert list(map_files(pool_jobs.patient, ["a"], 1, told, seconds=0.8)) == ["a"] and paused


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
