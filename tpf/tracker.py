"""Weights & Biases as one more display of a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from tpf.config import Config, to_dict
from tpf.errors import UsageError

Mode = Literal["auto", "disabled", "offline", "online"]


def wanted(mode: Mode) -> bool:
    """Return whether to track: ``auto`` does if WANDB_API_KEY is set."""
    return mode in ("offline", "online") or (
        mode == "auto" and bool(os.environ.get("WANDB_API_KEY"))
    )


class Tracker:
    """Sends configuration, step records and validation means to a wandb run (a ``Display``)."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._run: Any = None

    def start(self, facts: dict[str, Any]) -> None:
        """Open the wandb run; raise ``UsageError`` if wandb refuses."""
        import wandb

        mode = self._config.train.wandb
        try:
            self._run = wandb.init(
                project="tpf",
                name=self._folder.name,
                dir=str(self._folder),
                mode="online" if mode == "auto" else mode,
                config=to_dict(self._config) | {"facts": facts},
                settings=wandb.Settings(silent=True),
            )
        except wandb.errors.Error as error:
            raise UsageError(f"--wandb {mode}: {error}; use --wandb offline or disabled") from error

    def step(self, record: dict[str, Any], steps: int) -> None:
        """Send the numbers of a step."""
        numbers = {k: v for k, v in record.items() if isinstance(v, (int, float))}
        self._run.log(numbers, step=record["step"])

    def validation(self, step: int, result: dict[str, Any]) -> None:
        """Send the data set means of a validation."""
        means = {f"validation/{name}": v["mean"] for name, v in result["dataset"].items()}
        self._run.log(means, step=step)

    def message(self, text: str) -> None:
        """Messages are for people at the terminal."""

    def end(self, summary: dict[str, Any]) -> None:
        """The last validation has been sent already."""

    def close(self) -> None:
        """Close the wandb run, also after an error."""
        if self._run is not None:
            self._run.finish()


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
