"""Validation as a whole: repeatable, resumable, shared by ranks, explained where targets fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tpf import checkpoint
from tpf.config import DataConfig, load
from tpf.data.ccd import Dictionary
from tpf.data.jobs import read_job
from tpf.data.records import Entries
from tpf.data.tables import LIGAND
from tpf.data.write import write_mmcif
from tpf.dist import World
from tpf.errors import HardwareError, Interrupted, UsageError
from tpf.launch import Plan, launch, plan
from tpf.metrics.schema import Validation, read_json
from tpf.model.model import Model
from tpf.targets import Targets, read_groups, read_ids
from tpf.validate import Request, compare_files, validate_checkpoint, validate_rank

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
    config = load("tiny", [
        f"data.path={folder / 'data'}", "data.conformers=ideal", "validate.samples=2",
        "validate.seeds=2", "validate.sampling_steps=2", "validate.recycles=0",
        "validate.max_tokens=50", "validate.extras=true", "model.pairformer_blocks=1",
    ])  # fmt: skip
    torch.manual_seed(0)
    weights = Model(config.model).state_dict()
    tensors = {"model": weights, "ema": weights, "optimizer": {}}
    checkpoint.save(folder / "run", 0, config, tensors, {"seed": 0})
    return folder / "run"


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
    assert reasons["4ddd"] == "size: 60 tokens, more than 50"
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
