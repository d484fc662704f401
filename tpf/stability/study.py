"""The study as a whole: its folder, its arms one after the other, and going on where it stopped.

DIR/study.json curves.csv report.html     results, written anew after every arm
DIR/config.yaml                           configuration that all arms share
DIR/warmup/                               the run from which all arms go on
DIR/arms/crop-384/cuda/                   one arm: task.json, config.yaml, log.txt, run/
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from tpf.bench import backends
from tpf.checkpoint import write_text
from tpf.config import Config, load, to_yaml
from tpf.errors import HardwareError, Interrupted, TpfError, UsageError
from tpf.runfolder import refuse_existing
from tpf.signals import Stop
from tpf.stability import faults, operators
from tpf.stability.arm import Outcome, Task, read_outcome

REFERENCE = "torch"
RESULT = "study.json"
POLL = 0.2
"""Seconds between two looks at a running arm."""
FP32 = "@fp32"
"""Suffix of a backend whose arm trains in FP32."""
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is compared; on resuming, only arms and updates may be added and ``nan`` changed."""

    impls: tuple[str, ...]
    """Backends, each with ``@fp32`` to train in FP32."""
    faults: tuple[str, ...] = ()
    crops: tuple[int, ...]
    warmup_steps: int
    warmup_crop: int
    warmup_impl: str = REFERENCE
    steps: int
    """Updates after the warm-up."""
    nan: Literal["stop", "skip"] = "stop"
    determinism: bool = False
    """Run every arm twice."""
    init: str | None = None
    """Checkpoint from whose weights the warm-up starts."""
    cpu: bool = False
    """Hide the GPUs of the machine."""

    def __post_init__(self) -> None:
        for impl in (*self.impls, self.warmup_impl):
            operators.check_name(impl.removesuffix(FP32))
            if impl.endswith(FP32) and not operators.is_own(impl.removesuffix(FP32)):
                raise UsageError(
                    f"--impls {impl}: backends of others run in BF16 only; give torch{FP32}"
                )
        if not operators.is_own(self.warmup_impl):
            raise UsageError(f"--warmup-impl {self.warmup_impl}: choose one of tpf train --impl")
        for fault in self.faults:
            faults.make_fault(fault, lambda: 0)
        for name in ("warmup_steps", "warmup_crop", "steps"):
            if getattr(self, name) < 1:
                raise UsageError(
                    f"--{name.replace('_', '-')} {getattr(self, name)}: give 1 or more"
                )
        if not self.crops or min(self.crops) < 1:
            raise UsageError(f"--crops {','.join(map(str, self.crops))}: give numbers from 1")
        if not self.impls:
            raise UsageError("--impls names no backend")

    @property
    def reference(self) -> str:
        """The arm that the others are compared with: torch if it takes part, else the first."""
        return REFERENCE if REFERENCE in self.impls else self.impls[0]


@dataclass(frozen=True)
class Arm:
    """One training run of the study after the warm-up."""

    crop: int
    name: str
    """Backend or fault, as in ``--impls`` and ``--faults``."""
    fault: bool = False
    again: bool = False
    """The second run of the same arm."""

    @property
    def impl(self) -> str:
        """Backend of the arm."""
        return REFERENCE if self.fault else self.name.removesuffix(FP32)

    @property
    def folder(self) -> Path:
        """Folder below that of the study."""
        name = self.name.replace(":", "-").replace("@", "-") + ("-again" if self.again else "")
        return Path("arms") / f"crop-{self.crop}" / name


def default_impls(gpu: bool) -> tuple[str, ...]:
    """Return the backends of a study that names none: every one that the machine may run."""
    if not gpu:
        return (REFERENCE, "eager")
    return (REFERENCE, *(name for name in backends.BACKENDS if name != REFERENCE))


