"""Schedule, per-sample clipping and weight averages against worked numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tpf.config import TrainConfig
from tpf.errors import TpfError, UsageError
from tpf.optim import Ema, SampleGradients, build_optimizer, learning_rate


class Vectors(nn.Module):
    """Two parameters whose gradients a test sets through a linear loss."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(3, 2))
        self.b = nn.Parameter(torch.zeros(4))
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("scale", torch.ones(2))

    def backward(self, a: torch.Tensor | None, b: torch.Tensor | None) -> None:
        parts = [(p * g).sum() for p, g in ((self.a, a), (self.b, b)) if g is not None]
        torch.stack(parts).sum().backward()


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 0.0),
        (1, 1.8e-6),
        (500, 9e-4),
        (999, 1.8e-3 * 0.999),
        (1000, 1.8e-3),
        (50_000, 1.8e-3),
        (50_001, 1.71e-3),
        (99_999, 1.71e-3),
        (100_000, 1.6245e-3),
        (150_000, 1.543275e-3),
    ],
)
def test_learning_rate_check_values(step: int, expected: float) -> None:
    assert learning_rate(step, TrainConfig()) == pytest.approx(expected, rel=1e-12)


def test_learning_rate_without_warmup_is_flat() -> None:
    cfg = TrainConfig(warmup=0, lr=3e-4)
    assert [learning_rate(step, cfg) for step in (0, 1, 400)] == [3e-4] * 3


def test_adam_has_the_recipe_and_skips_frozen_parameters() -> None:
    model = Vectors()
    optimizer = build_optimizer(model, TrainConfig())
    (group,) = optimizer.param_groups
    assert group["betas"] == (0.9, 0.95)
    assert (group["lr"], group["eps"], group["weight_decay"]) == (1.8e-3, 1e-8, 0)
    assert [id(p) for p in group["params"]] == [id(model.a), id(model.b)]


def unit(*shape: int) -> torch.Tensor:
    x = torch.randn(*shape)
    return x / x.norm()


def test_clipping_is_per_sample_before_the_average() -> None:
    model, u1, u2 = Vectors(), unit(3, 2), unit(3, 2)
    gradients = SampleGradients(model, clip=10.0)
    norms = []
    for size, direction in ((20, u1), (5, u2)):
        model.backward(size * direction, None)
        norms.append(float(gradients.add()))
    assert norms == pytest.approx([20, 5], rel=1e-6)
    gradients.average(gradients.counted()[0])
    torch.testing.assert_close(model.a.grad, (10 * u1 + 5 * u2) / 2)
    assert model.b.grad is None


def test_norm_spans_all_parameters() -> None:
    model = Vectors()
    gradients = SampleGradients(model, clip=1.0)
    a, b = torch.full((3, 2), 3.0), torch.full((4,), 4.0)
    model.backward(a, b)
    norm = (6 * 9 + 4 * 16) ** 0.5
    assert float(gradients.add()) == pytest.approx(norm)
    gradients.average(gradients.counted()[0])
    torch.testing.assert_close(model.a.grad, a / norm)
    torch.testing.assert_close(model.b.grad, b / norm)


def test_average_counts_only_the_samples_that_reached_a_parameter() -> None:
    model = Vectors()
    gradients = SampleGradients(model, clip=1e9)
    ga, gb = [torch.randn(3, 2) for _ in range(3)], torch.randn(4)
    for k in range(3):
        model.backward(ga[k], gb if k == 1 else None)
        gradients.add()
        assert model.a.grad is None
    gradients.average(gradients.counted()[0])
    torch.testing.assert_close(model.a.grad, sum(ga) / 3)
    torch.testing.assert_close(model.b.grad, gb)


def test_buffers_of_processes_add_up_to_one_average() -> None:
    """What an all-reduce does: two accumulators' buffers summed equal one over both samples."""
    one, two, whole = Vectors(), Vectors(), Vectors()
    sums = [SampleGradients(m, clip=10.0) for m in (one, two, whole)]
    ga, gb = torch.randn(3, 2) * 9, torch.randn(4) * 9
    one.backward(ga, None)
    two.backward(ga * 0.1, gb)
    sums[0].add(), sums[1].add()
    for a, b in ((ga, None), (ga * 0.1, gb)):
        whole.backward(a, b)
        sums[2].add()
    sums[0].buffer += sums[1].buffer
    assert sums[0].buffer.dtype == torch.float32
    assert sums[0].buffer.shape == (3 * 2 + 4 + 2,)
    for s in (sums[0], sums[2]):
        s.average(s.counted()[0])
    torch.testing.assert_close(one.a.grad, whole.a.grad)
    torch.testing.assert_close(one.b.grad, whole.b.grad)


def test_reset_starts_a_new_step() -> None:
    model = Vectors()
    gradients = SampleGradients(model, clip=1e9)
    optimizer = build_optimizer(model, TrainConfig(lr=0.1))
    for _ in range(2):
        model.backward(torch.ones(3, 2), torch.ones(4))
        gradients.add()
        gradients.average(gradients.counted()[0])
        torch.testing.assert_close(model.a.grad, torch.ones(3, 2))
        optimizer.step()
        gradients.reset()
        assert model.a.grad is None
    torch.testing.assert_close(model.a.detach(), torch.full((3, 2), -0.2))


