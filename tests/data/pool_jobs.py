"""Functions that test processes run; apart, as a process imports the module of its function."""

from __future__ import annotations

import os
import signal

import numpy as np


def hungry(_: str) -> str:
    """Ask for 512 MB."""
    try:
        return str(np.ones(2**26).sum())
    except MemoryError:
        return "too much"


def mortal(file: str) -> str:
    """Return the name of the file; die at file 3."""
    if file == "3":
        os.kill(os.getpid(), signal.SIGKILL)
    return file
