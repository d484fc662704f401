"""From ``--gpus N`` to processes: alone, several on this machine, several machines, or joining."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from tpf import errors, slurm
from tpf.errors import HardwareError, TpfError, UsageError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

RUN_ID = "tpf"
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
STOPPED = "TPF_STOPPED"
"""Variable that tells ranks which are started late that the job was asked to stop."""
GO_ON = (
    "the same command goes on (tpf train: with --resume); nothing is lost but the work since the "
    "last checkpoint"
)


@dataclass(frozen=True)
class Plan:
    """How this process takes part in the job."""

    kind: Literal["alone", "join", "launch"]
    processes: int = 1
    """Ranks that this machine starts."""
    nodes: int = 1
    rendezvous: str = ""
    """HOST:PORT where the machines meet; empty for one machine."""


def plan(
    gpus: int | None, nodes: int, rendezvous: str | None, available: int, command: str = "tpf train"
) -> Plan:
    """Decide how to start ``gpus`` ranks of ``command`` where this machine has ``available`` GPUs.

    Several tasks that srun started join as ranks, for which torch's variables are set from Slurm's.
    Raises ``HardwareError`` with the exact lines to run when the machine cannot hold them, and
    ``UsageError`` for numbers that make no sense.
    """
    if gpus is not None and gpus < 1:
        raise UsageError(f"--gpus is {gpus}; give 1 or more, or leave it out")
    if nodes < 1:
        raise UsageError(f"--nodes is {nodes}; give 1 or more")
    tasks = slurm.tasks(os.environ) if "WORLD_SIZE" not in os.environ else None
    if tasks is not None and tasks.size > 1:
        return _under_slurm(gpus, tasks, available, command)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        size = int(os.environ["WORLD_SIZE"])
        if gpus not in (None, size):
            raise UsageError(f"--gpus {gpus}, but the launcher started {size} ranks")
        return Plan("join")
    if nodes > 1:
        return _several_nodes(gpus, nodes, rendezvous, available, command)
    if rendezvous is not None:
        raise UsageError(f"--rdzv {rendezvous} needs --nodes, the number of machines")
    if gpus is None:
        return Plan("alone")
    if gpus > available:
        raise HardwareError(_not_enough(gpus, available, command))
    return Plan("alone") if gpus == 1 else Plan("launch", gpus)


def _under_slurm(gpus: int | None, tasks: slurm.Tasks, available: int, command: str) -> Plan:
    """Join the tasks of a job step as ranks, or start ``gpus`` ranks over one task per node."""
    if gpus in (None, tasks.size):
        os.environ.update(tasks.variables(available))
        return Plan("join")
    if tasks.size != tasks.nodes:
        raise UsageError(
            f"--gpus {gpus}, but srun started {tasks.size} tasks on {tasks.nodes} nodes; start one "
            "task per GPU, or one per node"
        )
    return _several_nodes(gpus, tasks.nodes, tasks.rendezvous, available, command)


def _several_nodes(
    gpus: int | None, nodes: int, rendezvous: str | None, available: int, command: str
) -> Plan:
    if gpus is None:
        raise UsageError(f"--nodes {nodes} needs --gpus, the number of GPUs over all nodes")
    if gpus % nodes:
        raise UsageError(f"--gpus {gpus} does not divide over --nodes {nodes}; give a multiple")
    host, _, port = (rendezvous or "").rpartition(":")
    if rendezvous is None or not host or not port.isdigit():
        given = f", not {rendezvous!r}" if rendezvous else ""
        raise UsageError(f"--nodes {nodes} needs --rdzv HOST:PORT of the first node{given}")
    if gpus // nodes > available:
        raise HardwareError(
            f"--nodes {nodes} is {gpus // nodes} GPUs a node; "
            f"{_not_enough(gpus, available, command)}"
        )
    return Plan("launch", gpus // nodes, nodes, rendezvous)


def _not_enough(gpus: int, available: int, command: str) -> str:
    if available == 0:
        per_node = min(8, gpus)
        have = "this machine has no NVIDIA GPU (leave --gpus out to use the CPU)"
    else:
        per_node = max(n for n in range(1, available + 1) if gpus % n == 0)
        have = f"this machine has {available}"
    nodes = -(-gpus // per_node)
    line = f"{command} --gpus {nodes * per_node}"
    if nodes > 1:
        line += f" --nodes {nodes} --rdzv FIRST_NODE:29400"
    where = "one node" if nodes == 1 else f"each of {nodes} nodes"
    return f"--gpus {gpus}: {have}; run on {where} with {per_node} GPUs: {line}"


def launch(
    chosen: Plan, entry: Callable[..., Any], *arguments: Any, restarts: int = 0
) -> dict[int, Any]:
    """Start the ranks of a ``launch`` plan through torch's elastic launcher and wait for them.

    Return what ``entry`` returned on each rank of this machine. SIGINT, SIGTERM and SIGUSR1 are
    passed on, and the ranks take the time that they need; a second SIGINT kills them. When a rank
    dies all are started anew, ``restarts`` times at most, unless they failed together.

    Raises the first failing rank's error, with its exit code, as a ``TpfError``.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Ranks that start anew would look for each other at the addresses of those before them.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    config = LaunchConfig(
        min_nodes=chosen.nodes,
        max_nodes=chosen.nodes,
        nproc_per_node=chosen.processes,
        run_id=RUN_ID,
        rdzv_backend="c10d",
        rdzv_endpoint=chosen.rendezvous or "localhost:0",
        max_restarts=restarts,
        signals_to_handle="SIGHUP,SIGQUIT",
    )
    with _passing_signals() as received, _telling_of_restarts(restarts):
        try:
            found: dict[int, Any] = elastic_launch(config, _rank)(entry, *arguments)
        except SignalException as error:
            raise errors.Interrupted(f"ended by a signal ({error}); {GO_ON}") from error
        except RendezvousError as error:
            where = chosen.rendezvous or "this machine"
            raise TpfError(
                f"the {chosen.nodes} nodes did not meet at {where} ({error}); is the command "
                "running on every node, and is the first node reachable at --rdzv?"
            ) from error
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if received and failure.exitcode < 0:
                raise errors.Interrupted(f"interrupted; {GO_ON}") from error
            raise _error_of(rank, failure) from error
    for value in found.values():
        if isinstance(value, TpfError):
            raise value
    return found


