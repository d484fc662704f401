"""Schedule, per-sample clipping and weight averages against worked numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tpf.config import TrainConfig
from tpf.dist import World
from tpf.errors import TpfError, UsageError
from tpf.flat import ALIGN, FlatParameters
from tpf.optim import Adam, Ema, SampleGradients, learning_rate

ALONE = World(0, 1, torch.device("cpu"))


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


def flat(model: nn.Module) -> FlatParameters:
    return FlatParameters(model, ALONE, shard=True)


def summed(
    model: nn.Module, clip: float, flags: int = 0
) -> tuple[SampleGradients, dict[str, torch.Tensor]]:
    """Return an empty sum of a model, and its numbers by parameter."""
    parameters = flat(model)
    gradients = SampleGradients(parameters, clip, flags)
    return gradients, parameters.named(gradients.sums)


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


def test_parameters_are_views_of_one_aligned_vector() -> None:
    model = Vectors()
    nn.init.normal_(model.a)
    before = model.a.detach().clone()
    parameters = flat(model)
    assert parameters.names == ["a", "b"] and parameters.length == 2 * ALIGN
    assert torch.equal(model.a, before) and torch.equal(parameters.vector[:6].view(3, 2), before)
    parameters.vector.fill_(2.0)
    assert (model.b == 2).all() and (model.frozen == 0).all()
    model.load_state_dict({**model.state_dict(), "b": torch.arange(4.0)})
    assert torch.equal(parameters.vector[ALIGN : ALIGN + 4], torch.arange(4.0))


def test_parameters_of_another_format_are_refused() -> None:
    with pytest.raises(ValueError, match=r"weight is torch\.bfloat16"):
        flat(nn.Linear(2, 2, bias=False).bfloat16())


def test_parameters_with_two_names_are_refused() -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"1\.weight is a second name"):
        flat(nn.Sequential(layer, layer))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_parts_are_equal_and_cover_all_parameters(size: int) -> None:
    """What every rank reads and the stretches that it updates, against the whole vector."""
    named = {"x": torch.randn(150), "y": torch.randn(3, 70), "z": torch.randn(1)}
    model = nn.ParameterDict({name: nn.Parameter(value) for name, value in named.items()})
    whole, keys = flat(model).vector.clone(), [1, 1, 0]
    found, stretches = [], []
    for rank in range(size):
        parameters = FlatParameters(model, World(rank, size, torch.device("cpu")), shard=True)
        part = torch.zeros_like(parameters.own)
        parameters.read({f"{name}": value for name, value in named.items()}, part)
        found.append(part)
        marks = torch.zeros_like(part)
        for k, run in parameters.runs(keys):
            assert run.start % ALIGN == run.stop % ALIGN == 0
            marks[run] = float(keys[k] + 1)
        stretches.append(marks)
    assert len({len(part) for part in found}) == 1 and len(found[0]) % ALIGN == 0
    assert torch.equal(torch.cat(found)[: len(whole)], whole)
    x, y, z = 192, 256, 64  # rounded up
    expected = torch.tensor([2.0] * (x + y) + [1.0] * z)
    assert torch.equal(torch.cat(stretches)[: x + y + z], expected)
    assert not torch.cat(stretches)[x + y + z :].any()


def test_adam_has_the_recipe_of_torch_for_every_parameter() -> None:
    """Against torch's optimiser in FP64; one parameter is reached in two steps of three."""
    model, peer = Vectors(), Vectors().double()
    cfg = TrainConfig()
    optimizer = Adam(flat(model), cfg)
    theirs = torch.optim.Adam([peer.a, peer.b], betas=(0.9, 0.95), eps=1e-8)
    gradients = SampleGradients(optimizer._flat, clip=1e9)
    for step, reached in enumerate((True, False, True)):
        ga, gb = torch.randn(3, 2), torch.randn(4)
        model.backward(ga, gb if reached else None)
        gradients.add()
        counts, _ = gradients.counted()
        gradients.average(counts)
        optimizer.step(gradients.own, counts, 1e-3 * (step + 1))
        gradients.reset()
        theirs.param_groups[0]["lr"] = 1e-3 * (step + 1)
        peer.a.grad, peer.b.grad = ga.double(), gb.double() if reached else None
        theirs.step()
    assert optimizer.steps == [3, 2]
    torch.testing.assert_close(model.a.double(), peer.a, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(model.b.double(), peer.b, rtol=1e-6, atol=1e-8)


def test_adam_state_round_trips_under_the_names_of_torch() -> None:
    model = Vectors()
    first = Adam(flat(model), TrainConfig())
    first.step(torch.randn(2 * ALIGN), [1.0, 0.0], 0.1)
    state = first.state_dict(first.mean, first.square)
    assert state.keys() == {"step.a", "exp_avg.a", "exp_avg_sq.a"}
    assert state["step.a"] == 1 and state["exp_avg.a"].shape == (3, 2)
    second = Adam(flat(Vectors()), TrainConfig())
    second.mean.fill_(7.0)
    second.load_state_dict(state)
    assert second.steps == [1, 0]
    assert torch.equal(second.mean[:6], first.mean[:6]) and not second.mean[ALIGN:].any()
    assert torch.equal(second.square[:6], first.square[:6])


def unit(*shape: int) -> torch.Tensor:
    x = torch.randn(*shape)
    return x / x.norm()


def test_clipping_is_per_sample_before_the_average() -> None:
    model, u1, u2 = Vectors(), unit(3, 2), unit(3, 2)
    gradients, mean = summed(model, clip=10.0)
    norms = []
    for size, direction in ((20, u1), (5, u2)):
        model.backward(size * direction, None)
        norms.append(float(gradients.add()))
    assert norms == pytest.approx([20, 5], rel=1e-6)
    gradients.average(gradients.counted()[0])
    torch.testing.assert_close(mean["a"], (10 * u1 + 5 * u2) / 2)
    assert not mean["b"].any()


def test_norm_spans_all_parameters() -> None:
    model = Vectors()
    gradients, mean = summed(model, clip=1.0)
    a, b = torch.full((3, 2), 3.0), torch.full((4,), 4.0)
    model.backward(a, b)
    norm = (6 * 9 + 4 * 16) ** 0.5
    assert float(gradients.add()) == pytest.approx(norm)
    gradients.average(gradients.counted()[0])
    torch.testing.assert_close(mean["a"], a / norm)
    torch.testing.assert_close(mean["b"], b / norm)


def test_average_counts_only_the_samples_that_reached_a_parameter() -> None:
    model = Vectors()
    gradients, mean = summed(model, clip=1e9)
    ga, gb = [torch.randn(3, 2) for _ in range(3)], torch.randn(4)
    for k in range(3):
        model.backward(ga[k], gb if k == 1 else None)
        gradients.add()
        assert model.a.grad is None
    gradients.average(gradients.counted()[0])
    torch.testing.assert_close(mean["a"], sum(ga) / 3)
    torch.testing.assert_close(mean["b"], gb)


def test_buffers_of_processes_add_up_to_one_average() -> None:
    """What an all-reduce does: two accumulators' buffers summed equal one over both samples."""
    one, two, whole = Vectors(), Vectors(), Vectors()
    sums, means = zip(*(summed(m, clip=10.0) for m in (one, two, whole)), strict=True)
    ga, gb = torch.randn(3, 2) * 9, torch.randn(4) * 9
    one.backward(ga, None)
    two.backward(ga * 0.1, gb)
    sums[0].add(), sums[1].add()
    for a, b in ((ga, None), (ga * 0.1, gb)):
        whole.backward(a, b)
        sums[2].add()
    sums[0].buffer += sums[1].buffer
    assert sums[0].buffer.dtype == torch.float32
    assert sums[0].buffer.shape == (2 * ALIGN + 2,)
    for s in (sums[0], sums[2]):
        s.average(s.counted()[0])
    torch.testing.assert_close(means[0], means[2])


def test_reset_starts_a_new_step() -> None:
    model = Vectors()
    gradients, mean = summed(model, clip=1e9)
    optimizer = Adam(gradients._flat, TrainConfig())
    for _ in range(2):
        model.backward(torch.ones(3, 2), torch.ones(4))
        gradients.add()
        counts, _ = gradients.counted()
        gradients.average(counts)
        torch.testing.assert_close(mean["a"], torch.ones(3, 2))
        optimizer.step(gradients.own, counts, 0.1)
        gradients.reset()
        assert model.a.grad is None and not mean["a"].any()
    torch.testing.assert_close(model.a.detach(), torch.full((3, 2), -0.2))


def test_a_forgotten_reset_is_an_error() -> None:
    model = Vectors()
    gradients, mean = summed(model, clip=1.0)
    model.backward(torch.ones(3, 2), None)
    gradients.add()
    gradients.average(gradients.counted()[0])
    model.backward(torch.ones(3, 2), None)
    with pytest.raises(RuntimeError, match="call reset"):
        gradients.add()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_norm_that_is_not_finite_spoils_the_sums_for_all_processes(bad: float) -> None:
    model = Vectors()
    gradients, mean = summed(model, clip=10.0)
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
    gradients, mean = summed(model, clip=10.0, flags=2)
    model.backward(torch.ones(3, 2), None)
    gradients.add()
    gradients.flags[1] = 1.0
    gradients.buffer += gradients.buffer.clone()
    assert gradients.counted() == ([2.0, 0.0], [0.0, 2.0])
    gradients.average([2.0, 0.0])
    torch.testing.assert_close(mean["a"], torch.ones(3, 2))
    gradients.reset()
    assert gradients.counted()[1] == [0.0, 0.0]


def test_zero_and_absent_gradients() -> None:
    model = Vectors()
    gradients, mean = summed(model, clip=10.0)
    assert gradients.add() == 0.0
    model.backward(torch.zeros(3, 2), None)
    assert gradients.add() == 0.0
    gradients.average(gradients.counted()[0])
    assert not gradients.own.any()


# Weight averages ------------------------------------------------------------------------------


def shifted(model: Vectors) -> None:
    with torch.no_grad():
        model.a.add_(1)
        model.scale.mul_(3)
        model.frozen.add_(1)
    model.steps += 1


def state_of(ema: Ema) -> dict[str, torch.Tensor]:
    return ema.state_dict(ema.average)


def test_ema_follows_the_recurrence_for_the_whole_state() -> None:
    model = Vectors()
    ema = Ema(model, flat(model), decay=0.9)
    expected = 0.0
    for _ in range(3):
        shifted(model)
        ema.update()
        expected = 0.9 * expected + 0.1 * model.a[0, 0].item()
    state = state_of(ema)
    assert state.keys() == model.state_dict().keys()
    torch.testing.assert_close(state["a"], torch.full((3, 2), expected))
    torch.testing.assert_close(state["frozen"], torch.full((2,), expected))
    scale = 0.9 * (0.9 * (0.9 + 0.3) + 0.9) + 2.7
    torch.testing.assert_close(state["scale"], torch.full((2,), scale))
    assert state["steps"] == 3
    assert state["steps"].dtype == torch.long


def test_ema_is_independent_of_the_model() -> None:
    model = Vectors()
    ema = Ema(model, flat(model), decay=0.5)
    shifted(model)
    assert not ema.average.any()
    assert (state_of(ema)["scale"] == 1).all()
    ema.restart()
    state = state_of(ema)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_ema_applied_gives_the_weights_back_bit_by_bit() -> None:
    model = Vectors()
    nn.init.normal_(model.a)
    ema = Ema(model, parameters := flat(model), decay=0.9)
    shifted(model)
    ema.update()
    before = copy.deepcopy(model.state_dict())
    average = {k: v.clone() for k, v in state_of(ema).items()}
    spare = torch.zeros_like(parameters.vector)
    with pytest.raises(KeyError), ema.applied(spare):
        for name, value in model.state_dict().items():
            assert torch.equal(value, average[name])
        with pytest.raises(RuntimeError, match="applied"):
            ema.update()
        raise KeyError
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
        assert torch.equal(state_of(ema)[name], average[name])
    assert not spare.any()


def test_ema_state_round_trips_and_keeps_the_configured_decay() -> None:
    model, target = Vectors(), Vectors()
    ema = Ema(model, flat(model), decay=0.999)
    shifted(model)
    ema.update()
    other = Ema(target, flat(target), decay=0.98)
    other.load_state_dict(state_of(ema))
    assert other.decay == 0.98
    assert all(torch.equal(x, state_of(ema)[name]) for name, x in state_of(other).items())


def test_ema_of_another_model_is_refused() -> None:
    model = Vectors()
    ema = Ema(model, flat(model), decay=0.9)
    state = state_of(ema)
    with pytest.raises(TpfError, match="b is in the model only"):
        ema.load_state_dict({k: v for k, v in state.items() if k != "b"})
    with pytest.raises(TpfError, match="c is in the stored average only"):
        ema.load_state_dict({**state, "c": torch.zeros(1)})
    with pytest.raises(TpfError, match=r"b has shape \(5,\)"):
        ema.load_state_dict({**state, "b": torch.zeros(5)})
    with pytest.raises(UsageError, match="decay"):
        Ema(model, flat(model), decay=1.0)
