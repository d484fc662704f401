"""Confidence, ranking, exposure: worked numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from metric_structures import build_structure

from tpf.data.tables import PROTEIN
from tpf.metrics.confidence import (
    ERROR_RANGE,
    PLDDT_RANGE,
    Confidence,
    confidence_metrics,
    contact_probability,
    expected,
    gpde,
    predicted_tm,
    ranking_score,
    tm_scale,
)
from tpf.metrics.rasa import (
    disorder_fraction,
    exposure,
    rasa,
    relative_area,
    smooth,
    unresolved_mean,
)
from tpf.metrics.structure import Sample, Scored


def in_bin(shape: tuple[int, ...], index: int) -> torch.Tensor:
    logits = torch.full(shape, -1e4)
    logits[..., index] = 1e4
    return logits


def test_worked_plddt_and_expected_error() -> None:
    assert expected(torch.zeros(3, 50), PLDDT_RANGE).tolist() == pytest.approx([0.5] * 3)
    assert expected(in_bin((2, 2, 64), 3), ERROR_RANGE)[0, 1].item() == pytest.approx(1.75)


def test_worked_ptm() -> None:
    assert tm_scale(20) == pytest.approx(0.3203702, abs=1e-6)
    assert tm_scale(5) == pytest.approx(0.1683773, abs=1e-6)
    frames = torch.ones(20, dtype=torch.bool)
    one = torch.zeros(20)
    ptm, iptm = predicted_tm(in_bin((20, 20, 64), 0), frames, one)
    assert ptm == pytest.approx(0.6215265, abs=1e-6) and iptm == 0.0
    for n in (4, 19):
        ptm, _ = predicted_tm(in_bin((n, n, 64), 0), frames[:n], one[:n])
        assert ptm == pytest.approx(0.3120598, abs=1e-6)


def test_iptm_averages_other_chains_and_skips_tokens_without_frame() -> None:
    logits = in_bin((20, 20, 64), 63)
    chain = torch.tensor([0] * 5 + [1] * 15)
    logits[2, 5:] = in_bin((15, 64), 0)  # token 2 places the other chain exactly
    frames = torch.ones(20, dtype=torch.bool)
    assert predicted_tm(logits, frames, chain)[1] == pytest.approx(0.6215265, abs=1e-6)
    frames[2] = False
    assert predicted_tm(logits, frames, chain)[1] < 0.01
    assert predicted_tm(logits, torch.zeros(20, dtype=torch.bool), chain) == (0.0, 0.0)


def test_worked_gpde_and_contact_bins() -> None:
    contact, pde = torch.tensor([[0.9, 0.1]]), torch.tensor([[1.0, 10.0]])
    assert gpde(contact, pde) == pytest.approx(1.9, abs=1e-6)
    inside = [float(contact_probability(in_bin((1, 1, 64), b))) for b in range(64)]
    assert inside == [1.0] * 19 + [0.0] * 45


def test_worked_ranking_score() -> None:
    assert ranking_score(0.8, 0.9, 0.1, False) == pytest.approx(0.87)
    assert ranking_score(0.8, 0.9, 0.1, True) == pytest.approx(-99.13)


def test_confidence_of_a_single_chain_reports_both_rankings() -> None:
    structure = build_structure([PROTEIN] * 20)
    confidence = Confidence(
        plddt=torch.zeros(20, 50),
        pae=in_bin((20, 20, 64), 0),
        pde=in_bin((20, 20, 64), 1),
        distogram=in_bin((20, 20, 64), 0),
        has_frame=torch.ones(20, dtype=torch.bool),
    )
    found = confidence_metrics(structure, confidence, Scored.everything(structure), (0.0, False))
    assert found["gpde"] == pytest.approx(0.75)
    assert found["plddt_protein"] == pytest.approx(50.0) == found["plddt_complex"]
    assert found["sample_ranking_score"] == pytest.approx(0.2 * 0.6215265)
    assert found["sample_ranking_score_si"] == pytest.approx(0.6215265)


@pytest.mark.parametrize(
    ("values", "smoothed"),
    [
        ((0, 0.3, 0.6, 0.9, 1.0), (0.2, 0.3, 0.6, 0.833333, 0.933333)),
        ((0, 1, 0, 1, 0), (2 / 3, 1 / 3, 2 / 3, 1 / 3, 2 / 3)),
    ],
)
def test_worked_smoothing(values: tuple[float, ...], smoothed: tuple[float, ...]) -> None:
    np.testing.assert_allclose(smooth(np.array(values, float), 3), smoothed, atol=1e-6)


def test_smoothing_of_short_chains() -> None:
    assert smooth(np.array([0.4])).tolist() == pytest.approx([0.4])
    assert smooth(np.zeros(0)).shape == (0,)
    assert smooth(np.full(7, 0.3)).tolist() == pytest.approx([0.3] * 7)
    with pytest.raises(ValueError, match="even"):
        smooth(np.zeros(9), 4)


def test_worked_rasa_and_disorder() -> None:
    relative = relative_area(np.array([53, 100, 56.5]), np.array(["ALA", "GLY", "MSE"]))
    assert relative.tolist() == pytest.approx([0.5, 1.0, 0.5])
    smoothed = smooth(relative, 1)
    assert unresolved_mean(smoothed, np.array([False, True, False])) == pytest.approx(1.0)
    assert unresolved_mean(smoothed, np.array([True, False, True])) == pytest.approx(0.5)
    assert unresolved_mean(smoothed, np.zeros(3, bool)) is None
    assert disorder_fraction(np.array([0.58, 0.582, 0.7, 0.2])) == pytest.approx(0.5)
    assert disorder_fraction(np.zeros(0)) == 0.0


def test_rasa_takes_wholly_unresolved_residues_and_each_chain_alone() -> None:
    structure = build_structure(
        [PROTEIN] * 4, [0, 0, 1, 1], residues=[0, 0, 1, 1], names=["N", "CA"] * 2
    )
    x = np.array([[0, 0, 0], [1.46, 0, 0], [0.5, 0, 0], [1.9, 0, 0]])
    exposed = exposure(structure, x)
    alone = exposure(build_structure([PROTEIN] * 2, residues=[0, 0], names=["N", "CA"]), x[:2])
    assert exposed.value[0] == pytest.approx(alone.value[0])  # chain 2 does not bury chain 1
    for resolved, hidden in (([1, 1, 0, 0], exposed.value[1]), ([1, 1, 1, 0], None)):
        value = rasa(structure, Sample.make(x, x, resolved), exposed)
        assert value is None if hidden is None else value == pytest.approx(hidden)
