"""The parts of a benchmark: inputs, schedules, adapters of third parties, the GPU clock."""

from __future__ import annotations

import math
import sys
from collections import Counter
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tpf.bench import peers
from tpf.bench.accuracy import compare
from tpf.bench.backends import BACKENDS, UnavailableError, fused_attention, open_backend
from tpf.bench.cases import Attend, Shape, make_inputs
from tpf.bench.timing import Clock, Timing, blocks, reduction_percent, rounds, speed_up
from tpf.kernels.ops import triangle_attention

CPU = torch.device("cpu")
SHAPE = Shape(9, 16, heads=2)


def test_inputs_are_repeatable_and_laid_out_as_asked() -> None:
    first, again = (make_inputs(SHAPE, 3, CPU, masked=True) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first.leaves, again.leaves, strict=True))
    assert not torch.equal(first.q, make_inputs(SHAPE, 4, CPU).q)
    assert first.q.shape == (1, 9, 2, 9, 16) and first.q.transpose(2, 3).is_contiguous()
    assert make_inputs(SHAPE, 3, CPU, layout="heads").q.is_contiguous()
    assert first.mask is not None and first.mask.any(-1).all() and not first.mask.all()
    assert all(x.is_leaf and x.requires_grad for x in first.leaves)


def test_sharp_inputs_are_wider() -> None:
    plain, sharp = (make_inputs(SHAPE, 0, CPU, kind=kind) for kind in ("normal", "sharp"))
    wider = sharp.q.detach().float().std() / plain.q.detach().float().std()
    assert float(wider) == pytest.approx(3, rel=0.01)
    assert torch.equal(sharp.v, plain.v)


def test_schedules_give_every_arm_its_turns() -> None:
    schedule = rounds(4, 30)
    assert Counter(schedule) == dict.fromkeys(range(4), 30)
    turns = [schedule[i : i + 4] for i in range(0, 120, 4)]
    assert all(sorted(t) == [0, 1, 2, 3] for t in turns) and len(set(map(tuple, turns))) > 5
    assert blocks(3, 2, 2) == [0, 0, 1, 1, 2, 2, 1, 1, 2, 2, 0, 0]


def test_statistics_of_a_timing() -> None:
    found = Timing(tuple(float(x) for x in range(1, 12)), "clock").fields()
    assert (found["p10_ms"], found["median_ms"], found["p90_ms"]) == (2, 6, 10)
    assert Timing((5.0,), "clock").fields()["p90_ms"] == 5


def additive(q: Tensor, k: Tensor, v: Tensor, added: Tensor, bias: Tensor) -> Tensor:
    """A kernel of q, k, v [B, O, N, H, D] with an additive mask, written independently."""
    scores = torch.einsum("bqihd,bqjhd->bqhij", q, k) / math.sqrt(q.shape[-1])
    weights = torch.softmax(scores + added + bias, -1)
    return torch.einsum("bqhij,bqjhd->bqihd", weights, v)


def heads_first(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dropped: Tensor) -> Tensor:
    """TriFast's documented interface: q [B, H, O, N, D], bias [B, H, N, N], True drops the key."""
    scores = torch.einsum("bhqid,bhqjd->bhqij", q, k) / math.sqrt(q.shape[-1]) + bias[:, :, None]
    scores = scores.masked_fill(dropped[:, None, :, None], -math.inf)
    return torch.softmax(scores, -1) @ v


def authors(
    q: Tensor, k: Tensor, v: Tensor, *, pair_bias: Tensor, res_mask: Tensor | None = None
) -> Tensor:
    """The authors' documented interface: additive -inf mask, output [B, O, N, H, D]."""
    rows = [x.transpose(2, 3) for x in (q, k, v)]
    return additive(*rows, torch.zeros(()) if res_mask is None else res_mask, pair_bias)


def nvidia(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    scores = scale * q @ k.mT + bias
    if mask is not None:
        scores = torch.where(mask, scores, torch.tensor(-1e9, dtype=scores.dtype))
    return torch.softmax(scores, -1) @ v


def prescaled(q: Tensor, k: Tensor, v: Tensor, added: Tensor, bias: Tensor) -> Tensor:
    return additive(q * math.sqrt(q.shape[-1]), k, v, added, bias)


class Applied:
    apply = staticmethod(prescaled)


KERNELS: dict[str, tuple[str, str, object]] = {
    "openfold3": ("openfold3.core.kernels.triton.evoformer", "TritonEvoformer", additive),
    "megafold": ("megafold.model.FusedEvoAttention.evoattention", "TritonEvoformer", additive),
    "protenix": ("protenix.model.tri_attention.op", "TriAttentionFunction", Applied),
    "deepspeed": (
        "deepspeed.ops.deepspeed4science",
        "DS4Sci_EvoformerAttention",
        lambda q, k, v, biases: additive(q, k, v, *biases),
    ),
    "cuequivariance": ("cuequivariance_torch", "triangle_attention", nvidia),
    "trifast": ("trifast", "triangle_attention", heads_first),
    "turbopairformer": ("turbopairformer", "turbo_attention", authors),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", list(KERNELS))
def test_adapters_serve_the_documented_interfaces(
    name: str, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, function, kernel = KERNELS[name]
    module = ModuleType(path)
    setattr(module, function, kernel)
    monkeypatch.setitem(sys.modules, path, module)
    attend: Attend = getattr(peers, name)()
    inputs = make_inputs(SHAPE, 0, CPU, masked=masked)
    leaves = [x.detach().double().requires_grad_() for x in inputs.leaves]
    results = []
    for function_ in (attend, lambda *a: triangle_attention(*a, impl="torch")):
        out = function_(*leaves, inputs.mask)
        results.append([out, *torch.autograd.grad(out, leaves, inputs.dout.double())])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("masked", [False, True])
def test_fused_attention_agrees_with_the_operator(masked: bool) -> None:
    inputs = make_inputs(SHAPE, 0, CPU, masked=masked)
    wide = [x.detach().double() for x in inputs.leaves]
    want = triangle_attention(*wide, inputs.mask, impl="torch")
    torch.testing.assert_close(fused_attention(*wide, inputs.mask), want)


def test_absent_backends_say_why() -> None:
    for name, reason in (("trifast", "not installed"), ("cuda", "needs an NVIDIA GPU")):
        with pytest.raises(UnavailableError, match=reason):
            open_backend(BACKENDS[name], CPU)


@pytest.mark.gpu
def test_graph_and_events_agree_and_a_call_that_cannot_be_captured_is_timed() -> None:
    device = torch.device("cuda")
    x = torch.randn(4096, 4096, device=device)
    with Clock(device) as clock:
        x @ x
        graph = clock.prepare(lambda: x @ x)
        eager = clock.prepare(lambda: (x @ x).sum().item())
        assert (graph.timer, eager.timer) == ("graph", "events")
        again = clock.prepare(lambda: x @ x)
        assert again.timer == "graph", "a failed capture must not spoil the next"
        first, second, _ = clock.measure([graph, eager, again], rounds(3, 20))
    assert first.median == pytest.approx(second.median, rel=0.5)


def test_worked_numbers_of_errors_and_times() -> None:
    got, want = ({"out": torch.tensor(x, dtype=torch.float64)} for x in ([3, 4.05], [3, 4]))
    error = compare(got, want)["out"]
    assert error.rel_l2 == pytest.approx(1.0)
    assert error.rmse == pytest.approx(0.0353553, abs=1e-7)
    assert reduction_percent(2.0, 1.8) == pytest.approx(10.0)
    assert speed_up(2.0, 1.8) == pytest.approx(1.1111, abs=1e-4)
