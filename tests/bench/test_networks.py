"""Studies of a block and of whole steps: replaced operators, phases, tables."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.bench.studies import pick, run
from tests.model.rerun import Rerun
from tpf.bench import block, block_cases, memory, profiling, step, step_studies, swap
from tpf.bench.backends import BACKENDS, Backend, plain_attention
from tpf.bench.cases import Settings, Shape
from tpf.bench.protein import make_protein, make_sample
from tpf.bench.record import Record, Row
from tpf.bench.trimul_backends import MULTIPLIERS
from tpf.config import Config, load
from tpf.data.tokens import tokenize
from tpf.dist import World
from tpf.errors import TpfError
from tpf.model import pairformer, primitives
from tpf.model.graphs import Graphs
from tpf.phases import PHASES, Phases
from tpf.runfolder import RunFolder
from tpf.trainer import Trainer

CPU = torch.device("cpu")
SMALL = ["train.diffusion_samples=2", "train.rollout_steps=1", "train.max_recycles=1"]


def settings(*impls: str, **changes: Any) -> Settings:
    chosen = Settings(impls, (Shape(12, 128),), CPU, seeds=1, reps=2, config="tiny")
    return dataclasses.replace(chosen, **changes)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Config:
    """Let the study of steps have few and cheap ones."""
    config = load("tiny", SMALL)
    monkeypatch.setattr(step, "load", lambda name: config)
    return config


# ------------------------------------------------------------------------- operators


def test_replaced_names_come_back() -> None:
    before = pairformer.triangle_attention, pairformer.fusable, primitives.fusable
    with pytest.raises(RuntimeError), swap.CHOICES["torch"].open(CPU).used():
        assert pairformer.triangle_attention is not before[0]
        assert pairformer.fusable() is primitives.fusable() is False  # type: ignore[call-arg]
        raise RuntimeError
    assert (pairformer.triangle_attention, pairformer.fusable, primitives.fusable) == before
    fused = swap.Choice("torch", "torch", fused=True).open(CPU)
    with fused.used():
        assert pairformer.fusable is before[1]


def test_a_block_runs_the_chosen_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
        calls.append("attention")
        return plain_attention(q, k, v, bias, mask)

    monkeypatch.setitem(BACKENDS, "mine", Backend(lambda: attend, "anything"))
    module = block_cases.make_block(CPU, dropout=0.0)
    x = block_cases.make_block_inputs(7, CPU, torch.float32)
    want = block_cases.results(module, x, autocast=False)
    with swap.Choice("mine", "eager").open(CPU).used():
        got = block_cases.results(module, x, autocast=False)
    assert calls == ["attention", "attention"]
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


def test_every_choice_names_known_backends() -> None:
    for choice in swap.CHOICES.values():
        assert choice.attention in BACKENDS and choice.multiplication in MULTIPLIERS


# ----------------------------------------------------------------------------- block


def test_block_on_the_cpu() -> None:
    record = run(block.bench_block, settings("eager", "torch", "cuda", errors=True))
    timed = [r for r in record.rows if "median_ms" in r]
    assert {r["impl"] for r in timed} == {"eager", "torch"}
    assert all(r["timer"] == "wall" and r["reps"] == 2 and r["host_us"] > 0 for r in timed)
    assert pick(record, impl="cuda", error="needs an NVIDIA GPU")
    judged = pick(record, impl="torch", metric="rel_l2")
    named = dict(block_cases.make_block(CPU).named_parameters())
    assert {r["tensor"] for r in judged} == {"s", "z", "ds", "dz", *named}
    assert {r["ratio"] for r in judged} == {1.0} and not record.failures
    assert {r["passed"] for r in pick(record, metric="bitwise")} == {1}


def test_our_block_may_not_be_far_from_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block, "OURS", ("eager",))
    monkeypatch.setattr(block, "MAX_RATIO", 1.01)
    record = run(block.bench_block, settings("eager", errors=True))
    assert len(record.failures) == 1 and "more than 1.01 times that of torch" in record.failures[0]


def test_sublayers_run_and_leave_no_gradients() -> None:
    module = block_cases.make_block(CPU)
    x = block_cases.make_block_inputs(6, CPU)
    calls = block_cases.sublayers(module, x, fused=False)
    assert list(calls) == [
        "tri mul out", "tri mul in", "tri att start", "tri att end", "pair transition",
        "single attention", "single transition",
    ]  # fmt: skip
    for call in calls.values():
        call()
    assert all(p.grad is None for p in module.parameters()) and x.z.grad is None


# ---------------------------------------------------------------- memory and profiles


def test_memory_of_all_parts(small: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def called(prepare: Any, device: torch.device) -> tuple[float | None, float]:
        forward, whole = prepare()
        whole()
        assert forward is None or forward() is not None
        return (None if forward is None else 1.0), 2.0

    monkeypatch.setattr(memory, "_measure", called)
    monkeypatch.setattr(memory, "load", lambda name: small)
    chosen = settings("eager", "sdpa", "cuequivariance", shapes=(Shape(8, 16),))
    record = run(memory.memory, chosen)
    measured = {(r["op"], r["impl"], r["phase"]) for r in record.rows if "peak_mib" in r}
    assert measured == {
        *(("attention", impl, phase) for impl in ("eager", "sdpa") for phase in ("fwd", "fwd_bwd")),
        *((op, "eager", phase) for op in ("trimul", "block") for phase in ("fwd", "fwd_bwd")),
        ("step", "eager", "step"),
    }
    missing = {r["op"] for r in pick(record, impl="cuequivariance")}
    assert missing == {"attention", "trimul", "block", "step"}
    with pytest.raises(TpfError, match="no backend can run here: cuequivariance: not installed"):
        run(memory.memory, settings("cuequivariance"))


def test_a_profile_lists_the_longest_kernels_first() -> None:
    work = {"gemm" * 30: profiling.Work(2, 3.0), "copy": profiling.Work(1, 1.0)}
    assert profiling.total(work) == (3, 4.0)
    record = Record("test")
    profiling.report("Kernels", work, record, op="block", impl="cuda", n=384)
    assert record.tables[0].rows[0] == (("gemm" * 30)[:80], "2", 3000.0, "75.0 %")
    assert record.rows[1] == {
        "op": "block", "impl": "cuda", "n": 384, "metric": "kernel", "kernel": "copy",
        "launches": 1, "busy_ms": 1.0,
    }  # fmt: skip


@pytest.mark.gpu
def test_a_profile_counts_launches() -> None:
    x = torch.randn(1024, 1024, device="cuda")
    work = profiling.kernels(lambda: (x.sin(), x.cos(), x.cos()))
    assert profiling.total(work).launches == 3 and profiling.total(work).ms > 0


# ------------------------------------------------------------------------------ step


def test_a_protein_has_the_size_of_the_crop_and_two_equal_chains() -> None:
    tokens = tokenize(make_protein(10))
    assert len(tokens) == 10 and not tokens.atomized.any()
    names = tokens.tables.res_name.tolist()
    assert names[:5] == names[5:] and len(set(tokens.tables.chain_sym)) == 2
    assert len(tokens.tables.bonds) == 8
    assert (make_protein(10).pos == tokens.tables.pos).all()
    assert len(make_protein(7).chain_id) == 1
    sample = make_sample(10, load("tiny"))
    assert sample["token_mask"].shape == (1, 10)
    assert sample["ground_truth"]["atom_positions"].isfinite().all()
    assert float(sample["loss_weights"]["plddt"]) > 0


def test_a_timed_step_is_the_trainers_step(small: Config, tmp_path: Path) -> None:
    world = World(0, 1, CPU)
    stepper = step.Stepper(8, small, world, tmp_path)
    for number in range(2):
        sample = stepper.step(swap.CHOICES["torch"].open(CPU), number)
        assert all(sample.phases[phase] > 0 for phase in PHASES)
        assert sum(sample.phases.values()) < sample.wall
    plain = Trainer.build(small, world)
    for _ in range(2):
        plain.train_step([make_sample(8, small)], RunFolder(tmp_path))
    theirs = plain.model.state_dict()
    for name, value in stepper.trainer.model.state_dict().items():
        assert torch.equal(value, theirs[name]), name


def test_steps_with_graphs_have_the_weights_of_steps_without(small: Config, tmp_path: Path) -> None:
    plain, capture = swap.CHOICES["torch"].open(CPU), Rerun()
    replayed = dataclasses.replace(plain, graphs=Graphs(CPU, capture))
    found = []
    for operators in (plain, replayed):
        stepper = step.Stepper(8, small, World(0, 1, CPU), tmp_path)
        for number in range(3):
            stepper.step(operators, number)
        found.append(stepper.trainer.model.state_dict())
    assert capture.replays > 10
    bad = [name for name, value in found[0].items() if not torch.equal(value, found[1][name])]
    assert bad == []
    held, free = replayed.held_mib()
    assert held > 3 and free == 1 and plain.held_mib() == (0, 0)
    replayed.forget()
    assert replayed.held_mib() == (3, 1)


def test_phases_are_the_times_between_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 0.001, 0.004, 0.010, 0.011, 0.015])
    phases = Phases(CPU)
    monkeypatch.setattr(phases, "_now", lambda: next(moments))
    for phase in ("forward", "backward", None, "forward", "clipping", None):
        phases.enter(phase)
    found = phases.finished()
    assert found["forward"] == pytest.approx(2) and found["backward"] == pytest.approx(3)
    assert found["clipping"] == pytest.approx(4) and "optimiser" not in found
    assert not phases.finished()


def test_steps_of_every_backend(small: Config) -> None:
    record = run(step_studies.bench_step, settings("eager", "torch", "cuda"))
    assert [r["impl"] for r in record.rows if "mean_ms" in r] == ["eager", "torch"]
    for row in pick(record, phase="step"):
        assert row["reps"] == 2 and row["ranks"] == 1 and row["config"] == "tiny"
        assert row["gpu_ms"] == pytest.approx(sum(row[f"{phase}_ms"] for phase in PHASES))
    assert pick(record, impl="cuda", error="needs an NVIDIA GPU")


def times(**means: float) -> list[Row]:
    phases = {f"{phase}_ms": 1.0 for phase in PHASES}
    return [
        {"impl": name.replace("_and_", " + ").replace("_with_", ", ").replace("_", " "), "n": 384,
         "mean_ms": ms, "gpu_ms": ms, "ranks": 1, **phases}
        for name, ms in means.items()
    ]  # fmt: skip


def test_table_13_is_the_reduction_in_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = times(
        eager=200.0, eager_and_attention=180.0, eager_and_multiplication=195.0, both=150.0,
        both_with_fused_layers=100.0,
    )  # fmt: skip
    asked: dict[str, swap.Choice] = {}

    def measured(choices: dict[str, swap.Choice], _: object, record: Record, *__: object) -> None:
        asked.update(choices)
        record.rows += rows

    monkeypatch.setattr(step_studies, "measure", measured)
    record = run(step_studies.table_13, settings("eager"))
    assert set(asked) == {r["impl"] for r in rows}
    assert asked["eager + attention"] == swap.Choice("torch", "eager")
    assert record.tables[0].rows == [("384", "eager", 200.0, "10.00", "2.50", "25.00", "50.00")]


def test_table_13_needs_its_baseline() -> None:
    with pytest.raises(TpfError, match="cuequivariance: not installed"):
        run(step_studies.table_13, settings("cuequivariance"))


def test_tables_4_and_figure_3_order_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = times(flex=7_430.0, cuda=7_010.0)
    monkeypatch.setattr(step_studies, "measure", lambda *given: given[2].rows.extend(rows))
    record = run(step_studies.table_4, settings("flex", "cuda"))
    assert record.tables[0].rows == [("cuda", 7.01), ("flex", 7.43)]
    record = run(step_studies.figure_3, settings("flex", "cuda"))
    assert record.tables[0].rows[0][:3] == ("384", "cuda", 7010.0) and "<svg" in record.figures[0]


def test_the_first_steps_are_not_counted(small: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[int] = []

    class Counted:
        device = CPU

        def __init__(self, *_: object) -> None: ...

        def step(self, operators: object, number: int) -> step.Sample:
            numbers.append(number)
            return step.Sample(float(number), dict.fromkeys(PHASES, 1.0))

    monkeypatch.setattr(step, "Stepper", Counted)
    record = Record("test")
    step.measure({"torch": swap.CHOICES["torch"]}, settings("torch", reps=4), record, 3)
    assert numbers == [0, 0, 1, 2, 3, 4, 5, 6]  # a first step to see whether it runs
    assert step.timed(record)[0]["mean_ms"] == pytest.approx(4.5)