def test_a_forgotten_reset_is_an_error() -> None:
    model = Vectors()
    gradients = SampleGradients(model, clip=1.0)
    model.backward(torch.ones(3, 2), None)
    gradients.add()
    gradients.average(gradients.counted()[0])
    model.backward(torch.ones(3, 2), None)
    with pytest.raises(RuntimeError, match="call reset"):
        gradients.add()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_norm_that_is_not_finite_spoils_the_sums_for_all_processes(bad: float) -> None:
    model = Vectors()
    gradients = SampleGradients(model, clip=10.0)
    wrong = torch.ones(4)
    wrong[2] = bad
    model.backward(torch.ones(3, 2), wrong)
    assert not gradients.add() < float("inf")
    assert not gradients.buffer.isfinite().all()
    assert model.a.grad is None
    gradients.reset()
    assert (gradients.buffer == 0).all()


def test_flags_travel_in_the_buffer() -> None:
    model = Vectors()
    gradients = SampleGradients(model, clip=10.0, flags=2)
    model.backward(torch.ones(3, 2), None)
    gradients.add()
    gradients.flags[1] = 1.0
    gradients.buffer += gradients.buffer.clone()
    assert gradients.counted() == ([2.0, 0.0], [0.0, 2.0])
    gradients.average([2.0, 0.0])
    torch.testing.assert_close(model.a.grad, torch.ones(3, 2))
    gradients.reset()
    assert gradients.counted()[1] == [0.0, 0.0]


def test_zero_and_absent_gradients() -> None:
    model = Vectors()
    gradients = SampleGradients(model, clip=10.0)
    assert gradients.add() == 0.0
    model.backward(torch.zeros(3, 2), None)
    assert gradients.add() == 0.0
    gradients.average(gradients.counted()[0])
    assert (model.a.grad == 0).all()
    assert model.b.grad is None


# Weight averages ------------------------------------------------------------------------------


def shifted(model: Vectors) -> None:
    with torch.no_grad():
        model.a.add_(1)
        model.scale.mul_(3)
        model.frozen.add_(1)
    model.steps += 1


def test_ema_follows_the_recurrence_for_the_whole_state() -> None:
    model = Vectors()
    ema = Ema(model, decay=0.9)
    expected = 0.0
    for _ in range(3):
        shifted(model)
        ema.update(model)
        expected = 0.9 * expected + 0.1 * model.a[0, 0].item()
    state = ema.state_dict()
    assert state.keys() == model.state_dict().keys()
    torch.testing.assert_close(state["a"], torch.full((3, 2), expected))
    torch.testing.assert_close(state["frozen"], torch.full((2,), expected))
    scale = 0.9 * (0.9 * (0.9 + 0.3) + 0.9) + 2.7
    torch.testing.assert_close(state["scale"], torch.full((2,), scale))
    assert state["steps"] == 3
    assert state["steps"].dtype == torch.long


def test_ema_is_independent_of_the_model() -> None:
    model = Vectors()
    ema = Ema(model, decay=0.5)
    shifted(model)
    assert (ema.state_dict()["a"] == 0).all()
    assert not ema.state_dict()["a"].requires_grad


def test_ema_applied_to_gives_the_weights_back_bit_by_bit() -> None:
    model = Vectors()
    nn.init.normal_(model.a)
    ema = Ema(model, decay=0.9)
    shifted(model)
    ema.update(model)
    before = copy.deepcopy(model.state_dict())
    average = {k: v.clone() for k, v in ema.state_dict().items()}
    with pytest.raises(KeyError), ema.applied_to(model):
        for name, value in model.state_dict().items():
            assert torch.equal(value, average[name])
        with pytest.raises(RuntimeError, match="applied"):
            ema.update(model)
        raise KeyError
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
        assert torch.equal(ema.state_dict()[name], average[name])


def test_ema_state_round_trips_and_keeps_the_configured_decay() -> None:
    model = Vectors()
    ema = Ema(model, decay=0.999)
    shifted(model)
    ema.update(model)
    other = Ema(Vectors(), decay=0.98)
    other.load_state_dict(ema.state_dict())
    assert other.decay == 0.98
    target = Vectors()
    other.copy_to(target)
    torch.testing.assert_close(target.a.detach(), ema.state_dict()["a"])


def test_ema_of_another_model_is_refused() -> None:
    ema = Ema(Vectors(), decay=0.9)
    state = ema.state_dict()
    with pytest.raises(TpfError, match="b is in the model only"):
        ema.load_state_dict({k: v for k, v in state.items() if k != "b"})
    with pytest.raises(TpfError, match="c is in the stored average only"):
        ema.load_state_dict({**state, "c": torch.zeros(1)})
    with pytest.raises(TpfError, match=r"b has shape \(5,\)"):
        ema.load_state_dict({**state, "b": torch.zeros(5)})
    with pytest.raises(UsageError, match="decay"):
        Ema(Vectors(), decay=1.0)


def test_ema_keeps_a_shared_tensor_once() -> None:
    model = nn.ModuleDict({"one": Vectors()})
    model["alias"] = model["one"]
    ema = Ema(model, decay=0.5)
    shifted(model["one"])
    ema.update(model)
    state = ema.state_dict()
    assert state["one.a"] is state["alias.a"]
    with ema.applied_to(model):
        torch.testing.assert_close(model["one"].a.detach(), torch.full((3, 2), 0.5))
    torch.testing.assert_close(model["one"].a.detach(), torch.ones(3, 2))
    torch.testing.assert_close(ema.state_dict()["one.a"], torch.full((3, 2), 0.5))
