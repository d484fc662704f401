"""From --gpus to processes, and what an impossible wish is told."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tpf import slurm
from tpf.errors import HardwareError, UsageError
from tpf.launch import Plan, plan

CLI = Path(__file__).resolve().parents[1] / "cli"
STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name.startswith("SLURM_") or name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name)


def test_plans() -> None:
    assert plan(None, 1, None, 0) == Plan("alone")
    assert plan(1, 1, None, 8) == Plan("alone")
    assert plan(4, 1, None, 8) == Plan("launch", 4)
    assert plan(16, 2, "a:29400", 8) == Plan("launch", 8, 2, "a:29400")


def test_joining_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert plan(None, 1, None, 0) == Plan("join")
    assert plan(4, 1, None, 0) == Plan("join")
    with pytest.raises(UsageError, match="started 4 ranks"):
        plan(8, 1, None, 0)


@pytest.mark.parametrize(("gpus", "available"), [(16, 0), (16, 8), (3, 2), (7, 4)])
def test_too_many_gpus_name_the_line_to_run(gpus: int, available: int) -> None:
    with pytest.raises(HardwareError, match=rf"--gpus {gpus}: .*tpf train --gpus") as caught:
        plan(gpus, 1, None, available)
    assert caught.value.exit_code == 3


def test_the_suggested_line_is_a_possible_plan() -> None:
    with pytest.raises(HardwareError) as caught:
        plan(16, 1, None, 8)
    line = str(caught.value).rsplit(": ", 1)[1].split()
    gpus, nodes = int(line[line.index("--gpus") + 1]), int(line[line.index("--nodes") + 1])
    assert plan(gpus, nodes, "first:29400", 8).processes * nodes == 16


@pytest.mark.parametrize(
    ("gpus", "nodes", "rdzv", "words"),
    [
        (0, 1, None, "--gpus is 0"),
        (-2, 1, None, "--gpus is -2"),
        (16, 3, "a:1", "does not divide"),
        (16, 2, None, "needs --rdzv"),
        (4, 0, None, "--nodes is 0"),
    ],
)
def test_senseless_numbers(gpus: int, nodes: int, rdzv: str | None, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        plan(gpus, nodes, rdzv, 8)


def under(monkeypatch: pytest.MonkeyPatch, **changed: str) -> None:
    for name, value in (STEP | changed).items():
        monkeypatch.setenv(name, value)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)


def test_tasks_of_srun_join_as_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    under(monkeypatch)
    assert plan(None, 1, None, 8) == Plan("join")
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("9", "16")
    assert (os.environ["LOCAL_RANK"], os.environ["MASTER_ADDR"]) == ("1", "gpu07")
    assert 20_000 <= int(os.environ["MASTER_PORT"]) < 40_000


def test_a_task_with_one_gpu_of_its_own_calls_it_number_0(monkeypatch: pytest.MonkeyPatch) -> None:
    under(monkeypatch)
    plan(16, 1, None, 1)
    assert os.environ["LOCAL_RANK"] == "0"


def test_one_task_per_node_starts_the_ranks_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    under(monkeypatch, SLURM_STEP_NUM_TASKS="2", SLURM_PROCID="1", SLURM_LOCALID="0")
    chosen = plan(16, 1, None, 8)
    assert (chosen.kind, chosen.processes, chosen.nodes) == ("launch", 8, 2)
    assert chosen.rendezvous.startswith("gpu07:")
    under(monkeypatch)
    with pytest.raises(UsageError, match="one task per GPU, or one per node"):
        plan(32, 1, None, 8)


def test_a_batch_script_is_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "16")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    assert plan(None, 1, None, 8) == Plan("alone")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[07-09,12],login1", "gpu07"),
        ("gpu[12,07-09]", "gpu12"),
        ("node3", "node3"),
        ("node3,node4", "node3"),
        ("r[1-2]-n", "r1-n"),
    ],
)
def test_first_host_of_a_list(nodes: str, first: str) -> None:
    assert slurm.first_host(nodes) == first


def dry(script: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    assert subprocess.run(["bash", "-n", CLI / script], check=False).returncode == 0
    return subprocess.run(
        ["bash", CLI / script, *words],
        env=os.environ | {"TPF_DRY": "1"} | variables,
        cwd=CLI.parent,
        capture_output=True,
        text=True,
        check=False,
    )


def test_torchrun_script(tmp_path: Path) -> None:
    line = dry("torchrun.sh", "--crop", "384", NPROC="4").stdout
    assert "--nproc-per-node 4" in line and "--standalone" in line
    assert line.strip().endswith("-m tpf.cli train --crop 384")
    line = dry("torchrun.sh", NNODES="2", HEAD="first:29400", NPROC="8").stdout
    assert "--rdzv-endpoint first:29400" in line and "--nnodes 2" in line
    missing = dry("torchrun.sh", NNODES="2")
    assert missing.returncode != 0 and "set HEAD" in missing.stderr


def test_slurm_script_goes_on_with_its_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ("--out", str(out), "--crop", "384")
    line = dry("slurm.sbatch", *words).stdout.strip()
    assert line.startswith("srun ") and line.endswith(f"tpf.cli train --out {out} --crop 384")
    out.mkdir()
    (out / "config.yaml").write_text("")
    assert dry("slurm.sbatch", *words).stdout.strip().endswith("--resume")
    assert dry("slurm.sbatch", "--crop", "384").returncode == 2
