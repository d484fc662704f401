"""Validation as a whole: repeatable, resumable, shared by ranks, explained where targets fail."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from tests.untrained import save_untrained
from tpf.config import Config, DataConfig, load
from tpf.data.ccd import Dictionary
from tpf.data.jobs import read_job
from tpf.data.load import load_tables
from tpf.data.records import Entries
from tpf.data.tables import LIGAND
from tpf.data.write import write_mmcif
from tpf.dist import World
from tpf.errors import HardwareError, Interrupted, UsageError
from tpf.infer import Drawn, draw
from tpf.launch import Plan, launch, plan
from tpf.metrics.parts import Part
from tpf.metrics.schema import SeedResult, TargetResult, Validation, read_json
from tpf.model.model import Model
from tpf.targets import Targets, read_groups, read_ids
from tpf.validate import (
    Request,
    compare_files,
    validate_checkpoint,
    validate_model,
    validate_rank,
)

SPLITS = Path(__file__).resolve().parents[1] / "data" / "splits"
COMPLEXES: dict[str, list[dict[str, Any]]] = {
    "1aaa": [{"protein": {"sequence": "MKVLQAGDST"}}, {"ligand": {"ccd": "BEN"}}],
    "2bbb": [{"protein": {"id": ["A", "B"], "sequence": "GLSDGEWQQVL"}}],
    "3ccc": [{"protein": {"sequence": "MTEYKLVVVGAG"}}],
    "4ddd": [{"protein": {"sequence": "MKVLQ" * 12}}],
}
"""Made-up entries; the last one is above the limit of tokens."""
ENTRIES = ["1aaa", "2bbb", "3ccc"]
ALONE = World(0, 1, torch.device("cpu"))
FILES = ("metrics.json", "targets.csv")


def write_entry(folder: Path, name: str) -> None:
    """Write a structure with a random walk for a backbone and its ligand beside it."""
    job = folder / f"{name}.json"
    job.write_text(json.dumps({"name": name, "sequences": COMPLEXES[name]}))
    tables = read_job(job, DataConfig()).tokens.tables
    job.unlink()
    rng = np.random.default_rng(int(name[0]))
    walk = np.cumsum(rng.normal(size=(len(tables.res_name), 3)) * 2.0, axis=0)
    x = walk[tables.atom_residue] + rng.normal(size=(len(tables.atom_residue), 3))
    ligand = tables.chain_type[tables.res_chain[tables.atom_residue]] == LIGAND
    if ligand.any():
        component = Dictionary().get("BEN")
        assert component is not None
        x[ligand] = component.ideal + x[~ligand][x[~ligand, 0].argmax()] + [6.0, 0.0, 0.0]
    write_mmcif(folder / f"{name}.cif", tables, x)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small untrained model and its entries, among them a large one and a broken file."""
    folder = tmp_path_factory.mktemp("validate")
    (folder / "data").mkdir()
    for name in COMPLEXES:
        write_entry(folder / "data", name)
    (folder / "data" / "cut.cif").write_text("data_cut\nloop_\n_atom_site.id\n")
    return save_untrained(folder / "run", [
        f"data.path={folder / 'data'}", "validate.samples=2", "validate.seeds=2",
        "validate.sampling_steps=2", "validate.recycles=0", "validate.max_tokens=50",
        "validate.extras=true", "model.pairformer_blocks=1",
    ])  # fmt: skip


def validate(run: Path, out: Path | None, *overrides: str, **named: Any) -> Validation:
    progress: Callable[[str, int, int], None] = named.pop("progress", lambda *_: None)
    request = Request(run, list(overrides), out=out, **named)
    return validate_checkpoint(request, ALONE, progress)[0]


