"""Data sets, records, the store and the loader."""

from __future__ import annotations

import dataclasses
import datetime
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from assemblies import make_tables, make_tokens

from tpf.config import DataConfig
from tpf.data import dataset as dataset_module
from tpf.data import store
from tpf.data.cache import EntryCache
from tpf.data.dataset import CropDataset, Loader, ValidationDataset
from tpf.data.records import Entries, record_of
from tpf.data.store import Parsed
from tpf.data.tables import DNA, LIGAND, PROTEIN, Tokens
from tpf.errors import DataError, UsageError

PEPTIDES = (["ALA", "PHE", "GLY"] * 6, ["SER", "ASP"] * 8, ["MET"] * 12)


def write_store(folder: Path, entries: list[Tokens]) -> None:
    store.open_store(folder)
    with store.open_index(folder, (1, 1)) as index:
        for tokens in entries:
            parsed = Parsed(tokens, {})
            record = record_of(parsed, store.write_entry(folder, parsed))
            line = {"source": f"/{tokens.tables.id}.cif", "mtime_ns": 1}
            store.append_index(index, line | {"record": dataclasses.asdict(record)})


def stored(folder: Path, name: str) -> Path:
    (path,) = folder.glob(f"*/{name}-*.npz")
    return path


def make_entry(name: str, number: int, **changes: Any) -> Tokens:
    chains = [(PROTEIN, PEPTIDES[number]), (PROTEIN, PEPTIDES[number]), (LIGAND, ["SO4"])]
    tables = make_tables(chains, entry=name, seed=number, spacing=3.8)
    return make_tokens(dataclasses.replace(tables, **changes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store")
    write_store(path, [make_entry(name, k) for k, name in enumerate(("1aaa", "2bbb", "3ccc"))])
    return path


@pytest.fixture(scope="module")
def config(folder: Path) -> DataConfig:
    return DataConfig(path=str(folder), crop=16, conformers="ideal", max_templates=1)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor):
        return torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
    return bool(np.array_equal(a, b))


def test_record(folder: Path, config: DataConfig) -> None:
    record = Entries(config).records[0]
    assert record.id == "1aaa" and record.n_tokens == 41
    assert record.chains == ("A", "B", "C") and record.chain_types == (PROTEIN, PROTEIN, LIGAND)
    assert record.chain_keys[0] == record.chain_keys[1] != record.chain_keys[2]
    assert record.resolved == (0, 1, 2) and record.n_polymers == 2


def test_interfaces_are_heavy_atoms_within_five_angstrom() -> None:
    tables = make_tables([(PROTEIN, ["ALA"]), (PROTEIN, ["GLY"]), (DNA, ["DA"])])
    pos = np.zeros_like(tables.pos)
    chain = tables.res_chain[tables.atom_residue]
    pos[chain == 1] = (4.9, 0, 0)
    pos[chain == 2] = (9.95, 0, 0)
    tokens = make_tokens(dataclasses.replace(tables, pos=pos))
    assert record_of(Parsed(tokens, {}), "x").interfaces == ((0, 1),)


def test_weights_of_units(config: DataConfig) -> None:
    entries = Entries(config)
    units = entries.units()
    weights = dict(zip(units, entries.weights(units), strict=True))
    # every protein sequence occurs twice, the ligand in all three entries
    for unit, weight in weights.items():
        if len(unit.chains) == 1:
            assert weight == pytest.approx(0.5 / 3 if unit.chains == (2,) else 1.5 / 2)
    one = {f"{r.id}_{c}": "all" for r in entries.records for c in ("A", "B")}
    clustered = dict(zip(units, entries.weights(units, one), strict=True))
    for unit, weight in clustered.items():
        if len(unit.chains) == 1 and unit.chains != (2,):
            assert weight == pytest.approx(1.5 / 6)


def test_filters_count_reasons(tmp_path: Path) -> None:
    entries = [
        make_entry("good", 0, release_date=datetime.date(2020, 1, 1)),
        make_entry("late", 1, release_date=datetime.date(2022, 1, 1)),
        make_entry("dim", 2, resolution=9.5),
        make_entry("nmr", 2, resolution=None),
    ]
    crowd = make_tokens(make_tables([(PROTEIN, ["ALA"])] * 4, entry="crowd"))
    empty = make_entry("empty", 0)
    empty.tables.occupancy[:] = 0
    write_store(tmp_path, [*entries, crowd, empty])
    config = DataConfig(path=str(tmp_path), release_cutoff="2021-09-30", max_chains=3)
    found = Entries(config)
    assert [r.id for r in found.records] == ["good", "nmr"]
    assert {s.id: s.reason for s in found.skipped} == {
        "late": "released after 2021-09-30",
        "dim": "resolution worse than 9 A",
        "crowd": "more than 3 polymer chains",
        "empty": "no token has a resolved centre atom",
    }
    strict = dataclasses.replace(config, release_cutoff="2019-01-01", max_resolution=1.0)
    with pytest.raises(UsageError, match="none of 6 entries is usable") as error:
        Entries(dataclasses.replace(strict, max_chains=1))
    assert "released after 2019-01-01" in str(error.value)
    with pytest.raises(UsageError, match="YYYY-MM-DD"):
        Entries(dataclasses.replace(config, release_cutoff="last year"))


def test_a_sample_depends_on_seed_and_position_only(config: DataConfig) -> None:
    first = CropDataset(Entries(config), config, seed=4)
    second = CropDataset(Entries(config), config, seed=4)
    samples = [first[k] for k in range(6)]
    for k in reversed(range(6)):
        assert same(samples[k], second[k])
    assert not same(samples[0], samples[1])
    assert not same(samples[0], CropDataset(Entries(config), config, seed=5)[0])
    for sample in samples:
        assert sample["token_mask"].sum() <= 16
        assert sample["skipped"] == []


def test_epochs_are_drawn_anew(config: DataConfig) -> None:
    short = CropDataset(Entries(config), config, epoch_length=4)
    ids = [short[k]["id"] for k in range(12)]
    expected = [short.entries.records[short.units[u].entry].id for e in range(3)
                for u in short._draw_order(e)]  # fmt: skip
    assert ids == expected


def ids_of(loader: Loader) -> list[list[int]]:
    return [[batch["position"][0] for batch in step] for step in loader]


def test_loader_positions(config: DataConfig) -> None:
    data = CropDataset(Entries(config), config)
    whole = ids_of(Loader(data, batch_size=4, stop_step=3))
    assert whole == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert ids_of(Loader(data, batch_size=4, start_step=1, stop_step=3)) == whole[1:]
    ranks = [ids_of(Loader(data, batch_size=4, rank=r, world=2, stop_step=3)) for r in (0, 1)]
    assert ranks[1] == [[1, 3], [5, 7], [9, 11]]
    assert [sorted(sum(parts, [])) for parts in zip(*ranks, strict=True)] == whole
    with pytest.raises(UsageError, match="batch size 3 is not a multiple of 2"):
        Loader(data, batch_size=3, world=2)


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_and_resuming_do_not_change_the_batches(config: DataConfig, workers: int) -> None:
    data = CropDataset(Entries(config), config, seed=1)
    alone = list(Loader(data, batch_size=2, stop_step=4))
    resumed = list(Loader(data, batch_size=2, start_step=2, stop_step=4, workers=workers))
    assert same(alone[2:], resumed)


def test_a_bad_entry_is_replaced_and_reported(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    stored(tmp_path, "2bbb").write_bytes(b"nothing")
    config = DataConfig(path=str(tmp_path), crop=16, conformers="ideal", max_templates=0)
    data = CropDataset(Entries(config), config, seed=0)
    batches = [batch for step in Loader(data, batch_size=2, stop_step=5) for batch in step]
    assert {batch["id"][0] for batch in batches} == {"1aaa", "3ccc"}
    reported = [item for batch in batches for item in batch["skipped"][0]]
    assert reported
    assert {(s["id"], s["stage"]) for s in reported} == {("2bbb", "store")}
    again = Loader(CropDataset(Entries(config), config), batch_size=2, stop_step=5, workers=2)
    assert same([batch for step in again for batch in step], batches)


def test_an_error_in_the_code_names_the_entry(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise IndexError("list index out of range")

    monkeypatch.setattr(dataset_module, "featurize", broken)
    data = CropDataset(Entries(config), config)
    with pytest.raises(
        DataError, match="unexpected: IndexError.*20 draws in a row failed"
    ) as error:
        next(iter(Loader(data)))
    assert error.value.entry in {"1aaa", "2bbb", "3ccc"}
    with pytest.raises(DataError, match="unexpected: IndexError"):
        next(iter(Loader(data, workers=1)))


def test_validation_set(config: DataConfig) -> None:
    entries = Entries(config)
    whole = ValidationDataset(entries, config)
    assert len(whole) == 3 and whole.too_large == []
    features = whole[1]
    assert features["id"] == "2bbb"
    assert len(features["token_mask"]) == len(whole.tokens(1)) == entries.records[1].n_tokens
    assert same(features, whole[1])
    small = ValidationDataset(entries, config, max_tokens=38)
    assert [r.id for r in small.records] == ["2bbb", "3ccc"]
    assert [(r.id, r.n_tokens) for r in small.too_large] == [("1aaa", 41)]


def test_cache_drops_the_least_recently_used(folder: Path, config: DataConfig) -> None:
    paths = [str(stored(folder, name)) for name in ("1aaa", "2bbb", "3ccc")]
    size = [EntryCache(config).get(path).nbytes for path in paths]
    cache = EntryCache(config, max_bytes=sum(size) - 1)
    first, second = cache.get(paths[0]), cache.get(paths[1])
    assert cache.get(paths[0]) is first
    cache.get(paths[2])
    assert cache.get(paths[0]) is first
    assert cache.get(paths[1]) is not second
    assert len(pickle.dumps(cache)) < 2000


def test_missing_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(UsageError, match=str(path)):
            Entries(DataConfig(path=str(path)))


def test_real_entries(shared_data: Path, tmp_path: Path) -> None:
    """A protein, a protein-DNA complex, a modified residue and a kinase with its inhibitor."""
    names = ["general/1ubq", "general/2q2k", "general/1a8o", "kinase/2gdo", "torture/gz_truncated"]
    listing = tmp_path / "list.txt"
    listing.write_text("".join(f"{shared_data / name}.cif.gz\n" for name in names))
    config = DataConfig(path=str(listing), crop=64, conformers="ideal", max_templates=0)
    entries = Entries(config)
    assert sorted(r.id for r in entries.records) == ["1a8o", "1ubq", "2gdo", "2q2k"]
    assert len(entries.skipped) == 1
    data = CropDataset(entries, config)
    seen = set()
    for position in range(24):
        sample = data[position]
        seen.add(sample["id"])
        assert sample["skipped"] == []
        assert 0 < len(sample["token_mask"]) <= 64
        assert (sample["ref_mask"] == 1).all()
        truth = sample["ground_truth"]
        assert truth["atom_resolved_mask"].any()
        predicted = set(
            zip(
                sample["mol_entity_id"].tolist(),
                sample["mol_sym_token_index"].tolist(),
                strict=True,
            )
        )
        stored = set(
            zip(truth["mol_entity_id"].tolist(), truth["mol_sym_token_index"].tolist(), strict=True)
        )
        assert predicted == stored
    assert len(seen) >= 3
