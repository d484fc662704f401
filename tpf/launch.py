"""From ``--gpus N`` to processes: alone, several on this machine, several machines, or joining."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from tpf import errors
from tpf.errors import HardwareError, TpfError, UsageError

RUN_ID = "tpf"


@dataclass(frozen=True)
class Plan:
    """How this process takes part in the job."""

    kind: Literal["alone", "join", "launch"]
    processes: int = 1
    """Ranks that this machine starts."""
    nodes: int = 1
    rendezvous: str = ""
    """HOST:PORT where the machines meet; empty for one machine."""


def plan(gpus: int | None, nodes: int, rendezvous: str | None, available: int) -> Plan:
    """Decide how to start ``gpus`` ranks where this machine has ``available`` GPUs.

    Raises ``HardwareError`` with the exact lines to run when the machine cannot hold them, and
    ``UsageError`` for numbers that make no sense.
    """
    if gpus is not None and gpus < 1:
        raise UsageError(f"--gpus is {gpus}; give 1 or more, or leave it out")
    if nodes < 1:
        raise UsageError(f"--nodes is {nodes}; give 1 or more")
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and "WORLD_SIZE" not in os.environ:
        raise HardwareError(
            "srun started several tasks of tpf train; start one task per node with "
            "--gpus N --nodes M --rdzv FIRST_NODE:29400"
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        size = int(os.environ["WORLD_SIZE"])
        if gpus not in (None, size):
            raise UsageError(f"--gpus {gpus}, but the launcher started {size} ranks")
        return Plan("join")
    if nodes > 1:
        return _several_nodes(gpus, nodes, rendezvous, available)
    if gpus is None:
        return Plan("alone")
    if gpus > available:
        raise HardwareError(_not_enough(gpus, available))
    return Plan("alone") if gpus == 1 else Plan("launch", gpus)


def _several_nodes(gpus: int | None, nodes: int, rendezvous: str | None, available: int) -> Plan:
    if gpus is None:
        raise UsageError(f"--nodes {nodes} needs --gpus, the number of GPUs over all nodes")
    if gpus % nodes:
        raise UsageError(f"--gpus {gpus} does not divide over --nodes {nodes}; give a multiple")
    if rendezvous is None or ":" not in rendezvous:
        raise UsageError(f"--nodes {nodes} needs --rdzv HOST:PORT of the first node")
    if gpus // nodes > available:
        raise HardwareError(
            f"--gpus {gpus} on {nodes} nodes is {gpus // nodes} a node; this one has {available}"
        )
    return Plan("launch", gpus // nodes, nodes, rendezvous)


def _not_enough(gpus: int, available: int) -> str:
    if available == 0:
        per_node = min(8, gpus)
        have = "this machine has no NVIDIA GPU (leave --gpus out to train on the CPU)"
    else:
        per_node = max(n for n in range(1, available + 1) if gpus % n == 0)
        have = f"this machine has {available}"
    nodes = -(-gpus // per_node)
    line = f"tpf train --gpus {nodes * per_node}"
    if nodes > 1:
        line += f" --nodes {nodes} --rdzv FIRST_NODE:29400"
    where = "one node" if nodes == 1 else f"each of {nodes} nodes"
    return f"--gpus {gpus}: {have}; run on {where} with {per_node} GPUs: {line}"


def launch(chosen: Plan, entry: Callable[..., Any], *arguments: Any) -> None:
    """Start the ranks of a ``launch`` plan through torch's elastic launcher and wait for them.

    Raises the first failing rank's error, with its exit code, as a ``TpfError``.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=chosen.nodes,
        max_nodes=chosen.nodes,
        nproc_per_node=chosen.processes,
        run_id=RUN_ID,
        rdzv_backend="c10d",
        rdzv_endpoint=chosen.rendezvous or "localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(config, entry)(*arguments)
    except SignalException as error:
        raise errors.Interrupted(
            "interrupted; go on from the last checkpoint with the same command and --resume"
        ) from error
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise _error_of(rank, failure.message) from error


def _error_of(rank: int, message: object) -> TpfError:
    """Rebuild a rank's error from what the elastic launcher kept: its kind and its text."""
    text = str(message["message"] if isinstance(message, dict) else message)
    kind, _, sentence = text.partition(": ")
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, TpfError) and known is not errors.DataError:
        return known(f"rank {rank} failed: {sentence}")
    return TpfError(f"rank {rank} failed: {text}")