def unavailable(settings: Settings) -> dict[str, str]:
    """Return the backends that cannot run here, with the reason; raise if none can.

    The error is a ``HardwareError``.
    """
    device = torch.device("cuda" if torch.cuda.is_available() and not settings.cpu else "cpu")
    impls = dict.fromkeys(arm.impl for arm in arms(settings))
    reasons = {impl: operators.why_unavailable(impl, device) for impl in impls}
    missing = {impl: reason for impl, reason in reasons.items() if reason is not None}
    if len(missing) == len(impls):
        found = "; ".join(f"{impl}: {reason}" for impl, reason in missing.items())
        raise HardwareError(f"no backend of the study can run here: {found}")
    return missing


def arms(settings: Settings) -> list[Arm]:
    """Return the arms in the order in which they run, the reference arm of a crop first."""
    found = []
    for crop in settings.crops:
        names = sorted(settings.impls, key=lambda name: name != settings.reference)
        chosen = [Arm(crop, name) for name in names]
        chosen += [Arm(crop, name, fault=True) for name in settings.faults]
        for arm in chosen:
            found.append(arm)
            if settings.determinism:
                found.append(dataclasses.replace(arm, again=True))
    return found


@dataclass
class Study:
    """A study in its folder."""

    path: Path
    settings: Settings
    config: Config
    say: Say

    @classmethod
    def create(cls, path: Path, settings: Settings, config: Config, say: Say) -> Study:
        """Make the folder of a new study.

        Raises ``UsageError`` if it exists or cannot be made, ``HardwareError`` if no backend of the
        study can run here.
        """
        refuse_existing(path)
        unavailable(settings)
        try:
            path.mkdir(parents=True)
            write_text(path / "config.yaml", to_yaml(config))
        except OSError as error:
            raise UsageError(f"--out {path}: cannot be written ({error.strerror})") from error
        return cls(path, settings, config, say)

    @classmethod
    def open(cls, path: Path, changes: dict[str, Any], say: Say) -> Study:
        """Open a study to go on with; ``changes`` are settings to replace.

        Raises ``UsageError`` for a folder without a study, and for a change that would make its
        finished arms differ from those to come.
        """
        stored = read_settings(path)
        changed = dataclasses.replace(stored, **changes)
        if changed.steps < stored.steps:
            raise UsageError(
                f"--steps {changed.steps}: the study in {path} has {stored.steps}; "
                "give as many or more"
            )
        return cls(path, changed, load(str(path / "config.yaml")), say)

    def run(self, write_results: Callable[[Study], None]) -> None:
        """Run what is missing, with ``write_results`` at first and after every arm.

        The file that it writes holds the settings, by which ``open`` goes on. Raises
        ``HardwareError`` if no backend can run here, ``TpfError`` if the warm-up fails,
        ``Interrupted`` after a signal with the arm in progress saved.
        """
        missing = unavailable(self.settings)
        write_results(self)
        with Stop().listening() as stop:
            self._warm_up(stop)
            for arm in arms(self.settings):
                try:
                    self._run_if_missing(arm, missing, stop)
                finally:
                    write_results(self)

    def _run_if_missing(self, arm: Arm, missing: dict[str, str], stop: Stop) -> None:
        """Run an arm that has not ended; ``missing`` has, and learns, what cannot run here."""
        folder = self.path / arm.folder
        if arm.impl in missing:
            folder.mkdir(parents=True, exist_ok=True)
            Outcome("unavailable", 0, missing[arm.impl]).write(folder)
        elif not self._finished(folder):
            self._run_arm(arm, stop)
            if (outcome := read_outcome(folder)) and outcome.state == "unavailable":
                missing[arm.impl] = outcome.reason

    def _warm_up(self, stop: Stop) -> None:
        settings, folder = self.settings, self.path / "warmup"
        config = self._configure(settings.warmup_steps, settings.warmup_crop, settings.warmup_impl)
        if (done := read_outcome(folder)) is None or done.state != "done":
            task = Task(settings.warmup_impl, init=settings.init)
            self._run_process("warm-up", folder, task, config, stop)
        outcome = read_outcome(folder)
        if outcome is None or outcome.state != "done":
            refused = {error.exit_code: error for error in (UsageError, HardwareError)}
            if outcome is not None and outcome.code in refused and not (folder / "run").exists():
                shutil.rmtree(self.path)
                raise refused[outcome.code](outcome.reason)
            reason = "no outcome" if outcome is None else outcome.reason
            raise TpfError(f"the warm-up failed: {reason} (see {folder / 'log.txt'})")

    def _finished(self, folder: Path) -> bool:
        outcome = read_outcome(folder)
        if outcome is None:
            return False
        if outcome.state == "nan":
            return self.settings.nan == "stop"
        return outcome.state == "done" and outcome.steps >= self._last_step

    @property
    def _last_step(self) -> int:
        return self.settings.warmup_steps + self.settings.steps

    def _run_arm(self, arm: Arm, stop: Stop) -> None:
        own = operators.is_own(arm.impl)
        config = self._configure(self._last_step, arm.crop, arm.impl if own else REFERENCE)
        if arm.name.endswith(FP32):
            precise = dataclasses.replace(config.train, precision="fp32")
            config = dataclasses.replace(config, train=precise)
        task = Task(
            arm.impl,
            fault=arm.name if arm.fault else None,
            start=self.settings.warmup_steps,
            source=str(self.path / "warmup" / "run"),
            nan=self.settings.nan,
        )
        title = f"crop {arm.crop}, {arm.name}" + (", again" if arm.again else "")
        self._run_process(title, self.path / arm.folder, task, config, stop)

    def _configure(self, steps: int, crop: int, impl: str) -> Config:
        base = self.config
        return dataclasses.replace(
            base,
            train=dataclasses.replace(base.train, steps=steps, warmup=self.settings.warmup_steps),
            data=dataclasses.replace(base.data, crop=crop),
            model=dataclasses.replace(base.model, impl=impl),
        )

    def _run_process(
        self, title: str, folder: Path, task: Task, config: Config, stop: Stop
    ) -> None:
        """Run one task in its process to the end; a failure becomes its outcome."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "outcome.json").unlink(missing_ok=True)
        write_text(folder / "config.yaml", to_yaml(config))
        write_text(folder / "task.json", json.dumps(asdict(task)) + "\n")
        self.say(f"{title}: starting")
        begin = time.monotonic()
        with (folder / "log.txt").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tpf.stability.arm", str(folder)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if self.settings.cpu else {}),
                start_new_session=True,  # a Ctrl-C comes here only, and is passed on once
            )
            log_of_run = folder / "run" / "train.jsonl"
            self._wait(title, log_of_run, config.train.steps - task.start, process, stop)
        if stop():
            raise Interrupted(f"interrupted; go on with: tpf stability --resume {self.path}")
        outcome = read_outcome(folder)
        if outcome is None:
            killed = f"ended by signal {-process.returncode}" if process.returncode < 0 else None
            reason = killed or _last_line(folder / "log.txt")
            outcome = Outcome("failed", config.train.steps, reason, process.returncode)
            outcome.write(folder)
        self.say(f"{title}: {outcome.state}, {time.monotonic() - begin:.0f} s {outcome.reason}")

    def _wait(
        self, title: str, log: Path, updates: int, process: subprocess.Popen[bytes], stop: Stop
    ) -> None:
        told, shown = False, 0
        try:
            while process.poll() is None:
                if stop() and not told:
                    process.terminate()
                    told = True
                done = _lines(log)
                if done // 25 > shown // 25:
                    self.say(f"{title}: update {done} of {updates}")
                shown = done
                time.sleep(POLL)
        finally:
            process.kill()  # does nothing to one that has ended
            process.wait()


def read_settings(path: Path) -> Settings:
    """Return the settings of the study in a folder; raise ``UsageError`` if there is none."""
    try:
        stored: dict[str, Any] = json.loads((path / RESULT).read_text())["settings"]
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in stored.items()
        }
        return Settings(**values)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--resume {path}: not the folder of a study") from error


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def _last_line(path: Path) -> str:
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "no output").removeprefix("tpf: ")
