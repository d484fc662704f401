"""One arm of the study in a process of its own: ``python -m tpf.stability.arm FOLDER``.

FOLDER holds ``task.json`` and ``config.yaml``, written by the study. The arm trains in
``FOLDER/run``, an ordinary run folder, from wherever that stands, and says how it ended in
``FOLDER/outcome.json``. It exits with the codes of ``tpf.errors``.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tpf import checkpoint
from tpf.bench.backends import UnavailableError
from tpf.bench.swap import Operators
from tpf.checkpoint import write_text
from tpf.config import Config, load
from tpf.errors import NonFinite, TpfError, UsageError
from tpf.runfolder import RunFolder
from tpf.signals import leave_interrupts
from tpf.stability import faults, operators, probe
from tpf.train import Options, train
from tpf.trainer import Trainer


@dataclass(frozen=True)
class Task:
    """What one process of the study does; the configuration says the rest."""

    impl: str
    """Backend; one that is not an ``--impl`` of training takes the place of the reference."""
    fault: str | None = None
    """Faulty backend instead, as ``nan:10``."""
    start: int = 0
    """Steps before the first update."""
    source: str | None = None
    """Run from whose last checkpoint the arm goes on; None for the warm-up."""
    init: str | None = None
    """Weights from which the warm-up starts; None draws them from the seed."""
    nan: Literal["stop", "skip"] = "stop"


@dataclass(frozen=True)
class Outcome:
    """How the process of an arm ended."""

    state: Literal["done", "nan", "unavailable", "failed"]
    steps: int = 0
    """Steps that the run was to reach."""
    reason: str = ""
    code: int = 0
    """Exit code of the process."""

    def write(self, folder: Path) -> None:
        """Store the outcome in the folder of the arm."""
        write_text(folder / "outcome.json", json.dumps(asdict(self)) + "\n")


def read_outcome(folder: Path) -> Outcome | None:
    """Return how an arm ended; None if it has not."""
    try:
        return Outcome(**json.loads((folder / "outcome.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


class _Log:
    """Writes what a person may want to know to standard error (a ``Display`` of training)."""

    def start(self, facts: dict[str, Any]) -> None:
        self.message(json.dumps(facts))

    def step(self, record: dict[str, Any], steps: int) -> None:
        """Steps stand in the log of the run."""

    def validation(self, step: int, result: dict[str, Any]) -> None:
        """The study does not validate."""

    def message(self, text: str) -> None:
        print(f"tpf: {text}", file=sys.stderr, flush=True)

    def end(self, summary: dict[str, Any]) -> None:
        """The outcome says it."""

    def close(self) -> None: ...


def run_arm(folder: Path) -> Outcome:
    """Train the arm of a folder to its end and return how it ended.

    Raises ``Interrupted`` after a signal, and whatever else training raises.
    """
    task = Task(**json.loads((folder / "task.json").read_text()))
    config = load(str(folder / "config.yaml"))
    with ExitStack() as replaced:

        def prepare(trainer: Trainer) -> None:
            probe.attach(trainer, task.start)
            if (chosen := _replacement(task, trainer)) is not None:
                trainer.graphs = None  # they would replay what was captured, also of a fault
                replaced.enter_context(chosen.used())

        return _train(folder, task, config, prepare)


def _replacement(task: Task, trainer: Trainer) -> Operators | None:
    """Return the operators of an arm that is not one of our own backends."""
    device = trainer.world.device
    if task.fault is not None:
        clock = lambda: trainer.step + 1 - task.start  # noqa: E731
        return operators.with_attention(faults.make_fault(task.fault, clock), device)
    return None if operators.is_own(task.impl) else operators.choice(task.impl).open(device)


def _train(folder: Path, task: Task, config: Config, prepare: Callable[[Trainer], None]) -> Outcome:
    run = folder / "run"
    started = _has_checkpoint(run)
    if not started:
        shutil.rmtree(run, ignore_errors=True)  # what a process left that was killed at its start
        if task.source is not None:
            branch(checkpoint.resolve(task.source), run, config)
    init = Path(task.init) if task.init is not None and not started else None
    resume = started or task.source is not None
    options = Options(run, resume, init, validate=False, nan=task.nan, prepare=prepare)
    try:
        train(config, options, _Log())
    except NonFinite as error:
        return Outcome("nan", config.train.steps, str(error))
    except UnavailableError as error:
        return Outcome("unavailable", config.train.steps, str(error))
    return Outcome("done", config.train.steps)


def branch(source: Path, run: Path, config: Config) -> None:
    """Make a run folder whose only checkpoint is ``source``, so that resuming it goes on there.

    The files are shared by hard links where the file system has them. The folder appears whole.
    """
    temporary = run.with_name(f".{run.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    made = RunFolder.create(temporary, config)
    target = made.path / "checkpoints" / source.name
    shutil.copytree(source, target, copy_function=_link)
    temporary.rename(run)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)


def _has_checkpoint(run: Path) -> bool:
    try:
        checkpoint.resolve(run)
    except UsageError:
        return False
    return True


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process works on this arm, and keep others waiting."""
    with (folder / "lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _end_with_parent() -> None:
    """Stop as after a signal when the study dies: its end of our standard input closes then."""

    def wait() -> None:
        leave_interrupts()
        while os.read(0, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def main() -> None:
    """Run the arm whose folder is the one argument."""
    folder = Path(sys.argv[1])
    _end_with_parent()
    try:
        with _alone(folder):
            run_arm(folder).write(folder)
    except TpfError as error:
        print(f"tpf: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
