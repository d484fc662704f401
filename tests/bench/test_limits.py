"""A benchmark that ends before its time: a backend that hangs, signals, and what is left then."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.bench.studies import pick
from tests.command import Run, in_empty_folder
from tpf.bench import accuracy, attention, determinism, limits, step, step_studies
from tpf.bench.backends import BACKENDS, Backend, plain_attention
from tpf.bench.cases import Attend, Settings, Shape
from tpf.bench.record import Record
from tpf.phases import PHASES

CPU = torch.device("cpu")


def add(name: str, attend: Attend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, name, Backend(lambda: attend, "anything"))


def hanging(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
    time.sleep(60)
    return q


def test_a_backend_that_hangs_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    add("hanging", hanging, monkeypatch)
    chosen = Settings(("eager",), (Shape(3, 8),), CPU, reps=2)
    attention.table_8(chosen, Record("test"))  # imports what torch imports late
    record = Record("test", limit=2)
    attention.table_8(dataclasses.replace(chosen, impls=("hanging", "eager")), record)
    record.finish()
    (row,) = pick(record, impl="hanging")
    assert row["error"] == "timed out after 2 s" and row["n"] == 3
    assert len(pick(record, impl="eager", n=3)) == 3
    assert [line[1] for line in record.tables[0].rows] == ["eager"]


def test_a_time_out_that_is_caught_is_raised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "AGAIN", 0.02)
    caught = 0
    with pytest.raises(limits.TimedOut, match=r"timed out after 0\.02 s"), limits.time_limit(0.02):
        while True:
            try:
                time.sleep(60)
            except limits.TimedOut:
                caught += 1
                if caught == 3:
                    raise
    time.sleep(0.05)  # nothing comes after the block


def test_an_import_that_hangs_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "slow", Backend(lambda: time.sleep(60), "anything"))  # type: ignore[arg-type, return-value]
    record = Record("test", limit=0.1)
    assert list(record.open_backends(("slow", "eager"), CPU)) == ["eager"]
    assert pick(record, impl="slow")[0]["error"] == "cannot be imported: timed out after 0.1 s"


def _stuck_in_c(folder: Path) -> None:
    """Hang outside Python, where no error can be raised: the alarm goes to another thread."""
    limits.GRACE = 0.2
    record = Record("test", {"study": "attention"}, limit=0.2)
    record.open(folder)
    record.add(op="attention", impl="eager", median_ms=1.0)
    with record.case("hanging", n=8):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        ctypes.CDLL(None).sleep(60)


def test_one_that_never_comes_back_ends_the_study_with_its_rows(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(
        target=_stuck_in_c, args=(tmp_path / "run",)
    )
    process.start()
    process.join(timeout=20)
    assert process.exitcode == 1
    rows = json.loads((tmp_path / "run" / "bench.json").read_text())["rows"]
    assert rows[0]["impl"] == "eager" and "did not come back" in rows[1]["error"]
    assert "leave it out of --impls" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_with_the_report_of_what_is_there(
    number: signal.Signals,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
        if q.shape[1] == 6:
            os.kill(os.getpid(), number)
        return plain_attention(q, k, v, bias, mask)

    add("eager", interrupted, monkeypatch)
    tpf: Run = in_empty_folder("bench", tmp_path, monkeypatch, capsys)
    words = ("--device", "cpu", "--impls", "eager", "--crop", "5,6", "--dim", "8", "--reps", "2")
    code, shown, errors = tpf("attention", *words, "--out", "run")
    assert code == 130 and errors.endswith("interrupted; what was measured is in run\n"), errors
    assert "Table 8: triangle attention" in shown and "interrupted: these are" in shown
    result = json.loads((tmp_path / "run" / "bench.json").read_text())
    assert {row["n"] for row in result["rows"]} == {5}
    assert "<svg" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize("study", [accuracy.figure_4, determinism.figure_10])
def test_tables_show_the_shapes_before_an_interruption(
    study: Callable[[Settings, Record], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
        if q.shape[1] == 6:
            raise KeyboardInterrupt
        return plain_attention(q, k, v, bias, mask)

    add("eager", interrupted, monkeypatch)
    record = Record("test")
    with pytest.raises(KeyboardInterrupt):
        study(Settings(("eager",), (Shape(5, 8), Shape(6, 8)), CPU, seeds=2), record)
    record.finish()
    assert "5 x 8" in str(record.tables[0]) and {row["n"] for row in record.rows} == {5}


def test_steps_before_an_interruption_count(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        device = CPU

        def __init__(self, *_: object) -> None: ...

        def step(self, operators: object, number: int) -> step.Sample:
            if number == 4:
                raise KeyboardInterrupt
            return step.Sample(float(number), dict.fromkeys(PHASES, 1.0))

    monkeypatch.setattr(step, "Stepper", Interrupted)
    chosen = Settings(("torch",), (Shape(8, 128),), CPU, reps=50, config="tiny")
    record = Record("test")
    with pytest.raises(KeyboardInterrupt):
        step_studies.bench_step(chosen, record)
    record.finish()
    assert step.timed(record)[0]["reps"] == 1 and record.tables[0].rows[0][2] == 3.0
