"""Exceptions of tpf; each carries one sentence naming the thing, the value and the fix."""

from __future__ import annotations


class TpfError(Exception):
    """An error that a user can act on; the command line prints its text as one line.

    ``exit_code`` is the process exit code of the command line (1 failed while running).
    """

    exit_code = 1
    shared = False
    """Raised on every rank of the job at the same place, so that none waits for another."""


class UsageError(TpfError):
    """Wrong flag, configuration or path (exit code 2)."""

    exit_code = 2


class HardwareError(TpfError):
    """A GPU, driver or number of processes that this machine does not have (exit code 3)."""

    exit_code = 3


class Interrupted(TpfError):
    """Stopped by a signal after the state was saved (exit code 130)."""

    exit_code = 130
    shared = True


class NonFinite(TpfError):
    """A loss or gradient that is NaN or infinite."""


class DataError(TpfError):
    """An entry that cannot be used: which entry, at which stage of the pipeline, and why."""

    def __init__(self, entry: str, stage: str, reason: str) -> None:
        super().__init__(f"{entry}: {stage}: {reason}")
        self.entry = entry
        self.stage = stage
        self.reason = reason

    def __reduce__(self) -> tuple[type[DataError], tuple[str, str, str]]:
        return (DataError, (self.entry, self.stage, self.reason))


def told(error: Exception) -> TpfError:
    """Return an error as a user is told it: one that nobody foresaw as a ``TpfError``."""
    if isinstance(error, TpfError):
        return error
    if "use_deterministic_algorithms" in str(error):  # of torch, which goes on with Python calls
        what = str(error).partition(", but you set")[0]
        return TpfError(f"{what}; give train.deterministic=false, and runs do not repeat exactly")
    first = next(iter(str(error).splitlines()), "")  # torch's go on with C++ frames
    return TpfError(f"unexpected {type(error).__name__}: {first} (--debug shows where)")


def rebuild(kind: str, text: str) -> TpfError:
    """Return the error of another process from the name of its class and its text."""
    known = globals().get(kind)
    if isinstance(known, type) and issubclass(known, TpfError) and known is not DataError:
        return known(text)
    return TpfError(text)
