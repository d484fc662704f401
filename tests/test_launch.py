"""From --gpus to processes, and what an impossible wish is told."""

from __future__ import annotations

import pytest

from tpf.errors import HardwareError, UsageError
from tpf.launch import Plan, plan


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def test_plans() -> None:
    assert plan(None, 1, None, 0) == Plan("alone")
    assert plan(1, 1, None, 8) == Plan("alone")
    assert plan(4, 1, None, 8) == Plan("launch", 4)
    assert plan(16, 2, "a:29400", 8) == Plan("launch", 8, 2, "a:29400")


def test_joining_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert plan(None, 1, None, 0) == Plan("join")
    assert plan(4, 1, None, 0) == Plan("join")
    with pytest.raises(UsageError, match="started 4 ranks"):
        plan(8, 1, None, 0)


@pytest.mark.parametrize(("gpus", "available"), [(16, 0), (16, 8), (3, 2), (7, 4)])
def test_too_many_gpus_name_the_line_to_run(gpus: int, available: int) -> None:
    with pytest.raises(HardwareError, match=rf"--gpus {gpus}: .*tpf train --gpus") as caught:
        plan(gpus, 1, None, available)
    assert caught.value.exit_code == 3


def test_the_suggested_line_is_a_possible_plan() -> None:
    with pytest.raises(HardwareError) as caught:
        plan(16, 1, None, 8)
    line = str(caught.value).rsplit(": ", 1)[1].split()
    gpus, nodes = int(line[line.index("--gpus") + 1]), int(line[line.index("--nodes") + 1])
    assert plan(gpus, nodes, "first:29400", 8).processes * nodes == 16


@pytest.mark.parametrize(
    ("gpus", "nodes", "rdzv", "words"),
    [
        (0, 1, None, "--gpus is 0"),
        (-2, 1, None, "--gpus is -2"),
        (16, 3, "a:1", "does not divide"),
        (16, 2, None, "needs --rdzv"),
        (4, 0, None, "--nodes is 0"),
    ],
)
def test_senseless_numbers(gpus: int, nodes: int, rdzv: str | None, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        plan(gpus, nodes, rdzv, 8)
