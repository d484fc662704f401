"""Weights & Biases as one more display of a run; nothing here needs a login but ``online``."""

from __future__ import annotations

import json
import netrc
import os
import secrets
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from tpf.config import Config, to_dict
from tpf.errors import UsageError

Mode = Literal["auto", "disabled", "offline", "online"]
ID_FILE = "wandb-id"
"""In the run folder: the id under which a resumed run goes on."""
STRUCTURES = 4
"""Targets of a validation whose first predicted structure is sent."""


def wanted(mode: Mode) -> bool:
    """Return whether to track: ``auto`` does if WANDB_API_KEY is set."""
    return mode in ("offline", "online") or (
        mode == "auto" and bool(os.environ.get("WANDB_API_KEY"))
    )


def ready(mode: Mode) -> tuple[Mode, Any]:
    """Return the mode to track in and the module of wandb.

    Raises ``UsageError`` if wandb is missing or would ask for a login.
    """
    mode = "online" if mode == "auto" else mode
    try:
        import wandb
    except ImportError as error:
        raise UsageError(f"--wandb {mode}: {error}; pip install wandb") from error
    if mode == "online" and not _has_key():
        raise UsageError(
            "--wandb online: no login found; run wandb login or set WANDB_API_KEY, or use "
            "--wandb offline"
        )
    return mode, wandb


class Tracker:
    """Sends a run to wandb (a ``Display``): configuration, environment, steps, validations.

    A validation is its means, a table of its targets, and some predicted structures.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._wandb: Any = None
        self._run: Any = None

    def start(self, facts: dict[str, Any]) -> None:
        """Open the wandb run, or the one of the run that is resumed.

        Raises ``UsageError`` as ``ready`` does, and if wandb refuses.
        """
        mode, wandb = ready(self._config.train.wandb)
        self._wandb = wandb
        try:
            self._run = wandb.init(
                project="tpf",
                name=self._folder.name,
                id=self._id(),
                resume="allow",
                dir=str(self._folder),
                mode=mode,
                config=to_dict(self._config) | {"facts": facts, "environment": self._environment()},
                settings=wandb.Settings(silent=True),
            )
        except wandb.errors.Error as error:
            raise UsageError(f"--wandb {mode}: {error}; use --wandb offline or disabled") from error

    def _id(self) -> str:
        """Return the id of the folder's run, made at its start."""
        path = self._folder / ID_FILE
        if not path.is_file():
            path.write_text(secrets.token_hex(4) + "\n")
        return path.read_text().strip()

    def _environment(self) -> dict[str, Any]:
        path = self._folder / "environment.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
        return found

    def step(self, record: dict[str, Any], steps: int) -> None:
        """Send the numbers of a step."""
        numbers = {k: v for k, v in record.items() if isinstance(v, (int, float))}
        self._run.log(numbers, step=record["step"])

    def validation(self, step: int, result: dict[str, Any]) -> None:
        """Send the means, the table of targets and some structures of a validation."""
        content: dict[str, Any] = {
            f"validation/{name}": value["mean"] for name, value in result["dataset"].items()
        }
        columns, rows = _target_table(result["targets"])
        if rows:
            content["validation/targets"] = self._wandb.Table(columns=columns, data=rows)
        for name, path in self._structures(step, result["targets"]):
            content[f"predicted/{name}"] = self._wandb.Molecule(str(path))
        self._run.log(content, step=step)

    def _structures(
        self, step: int, targets: Sequence[dict[str, Any]]
    ) -> Iterator[tuple[str, Path]]:
        folder = self._folder / "validation" / f"step-{step:06d}" / "predicted"
        for target in targets[:STRUCTURES]:
            files = sorted(folder.glob(f"{target['id']}-seed*-sample*.cif"))
            if files:
                yield target["id"], files[0]

    def message(self, text: str) -> None:
        """Messages are for people at the terminal."""

    def end(self, summary: dict[str, Any]) -> None:
        """The last validation has been sent already."""

    def close(self) -> None:
        """Close the wandb run, also after an error."""
        if self._run is not None:
            self._run.finish()


def _has_key() -> bool:
    """Return whether wandb can log in without asking: by its variable or what it stored."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _target_table(targets: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Return columns and rows: every target with its reported metrics, means over seeds."""
    names = sorted({name for t in targets for seed in t["seeds"] for name in seed["reported"]})
    rows = []
    for target in targets:
        row: list[Any] = [target["id"], target["n_tokens"]]
        for name in names:
            values = [s["reported"][name] for s in target["seeds"] if name in s["reported"]]
            row.append(statistics.fmean(values) if values else None)
        rows.append(row)
    return ["id", "n_tokens", *names], rows


class Several:
    """Passes everything on to several displays in order."""

    def __init__(self, displays: Sequence[Any]) -> None:
        self._displays = displays

    def start(self, facts: dict[str, Any]) -> None:
        for display in self._displays:
            display.start(facts)

    def step(self, record: dict[str, Any], steps: int) -> None:
        for display in self._displays:
            display.step(record, steps)

    def validation(self, step: int, result: dict[str, Any]) -> None:
        for display in self._displays:
            display.validation(step, result)

    def message(self, text: str) -> None:
        for display in self._displays:
            display.message(text)

    def end(self, summary: dict[str, Any]) -> None:
        for display in self._displays:
            display.end(summary)

    def close(self) -> None:
        for display in self._displays:
            display.close()