@pytest.fixture(scope="module")
def finished(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "out"
    validate(run, out)
    return out


def same_files(first: Path, second: Path) -> None:
    for name in FILES:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    names = sorted(p.name for p in (first / "predicted").iterdir())
    assert names == sorted(p.name for p in (second / "predicted").iterdir())
    for name in names:
        assert (first / "predicted" / name).read_bytes() == (
            second / "predicted" / name
        ).read_bytes(), name


def test_results(finished: Path) -> None:
    assert sorted(p.name for p in finished.iterdir()) == [
        "metrics.json", "predicted", "report.html", "targets.csv",
    ]  # fmt: skip
    result = read_json(finished)
    assert [t.id for t in result.targets] == ENTRIES
    for target in result.targets:
        assert [s.seed for s in target.seeds] == [0, 1]
        assert target.seeds[0].samples != target.seeds[1].samples
        assert all(len(s.samples) == 2 for s in target.seeds)
    reasons = {s.id: s.reason for s in result.skipped}
    assert reasons.keys() == {"4ddd", "cut"}
    assert reasons["4ddd"] == (
        "size: 60 tokens, more than 50; --max-tokens 60 admits all, in training "
        "validate.max_tokens=60"
    )
    assert reasons["cut"].startswith("parse: ")
    assert len(list((finished / "predicted").iterdir())) == 3 * 2 * 2


def test_ligands_are_classed_and_posed(finished: Path) -> None:
    target = read_json(finished).targets[0]
    (ligand,) = target.ligands
    assert (ligand.component, ligand.kind) == ("BEN", "small molecule")
    assert ligand.rmsd == pytest.approx([s.top1["ligand_rmsd_pocket"] for s in target.seeds])


def test_a_killed_validation_goes_on_where_it_stopped(
    run: Path, finished: Path, tmp_path: Path
) -> None:
    seen: list[str] = []

    def kill_at_the_second(target: str, done: int, total: int) -> None:
        seen.append(target)
        if len(seen) == 2:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        validate(run, out, progress=kill_at_the_second)
    assert not (out / "metrics.json").exists()
    with pytest.raises(UsageError, match="unfinished validation of other weights"):
        validate(run, out, "validate.samples=1")
    resumed: list[str] = []
    validate(run, out, progress=lambda target, *_: resumed.append(target))
    assert resumed[0] == seen[1] and sorted([seen[0], *resumed]) == ENTRIES
    same_files(finished, out)
    with pytest.raises(UsageError, match="exists; nothing is overwritten"):
        validate(run, out)


def test_a_signal_ends_it_between_two_targets(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    request = Request(run, ["validate.seeds=1"], out=out)
    seen: list[str] = []
    with pytest.raises(Interrupted, match="the same command goes on"):
        validate_checkpoint(request, ALONE, lambda name, *_: seen.append(name), lambda: True)
    assert len(seen) == 1
    validate_checkpoint(request, ALONE, lambda name, *_: seen.append(name))
    assert sorted(seen) == ENTRIES


def test_the_default_folder_is_found_again_when_unfinished(run: Path) -> None:
    def kill(target: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            validate(run, None, progress=kill)
    folders = list((run / "checkpoints" / "validation").iterdir())
    assert [p.name for p in folders] == ["step-000000"]


def test_two_ranks_give_the_same_bytes(run: Path, finished: Path, tmp_path: Path) -> None:
    request = Request(run, [], out=tmp_path / "out")
    folders = launch(Plan("launch", 2), validate_rank, request)
    assert set(folders.values()) == {tmp_path / "out"}
    same_files(finished, tmp_path / "out")


def test_more_gpus_than_there_are_name_the_command() -> None:
    with pytest.raises(HardwareError, match="run on .*: tpf validate --gpus 2"):
        plan(2, 1, None, 0, "tpf validate")


def test_of_two_files_of_one_id_the_second_is_listed(tmp_path: Path) -> None:
    write_entry(tmp_path, "1aaa")
    (tmp_path / "copy.cif").write_bytes((tmp_path / "1aaa.cif").read_bytes())
    config = load("tiny", [f"data.path={tmp_path}"])
    targets = Targets(Entries(config.data), config, None)
    assert targets.ids() == ["1aaa"]
    assert [s.id for s in targets.skipped] == ["1aaa"]
    assert "1aaa.cif has the same id as" in targets.skipped[0].reason


def test_targets_and_groups(run: Path, tmp_path: Path) -> None:
    lists = tmp_path / "list.txt"
    lists.write_text("../x/1AAA.cif.gz  # by path\ncut\n")
    groups = tmp_path / "groups.txt"
    groups.write_text("# comment\n1aaa  small beta\n")
    result = validate(run, tmp_path / "out", "validate.seeds=1", targets=lists, groups=groups)
    assert [(t.id, t.group) for t in result.targets] == [("1aaa", "small beta")]
    assert [s.id for s in result.skipped] == ["cut"]
    report = (tmp_path / "out" / "report.html").read_text()
    assert "small beta" in report and "calibration" in report
    groups.write_text("1aaa\tbeta\n")
    assert read_groups(groups) == {"1aaa": "beta"}
    lists.write_text("1aaa\n9xyz\n")
    with pytest.raises(UsageError, match="1 ids are not among the entries of --data, such as 9xyz"):
        validate(run, tmp_path / "other", targets=lists)
    lists.write_text("# nothing\n")
    with pytest.raises(UsageError, match="names no entry"):
        read_ids(lists)
    groups.write_text("1aaa\n")
    with pytest.raises(UsageError, match="'1aaa' has no group"):
        read_groups(groups)


def test_a_failing_target_is_listed(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("tpf.validate.draw", fail)
    result = validate(run, tmp_path / "out", "validate.seeds=1", "validate.extras=false")
    assert not result.targets
    assert {s.id: s.reason for s in result.skipped}["1aaa"] == "out of memory at 19 tokens"
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["dataset"] == {}


def test_comparison_with_itself_and_with_other_settings(
    run: Path, finished: Path, tmp_path: Path
) -> None:
    same = compare_files(finished, finished, 50)
    assert same["difference"] == 0.0 and same["interval"] == [0.0, 0.0] and same["targets"] == 3
    validate(run, tmp_path / "out", "validate.samples=1", "validate.seeds=1")
    with pytest.raises(UsageError, match="setting samples differs"):
        compare_files(finished, tmp_path / "out", 50)


def test_kinase_lists_have_a_group_for_every_entry() -> None:
    groups = read_groups(SPLITS / "kinase-groups.txt")
    ids = [i for part in ("train", "holdout") for i in read_ids(SPLITS / f"kinase-{part}.txt")]
    assert len(ids) == 31 and set(ids) == groups.keys()
    assert set(groups.values()) == {"TK", "TKL", "STE", "CMGC", "AGC", "CAMK"}


def test_85_targets_take_linear_work_and_go_on_after_a_kill_at_the_30th(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a validation does around its targets, counted in calls of our functions."""
    entry = (run.parent / "data" / "3ccc.cif").read_text()
    config = load("tiny", [f"data.path={tmp_path / 'data'}", "model.pairformer_blocks=1"])
    model = Model(config.model)
    sampled: list[str] = []

    def sample(model: Model, targets: Targets, index: int, folder: Path) -> Part:
        name = targets.record(index).id
        sampled.append(name)
        values = {"gpde": 1.0, "lddt_intra_protein": len(sampled) / 100}
        return Part(name, TargetResult(name, 12, [SeedResult.build(0, [values])]))

    monkeypatch.setattr("tpf.validate._validate_target", sample)

    def work(count: int) -> int:
        shutil.rmtree(tmp_path / "data", ignore_errors=True)
        (tmp_path / "data").mkdir()
        for k in range(count):
            (tmp_path / "data" / f"e{k:03d}.cif").write_text(entry.replace("3ccc", f"e{k:03d}"))
        calls = 0

        def hear(frame: FrameType, event: str, _: object) -> None:
            nonlocal calls
            calls += event == "call" and "/tpf/" in frame.f_code.co_filename

        sys.setprofile(hear)
        try:
            validate_model(model, Entries(config.data), config, tmp_path / f"{count}", origin="x")
        finally:
            sys.setprofile(None)
        return calls

    few, many = work(17), work(85)
    assert many <= 5 * few, (few, many)
    del sampled[:]

    def kill(target: str, done: int, total: int) -> None:
        if done == 29:
            raise KeyboardInterrupt

    again = (model, Entries(config.data), config, tmp_path / "killed")
    with pytest.raises(KeyboardInterrupt):
        validate_model(*again, origin="x", progress=kill)
    assert len(sampled) == 29
    result = validate_model(*again, origin="x")
    assert len(sampled) == 85 == len(set(sampled)) and result is not None
    assert [t.id for t in result.targets] == [f"e{k:03d}" for k in range(85)]


def test_the_experiment_under_other_names_scores_as_the_experiment(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains of a homodimer exchanged, a symmetric ligand turned by half, a phenyl ring flipped."""
    partners = {("BEN", a): b for a, b in pairs(("C2", "C6"), ("C3", "C5"), ("N1", "N2"))}
    partners |= {("PHE", a): b for a, b in pairs(("CD1", "CD2"), ("CE1", "CE2"))}

    def renamed(model: Model, batch: dict[str, Any], config: Config, seed: int) -> Drawn:
        drawn = draw(model, batch, config, seed)
        tables = load_tables(run.parent / "data" / f"{batch['id'][0]}.cif", filters=False)
        residue = tables.atom_residue
        names = list(zip(residue.tolist(), tables.atom_name.tolist(), strict=True))
        place = {name: k for k, name in enumerate(names)}
        order = [place[r, partners.get((str(tables.res_name[r]), atom), atom)] for r, atom in names]
        if len(set(tables.chain_entity.tolist())) < len(tables.chain_id):
            order = np.roll(order, len(order) // 2).tolist()
        assert order != list(range(len(order))) or batch["id"] == ["3ccc"]
        x = torch.from_numpy(tables.pos[order].astype(np.float32))
        return dataclasses.replace(drawn, x=x[None, None].expand_as(drawn.x))

    monkeypatch.setattr("tpf.validate.draw", renamed)
    result = validate(run, tmp_path / "out", "validate.seeds=1")
    assert [t.id for t in result.targets] == ENTRIES
    for target in result.targets:
        for name, value in target.seeds[0].reported.items():
            if name.startswith(("lddt", "gdt", "dockq", "ligand_success")):
                assert value == pytest.approx(1.0, abs=1e-6), (target.id, name)
            if name.startswith(("rmsd", "drmsd", "ligand_rmsd")):
                assert value == pytest.approx(0.0, abs=2e-3), (target.id, name)
    scored = set(result.dataset)
    assert {"lddt_inter_protein_protein", "ligand_rmsd_pocket", "lddt_intra_ligand"} <= scored


def pairs(*names: tuple[str, str]) -> list[tuple[str, str]]:
    return [pair for a, b in names for pair in ((a, b), (b, a))]
