"""The folder of one training run: configuration, environment, step log, checkpoints, reports."""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import tpf
from tpf.checkpoint import write_text
from tpf.config import Config, to_yaml
from tpf.errors import TpfError, UsageError
from tpf.lock import Lock
from tpf.saver import Saver

_FIRST = re.compile(r"\.?(config\.yaml|environment\.json|checkpoints|lock)(\.[\w-]+)?")
"""Names in a run folder before the first checkpoint, with those of files half written."""
_PACKAGES = ("torch", "numpy", "gemmi", "biopython", "rdkit", "biotite", "omegaconf", "triton")


def _command(*words: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def environment() -> dict[str, Any]:
    """Return what a result depends on: versions, GPU, driver, commit, command line."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    root = Path(tpf.__file__).parents[1]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    driver = _command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "tpf": tpf.__version__,
        "commit": _command("git", "-C", str(root), "rev-parse", "HEAD") or None,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "cuda": torch.version.cuda,
        "gpu": gpu,
        "gpus": torch.cuda.device_count() if gpu else 0,
        "driver": driver.splitlines()[0] if driver else None,
        "cpu_threads": torch.get_num_threads(),
        "command": sys.argv,
    }


def refuse_existing(path: Path) -> None:
    """Raise ``UsageError`` if something lies where a new run should go."""
    if path.exists():
        raise UsageError(
            f"--out {path} exists; a run is never overwritten: choose another folder, "
            f"or go on with --resume {path}"
        )


def remove_unstarted(path: Path, say: Callable[[str], None]) -> None:
    """Remove the folder of a run that died before its first checkpoint; leave any other alone.

    Raises ``UsageError`` naming the owner if the run lives; ``say`` tells of waiting to know that.
    """
    if not path.is_dir() or not all(_FIRST.fullmatch(inside.name) for inside in path.iterdir()):
        return
    if any(not inside.name.startswith(".") for inside in (path / "checkpoints").glob("*")):
        return
    with Lock(path) as lock:
        lock.take(say)
        shutil.rmtree(path)


def _no_place(path: Path, error: OSError) -> UsageError:
    return UsageError(f"--out {path}: cannot be written ({error.strerror}); choose another folder")


class RunFolder:
    """Files of one run below ``path`` (layout: spec of ``tpf train``)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = Lock(path)
        self.saver = Saver(path, self.lock.check)

    @classmethod
    def create(cls, path: Path, config: Config) -> RunFolder:
        """Make a new run folder; raise ``UsageError`` if it exists or cannot be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir()
        except OSError as error:
            refuse_existing(path)
            raise _no_place(path, error) from error
        try:
            (path / "checkpoints").mkdir()
            write_text(path / "config.yaml", to_yaml(config))
            write_text(path / "environment.json", json.dumps(environment(), indent=1) + "\n")
        except OSError as error:
            shutil.rmtree(path, ignore_errors=True)  # it would be taken for a run
            raise _no_place(path, error) from error
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open the folder of an existing run; raise ``UsageError`` if it is not one."""
        if not (path / "config.yaml").is_file():
            raise UsageError(f"--resume {path}: not a run folder (it has no config.yaml)")
        return cls(path)

    @property
    def log_path(self) -> Path:
        return self.path / "train.jsonl"

    def log(self, record: dict[str, Any]) -> None:
        """Append one step's record to ``train.jsonl``; raise ``TpfError`` if that fails."""
        try:
            with self.log_path.open("a") as handle:
                handle.write(json.dumps(record) + "\n")
        except OSError as error:
            raise self._unwritable(self.log_path, error) from error

    def rewind(self, step: int, config: Config) -> None:
        """Drop records and validations after ``step``, to run again, and store the configuration.

        Raises ``TpfError`` if the folder cannot be written.
        """
        try:
            self._truncate_log(step)
            for folder in (self.path / "validation").glob("step-*"):
                number = folder.name.removeprefix("step-")
                if number.isdigit() and int(number) > step:  # step-000100-2 is of tpf validate
                    shutil.rmtree(folder)
            write_text(self.path / "config.yaml", to_yaml(config))
        except OSError as error:
            raise self._unwritable(self.path, error) from error

    def _unwritable(self, path: Path, error: OSError) -> TpfError:
        return TpfError(
            f"{path}: cannot be written ({error.strerror}); free space or make it writable, then "
            f"go on with --resume {self.path}"
        )

    def _truncate_log(self, step: int) -> None:
        if not self.log_path.is_file():
            return
        kept = []
        for line in self.log_path.read_text().splitlines():
            try:
                record = json.loads(line)
            except ValueError:  # the line that a killed process was writing
                continue
            if record["step"] <= step:
                kept.append(line)
        write_text(self.log_path, "".join(line + "\n" for line in kept))

    def validation_dir(self, step: int) -> Path:
        return self.path / "validation" / f"step-{step:06d}"
