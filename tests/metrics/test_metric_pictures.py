"""What the report shows of a target: calibration of pLDDT, the picture, classes of ligands."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from metric_structures import build_structure

from tpf.config import DataConfig
from tpf.data.batch import to_torch
from tpf.data.ccd import Dictionary
from tpf.data.features import featurize
from tpf.data.jobs import read_job
from tpf.data.load import load_tables
from tpf.data.tables import LIGAND, PROTEIN
from tpf.data.tokens import tokenize
from tpf.losses.confidence import lddt_targets
from tpf.metrics.calibration import add, atom_lddt, calibration, calibration_error
from tpf.metrics.ligand import ligand_class
from tpf.metrics.picture import traces
from tpf.metrics.structure import Sample, from_features, unbatch
from tpf.report.structure import structure_figure

EXAMPLES = Path(__file__).resolve().parents[2] / "data" / "examples"
HELIX = np.array([[2.3 * np.cos(k), 2.3 * np.sin(k), 1.5 * k] for k in range(12)])


@pytest.mark.parametrize("entry", ["1ubq", "2q2k"])
def test_atom_lddt_is_the_target_of_the_confidence_head(entry: str) -> None:
    tokens = tokenize(load_tables(EXAMPLES / f"{entry}.cif.gz"))
    config = DataConfig(conformers="ideal", max_templates=0)
    rng = np.random.default_rng(0)
    features = featurize(tokens, np.arange(len(tokens)), Dictionary(), rng, config=config)
    batch = to_torch(features)
    truth = batch["ground_truth"]
    positions, resolved = truth["atom_positions"][:, None], truth["atom_resolved_mask"][:, None]
    x = positions + torch.randn_like(positions)
    score, known = lddt_targets(batch, x, positions, resolved)
    sample = Sample.make(x[0, 0], positions[0, 0], resolved[0, 0])
    ours, has = atom_lddt(from_features(unbatch(batch)), sample)
    assert np.array_equal(has, known[0, 0].numpy())
    np.testing.assert_allclose(ours[has], score[0, 0].numpy()[has], atol=2e-3)


def test_calibration_by_hand() -> None:
    """Three CA on a line; the third moves by 3 A, so its two distances keep a quarter."""
    structure = build_structure([PROTEIN] * 3, residues=[0, 1, 2])
    truth = np.array([[0.0, 0, 0], [4, 0, 0], [8, 0, 0]])
    predicted = truth + np.array([[0.0, 0, 0], [0, 0, 0], [3.0, 0, 0]])
    sample = Sample.make(predicted, truth, np.ones(3))
    score, known = atom_lddt(structure, sample)
    assert score.tolist() == pytest.approx([0.625, 0.625, 0.25]) and known.all()
    table = calibration(structure, sample, np.array([62.0, 64.0, 100.0]))
    assert table[12] == pytest.approx([2, 126, 125]) and table[19] == pytest.approx([1, 100, 25])
    assert sum(row[0] for row in table) == 3
    assert calibration_error(table) == pytest.approx((1 + 75) / 3)
    assert add([table, table])[12] == pytest.approx([4, 252, 250])
    assert calibration_error(add([])) is None


def test_the_picture_lays_the_prediction_on_the_experiment() -> None:
    structure = build_structure(
        [PROTEIN] * 12 + [LIGAND] * 2, [0] * 12 + [1] * 2, names=["CA"] * 12 + ["C1", "C2"]
    )
    truth = np.concatenate([HELIX, [[9.0, 0, 3], [9, 1, 4]]])
    turn = np.array([[0, -1, 0], [1, 0, 0], [0, 0, 1]], dtype=float)
    resolved = np.ones(14)
    resolved[5] = 0
    sample = Sample.make(truth @ turn.T + 7, truth, resolved)
    plddt = np.linspace(30, 95, 14)
    chain, ligand = traces(structure, ["A", "B"], sample.predicted, plddt, sample)
    assert (chain.chain, chain.ligand, ligand.chain, ligand.ligand) == ("A", False, "B", True)
    assert chain.truth[5] is None and chain.predicted[5] is not None
    for at, expected in zip(chain.predicted, chain.truth, strict=True):
        assert expected is None or at == pytest.approx(expected, abs=0.11)
    assert chain.plddt[0] == 30 and ligand.plddt[-1] == 95
    alone = traces(structure, ["A", "B"], sample.predicted, plddt, None)
    assert alone[0].truth == []
    for shown in ([chain, ligand], alone):
        figure = structure_figure(shown, "a < b")
        svg = figure[figure.index("<svg") : figure.index("</svg>") + 6]
        root = ElementTree.fromstring(svg)
        assert "a &lt; b" in figure and "nan" not in svg
        assert len(list(root.iter("circle"))) == (4 if shown[0].truth else 2)
    assert structure_figure([], "nothing") == ""


def test_classes_of_ligands(tmp_path: Path) -> None:
    job = tmp_path / "job.json"
    codes = ("ATP", "MG", "GOL", "STI", "BEN")
    ligands = [{"ligand": {"ccd": code}} for code in codes]
    job.write_text(json.dumps({"sequences": [*ligands, {"protein": {"sequence": "GSC"}}]}))
    tables = read_job(job, DataConfig()).tokens.tables
    kinds = [ligand_class(tables, c) for c in range(5)]
    expected = ["nucleotide", "ion", "crystal aid", "small molecule", "small molecule"]
    assert kinds == expected
    ends = [
        int(np.flatnonzero(tables.res_name[tables.atom_residue] == n)[-1]) for n in ("BEN", "CYS")
    ]
    linked = np.append(tables.bonds, [ends], axis=0).astype(np.int32)
    tables = dataclasses.replace(tables, bonds=linked)
    assert ligand_class(tables, 4) == "covalent" and ligand_class(tables, 3) == expected[3]
