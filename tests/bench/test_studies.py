"""What the studies find: worked numbers, planted faults, and a perfect backend at the floor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.bench.studies import TooLarge, pick, run
from tpf.bench import ablation, accuracy, attention, captured, determinism, residual, workspace
from tpf.bench.backends import BACKENDS, Backend, plain_attention
from tpf.bench.cases import Attend, Settings, Shape, make_inputs
from tpf.errors import TpfError, UsageError
from tpf.kernels import tri_attn
from tpf.kernels.ops import triangle_attention

CPU = torch.device("cpu")
SHAPE = Shape(12, 8, heads=2)


def settings(*impls: str, **changes: object) -> Settings:
    return Settings(impls, (SHAPE,), CPU, **{"seeds": 2, "reps": 3, **changes})  # type: ignore[arg-type]


def perfect(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
    """Compute in FP64 and round each result once."""
    wide = (x.double() for x in (q, k, v, bias))
    return triangle_attention(*wide, mask, impl="torch").to(q.dtype)


def planted(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
    return perfect(q, k, v, TooLarge.apply(bias), mask)


def noisy(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
    """Change with every call in the gradient of v alone."""
    return perfect(q, k, v * (1 + 0.02 * torch.rand(())), bias, mask)


def broken(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
    raise RuntimeError("no kernel for this shape\nmore lines")


def not_finite(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
    return perfect(q, k, v, bias, mask) * torch.tensor(float("nan"))


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    def add(attend: Attend) -> None:
        monkeypatch.setitem(BACKENDS, attend.__name__, Backend(lambda: attend, "anything"))

    for attend in (perfect, planted, noisy, broken, not_finite):
        add(attend)


# ------------------------------------------------------------------------------ Table 2


@pytest.mark.parametrize(
    ("n", "mib"),
    [
        (384, (216, 108, 108, 36, 864)),
        (640, (1000, 500, 500, 100, 4000)),
        (768, (1728, 864, 252, 144, 6912)),
        (1024, (4096, 2048, 256, 256, 16384)),
    ],
)
def test_table_2_is_the_papers(n: int, mib: tuple[int, ...]) -> None:
    assert tuple(size / 2**20 for size in workspace.workspace(Shape(n, 32))) == mib


# ----------------------------------------------------------------------------- accuracy


def test_errors_of_a_worked_example() -> None:
    got, want = (torch.tensor(x, dtype=torch.float64) for x in ([3, 4.05], [3, 4]))
    pair = accuracy.compare({"x": got}, {"x": want})
    assert pair["x"].rel_l2 == pytest.approx(1.0, rel=1e-6)
    assert pair["x"].rmse == pytest.approx(0.0353553, rel=1e-5)


def test_spread_is_the_sample_deviation() -> None:
    found = accuracy.spread([0.71, 0.73, 0.70, 0.74, 0.72])
    assert found.mean == pytest.approx(0.72) and found.sd == pytest.approx(0.0158114, rel=1e-5)
    assert accuracy.spread([1.0]).sd is None


def test_a_perfect_backend_lies_on_the_floor_exactly() -> None:
    record = run(accuracy.figure_4, settings("perfect"))
    rows = pick(record, impl="perfect")
    assert len(rows) == 2 * 2 * 5 * 2  # inputs, masks, tensors, metrics
    for row in rows:
        assert row["mean"] == row["floor"] and row["verdict"] == "floor", row
    relative = {r["mean"] for r in pick(record, metric="rel_l2")}
    assert all(0.1 < x < 0.25 for x in relative)  # rounding to 8 bits


def test_a_planted_error_is_flagged_where_it_is() -> None:
    record = run(accuracy.figure_4, settings("planted", "eager"))
    wrong = pick(record, impl="planted", metric="rel_l2", tensor="dbias")
    assert len(wrong) == 4 and {r["verdict"] for r in wrong} == {"far"}
    assert all(r["mean"] == pytest.approx(6, rel=0.02) for r in wrong)
    others = [r for r in pick(record, impl="planted") if r["tensor"] != "dbias"]
    assert {r["verdict"] for r in others} == {"floor"}
    assert "far" not in {r["verdict"] for r in pick(record, impl="eager")}
    marked = [row for table in record.tables for row in table.rows if row[1] == "dbias"]
    assert all(str(row[2]).endswith("!") and str(row[3]).endswith("*") for row in marked)


def test_a_backend_that_fails_leaves_the_others_alone() -> None:
    record = run(accuracy.figure_4, settings("broken", "perfect", "not_finite"))
    assert len(pick(record, impl="broken", error="RuntimeError: no kernel for this shape")) == 4
    assert len(pick(record, impl="perfect")) == 40
    rows = pick(record, impl="not_finite")
    assert {(r["mean"], r["verdict"]) for r in rows} == {("nan", "far")}


# -------------------------------------------------------------------------- determinism


def test_only_repeatable_gradients_pass() -> None:
    chosen = settings("perfect", "noisy", "not_finite", "broken", seeds=3)
    record = run(determinism.figure_10, chosen)
    passed = {(r["impl"], r["tensor"]): r["passed"] for r in pick(record, metric="bitwise")}
    assert passed["perfect", "all"] == 3 and passed["noisy", "all"] == 0
    assert passed["noisy", "dv"] == 0
    assert passed["not_finite", "dq"] == 0, "equal NaN must not pass"
    assert len(pick(record, impl="broken")) == 1 and "error" in pick(record, impl="broken")[0]
    assert {row[0]: row[-1] for row in record.tables[0].rows}["perfect"] == "3/3"


def test_same_bits_sees_signs_of_zero_and_nan() -> None:
    zero, nan = torch.zeros(2), torch.full((2,), float("nan"))
    assert not determinism.same_bits(zero, -zero)
    assert determinism.same_bits(nan, nan.clone())


# ----------------------------------------------------------------------------- residual


def test_residual_lowers_the_errors_and_leaves_output_and_dv() -> None:
    record = run(residual.figure_9, settings("torch"))
    assert {r["passed"] for r in pick(record, metric="bitwise")} == {2} and not record.failures
    for tensor in residual.CHANGED:
        on, off = (
            pick(record, inputs="sharp", tensor=tensor, residual=x)[0]["mean"]
            for x in (True, False)
        )
        assert on < 0.8 * off


def test_a_residual_that_changes_dv_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, backward = residual.passes("torch")

    def leaking(*args: Tensor) -> tuple[Tensor, ...]:
        dq, dk, dv, dbias = backward(*args)
        return dq, dk, dv + 1 if args[8].numel() else dv, dbias

    monkeypatch.setattr(residual, "passes", lambda name: (forward, leaking))
    record = run(residual.figure_9, settings("torch"))
    assert len(record.failures) == 2 and "dV changed" in record.failures[0]


# ------------------------------------------------------------------------ captured calls


def test_captured_calls_are_replayed(tmp_path: Path) -> None:
    tensors = {}
    for i in range(3):
        inputs = make_inputs(SHAPE, i, CPU, masked=True)
        for name in ("q", "k", "v", "bias", "dout"):
            tensors[f"{i}.{name}"] = getattr(inputs, name).detach().contiguous()
        mask = inputs.mask
        assert mask is not None
        mask[:, -1] = False  # a slice without keys: its queries are not judged
        tensors[f"{i}.mask"] = mask
    save_file(tensors, tmp_path / "calls.safetensors")
    chosen = settings("perfect", "planted", capture=tmp_path / "calls.safetensors")
    record = run(captured.table_6, chosen)
    found = {(r["impl"], r["tensor"]): r for r in record.rows}
    assert all(found["perfect", t]["mean"] == found["perfect", t]["floor"] for t in ("out", "dq"))
    assert found["planted", "dbias"]["mean"] == pytest.approx(6, rel=0.02)
    assert found["planted", "dbias"]["calls"] == 3


def test_output_is_judged_on_valid_queries_only() -> None:
    want = {"out": torch.ones(1, 1, 1, 3, 2).double()}
    got = {"out": torch.tensor([[1.0, 1], [1, 1], [9, 9]]).view(1, 1, 1, 3, 2)}
    mask = torch.tensor([True, True, False]).view(1, 1, 1, 1, 3)
    assert accuracy.compare(got, want, mask)["out"].rel_l2 == 0
    assert accuracy.compare(got, want)["out"].rel_l2 > 100


def test_a_wrong_capture_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs --capture RUN"):
        run(captured.table_6, settings("perfect"))
    with pytest.raises(UsageError, match="cannot be read"):
        run(captured.table_6, settings("perfect", capture=tmp_path / "nothing"))
    save_file({"0.q": torch.zeros(1)}, tmp_path / "half")
    with pytest.raises(UsageError, match="no 0.k, 0.v, 0.bias, 0.dout"):
        run(captured.table_6, settings("perfect", capture=tmp_path / "half"))


# -------------------------------------------------------------------------------- speed


def test_speed_has_every_phase_and_goes_on_after_a_failure() -> None:
    record = run(attention.table_8, settings("broken", "eager", "torch", "trifast"))
    timed = [r for r in record.rows if "median_ms" in r]
    assert [(r["impl"], r["phase"]) for r in timed] == [
        (impl, phase) for impl in ("eager", "torch") for phase in ("fwd", "bwd", "fwd_bwd")
    ]
    for row in timed:
        assert 0 < row["p10_ms"] <= row["median_ms"] <= row["p90_ms"]
        assert row["reps"] == 3 and row["timer"] == "clock" and row["host_us"] > 0
    assert pick(record, impl="trifast", error="not installed (pip install trifast)")
    assert pick(record, impl="broken")[0]["error"].startswith("RuntimeError")


def test_nothing_to_run_is_an_error() -> None:
    with pytest.raises(TpfError, match="no backend can run here: cuda: needs an NVIDIA GPU"):
        run(attention.table_8, settings("cuda"))


def test_forward_variants_are_undone() -> None:
    tiles, stream = tri_attn.FORWARD_TILES, tri_attn.STREAM
    with ablation.forward_variant("baseline"):
        assert {tile.group for tile in tri_attn.FORWARD_TILES.values()} == {1}
        assert not tri_attn.STREAM
    with pytest.raises(RuntimeError), ablation.forward_variant("combined"):
        assert tri_attn.STREAM and tri_attn.FORWARD_TILES is tiles
        raise RuntimeError
    assert tri_attn.FORWARD_TILES is tiles and tri_attn.STREAM is stream


def test_plain_formula_agrees_with_the_operator() -> None:
    inputs = make_inputs(SHAPE, 0, CPU, masked=True)
    wide = [x.detach().double() for x in inputs.leaves]
    got = plain_attention(*wide, inputs.mask)
    torch.testing.assert_close(got, triangle_attention(*wide, inputs.mask, impl="torch"))
