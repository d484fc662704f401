"""Functions that test processes run; apart, as a process imports the module of its function."""

from __future__ import annotations

import os
import signal
import time

import numpy as np


def hungry(_: str) -> str:
    """Ask for 512 MB."""
    try:
        return str(np.ones(2**26).sum())
    except MemoryError:
        return "too much"


def mortal(file: str) -> str:
    """Return the name of the file; die at file 3, hang at 5 where nothing interrupts it."""
    if file == "3":
        os.kill(os.getpid(), signal.SIGKILL)
    if file == "5":
        signal.pthread_sigmask(signal.SIG_BLOCK, set(range(1, signal.NSIG)))
        time.sleep(600)
    return file


def failing(file: str) -> str:
    """Raise what a missing file raises."""
    raise FileNotFoundError(file)


def process(_: str) -> str:
    """Return the id of the process."""
    return str(os.getpid())


def patient(file: str) -> str:
    """Take half a second."""
    time.sleep(0.5)
    return file
