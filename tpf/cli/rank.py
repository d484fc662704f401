"""One rank of ``tpf train``; imported only when training starts, because it loads torch."""

from __future__ import annotations

import os
from pathlib import Path

from tpf import dist
from tpf.cli.display import make_display
from tpf.config import Config
from tpf.tracker import Several, Tracker, wanted
from tpf.train import Options, train


def run_rank(
    settings: Config, folder: Path, resume: bool, init: Path | None, as_json: bool
) -> None:
    """Train on this rank; the main rank shows progress and tracks the run."""
    is_main = int(os.environ.get("RANK", "0")) == 0
    display = make_display(as_json, speaks=is_main)
    if is_main and wanted(settings.train.wandb):
        display = Several([display, Tracker(settings, folder)])
    try:
        train(settings, Options(folder, resume, init), display)
    finally:
        dist.stop()
