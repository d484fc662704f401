"""One arm: same start and batches as the others, faults found, exact continuation."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections import Counter
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tpf import checkpoint
from tpf.bench import backends, trimul_backends
from tpf.bench.swap import Choice
from tpf.config import Config, load, to_yaml
from tpf.kernels.ops import triangle_attention
from tpf.model.model import Model
from tpf.report.train import read_records
from tpf.stability import faults, operators
from tpf.stability.arm import Outcome, Task, read_outcome, run_arm
from tpf.stability.probe import EVERY, digest, magnitudes
from tpf.stability.results import collect, read_curve
from tpf.stability.study import Arm, Settings, Study, arms
from tpf.stability.verdict import Losses, judge

EXAMPLES = Path(__file__).resolve().parents[2] / "data" / "examples"
WARMUP, UPDATES = 3, 12
CONFIG = load(
    "tiny",
    [
        f"data.path={EXAMPLES / '1ubq.cif.gz'}",
        "data.crop=16",
        "train.lr=5e-2",
        f"train.warmup={WARMUP}",
        "train.diffusion_samples=2",
        "train.rollout_steps=1",
        "train.wandb=disabled",
    ],
)


def with_steps(steps: int) -> Config:
    return dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, steps=steps))


def execute(folder: Path, task: Task, steps: int) -> Outcome:
    """Run a task in this process, as the process of an arm does."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "task.json").write_text(json.dumps(dataclasses.asdict(task)))
    (folder / "config.yaml").write_text(to_yaml(with_steps(steps)))
    outcome = run_arm(folder)
    outcome.write(folder)
    return outcome


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """A study with a warm-up and no arm."""
    settings = Settings(
        impls=("torch", "eager"), faults=("noise:1e4", "nan:4"), crops=(16,), steps=UPDATES,
        warmup_steps=WARMUP, warmup_crop=16, cpu=True,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("stability") / "study"
    made = Study.create(path, settings, CONFIG, lambda text: None)
    assert execute(path / "warmup", Task("torch"), WARMUP).state == "done"
    return made


def run_one(study: Study, name: str, *, updates: int = UPDATES, **changes: Any) -> Arm:
    """Run an arm of the study in this process; ``changes`` are those of its task."""
    arm = Arm(16, name, fault=":" in name, again=changes.pop("again", False))
    task = Task(
        arm.impl, name if arm.fault else None, WARMUP, str(study.path / "warmup" / "run"), **changes
    )
    execute(study.path / arm.folder, task, WARMUP + updates)
    return arm


@pytest.fixture(scope="module")
def finished(study: Study) -> Study:
    """The study with all its arms."""
    for arm in arms(study.settings):
        run_one(study, arm.name)
    return study


def test_verdicts_of_all_kinds(finished: Study) -> None:
    results = collect(finished)
    verdicts = {row["impl"]: row["verdict"] for row in results.rows}
    assert verdicts == {
        "torch": "stable", "eager": "stable", "noise:1e4": "diverged", "nan:4": "nan"
    }  # fmt: skip
    assert results.failures == []
    row = next(row for row in results.rows if row["impl"] == "nan:4")
    assert row["nonfinite_update"] == 4 and row["updates"] == 3
    assert "first not finite: module msa_module.blocks.0" in row["reason"]


def test_loss_curves_of_a_sound_and_of_a_faulty_arm(finished: Study) -> None:
    """The configuration is FP32, so that the arm in FP32 is the reference arm once more."""
    from benchmarks import loss_curve

    impls = ("torch", "torch@fp32", "eager")
    settings = dataclasses.replace(finished.settings, impls=impls, faults=("noise:1e4",))
    study = dataclasses.replace(finished, settings=settings)
    assert not loss_curve.document(collect(study), UPDATES)["complete"]
    run_one(finished, "torch@fp32")
    found = loss_curve.document(collect(study), UPDATES)
    assert found["complete"] and found["reference_distance"] == 0
    assert found["curves"]["torch"] == found["curves"]["torch@fp32"]
    judged = {name: backend["holds"] for name, backend in found["backends"].items()}
    assert judged == {"eager": True, "noise:1e4": False}
    json.dumps(found)


def test_arms_share_start_and_batches(finished: Study) -> None:
    curves = {arm.name: read_curve(finished.path, arm) for arm in arms(finished.settings)}
    reference = curves["torch"]
    assert all(isinstance(batch, str) for batch in reference.column("batch"))
    assert len(set(reference.column("batch"))) == UPDATES
    for curve in curves.values():
        n = len(curve.records)
        assert curve.column("batch") == reference.column("batch")[:n]
        assert curve.records[0]["weights"] == reference.records[0]["weights"]
        assert curve.records[0]["lr"] == curve.records[n - 1]["lr"] == pytest.approx(5e-2)
    warm = checkpoint.load(checkpoint.resolve(finished.path / "warmup" / "run"))
    assert warm.step == WARMUP and digest(warm.model) == reference.records[0]["weights"]


def test_only_the_first_of_every_25_records_has_magnitudes(finished: Study) -> None:
    measured = read_curve(finished.path, Arm(16, "torch")).column("magnitudes")
    assert [k for k, found in enumerate(measured) if found] == list(range(0, UPDATES, EVERY))
    blocks = CONFIG.model.pairformer_blocks
    for name in ("q", "k", "bias"):
        assert len(measured[0][name]) == blocks and all(v > 0 for v in measured[0][name])


def test_second_run_repeats_and_longer_run_continues(finished: Study) -> None:
    """An arm done in two parts, the second with more updates, is the arm done at once."""
    first = read_curve(finished.path, Arm(16, "torch"))
    run_one(finished, "torch", updates=5, again=True)
    again = run_one(finished, "torch", again=True)
    second = read_curve(finished.path, again)
    assert second.column("loss") == first.column("loss")
    assert second.column("grad_norm") == first.column("grad_norm")
    twice = dataclasses.replace(
        finished, settings=dataclasses.replace(finished.settings, determinism=True)
    )
    rows = {(row["impl"], row["run"]): row for row in collect(twice).rows}
    assert rows["torch", 2]["repeats"] is True
    assert rows["eager", 2]["verdict"] == "unfinished"


def test_skip_goes_on_after_nan_and_says_so(study: Study, finished: Study) -> None:
    """Only the faulty update has no loss; the study still calls the arm nan."""
    arm = run_one(study, "nan:4", nan="skip")
    curve = read_curve(study.path, arm)
    assert read_outcome(study.path / arm.folder) == Outcome("done", WARMUP + UPDATES)
    assert len(curve.records) == UPDATES
    assert [k for k, loss in enumerate(curve.column("loss"), 1) if loss is None] == [4]
    assert curve.records[3]["batch"] == read_curve(study.path, Arm(16, "torch")).records[3]["batch"]
    assert judge(curve.losses, None, UPDATES).name == "nan"
    assert curve.losses.nonfinite == 4 and "loss is nan" in str(curve.nonfinite_reason)


def test_probes_leave_training_alone(study: Study, finished: Study) -> None:
    """The measured arm has the losses of a run that nothing watches."""
    from tpf.cli.display import Silent
    from tpf.stability.arm import branch
    from tpf.train import Options, train

    run = study.path / "plain"
    config = with_steps(WARMUP + 3)
    branch(checkpoint.resolve(study.path / "warmup" / "run"), run, config)
    train(config, Options(run, resume=True, validate=False), Silent())
    plain = [record["loss"] for record in read_records(run / "train.jsonl")]
    assert plain == read_curve(study.path, Arm(16, "torch")).column("loss")[:3]


def test_start_cut_short_begins_anew(study: Study) -> None:
    folder = study.path / Arm(16, "sdpa").folder
    (folder / "run" / "checkpoints").mkdir(parents=True)  # a killed process left no checkpoint
    run_one(study, "sdpa", updates=1)
    assert len(read_records(folder / "run" / "train.jsonl")) == 1


def _inputs() -> list[torch.Tensor]:
    shapes = [(1, 5, 2, 5, 4)] * 3 + [(1, 1, 2, 5, 5)]
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def test_noise_multiplies_only_the_gradient_of_the_bias() -> None:
    inputs, clock = _inputs(), iter([7, 7, 7, 7]).__next__
    upstream = torch.randn(1, 5, 2, 5, 4, dtype=torch.float64)
    clean_out = triangle_attention(*inputs, impl="torch")
    clean = torch.autograd.grad(clean_out, inputs, upstream)
    noisy_out = faults.make_fault("noise:0.5", clock)(*inputs, None)
    noisy = torch.autograd.grad(noisy_out, inputs, upstream)
    assert torch.equal(clean_out, noisy_out)
    assert all(torch.equal(a, b) for a, b in zip(clean[:3], noisy[:3], strict=True))
    noise = torch.empty_like(clean[3]).normal_(generator=torch.Generator().manual_seed(7))
    torch.testing.assert_close(noisy[3], clean[3] * (1 + 0.5 * noise))


def test_nan_appears_in_its_update_only() -> None:
    now = 1
    attend = faults.make_fault("nan:2", lambda: now)
    assert attend(*_inputs(), None).isfinite().all()
    now = 2
    assert attend(*_inputs(), None).isnan().all()


def test_a_third_party_brings_its_update_too(
    study: Study, finished: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An arm of cuEquivariance runs its attention and its update, and only in its own process."""
    calls: Counter[str] = Counter()

    def triangle_attention_(*operands: Any, mask: Any, scale: float) -> torch.Tensor:
        calls["attention"] += 1
        assert scale == CONFIG.model.tri_dim**-0.5
        return triangle_attention(*operands, mask, impl="torch")

    def update(
        z: torch.Tensor, *, direction: Any, mask: torch.Tensor, **joined: torch.Tensor
    ) -> torch.Tensor:
        calls[direction] += 1
        weights = trimul_backends._divided([joined[name] for name in trimul_backends.JOINED])
        return trimul_backends.plain_update(z, mask, tuple(weights), direction)

    module: Any = ModuleType("cuequivariance_torch")
    module.__spec__ = ModuleSpec("cuequivariance_torch", None)
    module.triangle_attention, module.triangle_multiplicative_update = triangle_attention_, update
    monkeypatch.setitem(sys.modules, "cuequivariance_torch", module)
    for known in (backends.BACKENDS, trimul_backends.MULTIPLIERS):
        anywhere = dataclasses.replace(known["cuequivariance"], needs="anything")
        monkeypatch.setitem(known, "cuequivariance", anywhere)  # type: ignore[arg-type, misc]
    arm = run_one(study, "cuequivariance", updates=2)
    assert read_outcome(study.path / arm.folder) == Outcome("done", WARMUP + 2)
    assert calls["attention"] == 2 * calls["outgoing"] == 2 * calls["incoming"] > 0
    theirs, ours = (read_curve(study.path, a).column("loss") for a in (arm, Arm(16, "torch")))
    assert theirs[0] == pytest.approx(ours[0], rel=2e-2)  # its update has weights in BF16
    before = calls.total()
    run_one(study, "sdpa", updates=1)
    assert calls.total() == before


def test_each_backend_has_its_own_two_operators() -> None:
    assert operators.choice("protenix") == Choice("protenix", "cuequivariance")
    assert operators.choice("turbopairformer") == Choice("turbopairformer", "turbopairformer")
    assert operators.choice("sdpa") == Choice("sdpa", "torch")
    device = torch.device("cpu")
    assert operators.why_unavailable("torch", device) is None
    assert operators.why_unavailable("eager", device) is None
    reason = operators.why_unavailable("protenix", device)
    assert reason == "not installed (pip install protenix)"
    assert operators.why_unavailable("scalefold", device) == "has no public kernel"


def test_magnitudes_are_those_of_the_projections() -> None:
    torch.manual_seed(2)
    stack = Model(CONFIG.model).pairformer_stack.train()
    s, z = torch.randn(1, 6, CONFIG.model.c_s), torch.randn(1, 6, 6, CONFIG.model.c_z)
    mask = torch.ones(1, 6, dtype=torch.bool)
    state = torch.get_rng_state()
    found = magnitudes(
        stack,
        (
            s,
            z,
            mask,
        ),
    )
    assert torch.equal(torch.get_rng_state(), state) and stack.training
    pair = stack.blocks[0].pair_stack.eval()
    with torch.no_grad():
        keep = torch.ones(1, 6, 6, dtype=torch.bool)
        start = z + pair.tri_mul_out(z, keep)
        start = start + pair.tri_mul_in(start, keep)
        end = start + pair.tri_att_start(start, keep)
        layers = (pair.tri_att_start, start), (pair.tri_att_end, end)
        largest = max(float(a.mha.linear_q(a.layer_norm(x)).abs().max()) for a, x in layers)
    assert found["q"][0] == pytest.approx(largest)
    with torch.no_grad():
        stack.blocks[1].pair_stack.tri_att_end.mha.linear_k.weight[0, 0] = math.nan
    assert magnitudes(stack, (s, z, mask))["k"][1] is None


def test_measured_bf16_update_has_the_gradients_of_an_unmeasured_one() -> None:
    torch.manual_seed(3)
    stack = Model(CONFIG.model).pairformer_stack.eval()
    inputs = (
        torch.randn(1, 6, CONFIG.model.c_s, dtype=torch.bfloat16),
        torch.randn(1, 6, 6, CONFIG.model.c_z, dtype=torch.bfloat16),
        torch.ones(1, 6, dtype=torch.bool),
    )
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    gradients = []
    for measured in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if measured:
                magnitudes(stack, inputs)
            s, z = stack(*inputs)
        (s.float().square().sum() + z.float().square().sum()).backward()
        gradients.append({name: p.grad for name, p in stack.named_parameters()})
        stack.zero_grad(set_to_none=True)
    assert all(g is not None for g in gradients[0].values())
    assert all(torch.equal(gradients[1][name], g) for name, g in gradients[0].items())


def test_digest_sees_every_bit_name_and_shape() -> None:
    x = torch.arange(6.0)
    same = digest({"a": x, "b": [1, "x"]})
    assert same == digest({"b": [1, "x"], "a": x.clone()})
    others = [
        {"a": x.view(2, 3), "b": [1, "x"]},
        {"c": x, "b": [1, "x"]},
        {"a": x, "b": [1, "y"]},
        {"a": x.to(torch.float64), "b": [1, "x"]},
        {"a": x.nextafter(x + 1), "b": [1, "x"]},
    ]
    assert same not in {digest(other) for other in others}
    assert digest(torch.tensor(-0.0)) != digest(torch.tensor(0.0))
    assert digest(torch.ones(()).expand(1)) == digest(torch.ones(1))
    assert digest(torch.ones(3, dtype=torch.bfloat16)) != digest(
        torch.zeros(3, dtype=torch.bfloat16)
    )


def test_losses_before_nan_are_drawn_raw() -> None:
    assert Losses([3.0, 2.0, math.nan, 1.0], 3).finite == [(1, 3.0), (2, 2.0), (4, 1.0)]
