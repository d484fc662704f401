"""Run a command of the command line in the process of a test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tpf.cli.app import main

Run = Callable[..., tuple[int, str, str]]


def in_empty_folder(
    command: str, folder: Path, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Return what runs ``tpf COMMAND`` on a machine without GPU: code, output, errors."""
    patch.chdir(folder)
    patch.setattr(torch.cuda, "is_available", lambda: False)

    def run(*words: str) -> tuple[int, str, str]:
        patch.setattr("sys.argv", ["tpf", command, *words])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run
