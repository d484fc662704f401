"""The study of the multiplicative update: adapters, errors, failures, rows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.bench.studies import TooLarge, pick
from tpf.bench import trimul
from tpf.bench.backends import Backend
from tpf.bench.cases import Settings, Shape
from tpf.bench.record import Record
from tpf.bench.trimul_accuracy import computed, exact
from tpf.bench.trimul_backends import MULTIPLIERS, plain_update
from tpf.bench.trimul_cases import Multiplier, TriMulInputs, make_trimul
from tpf.kernels.ops import Direction, TriMulWeights

CPU = torch.device("cpu")
SHAPE = Shape(9, 16)


def joined_update(
    z: Tensor, direction: str, mask: Tensor | None, *, norm_in_weight: Tensor,
    norm_in_bias: Tensor, p_in_weight: Tensor, g_in_weight: Tensor, norm_out_weight: Tensor,
    norm_out_bias: Tensor, p_out_weight: Tensor, g_out_weight: Tensor,
) -> Tensor:  # fmt: skip
    """The documented third-party interface, written independently."""
    width = z.shape[-1:]
    zn = F.layer_norm(z, width, norm_in_weight, norm_in_bias)
    ab = torch.sigmoid(zn @ g_in_weight.T) * (zn @ p_in_weight.T)
    if mask is not None:
        ab = ab * mask[..., None]
    a, b = ab.chunk(2, -1)
    formula = "bikc,bjkc->bijc" if direction == "outgoing" else "bkic,bkjc->bijc"
    x = F.layer_norm(torch.einsum(formula, a, b), width, norm_out_weight, norm_out_bias)
    return torch.sigmoid(zn @ g_out_weight.T) * (x @ p_out_weight.T)


def wide(masked: bool) -> TriMulInputs:
    inputs = make_trimul(SHAPE, 0, CPU, masked=masked)
    weights = TriMulWeights._make(x.double() for x in inputs.weights)
    return TriMulInputs(inputs.z.double(), inputs.mask, weights, inputs.dout.double())


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
@pytest.mark.parametrize(
    ("name", "path", "function"),
    [
        ("cuequivariance-fp32", "cuequivariance_torch", "triangle_multiplicative_update"),
        ("turbopairformer", "turbopairformer", "turbo_trimul"),
    ],
)
def test_adapters_serve_the_documented_interface(
    name: str, path: str, function: str, direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType(path)
    setattr(module, function, joined_update)
    monkeypatch.setitem(sys.modules, path, module)
    loaded, inputs = MULTIPLIERS[name].load(), wide(masked=True)

    def update(
        z: Tensor, mask: Tensor | None, parameters: Sequence[Tensor], direction: Direction
    ) -> Tensor:
        return loaded.update(z, mask, [x.double() for x in parameters], direction)

    rounded = TriMulWeights._make(x.float().double() for x in inputs.weights)
    inputs = TriMulInputs(inputs.z, inputs.mask, rounded, inputs.dout)
    got = computed(Multiplier(update, loaded.pack, loaded.split), inputs, direction)
    for tensor, want in exact(inputs, direction).items():
        error = (got[tensor] - want).norm() / want.norm()
        assert error < 1e-6, tensor  # the gradients of FP32 parameters are FP32


@pytest.mark.parametrize("masked", [False, True])
def test_plain_formula_agrees_with_the_operator(masked: bool) -> None:
    inputs = wide(masked)
    got = computed(Multiplier(plain_update), inputs, "incoming")
    torch.testing.assert_close(got, exact(inputs, "incoming"))


def test_parameters_are_packed_once_in_bf16_or_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("cuequivariance_torch")
    module.triangle_multiplicative_update = joined_update  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuequivariance_torch", module)
    weights = make_trimul(SHAPE, 0, CPU).weights
    for name, dtype in (
        ("cuequivariance", torch.bfloat16),
        ("cuequivariance-fp32", torch.float32),
    ):
        packed = MULTIPLIERS[name].load().pack(weights)
        assert {x.dtype for x in packed} == {dtype} and packed[2].shape == (32, 16)


def perfect(
    z: Tensor, mask: Tensor | None, parameters: Sequence[Tensor], direction: Direction
) -> Tensor:
    """Compute in FP64 and round once."""
    return plain_update(z.double(), mask, [x.double() for x in parameters], direction).to(z.dtype)


def planted(
    z: Tensor, mask: Tensor | None, parameters: Sequence[Tensor], direction: Direction
) -> Tensor:
    *others, gate, last = parameters
    return perfect(z, mask, [*others, TooLarge.apply(gate), last], direction)


def broken(*_: object) -> Tensor:
    raise RuntimeError("no kernel for this shape\nmore lines")


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    def add(name: str, made: Multiplier) -> None:
        monkeypatch.setitem(MULTIPLIERS, name, Backend(lambda: made, "anything"))

    add("perfect", Multiplier(perfect))
    add("planted", Multiplier(planted))
    add("broken", Multiplier(broken))


def run(*impls: str) -> Record:
    record = Record("test")
    chosen = Settings(impls, (SHAPE,), CPU, seeds=2, reps=3, errors=True)
    trimul.table_10(chosen, record)
    record.finish()
    return record


def test_every_backend_has_both_directions_and_phases() -> None:
    record = run("eager", "torch", "cuda", "cuequivariance")
    timed = [r for r in record.rows if "median_ms" in r]
    assert [(r["impl"], r["direction"], r["phase"]) for r in timed] == [
        (impl, direction, phase)
        for impl in ("eager", "torch")
        for direction in ("outgoing", "incoming")
        for phase in ("fwd", "fwd_bwd")
    ]
    for row in timed:
        assert row["dim"] == 16 and row["n"] == 9 and row["timer"] == "clock"
        assert row["wall_ms"] > 0 and row["host_us"] > 0
    assert pick(record, impl="cuda", error="needs an NVIDIA GPU")
    assert "not installed" in pick(record, impl="cuequivariance")[0]["error"]
    ratios = {(line[1], line[2]): line[5] for line in record.tables[0].rows}
    assert ratios["outgoing", "eager"] == ratios["incoming", "eager"] == "1.00"


def test_errors_of_a_perfect_and_of_a_planted_backend() -> None:
    record = run("perfect", "planted", "broken")
    for row in pick(record, impl="perfect", metric="rel_l2"):
        if row["tensor"] in ("out", "dz"):
            assert row["mean"] == row["floor"]
        else:
            assert row["mean"] < 1e-4 and "floor" not in row
    wrong = {r["tensor"]: r["mean"] for r in pick(record, impl="planted", mask=True)}
    assert wrong.pop("linear_g") == pytest.approx(6, rel=1e-3)
    assert max(wrong.values()) < 0.3
    named = {line[3]: line[-1] for line in record.tables[-1].rows}
    assert named["planted"] == "linear_g" and named["floor"] is None
    failed = pick(record, impl="broken", op="trimul")
    assert {r["error"] for r in failed} == {"RuntimeError: no kernel for this shape"}
