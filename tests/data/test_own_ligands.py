"""Own ligands end to end: assembled, checked, trained on, validated, predicted anew."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from Bio.SVDSuperimposer import SVDSuperimposer
from joined import KINASE, SMALL, make, put, residue_of, symmetries
from poses import analog, posed_ligand, sdf
from typer.testing import CliRunner

from tpf.cli.app import app
from tpf.config import DataConfig
from tpf.data.ccd import Component
from tpf.data.chem import one_letters
from tpf.data.conformers import rdkit_molecule
from tpf.data.identity import graph_digest
from tpf.data.load import load_tables
from tpf.data.mmcif import read_structure
from tpf.data.records import Entries
from tpf.data.tables import LIGAND, PROTEIN, Tables

KINASES = {
    "2gdo": "12C", "2hyy": "STI", "4qyf": "3DV", "5sb2": "1K2", "6wtn": "RXT", "6yt6": "PKE",
    "7opg": "06N", "7r7r": "AWJ", "8ex2": "Q2Q", "8flv": "ZB9",
}  # fmt: skip
"""Entries whose chain A is a kinase, and their inhibitors."""

RECIPE = [
    "train.diffusion_samples=2",
    "train.rollout_steps=2",
    "validate.samples=1",
    "validate.sampling_steps=2",
    "validate.recycles=0",
    "validate.extras=true",
]


def trained(folder: Path, out: Path, *overrides: str) -> dict[str, Any]:
    """Train the tiny preset on a folder; return what the last validation wrote."""
    from tpf.cli.display import Silent
    from tpf.config import load
    from tpf.train import Options, train

    config = load("tiny", [f"data.path={folder}", *RECIPE, *overrides])
    train(config, Options(out), Silent())
    last = out / "validation" / f"step-{config.train.steps:06d}" / "metrics.json"
    result: dict[str, Any] = json.loads(last.read_text())
    return result


def test_training_and_validation_take_the_new_ligand(tmp_path: Path) -> None:
    pose = put(tmp_path, "p.sdf", sdf(*posed_ligand(SMALL, "ZYB")))
    folder = tmp_path / "data"
    folder.mkdir()
    make(folder, SMALL, pose, out="brd-analog.cif", names=("DRG",))
    result = trained(folder, tmp_path / "run", "train.steps=2", "data.crop=32")
    (target,) = result["targets"]
    assert target["id"] == "brd-analog" and not result["skipped"]
    ligand = next(row for row in target["ligands"] if row["component"] == "DRG")
    assert np.isfinite(ligand["rmsd"]).all()
    predicted = next((tmp_path / "run" / "validation").rglob("brd-analog*.cif"))
    assert "DRG" in load_tables(predicted, filters=False).res_name.tolist()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_kinase_series_is_trained_on_and_validated(tmp_path: Path, kinase: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / kinase.name).write_bytes(kinase.read_bytes())
    smiles = "CC1CN(CCO1)Cc1ccc(cc1)C(=O)Nc1cccc(c1)Nc1nccc(n1)-c1cccnc1"
    make(folder, KINASE, smiles, out="src-morpholine.cif.gz")  # another molecule called LIG
    overrides = ("train.steps=20", "data.crop=64", "validate.max_tokens=512")
    result = trained(folder, tmp_path / "run", *overrides)
    assert [target["id"] for target in result["targets"]] == ["src-analog", "src-morpholine"]
    for target in result["targets"]:
        (ligand,) = target["ligands"]
        assert ligand["component"] == "LIG" and np.isfinite(ligand["rmsd"]).all()


def tpf(*words: object) -> str:
    """Run a command that must succeed; return what it prints."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, f"{done.output}{done.exception!r}"
    return done.stdout


def pocket_rmsd(truth: Tables, predicted: Tables, part: Component) -> float:
    """Return the least RMSD of LIG after a fit of the CA atoms of its pocket, written out again."""
    own = residue_of(truth, "LIG")
    protein = truth.chain_type[truth.res_chain[truth.atom_residue]] == PROTEIN
    gap = np.linalg.norm(truth.pos[:, None] - truth.pos[own][None], axis=-1)
    near = np.flatnonzero(protein & (gap < 10.0).any(axis=1))
    residues = np.unique(truth.atom_residue[near])
    alpha = (truth.atom_name == "CA") & np.isin(truth.atom_residue, residues)
    alpha &= np.isfinite(truth.pos).all(axis=1)
    fit = SVDSuperimposer()
    fit.set(truth.pos[alpha].astype(float), predicted.pos[alpha].astype(float))
    fit.run()
    rotation, shift = fit.get_rotran()
    moved = predicted.pos[own].astype(float) @ rotation + shift
    square = ((moved[symmetries(part)] - truth.pos[own]) ** 2).sum(axis=-1)
    return float(np.sqrt(square.mean(axis=-1)).min())


