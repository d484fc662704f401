"""lDDT, dRMSD, superposition and clashes: worked numbers and FP64 loops."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from metric_structures import build_structure

from tpf.data.tables import DNA, LIGAND, PROTEIN, RNA
from tpf.errors import UsageError
from tpf.metrics.clash import clash_metrics, has_clash
from tpf.metrics.lddt import THRESHOLDS, THRESHOLDS_UHA, lddt, lddt_metrics, lddt_pocket
from tpf.metrics.pairs import close_pairs
from tpf.metrics.structure import MODIFIED, Floats, Sample, Scored, Structure
from tpf.metrics.superpose import drmsd_metrics, rmsd, superpose, superposed_metrics

TRUTH = np.array([[0, 0, 0], [3, 0, 0], [6, 0, 0], [30, 0, 0]], dtype=float)
PREDICTED = np.array([[0, 0, 0], [3.7, 0, 0], [6, 0, 0], [30, 0, 0]], dtype=float)
CORNER = np.array([[0, 0, 0], [4, 0, 0], [0, 3, 0], [0, 0, 2]], dtype=float)


def line(predicted: Floats = PREDICTED, truth: Floats = TRUTH) -> Sample:
    return Sample.make(predicted, truth, np.ones(len(truth)))


def scores(structure: Structure, sample: Sample) -> dict[str, float]:
    return lddt_metrics(structure, sample, Scored.everything(structure))


def clashes(structure: Structure, x: Floats) -> dict[str, float]:
    return clash_metrics(structure, line(x, x), Scored.everything(structure))


def test_worked_lddt_of_one_chain() -> None:
    found = scores(build_structure([PROTEIN] * 4), line())
    assert found["lddt_intra_protein"] == pytest.approx(0.833333, abs=1e-6)
    assert found["lddt_intra_complex"] == pytest.approx(0.833333, abs=1e-6)
    found = scores(build_structure([LIGAND] * 4), line())
    assert found["lddt_intra_ligand"] == pytest.approx(0.833333, abs=1e-6)
    assert found["lddt_intra_ligand_uha"] == pytest.approx(0.666667, abs=1e-6)
    assert lddt(PREDICTED, TRUTH) == pytest.approx(0.833333, abs=1e-6)
    assert lddt(PREDICTED, TRUTH, thresholds=THRESHOLDS_UHA) == pytest.approx(0.666667, abs=1e-6)


def test_worked_lddt_of_two_chains() -> None:
    found = scores(build_structure([PROTEIN] * 4, [0, 0, 1, 1]), line())
    assert found["lddt_intra_protein"] == pytest.approx(0.75)
    assert found["lddt_inter_protein_protein"] == pytest.approx(0.875)
    assert set(found) == {
        "lddt_intra_protein",
        "lddt_inter_protein_protein",
        "lddt_intra_complex",
    }


def test_worked_drmsd_and_superposition() -> None:
    found = drmsd_metrics(build_structure([PROTEIN] * 4), line())
    assert found == {"drmsd_intra_protein": pytest.approx(0.494975, abs=1e-6)}
    assert rmsd(PREDICTED, TRUTH) == pytest.approx(0.35)
    fitted = superposed_metrics(line())
    assert fitted["rmsd"] == pytest.approx(0.303109, abs=1e-6)
    assert fitted["gdt_ts"] == pytest.approx(1.0)
    assert fitted["gdt_ha"] == pytest.approx(0.9375)


def test_rigid_motion_and_mirror_image() -> None:
    turn = np.array([[0, -1, 0], [1, 0, 0], [0, 0, 1]], dtype=float)
    moved = CORNER @ turn.T + np.array([1, 2, 3])
    assert superposed_metrics(line(moved, CORNER))["rmsd"] < 1e-5
    structure = build_structure([PROTEIN] * 4)
    assert scores(structure, line(moved, CORNER))["lddt_intra_protein"] == 1.0
    mirror = CORNER * np.array([-1, 1, 1])
    assert superposed_metrics(line(mirror, CORNER))["rmsd"] > 0.1
    assert scores(structure, line(mirror, CORNER))["lddt_intra_protein"] == 1.0
    np.testing.assert_allclose(superpose(moved, CORNER), CORNER, atol=1e-12)


def test_worked_clashes() -> None:
    x = np.array([[0, 0, 0], [0.55, 0, 0], [5, 0, 0]])
    found = clashes(build_structure([PROTEIN] * 3, [0, 0, 1]), x)
    assert found["clash_intra_protein"] == pytest.approx(0.5)
    assert found["clash_inter_protein_protein"] == 0.0
    found = clashes(build_structure([PROTEIN] * 3, [0, 1, 1]), x)
    assert found["clash_intra_protein"] == 0.0
    assert found["clash_inter_protein_protein"] == pytest.approx(0.25)
    found = clashes(build_structure([PROTEIN, LIGAND, LIGAND], [0, 1, 1]), x)
    assert found["clash_inter_protein_ligand"] == pytest.approx(0.25)
    assert "clash_inter_protein_dna" not in found


@pytest.mark.parametrize(
    ("close", "kind", "clash"),
    [(6, PROTEIN, True), (5, PROTEIN, False), (6, LIGAND, False), (10, LIGAND, False)],
)
def test_worked_has_clash(close: int, kind: int, clash: bool) -> None:
    structure = build_structure([kind] * 10 + [PROTEIN] * 300, [0] * 10 + [1] * 300)
    x = np.arange(310)[:, None] * np.array([[3.0, 0, 0]])
    x[:close] = x[10 : 10 + close] + np.array([0.0, 1.0, 0.0])
    assert has_clash(structure, x) is clash


def test_ligand_with_500_close_pairs_does_not_clash() -> None:
    for kind, clash in ((LIGAND, False), (PROTEIN, True)):
        structure = build_structure([kind] * 20 + [PROTEIN] * 25, [0] * 20 + [1] * 25)
        assert has_clash(structure, np.zeros((45, 3))) is clash  # 20 x 25 pairs


def test_more_than_a_hundred_pairs_clash() -> None:
    for close, clash in ((100, False), (101, True)):
        structure = build_structure([PROTEIN] * 600, [0] * 300 + [1] * 300)
        x = np.arange(600)[:, None] * np.array([[3.0, 0, 0]])
        x[:close] = x[300 : 300 + close] + np.array([0.0, 1.0, 0.0])
        assert has_clash(structure, x) is clash


def naive_lddt(
    structure: Structure, sample: Sample, a: int, b: int, intra: bool, radius: float
) -> float | None:
    hits, pairs = 0.0, 0
    for i in range(structure.n_atoms):
        for j in range(structure.n_atoms):
            kinds = (structure.kind[i], structure.kind[j])
            same = structure.chain[i] == structure.chain[j]
            if i == j or not (sample.resolved[i] and sample.resolved[j]):
                continue
            if kinds != (a, b) or (a == b and same != intra):
                continue
            d_gt = np.sqrt(1e-10 + ((sample.truth[i] - sample.truth[j]) ** 2).sum())
            d = np.sqrt(1e-10 + ((sample.predicted[i] - sample.predicted[j]) ** 2).sum())
            if d_gt < radius:
                pairs += 1
                hits += float(np.mean([abs(d - d_gt) < t for t in THRESHOLDS]))
    return hits / pairs if pairs else None


@pytest.fixture
def mixed() -> tuple[Structure, Sample]:
    """Every class in its own two chains, a third of the atoms unresolved."""
    rng = np.random.default_rng(1)
    kinds = np.repeat([PROTEIN, PROTEIN, RNA, RNA, DNA, DNA, LIGAND, LIGAND, MODIFIED], 9)
    structure = build_structure(kinds.tolist(), np.repeat(np.arange(9), 9).tolist())
    truth = rng.uniform(0, 30, (len(kinds), 3))
    predicted = truth + rng.normal(0, 1.5, truth.shape)
    return structure, Sample.make(predicted, truth, rng.random(len(kinds)) > 0.33)


def test_every_class_agrees_with_a_double_loop(mixed: tuple[Structure, Sample]) -> None:
    structure, sample = mixed
    found = scores(structure, sample)
    cases = {
        "lddt_intra_protein": (PROTEIN, PROTEIN, True, 15),
        "lddt_inter_protein_protein": (PROTEIN, PROTEIN, False, 15),
        "lddt_intra_ligand": (LIGAND, LIGAND, True, 15),
        "lddt_inter_ligand_ligand": (LIGAND, LIGAND, False, 15),
        "lddt_intra_rna": (RNA, RNA, True, 30),
        "lddt_intra_rna_15": (RNA, RNA, True, 15),
        "lddt_intra_dna": (DNA, DNA, True, 30),
        "lddt_inter_dna_dna": (DNA, DNA, False, 30),
        "lddt_inter_dna_dna_15": (DNA, DNA, False, 15),
        "lddt_inter_rna_rna": (RNA, RNA, False, 30),
        "lddt_inter_protein_ligand": (PROTEIN, LIGAND, False, 15),
        "lddt_inter_protein_dna": (PROTEIN, DNA, False, 30),
        "lddt_inter_protein_rna": (PROTEIN, RNA, False, 30),
        "lddt_inter_protein_rna_15": (PROTEIN, RNA, False, 15),
        "lddt_inter_ligand_dna": (LIGAND, DNA, False, 30),
        "lddt_inter_ligand_rna": (LIGAND, RNA, False, 30),
        "lddt_intra_modified_residues": (MODIFIED, MODIFIED, True, 15),
    }
    for name, (a, b, intra, radius) in cases.items():
        assert found[name] == pytest.approx(naive_lddt(structure, sample, a, b, intra, radius)), (
            name
        )
    extra = {"lddt_intra_complex", "lddt_intra_ligand_uha", "lddt_inter_ligand_ligand_uha"}
    variants = {f"lddt_inter_{pair}_15" for pair in ("rna_rna", "protein_dna", "ligand_dna")}
    assert extra | variants | {"lddt_intra_dna_15", "lddt_inter_ligand_rna_15"} <= found.keys()


def test_filters_limit_chains_and_pairs(mixed: tuple[Structure, Sample]) -> None:
    structure, sample = mixed
    only = Scored.listed(structure, {1}, {(1, 7), (7, 99)})
    assert only.counts() == (1, 1)
    found = lddt_metrics(structure, sample, only)
    keep = np.isin(structure.chain, (0, 6))
    masked = replace(sample, resolved=sample.resolved & keep)
    everything = scores(structure, masked)
    assert found["lddt_inter_protein_ligand"] == everything["lddt_inter_protein_ligand"]
    assert found["lddt_intra_protein"] == everything["lddt_intra_protein"]
    assert not any("rna" in name or "dna" in name for name in found)
    assert "lddt_intra_ligand" not in found


def test_antibody_roles_are_scored_when_annotated(mixed: tuple[Structure, Sample]) -> None:
    structure, sample = mixed
    role = np.array([0, 1, -1, -1, -1, -1, -1, -1, -1])
    found = scores(replace(structure, role=role), sample)
    assert found["lddt_inter_ab_h_ab_l"] == found["lddt_inter_protein_protein"]
    assert "lddt_intra_ab_l" in found and "lddt_intra_ag" not in found


def test_pocket_lddt_takes_residues_near_the_ligand() -> None:
    structure = build_structure([PROTEIN] * 3 + [LIGAND], [0, 0, 0, 1], residues=[0, 0, 1, 2])
    truth = np.array([[0, 0, 0], [8, 0, 0], [20, 0, 0], [13, 0, 0]], dtype=float)
    predicted = truth.copy()
    predicted[0, 0] += 0.7
    found = lddt_pocket(structure, line(predicted, truth), Scored.everything(structure))
    assert found == pytest.approx((0.75 + 1.0) / 2)  # the third atom is 7 A away: no pocket


@settings(max_examples=40, deadline=None)
@given(n=st.integers(0, 70), cutoff=st.floats(0.1, 60), seed=st.integers(0, 99))
def test_close_pairs_are_all_pairs_below_the_cutoff(n: int, cutoff: float, seed: int) -> None:
    x = np.random.default_rng(seed).uniform(0, 40, (n, 3))
    found = [
        (min(i, j), max(i, j))
        for a, b, _ in close_pairs(x, cutoff)
        for i, j in zip(a, b, strict=True)
    ]
    d = np.sqrt(1e-10 + ((x[:, None] - x[None]) ** 2).sum(-1))
    expected = {(int(i), int(j)) for i, j in zip(*np.nonzero(np.triu(d < cutoff, 1)), strict=True)}
    assert len(found) == len(set(found)) and {(int(i), int(j)) for i, j in found} == expected


def test_wrong_inputs_name_the_problem() -> None:
    with pytest.raises(UsageError, match="differ"):
        Sample.make(TRUTH[:3], TRUTH, np.ones(4))
    bad = TRUTH.copy()
    bad[1] = np.nan
    with pytest.raises(UsageError, match="resolved ground-truth atom"):
        Sample.make(TRUTH, bad, np.ones(4))
    with pytest.raises(UsageError, match="1 predicted atoms"):
        Sample.make(bad, TRUTH, np.ones(4))
    assert Sample.make(TRUTH, bad, [1, 0, 1, 1]).resolved.tolist() == [True, False, True, True]


def test_nothing_resolved_leaves_every_metric_out() -> None:
    structure = build_structure([PROTEIN] * 4)
    sample = Sample.make(PREDICTED, TRUTH, np.zeros(4))
    assert scores(structure, sample) == {}
    assert superposed_metrics(sample) == {} == drmsd_metrics(structure, sample)
    assert lddt(PREDICTED, TRUTH, np.zeros(4)) is None


def test_five_samples_of_four_thousand_atoms_take_seconds() -> None:
    rng = np.random.default_rng(0)
    side = 2 * (4000 / 0.06 * 3 / (4 * np.pi)) ** (1 / 3)  # atoms per cubic Angstrom of protein
    truth = rng.uniform(0, side * 0.8, (4000, 3))
    structure = build_structure([PROTEIN] * 4000)
    start = time.process_time()
    for _ in range(5):
        scores(structure, line(truth + rng.normal(0, 1, truth.shape), truth))
    assert time.process_time() - start < 3.0
