"""Weights & Biases behind four calls; does nothing unless asked for or logged in."""

from __future__ import annotations

import os
from typing import Any, Literal

from tpf.config import Config, to_dict
from tpf.errors import UsageError


class Tracker:
    """Sends configuration, step records and validation means to a wandb run, or nowhere."""

    def __init__(self, mode: Literal["auto", "disabled", "offline", "online"], folder: str) -> None:
        if mode == "auto":
            mode = "online" if os.environ.get("WANDB_API_KEY") else "disabled"
        self.mode = mode
        self.folder = folder
        self._run: Any = None

    def start(self, config: Config, facts: dict[str, Any]) -> None:
        """Open the run; raise ``UsageError`` if wandb refuses."""
        if self.mode == "disabled":
            return
        import wandb

        try:
            self._run = wandb.init(
                project="tpf", mode=self.mode, dir=self.folder, config=to_dict(config) | facts
            )
        except wandb.errors.Error as error:
            raise UsageError(f"--wandb {self.mode}: {error}; use --wandb disabled") from error

    def log(self, record: dict[str, Any], step: int) -> None:
        """Send the numbers of a record."""
        if self._run is not None:
            self._run.log({k: v for k, v in record.items() if isinstance(v, (int, float))}, step)

    def finish(self) -> None:
        """Close the run."""
        if self._run is not None:
            self._run.finish()