@pytest.fixture
def analogs(shared_data: Path, tmp_path: Path) -> dict[str, Component]:
    """The inhibitor of each kinase, changed by an atom; its pose lies in ENTRY.sdf."""
    found = {}
    for name, code in KINASES.items():
        part, pos = analog(shared_data / "kinase" / f"{name}.cif.gz", code)
        put(tmp_path, f"{name}.sdf", sdf(part, pos))
        found[name] = part
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_analogs_from_sdf_to_prediction(
    shared_data: Path, analogs: dict[str, Component], tmp_path: Path
) -> None:
    chem = pytest.importorskip("rdkit.Chem")
    times = [time.perf_counter()]
    folder = shared_data / "kinase"
    rows = [f"{folder / name}.cif.gz,{name}.sdf,{name}-lig,A" for name in KINASES]
    table = put(tmp_path, "series.csv", "\n".join(["protein,ligand,id,chain", *rows]))
    data = tmp_path / "series"
    n = len(KINASES)
    assert f"{n} rows: {n} assembled" in tpf("data", "assemble", "--table", table, "--out", data)
    times.append(time.perf_counter())
    checked = map(json.loads, tpf("data", "check", data, "--strict", "--json").splitlines())
    assert {row["id"] for row in checked} == {f"{name}-lig" for name in KINASES}
    records = Entries(DataConfig(path=str(data))).records
    keys = [
        [k for k, kind in zip(r.chain_keys, r.chain_types, strict=True) if kind == LIGAND]
        for r in records
    ]
    assert len({key for own in keys for key in own}) >= n  # each LIG is its own
    times.append(time.perf_counter())

    run = tmp_path / "run"
    result = trained(data, run, "train.steps=20", "data.crop=64", "validate.max_tokens=512")
    times.append(time.perf_counter())
    assert len(result["targets"]) == n and not result["skipped"]
    for target in result["targets"]:
        part = analogs[target["id"].removesuffix("-lig")]
        (ligand,) = [row for row in target["ligands"] if row["component"] == "LIG"]
        truth = load_tables(data / f"{target['id']}.cif.gz")
        last = run / "validation" / "step-000020"
        predicted = load_tables(next(last.rglob(f"{target['id']}-seed0*.cif")), filters=False)
        assert ligand["rmsd"] == [pytest.approx(pocket_rmsd(truth, predicted, part), abs=2e-3)]

    jobs = []
    for name, part in analogs.items():
        tables = load_tables(data / f"{name}-lig.cif.gz")
        chain = int(np.flatnonzero(tables.chain_type == PROTEIN)[0])
        sequence = one_letters(tables.res_name[tables.res_chain == chain].tolist())
        smiles = chem.MolToSmiles(chem.RemoveHs(rdkit_molecule(part)))
        job = {"sequences": [{"protein": {"sequence": sequence}}, {"ligand": {"smiles": smiles}}]}
        jobs.append(put(tmp_path, f"{name}.json", json.dumps(job)))
    few = ("--samples", 1, "--sampling-steps", 2)
    anew = tmp_path / "predicted"
    documents = json.loads(tpf("predict", run, *jobs, "--out", anew, *few, "--json"))
    times.append(time.perf_counter())
    assert [document["id"] for document in documents] == list(KINASES)
    for name, part in analogs.items():
        structure, known = read_structure(anew / name / "seed0-sample0.cif")
        own = known.own["LIG1"]  # few steps leave its bonds too long to be read as bonds
        assert graph_digest(own.elements, own.bonds) == graph_digest(part.elements, part.bonds)
        ligand = structure.res_name[structure.atom_residue] == "LIG1"
        assert structure.atom_name[ligand].tolist() == own.atom_names.tolist()
        assert np.isfinite(structure.pos).all()
    spent = " ".join(
        f"{name} {seconds:.0f} s"
        for name, seconds in zip(
            ("assemble", "check", "train and validate", "predict"), np.diff(times), strict=True
        )
    )
    print(f"\nten analogs: {spent}")
