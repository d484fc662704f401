"""What Slurm says of the tasks that ``srun`` started."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tpf.errors import UsageError

FIRST_PORT, PORTS = 20_000, 20_000
"""Ports where the ranks of a job meet: one for each step, drawn from the ids of job and step."""


@dataclass(frozen=True)
class Tasks:
    """This process among the tasks of a job step."""

    size: int
    rank: int
    local: int
    """Among the tasks of this node."""
    nodes: int
    first_node: str
    port: int

    @property
    def rendezvous(self) -> str:
        """HOST:PORT of the first node."""
        return f"{self.first_node}:{self.port}"

    def variables(self, gpus: int) -> dict[str, str]:
        """Return torch's variables for these tasks, on a node of which a task sees ``gpus``.

        A task that was given one GPU of its own sees it as number 0.
        """
        return {
            "WORLD_SIZE": str(self.size),
            "RANK": str(self.rank),
            "LOCAL_RANK": str(0 if gpus == 1 else self.local),
            "MASTER_ADDR": self.first_node,
            "MASTER_PORT": str(self.port),
        }


def tasks(environment: Mapping[str, str]) -> Tasks | None:
    """Return the tasks of the job step, None for a process that ``srun`` did not start.

    MASTER_ADDR and MASTER_PORT win over what Slurm says. A batch script itself is no step, though
    it sees the variables of the allocation.
    """
    size = environment.get("SLURM_STEP_NUM_TASKS")
    if size is None and "SLURM_STEP_ID" in environment:
        size = environment.get("SLURM_NTASKS")
    if size is None:
        return None
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodes = next((environment[name] for name in names if name in environment), "localhost")
    count = environment.get("SLURM_STEP_NUM_NODES", environment.get("SLURM_NNODES", "1"))
    try:
        ids = int(environment.get("SLURM_JOB_ID", "0")), int(environment.get("SLURM_STEP_ID", "0"))
        port = environment.get("MASTER_PORT") or FIRST_PORT + (7 * ids[0] + ids[1]) % PORTS
        return Tasks(
            int(size),
            int(environment.get("SLURM_PROCID", "0")),
            int(environment.get("SLURM_LOCALID", "0")),
            int(count),
            environment.get("MASTER_ADDR") or first_host(nodes),
            int(port),
        )
    except ValueError as error:
        raise UsageError(f"Slurm's variables cannot be read ({error}); use torchrun") from error


def first_host(nodes: str) -> str:
    """Return the first host of a list as Slurm writes it: ``gpu[07-09,12],login1`` is gpu07."""
    first = re.match(r"([^,\[]*)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", nodes.strip())
    assert first is not None  # every part may be empty
    return first.group(1) + (first.group(2) or "") + first.group(3)
