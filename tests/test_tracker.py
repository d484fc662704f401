"""What is sent to wandb, with a module in its place that writes down its calls."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tpf.config import load
from tpf.errors import UsageError
from tpf.tracker import STRUCTURES, Tracker, wanted

TARGETS = [
    {
        "id": f"t{k}",
        "n_tokens": 10 + k,
        "seeds": [
            {"seed": 0, "reported": {"rmsd": 1.0 + k}},
            {"seed": 1, "reported": {"rmsd": 3.0 + k, "lddt": 0.5}},
        ],
    }
    for k in range(STRUCTURES + 2)
]
RESULT = {"dataset": {"rmsd": {"mean": 2.0, "sd": 1.0, "n": 6}}, "targets": TARGETS}


class FakeRun:
    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.finished = False

    def log(self, content: dict[str, Any], step: int) -> None:
        self.logged.append((step, content))

    def finish(self) -> None:
        self.finished = True


class FakeWandb:
    def __init__(self) -> None:
        self.errors = SimpleNamespace(Error=RuntimeError)
        self.calls: list[dict[str, Any]] = []
        self.run = FakeRun()

    def init(self, **arguments: Any) -> FakeRun:
        self.calls.append(arguments)
        return self.run

    def Settings(self, **arguments: Any) -> dict[str, Any]:  # noqa: N802
        return arguments

    def Table(self, columns: list[str], data: list[Any]) -> tuple[str, Any, Any]:  # noqa: N802
        return ("table", columns, data)

    def Molecule(self, path: str) -> tuple[str, str]:  # noqa: N802
        return ("molecule", path)


@pytest.fixture(autouse=True)
def no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def _tracker(folder: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> tuple[Tracker, FakeWandb]:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return Tracker(load("tiny", [f"train.wandb={mode}"]), folder), fake


def test_resumed_run_keeps_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "environment.json").write_text('{"gpu": "H200"}')
    ids = []
    for _ in range(2):
        tracker, fake = _tracker(tmp_path, monkeypatch, "offline")
        tracker.start({"crop": 64})
        (call,) = fake.calls
        ids.append(call["id"])
        assert call["resume"] == "allow" and call["mode"] == "offline"
        assert call["config"]["train"]["wandb"] == "offline"
        assert call["config"]["environment"] == {"gpu": "H200"}
        assert call["config"]["facts"] == {"crop": 64}
        tracker.close()
        assert fake.run.finished
    assert ids[0] == ids[1]
    other = tmp_path / "other"
    other.mkdir()
    tracker, fake = _tracker(other, monkeypatch, "offline")
    tracker.start({})
    assert fake.calls[0]["id"] != ids[0]


def test_validation_has_table_and_structures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predicted = tmp_path / "validation" / "step-000007" / "predicted"
    predicted.mkdir(parents=True)
    for target in TARGETS[1:]:
        for sample in (0, 1):
            (predicted / f"{target['id']}-seed0-sample{sample}.cif").touch()
    tracker, fake = _tracker(tmp_path, monkeypatch, "offline")
    tracker.start({})
    tracker.step({"step": 7, "loss": 1.5, "samples": ["a"]}, 10)
    tracker.validation(7, RESULT)
    assert fake.run.logged[0] == (7, {"step": 7, "loss": 1.5})
    step, content = fake.run.logged[1]
    assert step == 7 and content["validation/rmsd"] == 2.0
    kind, columns, rows = content["validation/targets"]
    assert (kind, columns) == ("table", ["id", "n_tokens", "lddt", "rmsd"])
    assert rows[0] == ["t0", 10, 0.5, 2.0] and len(rows) == len(TARGETS)
    sent = {name: value for name, value in content.items() if name.startswith("predicted/")}
    assert list(sent) == [f"predicted/t{k}" for k in range(1, STRUCTURES)]
    assert sent["predicted/t1"] == ("molecule", str(predicted / "t1-seed0-sample0.cif"))


def test_a_login_is_never_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker, fake = _tracker(tmp_path, monkeypatch, "online")
    with pytest.raises(UsageError, match="--wandb online: no login found"):
        tracker.start({})
    assert not fake.calls
    tracker.close()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password stored\n")
    tracker, fake = _tracker(tmp_path, monkeypatch, "online")
    tracker.start({})
    assert fake.calls[0]["mode"] == "online"


def test_missing_package_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match="pip install wandb"):
        Tracker(load("tiny", ["train.wandb=offline"]), tmp_path).start({})


def test_auto_tracks_with_a_key_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not wanted("auto") and not wanted("disabled") and wanted("offline")
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert wanted("auto")
