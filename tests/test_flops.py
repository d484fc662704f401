"""The formula of a step's operations against torch's counter of the operators that run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tpf.bench.protein import make_sample
from tpf.config import load
from tpf.data.batch import to_device
from tpf.flops import peak_flops, sample_flops
from tpf.memory import Sizes
from tpf.model import pairformer
from tpf.model.model import Model
from tpf.step import draws, sample_loss


def _attention(q: Any, k: Any, v: Any, bias: Any, *_: Any, **__: Any) -> Any:
    weights = (q @ k.mT + bias).softmax(-1)
    return weights @ v


def _multiplication(z: Any, mask: Any, w: Any, direction: str, **_: Any) -> Any:
    a, b = ((z @ p.mT) * (z @ g.mT) for p, g in ((w.linear_a_p, w.linear_a_g),
                                                 (w.linear_b_p, w.linear_b_g)))  # fmt: skip
    a, b = a.permute(0, 3, 1, 2), b.permute(0, 3, 1, 2)
    x = (a @ b.mT if direction == "outgoing" else a.mT @ b).permute(0, 2, 3, 1)
    return (x @ w.linear_z.mT) * (z @ w.linear_g.mT)


@pytest.mark.parametrize(
    ("crop", "overrides"),
    [
        (24, ["train.diffusion_samples=4"]),
        (
            32,
            ["model.msa_blocks=2", "train.diffusion_samples=2", "train.max_recycles=0"]
            + ["loss.plddt=0", "loss.pde=0", "loss.pae=0", "loss.resolved=0"],
        ),
    ],
)
def test_formula_counts_what_runs(
    crop: int, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counter does not see inside our operators, so plain products stand in for them."""
    monkeypatch.setattr(pairformer, "triangle_attention", _attention)
    monkeypatch.setattr(pairformer, "triangle_multiplication", _multiplication)
    config = load("tiny", [f"data.crop={crop}", *overrides])
    torch.manual_seed(0)
    model = Model(config.model).train()
    batch = to_device(make_sample(crop, config, seed=0) | {"position": [0]}, "cpu")
    draw = draws(config.train, 0, 0)
    with FlopCounterMode(display=False) as counter:
        sample_loss(model, batch, config, draw).total.backward()  # type: ignore[no-untyped-call]
    sizes = Sizes.of(batch)
    windows = -(-sizes.atoms // config.model.n_query)
    padded = Sizes(sizes.tokens, windows * config.model.n_query)
    found = sample_flops(config, padded, draw.cycles)
    assert found == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_cubic_terms_dominate_long_crops() -> None:
    config = load("full")
    short, long = (sample_flops(config, Sizes(n, 8 * n), 1) for n in (384, 768))
    assert 4 < long / short < 8


def test_unknown_devices_have_no_peak() -> None:
    assert peak_flops(torch.device("cpu")) is None
