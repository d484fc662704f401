"""The Chrome trace of a few steps."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tpf.trace import WAIT, WARM_UP, recording

CPU = torch.device("cpu")


def _run(path: Path, wanted: int, steps: int) -> list[str]:
    said: list[str] = []
    with recording(path, wanted, CPU, said.append) as stepped:
        for step in range(steps):
            torch.ones(step + 1).cumsum(0)
            stepped()
    return said


def test_trace_has_the_wanted_steps(tmp_path: Path) -> None:
    path = tmp_path / "profile" / "rank-0.json"
    (said,) = _run(path, 2, WAIT + WARM_UP + 5)
    assert said.endswith(f": {path}")
    events = json.loads(path.read_text())["traceEvents"]
    sums = [e for e in events if e.get("name") == "aten::cumsum" and e.get("ph") == "X"]
    steps = {e["name"] for e in events if str(e.get("name")).startswith("ProfilerStep")}
    assert len(sums) == 2
    assert steps == {f"ProfilerStep#{WAIT + WARM_UP + k}" for k in range(2)}


def test_short_runs_and_no_wish_write_nothing(tmp_path: Path) -> None:
    assert _run(tmp_path / "a.json", 3, WAIT) == []
    assert _run(tmp_path / "a.json", 0, 10) == []
    assert not list(tmp_path.iterdir())