def _rank(entry: Callable[..., Any], *arguments: Any) -> Any:
    """Run one rank; hand over an error of all ranks, which no restart would mend, as the result."""
    if STOPPED in os.environ:
        return errors.Interrupted(f"interrupted while the ranks were started anew; {GO_ON}")
    launcher = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the launcher passes it on
    try:
        return entry(*arguments)
    except TpfError as error:
        if not error.shared:
            raise
        return error
    finally:  # torch waits for the launcher, and sends SIGINT when that dies
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if os.getppid() != launcher:
            os._exit(errors.Interrupted.exit_code)


@contextmanager
def _passing_signals() -> Iterator[list[int]]:
    """Pass signals on to the ranks while the block runs; yield those that came."""
    received: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        again = number == signal.SIGINT and number in received
        received.append(number)
        os.environ[STOPPED] = "1"  # for ranks that are not yet started
        passed = signal.SIGKILL if again else signal.SIGTERM
        for child in multiprocessing.active_children():
            if child.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(child.pid, passed)
        if again:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, handler) for number in PASSED_ON}
    try:
        yield received
    finally:
        os.environ.pop(STOPPED, None)
        for number, action in before.items():
            signal.signal(number, action)


@contextmanager
def _telling_of_restarts(restarts: int) -> Iterator[None]:
    """Silence torch's launcher while the block runs; say in its place why ranks start anew."""
    from torch.multiprocessing.spawn import ProcessExitedException

    class Teller(logging.Handler):
        told = 0

        def emit(self, record: logging.LogRecord) -> None:
            error = record.exc_info[1] if record.exc_info else None
            if error is None or self.told == restarts:
                return
            self.told += 1
            index = getattr(error, "error_index", "?")
            how = "failed"
            if isinstance(error, ProcessExitedException):
                name = error.signal_name
                how = f"was killed by {name}" if name else f"ended with code {error.exit_code}"
            print(
                f"tpf: rank {index} of this machine {how}; all ranks start again from the last "
                f"checkpoint, or from step 0 without one (restart {self.told} of {restarts})",
                file=sys.stderr,
                flush=True,
            )

    names = ("torch.distributed.elastic", "torch.multiprocessing.spawn")
    source = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    loggers = [*map(logging.getLogger, names), source]
    teller, levels = Teller(), [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    source.setLevel(logging.ERROR)
    source.addHandler(teller)
    source.propagate = False
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        source.removeHandler(teller)
        source.propagate = True


def _error_of(rank: int, failure: ProcessFailure) -> TpfError:
    """Rebuild a rank's error from what the elastic launcher kept of it."""
    told: Any = failure.message
    if not isinstance(told, dict):
        if failure.exitcode < 0:
            name = failure.signal_name()
            memory = ", as the system does when memory runs out" if name == "SIGKILL" else ""
            how = f"was killed by {name}{memory}"
        else:
            how = f"ended with code {failure.exitcode} and left no message"
        return TpfError(f"rank {rank} (process {failure.pid}) {how}; {GO_ON}")
    kind, _, sentence = str(told["message"]).partition(": ")
    text = sentence if hasattr(errors, kind) else told["message"]
    error = errors.rebuild(kind, f"rank {rank} failed: {text}")
    error.add_note(f"On the rank:\n{told['extraInfo']['py_callstack']}")
    return error
