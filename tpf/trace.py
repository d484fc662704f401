"""A Chrome trace of some training steps: what the host and the GPU did, operator by operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tpf.errors import TpfError

WAIT, WARM_UP = 4, 2
"""Steps that are left out: compilation and allocation, then the profiler's own start."""


@contextmanager
def recording(
    path: Path, steps: int, device: torch.device, say: Callable[[str], None]
) -> Iterator[Callable[[], None]]:
    """Yield what to call after each step; after ``WAIT + WARM_UP + steps`` the trace is written.

    ``steps`` 0 writes nothing. Open the file with chrome://tracing or ui.perfetto.dev; ``say`` gets
    its path. Raises ``TpfError`` if it cannot be written.
    """
    if not steps:
        yield lambda: None
        return

    def write(profile: torch.profiler.profile) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            raise TpfError(f"--profile: {path} cannot be written ({error})") from error
        say(f"trace of the steps after the first {WAIT + WARM_UP}: {path}")

    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    schedule = torch.profiler.schedule(wait=WAIT, warmup=WARM_UP, active=steps, repeat=1)
    with torch.profiler.profile(
        activities=activities, schedule=schedule, on_trace_ready=write
    ) as profile:
        yield profile.step
