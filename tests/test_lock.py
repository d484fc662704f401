"""A run folder has one owner: live ones are respected, dead ones succeeded, on any machine."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ranks import small
from runs import Messages

from tpf import lock
from tpf.errors import TpfError, UsageError
from tpf.lock import Lock
from tpf.runfolder import RunFolder
from tpf.train import Options, train
from tpf.trainer import Trainer

HOLD = """
import sys, time
from pathlib import Path
from tpf.lock import Lock
with Lock(Path(sys.argv[1])) as held:
    held.take(print)
    print("taken", flush=True)
    time.sleep(60)
"""


_started = lock._started


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Let another process hold the folder."""
    words = [sys.executable, "-c", HOLD, str(folder)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "taken\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def take(folder: Path) -> list[str]:
    """Take and give back; return what was said."""
    said: list[str] = []
    with Lock(folder) as held:
        held.take(said.append)
        assert json.loads(held.path.read_text())["pid"] == os.getpid()
    assert not held.path.exists()
    return said


def written(folder: Path, **changed: Any) -> Path:
    """Write the lock of this process with changes."""
    path = folder / "lock"
    path.write_text(json.dumps(lock._identity() | changed))
    return path


def test_live_owner_is_named_and_a_killed_one_succeeded(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        words = rf"in use by process {process.pid} on {socket.gethostname()} since .*delete .*lock"
        with pytest.raises(UsageError, match=words):
            take(tmp_path)
        process.kill()
        time.sleep(0.1)  # a zombie, which nobody has waited for
        assert take(tmp_path) == []


def test_another_process_with_the_same_number_is_no_owner(tmp_path: Path) -> None:
    written(tmp_path, pid=os.getppid(), started=1)
    assert take(tmp_path) == []


@pytest.mark.parametrize(
    "changed", [{"host": "far"}, {"boot": "before"}, {"namespace": 1}, {"pid": 1}, None]
)
def test_silent_owner_is_succeeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any] | None
) -> None:
    """None: a file that its owner was about to fill when it died.

    Of an owner here with another user the system may not say when it started.
    """
    monkeypatch.setattr(lock, "SILENCE", 0.2)
    monkeypatch.setattr(lock, "POLL", 0.02)
    monkeypatch.setattr(lock, "_started", lambda pid: lock.UNKNOWN if pid == 1 else _started(pid))
    path = written(tmp_path, **(changed or {}))
    if changed is None:
        path.write_text("")
    (said,) = take(tmp_path)
    assert "for a sign of life of" in said and str(path) in said


def test_owner_elsewhere_that_gives_signs_of_life_is_respected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "SILENCE", 20.0)
    monkeypatch.setattr(lock, "POLL", 0.02)
    monkeypatch.setattr(lock, "BEAT", 0.1)
    (tmp_path / "here").mkdir()
    with Lock(tmp_path / "here") as held:
        held.take(print)
        (tmp_path / "there").symlink_to(tmp_path / "here")
        content = json.loads(held.path.read_text()) | {"host": "far"}
        held._mine = json.dumps(content)
        held.path.write_text(held._mine)
        with pytest.raises(UsageError, match="in use by process .* on far"):
            take(tmp_path / "there")
    assert not held.path.exists()


def test_one_of_many_succeeds_a_dead_owner(tmp_path: Path) -> None:
    written(tmp_path, started=1)
    context = multiprocessing.get_context("fork")
    go, done, won = context.Event(), context.Event(), context.Queue()

    def race() -> None:
        go.wait()
        try:
            Lock(tmp_path).take(lambda _: None)
            won.put(os.getpid())
        except UsageError:
            won.put(None)
        done.wait()
        os._exit(0)

    processes = [context.Process(target=race) for _ in range(8)]
    for process in processes:
        process.start()
    go.set()
    winners = [pid for _ in processes if (pid := won.get(timeout=30)) is not None]
    done.set()
    for process in processes:
        process.join()
    assert len(winners) == 1
    assert json.loads((tmp_path / "lock").read_text())["pid"] == winners[0]
    assert [p.name for p in tmp_path.iterdir()] == ["lock"]


def test_lock_of_a_successor_is_left_alone(tmp_path: Path) -> None:
    with Lock(tmp_path) as held:
        held.check()
        held.take(print)
        held.check()
        path = written(tmp_path, pid=1)
        with pytest.raises(TpfError, match="taken over by process 1 on"):
            held.check()
    assert path.exists()


@pytest.mark.parametrize("third", [False, True])
def test_new_owner_keeps_the_folder_or_learns_that_it_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, third: bool
) -> None:
    """A process removes the file of a dead owner so late that it gets that of the next one.

    A third one may make the file while the second puts it back.
    """
    dead, rename = written(tmp_path, started=1).read_text(), Path.rename
    others = json.dumps({"pid": 3, "host": "far", "since": "now"})

    def then_the_third(path: Path, to: Path) -> None:
        rename(path, to)
        assert not third or Lock(tmp_path)._create(others)

    with Lock(tmp_path) as first:
        first.take(print)
        mine = first.path.read_text()
        monkeypatch.setattr(Path, "rename", then_the_third)
        Lock(tmp_path)._remove(dead)
        assert first.path.read_text() == (others if third else mine)
        if third:
            with pytest.raises(TpfError, match="taken over by process 3 on far"):
                first.check()
    assert [p.name for p in tmp_path.iterdir()] == (["lock"] if third else [])


def test_deleted_file_of_a_live_owner_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "BEAT", 0.02)
    with Lock(tmp_path) as held:
        held.take(print)
        held.path.unlink()
        held.check()
        limit = time.monotonic() + 10
        while not held.path.exists() and time.monotonic() < limit:
            time.sleep(0.01)
        with pytest.raises(UsageError, match="in use by"):
            take(tmp_path)


def test_folder_that_cannot_be_written_is_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="lock: cannot be read or written"):
        Lock(tmp_path / "none").take(print)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(UsageError, match=r"cannot be read or written \(File too large\)"):
            Lock(tmp_path).take(print)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "lock").exists()
    (tmp_path / "lock").mkdir()
    with pytest.raises(UsageError, match=r"cannot be read or written \(Is a directory"):
        Lock(tmp_path).take(print)


def test_live_run_is_not_resumed_and_ends_without_a_lock(tmp_path: Path) -> None:
    out, refused = tmp_path / "run", []

    def resume(_: Trainer) -> None:
        with pytest.raises(UsageError, match="in use by process") as caught:
            train(small("train.steps=2"), Options(out, True, validate=False), Messages())
        refused.append(caught.value.exit_code)

    config = small("train.steps=1", "train.batch_size=1")
    train(config, Options(out, validate=False, prepare=resume), Messages())
    assert refused == [2] and not (out / "lock").exists()


def test_run_that_cannot_be_resumed_is_given_back(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", small())
    with pytest.raises(TpfError, match="no checkpoint to resume from"):
        train(small(), Options(run.path, True, validate=False), Messages())
    assert not (run.path / "lock").exists()


def test_two_new_runs_of_one_name_leave_the_first_alone(tmp_path: Path) -> None:
    first = RunFolder.create(tmp_path / "run", small())
    with pytest.raises(UsageError, match="exists; a run is never overwritten"):
        RunFolder.create(tmp_path / "run", small())
    assert (first.path / "config.yaml").is_file()
