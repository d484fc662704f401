"""Runs of several ranks as forked processes: no launcher, nothing to import anew."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runs import Messages

from tpf import dist
from tpf.config import Config, load
from tpf.launch import plan
from tpf.train import Options, train
from tpf.trainer import Trainer

EXAMPLES = Path(__file__).resolve().parents[1] / "data" / "examples"
SMALL = [
    f"data.path={EXAMPLES / '1ubq.cif.gz'}",
    "data.crop=16",
    "data.conformers=ideal",
    "model.pairformer_blocks=1",
    "model.diffusion_blocks=1",
    "train.lr=2e-3",
    "train.warmup=2",
    "train.diffusion_samples=1",
    "train.rollout_steps=1",
    "train.checkpoint_every=2",
    "train.batch_size=4",
    "train.steps=2",
]
Prepare = Callable[[Trainer], None]


def small(*overrides: str) -> Config:
    return load("tiny", [*SMALL, *overrides])


@dataclass(frozen=True)
class Ended:
    """How a rank ended."""

    error: Exception | None
    messages: list[str]


def torch_variables(rank: int, size: int, port: int) -> dict[str, str]:
    """Return what torchrun would set."""
    numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_PORT": port}
    return {"MASTER_ADDR": "localhost", **{name: str(n) for name, n in numbers.items()}}


def slurm_variables(rank: int, size: int, port: int) -> dict[str, str]:
    """Return what srun would set; ``port`` comes from the job's id."""
    numbers = {"NTASKS": size, "STEP_NUM_TASKS": size, "PROCID": rank, "LOCALID": rank}
    numbers |= {"JOB_ID": port, "STEP_ID": 0, "STEP_NUM_NODES": 1}
    found = {f"SLURM_{name}": str(n) for name, n in numbers.items()}
    return found | {"SLURM_STEP_NODELIST": "localhost"}


def run_ranks(
    size: int,
    config: Config,
    options: Options,
    faults: dict[int, Prepare] | None = None,
    variables: Callable[[int, int, int], dict[str, str]] = torch_variables,
) -> list[Ended | int]:
    """Train on forked ranks and return how each ended: an exit code where it could not say.

    ``faults`` are called on their ranks before the first step.
    """
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank in range(size):
        receive, send = context.Pipe(duplex=False)
        mine = replace(options, prepare=(faults or {}).get(rank))
        arguments = (send, variables(rank, size, port), config, mine)
        processes.append(context.Process(target=_one, args=arguments))
        processes[-1].start()
        send.close()
        pipes.append(receive)
    ends: list[Ended | int] = []
    for process, pipe in zip(processes, pipes, strict=True):
        process.join(timeout=120)
        if process.exitcode is None:
            for left in processes:
                left.kill()
            raise AssertionError("a rank hangs")
        try:
            ends.append(pipe.recv())
        except EOFError:
            ends.append(process.exitcode)
    return ends


def _one(send: Any, variables: dict[str, str], config: Config, options: Options) -> None:
    os.environ |= variables
    messages, failure = Messages(), None
    try:
        assert plan(None, 1, None, 0).kind == "join"
        train(config, options, messages)
    except Exception as error:
        failure = error
    send.send(Ended(failure, messages.texts))
    dist.stop()
    os._exit(0)
