"""Every system that the paper names has a row in every comparison, be it one that says why not."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tpf import doctor
from tpf.bench import studies, swap
from tpf.bench.backends import BACKENDS, Backend
from tpf.bench.record import Record, Row
from tpf.bench.trimul_backends import MULTIPLIERS
from tpf.stability import operators
from tpf.stability.study import default_impls

CPU = torch.device("cpu")
PAPER = (
    "openfold3", "cuequivariance", "protenix", "trifast", "megafold", "deepspeed", "scalefold",
    "turbopairformer",
)  # fmt: skip
"""OpenFold3's Triton kernel, cuEquivariance, Protenix, TriFast, MegaFold, DeepSpeed-Evo, ScaleFold,
and the authors' own release."""
NO_UPDATE = {"openfold3", "protenix", "trifast", "megafold", "deepspeed"}
COMPARISONS = {
    **studies.OPERATIONS,
    **{s.name: s for number, (_, s) in studies.TABLES.items() if number in (4, 6, 8, 10)},
    **{s.name: s for number, (_, s) in studies.FIGURES.items() if number in (3, 4, 10)},
}
"""The studies that compare systems; the others are about variants of our own."""


@pytest.mark.parametrize("name", COMPARISONS)
def test_every_comparison_names_every_system(name: str) -> None:
    assert set(PAPER) <= set(COMPARISONS[name].impls)


def test_the_stability_study_names_every_system() -> None:
    assert set(PAPER) <= set(default_impls(gpu=True))
    for name in PAPER:
        operators.check_name(name)


def rows_of(op: str) -> list[Row]:
    record, device = Record("test"), CPU
    if op == "step":
        chosen = {name: swap.CHOICES[name] for name in ("torch", *PAPER)}
        swap.open_choices(op, chosen, device, record)
    else:
        known: dict[str, Backend[object]] = dict(BACKENDS if op == "attention" else MULTIPLIERS)  # type: ignore[arg-type]
        record.open_all(op, known, ("torch", *PAPER), device)
    return record.rows


@pytest.mark.parametrize("op", ["attention", "trimul", "step", "stability"])
def test_what_cannot_run_says_how_to_get_it(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    if op == "stability":
        found = {name: operators.why_unavailable(name, CPU) for name in PAPER}
    else:
        found = {row["impl"]: row["error"] for row in rows_of(op)}
    assert set(found) == set(PAPER)
    for name, reason in found.items():
        if name == "scalefold":
            assert reason == "has no public kernel"
        elif op == "trimul" and name in NO_UPDATE:
            assert reason == "has no kernel of this update"
        else:
            assert reason == f"not installed ({doctor.BACKENDS[name][1]})"


def test_a_network_without_its_update_says_whose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "trifast", Backend(lambda: BACKENDS["eager"].load(), "anything"))  # type: ignore[misc]
    reason = operators.why_unavailable("trifast", CPU)
    assert reason is not None
    assert reason.startswith("its update, cuequivariance: not installed (pip install cuequi")
