"""The prepared cache: round trip, checksums, several writers, resuming, damage."""

from __future__ import annotations

import dataclasses
import datetime
import gzip
import json
import os
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from test_dataset import make_entry, same, stored, write_store
from typer.testing import CliRunner

from tpf.cli.app import app
from tpf.config import DataConfig
from tpf.data import store
from tpf.data.dataset import CropDataset
from tpf.data.prepare import Prepared, prepare
from tpf.data.records import Entries, Record, Skipped
from tpf.data.store import Parsed
from tpf.data.tables import Tables, Tokens
from tpf.errors import DataError, TpfError, UsageError

UBIQUITIN = "MQIFVKTLTGKTITLEVEPSDTIENVKAKIQDKEGIPPDQQRLIFAGKQLEDGRTLSDYNIQKESTLHLVLRLRGG"


@pytest.fixture
def files(shared_data: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    for name in ("1ubq", "1bna", "1a8o"):
        source = shared_data / "general" / f"{name}.cif.gz"
        (folder / source.name).write_bytes(source.read_bytes())
    (folder / "bad.cif").write_text("no structure")
    return folder


def test_store_round_trip(tmp_path: Path) -> None:
    tokens = make_entry("4ddd", 1, release_date=datetime.date(2020, 2, 3), notes=("a note.",))
    path = tmp_path / store.write_entry(tmp_path, Parsed(tokens, {}))
    assert store.write_entry(tmp_path, Parsed(tokens, {})) == str(path.relative_to(tmp_path))
    back = store.read_entry(path).tokens
    for whole, read in ((tokens, back), (tokens.tables, back.tables)):
        for field in dataclasses.fields(whole):
            a, b = getattr(whole, field.name), getattr(read, field.name)
            if isinstance(a, np.ndarray):
                assert a.dtype == b.dtype
                np.testing.assert_array_equal(a, b)
            elif not isinstance(a, Tables):
                assert a == b
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_damage_is_found_by_the_checksum(tmp_path: Path) -> None:
    path, other = (
        tmp_path / store.write_entry(tmp_path, Parsed(make_entry(f"{k}abc", k), {})) for k in (0, 1)
    )
    whole = path.read_bytes()
    for bad in (whole[:500], whole[:-1] + bytes([whole[-1] ^ 1]), other.read_bytes()):
        path.write_bytes(bad)
        with pytest.raises(DataError, match="0abc: store: .*checksum.*prepare it again"):
            store.read_entry(path)


def test_the_schema_names_the_stored_fields() -> None:
    """A change of these fields needs a new ``SCHEMA``, else old caches are read wrongly."""
    assert store.SCHEMA == 2
    assert store.array_fields(Tokens) == [
        "start_atom", "num_atoms", "residue", "atomized", "restype", "mol_type", "center_atom",
        "rep_atom",
    ]  # fmt: skip
    assert store.array_fields(Tables) == [
        "atom_name", "element", "charge", "ideal", "pos", "occupancy", "b_factor", "atom_residue",
        "res_name", "res_id", "auth_seq", "res_chain", "res_standard", "chain_id", "auth_chain",
        "chain_type", "chain_entity", "chain_sym", "bonds", "bond_order",
    ]  # fmt: skip
    assert [field.name for field in dataclasses.fields(Record)] == [
        "id", "path", "n_tokens", "method", "resolution", "release_date", "chains", "chain_types",
        "chain_keys", "resolved", "interfaces", "msa_rows",
        "kinase",
    ]  # fmt: skip


def test_index_survives_an_interrupted_writer(tmp_path: Path) -> None:
    write_store(tmp_path, [make_entry("1aaa", 0), make_entry("2bbb", 1)])
    index = tmp_path / "index-1-of-1.jsonl"
    lines = index.read_text()
    index.write_text(lines + '{"source": "/9zzz.cif", "mt')
    assert [line["record"]["id"] for line in store.read_index(tmp_path)] == ["1aaa", "2bbb"]
    with store.open_index(tmp_path, (1, 1)):
        assert index.read_text() == lines
        with pytest.raises(UsageError, match="another process"), store.open_index(tmp_path, (1, 1)):
            pass
    index.write_text("{broken\n" + lines)
    with pytest.raises(UsageError, match="line 1 is damaged"):
        store.read_index(tmp_path)


def test_other_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        store.open_store(tmp_path)
    cache = tmp_path / "cache"
    store.open_store(cache)
    ccd = tmp_path / "ccd.cif"
    ccd.write_text("data_X\n")
    with pytest.raises(UsageError, match="other --ccd or --msa"):
        store.open_store(cache, str(ccd))
    (cache / store.HEADER).write_text(json.dumps({"schema": 1}))
    for use in (store.open_store, store.read_index):
        with pytest.raises(UsageError, match="has schema 1, this version of tpf reads 2"):
            use(cache)
    with pytest.raises(UsageError, match="has schema 1"):
        Entries(DataConfig(path=str(cache)))


def test_shards_that_start_at_once_make_one_cache(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        for number in range(40):
            out = tmp_path / str(number)
            together = threading.Barrier(8)
            starts = [
                pool.submit(lambda o=out, t=together: (t.wait(), store.open_store(o)))
                for _ in range(8)
            ]
            for start in starts:
                start.result()
            assert [path.name for path in out.iterdir()] == [store.HEADER]


def test_wrong_options_leave_no_cache(files: Path, tmp_path: Path) -> None:
    for options in ({"ccd": "none"}, {"msa": "none"}):
        with pytest.raises(UsageError, match="none"):
            list(prepare(str(files), tmp_path / "cache", **options))  # type: ignore[arg-type]
    assert not (tmp_path / "cache").exists()
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot make the folder"):
        list(prepare(str(files), tmp_path / "file"))


def test_a_cache_without_entries_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "bad.cif").write_text("x\n")
    words = ["data", "prepare", str(tmp_path), "--out", str(tmp_path / "cache")]
    for _ in range(2):
        result = CliRunner().invoke(app, words)
        assert isinstance(result.exception, TpfError), result.output
        assert "files that cannot be used: 1" in result.output


def names(results: list[Prepared]) -> dict[str, type]:
    return {prepared.result.id: type(prepared.result) for prepared in results}


@pytest.mark.parametrize("workers", [1, 2])
def test_prepared_cache_equals_the_files(files: Path, tmp_path: Path, workers: int) -> None:
    out = tmp_path / "out"
    first = list(prepare(str(files), out, shard=(1, 2), workers=workers))
    (out / "index-1-of-2.jsonl").open("a").write('{"source": "cut sh')
    assert list(prepare(str(files), out, shard=(1, 2), workers=workers)) == []
    second = list(prepare(str(files), out, shard=(2, 2), workers=workers))
    assert names(first + second) == {"1a8o": Record, "1bna": Record, "bad": Skipped, "1ubq": Record}
    assert list(prepare(str(files), out)) == []  # another division finds all of it done
    assert names(list(prepare(str(files), out, retry=True))) == {"bad": Skipped}
    options = {"crop": 32, "conformers": "ideal", "max_templates": 0}
    cached = Entries(DataConfig(path=str(out), **options))
    direct = Entries(DataConfig(path=str(files), **options))
    assert [r.id for r in cached.records] == [r.id for r in direct.records]
    assert cached.skipped == direct.skipped and len(cached.skipped) == 1
    a = CropDataset(cached, DataConfig(**options))
    b = CropDataset(direct, DataConfig(**options))
    assert all(same(a[k], b[k]) for k in range(5))
    with pytest.raises(UsageError, match="shard 3/2"):
        list(prepare(str(files), out, shard=(3, 2)))


def test_changed_and_lost_entries_are_prepared_again(files: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    list(prepare(str(files), out))
    source = files / "1bna.cif.gz"
    source.write_bytes((files / "1ubq.cif.gz").read_bytes())
    os.utime(source, ns=(1, source.stat().st_mtime_ns + 10**9))
    stored(out, "1a8o").unlink()
    assert names(list(prepare(str(files), out, shard=(1, 3)))) == {"1a8o": Record}
    assert names(list(prepare(str(files), out))) == {"1ubq": Record}
    found = Entries(DataConfig(path=str(out)))
    assert [r.id for r in found.records] == ["1a8o", "1ubq"]  # equal content counts once


def test_a_bounded_process_does_its_work(files: Path, tmp_path: Path) -> None:
    results = list(prepare(str(files), tmp_path / "out", memory=0.25, seconds=60))
    assert names(results) == {"1a8o": Record, "1bna": Record, "1ubq": Record, "bad": Skipped}


def test_alignments_are_stored_with_the_entries(files: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    msa = tmp_path / "msa"
    msa.mkdir()
    query = UBIQUITIN
    (msa / "1ubq_A.a3m").write_text(f">q\n{query}\n>h OX=9606\naa{query[:-2]}--\n")
    (msa / "1ubq_A_pairing.a3m").write_text(f">q\n{query}\n>p OX=10090\n{query}\n")
    found = {p.result.id: p.result for p in prepare(str(files), out, msa=str(msa))}
    assert isinstance(found["1ubq"], Record) and found["1ubq"].msa_rows == (2,)
    cached = Entries(DataConfig(path=str(out)))
    notice = "4 of 5 polymer chains have no alignment: the query row alone"
    assert cached.alignment_notice() == notice
    direct = Entries(DataConfig(path=str(files), msa=str(msa)))
    assert direct.alignment_notice() == notice
    assert Entries(DataConfig(path=str(files))).alignment_notice() == ""
    (a,) = [cached.cache.get(r.path) for r in cached.records if r.id == "1ubq"]
    (b,) = [direct.cache.get(r.path) for r in direct.records if r.id == "1ubq"]
    for left, right in ((a.alignments[1], b.alignments[1]),) * 2:
        assert left.pairing is not None and right.pairing is not None
        for x, y in ((left, right), (left.pairing, right.pairing)):
            np.testing.assert_array_equal(x.rows, y.rows)
            np.testing.assert_array_equal(x.deletions, y.deletions)
            np.testing.assert_array_equal(x.species, y.species)


def test_changed_alignments_are_stored_again(files: Path, tmp_path: Path) -> None:
    """The entry that an alignment belongs to is stored anew, from what is stored of it."""
    out, msa = tmp_path / "out", tmp_path / "msa"
    msa.mkdir()
    (msa / "1ubq_A.a3m").write_text(f">q\n{UBIQUITIN}\n")

    def rows() -> dict[str, int]:
        found = Entries(DataConfig(path=str(out)))
        loaded = {record.id: found.cache.get(record.path).alignments for record in found.records}
        return {name: len(parts[1].rows) for name, parts in loaded.items() if 1 in parts}

    def again(shard: tuple[int, int] = (1, 1)) -> dict[str, type]:
        return names(list(prepare(str(files), out, msa=str(msa), shard=shard)))

    assert len(again()) == 4 and rows() == {"1ubq": 1}
    assert again() == {}
    (msa / "1ubq_A.a3m").write_text(f">q\n{UBIQUITIN}\n>h\n{'A' * 76}\n")
    (msa / "of_none.a3m").write_text(">q\nAAAA\n")
    for file in files.iterdir():  # nothing is parsed again
        stamp = file.stat().st_mtime_ns
        file.write_bytes(b"broken")
        os.utime(file, ns=(stamp, stamp))
    assert [set(again((k, 4))) for k in (1, 2, 3, 4)] == [set(), set(), {"1ubq"}, set()]
    assert rows() == {"1ubq": 2} and again() == {}
    (msa / "1ubq_A.a3m").unlink()
    (msa / "1bna_A.a3m").write_text(">q\nCGCGAATTCGCG\n")
    assert again() == {"1bna": Record, "1ubq": Record}
    assert rows() == {"1bna": 1}


def test_a_bad_alignment_costs_no_other_entry(files: Path, tmp_path: Path) -> None:
    out, msa = tmp_path / "out", tmp_path / "msa"
    msa.mkdir()
    (msa / "1ubq_A.a3m.gz").write_bytes(b"no gzip")
    (msa / "of_none.a3m.gz").write_bytes(gzip.compress(f">q\n{UBIQUITIN}\n".encode())[:-20])
    words = ["data", "prepare", str(files), "--out", str(out), "--msa", str(msa)]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    assert "1ubq: msa: 1ubq_A.a3m.gz: Not a gzipped file" in shown.output
    assert "2 entries stored" in shown.output
    assert "4 of 4 polymer chains have no alignment" in shown.output
    for name in ("1ubq_A", "of_none"):
        assert f"in {msa}, not read: {name}.a3m.gz: " in shown.output


def test_a_bad_alignment_is_tried_again_when_it_changes(files: Path, tmp_path: Path) -> None:
    out, msa = tmp_path / "out", tmp_path / "msa"
    msa.mkdir()
    (msa / "1ubq_A.a3m").write_text(f">q\n{UBIQUITIN}\n>short\nAAA\n")
    found = {p.result.id: p.result for p in prepare(str(files), out, msa=str(msa))}
    assert isinstance(found["1ubq"], Skipped) and found["1ubq"].stage == "msa"
    (msa / "1ubq_A.a3m").write_text(f">q\n{UBIQUITIN}\n")
    assert names(list(prepare(str(files), out, msa=str(msa)))) == {"1ubq": Record}


def test_the_line_written_last_counts(tmp_path: Path) -> None:
    """Whatever the shard that wrote it, and if a file got an older time."""
    store.open_store(tmp_path)
    for shard, written, mtime in (((1, 1), 2, 5), ((2, 3), 1, 9)):
        failed = {"id": "x", "stage": str(shard), "reason": ""}
        line = {"source": "/x.cif", "mtime_ns": mtime, "written": written, "failed": failed}
        with store.open_index(tmp_path, shard) as index:
            store.append_index(index, line)
    assert [line["failed"]["stage"] for line in store.read_index(tmp_path)] == ["(1, 1)"]


def test_training_from_a_cache_reads_no_structure_file(files: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["data", "prepare", str(files), "--out", str(out)])
    assert done.exit_code == 0 and "bad: parse: not valid CIF" in done.output, done.output
    assert re.search(r"3 entries stored in .*/out, \d+ kB each, .*; 1 cannot be used", done.output)
    shutil.rmtree(files)
    config = DataConfig(path=str(out), crop=32, conformers="ideal", max_templates=0)
    data = CropDataset(Entries(config), config)
    assert {data[k]["id"] for k in range(12)} == {"1a8o", "1bna", "1ubq"}
    for words, message in (
        (["--shard", "2"], "--shard 2: write I/N"),
        (["--shard", "3/2"], "shard 3/2: write I/N with I from 1"),
    ):
        wrong = CliRunner().invoke(app, ["data", "prepare", str(out), "--out", str(out), *words])
        assert message in str(wrong.exception)
    gone = CliRunner().invoke(app, ["data", "prepare", str(files), "--out", str(tmp_path / "x")])
    assert isinstance(gone.exception, UsageError)
