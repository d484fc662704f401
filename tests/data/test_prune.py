"""Pruning a prepared cache: gone sources and spare files go, all else stays, writers are safe."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tpf.cli.app import app
from tpf.config import DataConfig
from tpf.data import store
from tpf.data.prepare import prepare
from tpf.data.prune import gone_sources, prune
from tpf.data.records import Entries, data_files
from tpf.errors import UsageError

EXAMPLES = {path.name[:4]: path for path in data_files(None)}
QUERY = ">q\nMDIRQGPKEPFRDYVDRFYKTLRAEQASQEVKNWMTETLLVQNANPDCKTILKALGPGATLEEMMTACQG\n"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    for name in ("1ubq", "1a8o", "5i55"):
        (folder / EXAMPLES[name].name).write_bytes(EXAMPLES[name].read_bytes())
    (folder / "bad.cif").write_text("no structure")
    return folder


def ids(out: Path) -> list[str]:
    return [record.id for record in Entries(DataConfig(path=str(out))).records]


def stored(out: Path) -> list[Path]:
    return sorted(out.glob("*/*.npz"))


def test_entries_of_gone_files_are_dropped(files: Path, tmp_path: Path) -> None:
    out, msa = tmp_path / "out", tmp_path / "msa"
    msa.mkdir()
    (msa / "1a8o_A.a3m").write_text(QUERY)
    for shard in ((1, 2), (2, 2)):
        list(prepare(str(files), out, msa=str(msa), shard=shard))
    whole = prune(out)
    assert whole is not None and (whole.sources, whole.n_files) == ((), 0)
    assert len(stored(out)) == 4 and ids(out) == ["1a8o", "1ubq", "5i55"]
    for name in ("1a8o.cif.gz", "bad.cif"):
        (files / name).unlink()
    assert ids(out) == ["1a8o", "1ubq", "5i55"]  # the cache needs no sources
    spare = out / "00" / ".1abc-0.npz.123"  # of a writer that was killed
    spare.parent.mkdir(exist_ok=True)
    spare.write_bytes(b"x" * 10)
    (out / "00" / "notes.txt").touch()
    pruned = prune(out)
    assert pruned is not None and [Path(s).name for s in pruned.sources] == [
        "1a8o.cif.gz", "bad.cif",
    ]  # fmt: skip
    assert pruned.n_files == 3 and pruned.n_bytes > 10_000  # entry, alignment, spare
    assert ids(out) == ["1ubq", "5i55"] and not spare.exists() and len(stored(out)) == 2
    assert (out / "00" / "notes.txt").exists()
    assert list(prepare(str(files), out, msa=str(msa))) == []


def test_what_changed_files_left_behind_goes(files: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    list(prepare(str(files), out))
    source = files / EXAMPLES["1ubq"].name
    source.write_bytes(EXAMPLES["4zey"].read_bytes())
    os.utime(source, ns=(1, source.stat().st_mtime_ns + 10**9))
    list(prepare(str(files), out, shard=(1, 1)))
    assert len(stored(out)) == 4
    pruned = prune(out)
    assert pruned is not None and pruned.n_files == 1
    assert ids(out) == ["1a8o", "4zey", "5i55"]
    assert len(list(store.index_lines(out))) == 4
    # an entry that two files share stays while one of them is there
    (files / "copy.cif.gz").write_bytes(source.read_bytes())
    list(prepare(str(files), out))
    source.unlink()
    assert prune(out) is not None and ids(out) == ["1a8o", "5i55", "4zey"]


def test_nothing_is_pruned_while_another_process_writes(files: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    running = prepare(str(files), out, shard=(1, 2))
    next(running)
    (files / "bad.cif").unlink()
    words = ["data", "prepare", str(files), "--out", str(out), "--shard", "2/2", "--prune"]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0 and "not pruned: another process" in shown.output
    list(running)
    plain = CliRunner().invoke(app, words[:-1])
    assert "entries of files that are gone" not in plain.output  # it was never reached
    (files / "5i55.cif.gz").unlink()
    plain = CliRunner().invoke(app, words[:-1])
    assert "entries of files that are gone: 1; --prune drops them" in plain.output
    shown = CliRunner().invoke(app, words)
    assert "5i55.cif.gz" in shown.output and "pruned 1 stored files" in shown.output
    assert gone_sources(store.newest_lines(out)) == ()


def test_a_shard_that_starts_while_another_prunes_waits(files: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    store.open_store(out)
    with ThreadPoolExecutor(1) as pool:
        with store.locked(out, alone=True):
            shard = pool.submit(lambda: list(prepare(str(files), out)))
            with pytest.raises(TimeoutError):
                shard.result(timeout=0.3)
            assert not list(out.glob("index-*"))
        assert len(shard.result(timeout=60)) == 4
    with store.locked(out, alone=False), store.locked(out, alone=True) as held:
        assert not held


def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    store.open_store(tmp_path / "out")
    monkeypatch.setattr(store.fcntl, "flock", absent)
    with pytest.raises(UsageError, match="out/.lock: cannot be locked .Function not"):
        prune(tmp_path / "out")
