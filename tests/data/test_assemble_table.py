"""A table of complexes: resuming, changed rows, bad rows, limits, and what the command says."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from joined import FLUORINE, SMALL, put, residue_of
from poses import ends, posed_ligand, sdf, without
from typer.testing import CliRunner

from tpf.cli.app import app
from tpf.data.assemble_table import Row, assemble_table
from tpf.data.load import load_tables
from tpf.data.store import open_store
from tpf.errors import TpfError, UsageError


def test_a_table_goes_on_where_it_stopped(tmp_path: Path) -> None:
    part, pos = posed_ligand(SMALL, "ZYB")
    lighter = without(part, pos, ends(part, FLUORINE)[0])
    put(tmp_path, "series.sdf", sdf(part, pos, "one") + sdf(*lighter, "two"))
    rows = [
        f"{SMALL},series.sdf#one,first,",
        f"{SMALL},series.sdf#2,second,DRG",
        f"{SMALL},series.sdf#three,third,",
        f"{SMALL},series.sdf#1,first,",
        "absent.cif,series.sdf#1,,",
        f"{SMALL},,fifth,",
    ]
    table, out = tmp_path / "t.csv", tmp_path / "out"

    def go(lines: list[str]) -> list[Row | None]:
        table.write_text("\n".join(["Protein,ligand,id,name", *lines]) + "\n")
        return list(assemble_table(table, out))

    table.write_text("\n".join(["protein,ligand,id,name", *rows]) + "\n")
    running = assemble_table(table, out)
    first = next(running)
    running.close()  # as by an interruption
    assert first is not None and first.file == "first.cif.gz" and first.ligands == ("LIG",)
    stamp = (out / "first.cif.gz").stat().st_mtime_ns
    results = go(rows)
    assert results[0] is None and len(results) == len(rows)
    made = [row for row in results if row is not None]
    assert [row.id for row in made if row.file] == ["second"]
    assert made[0].ligands == ("DRG",)
    reasons = {row.row: f"{row.stage}: {row.reason}" for row in made if not row.file}
    assert reasons.keys() == {3, 4, 5, 6}
    assert "has no molecule three" in reasons[3] and "earlier row" in reasons[4]
    assert "no such file" in reasons[5] and "no ligand" in reasons[6]
    assert (out / "first.cif.gz").stat().st_mtime_ns == stamp
    lines = (out / "index-1-of-1.jsonl").read_text().splitlines()
    assert all(json.loads(line)["id"] for line in lines)
    # a changed row is made anew, and leaves no old file behind if it fails now
    changed = go([rows[0].replace("#one", "#two"), rows[1].replace("#2", "#9")])
    assert [bool(row and row.file) for row in changed] == [True, False]
    assert sorted(p.name for p in out.glob("*.cif.gz")) == ["first.cif.gz"]
    assert len(residue_of(load_tables(out / "first.cif.gz"), "LIG")) == len(part) - 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("protein,smiles\na,b\n", "no column ligand; its header is 'protein,smiles'"),
        ("protein;ligand\na;b\n", "its header is 'protein;ligand': name columns .* by commas"),
        ("protein,ligand\n", "no rows"),
        (None, "no such"),
    ],
)
def test_a_wrong_table_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    table = tmp_path / "t.csv"
    if text is not None:
        table.write_text(text)
    with pytest.raises(UsageError, match=message):
        list(assemble_table(table, tmp_path / "out"))


def test_a_cache_is_no_place_for_a_table(tmp_path: Path) -> None:
    """Lines of rows in its index would make it unreadable."""
    table, out = tmp_path / "t.csv", tmp_path / "out"
    table.write_text("protein,ligand\na.cif,CCO\n")
    open_store(out)
    with pytest.raises(UsageError, match="is a prepared cache; choose another"):
        list(assemble_table(table, out))


def test_bad_rows_name_what_is_wrong_with_them(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    rows = [f"{SMALL},C1CC,a", f"{SMALL},CCO |f:1,2|,b", f"{SMALL},CC.Cl,c/d", f",CCO,e,{SMALL}"]
    table.write_text("\n".join(["protein,ligand,id", *rows]) + "\n")
    reasons = [row.reason for row in assemble_table(table, tmp_path / "out") if row]
    wide = "it has more cells than the header; put one that has a comma in quotes"
    assert reasons == [
        "C1CC: not a valid SMILES, and no such SDF file", wide, "id 'c/d' is no file name", wide,
    ]  # fmt: skip


def test_what_is_no_fault_of_the_rows(tmp_path: Path) -> None:
    table, out = tmp_path / "t.csv", tmp_path / "out"
    table.write_text("protein,ligand,id\nnone.cif,CCO,a\nnone.cif,CCO,a\n")
    with pytest.raises(UsageError, match="data.ccd is none; no such file"):
        list(assemble_table(table, out, ccd="none"))
    with pytest.raises(UsageError, match="cannot make the folder"):
        list(assemble_table(table, table))
    out.mkdir()
    (out / "index-1-of-1.jsonl").write_text('rubbish\n{"id": "b", "file": ""}\n')
    with pytest.raises(UsageError, match="line 1 is damaged"):
        list(assemble_table(table, out))


def test_one_molecule_cannot_stop_the_others(tmp_path: Path) -> None:
    """A row that needs too long, or too much memory, costs itself alone."""
    pytest.importorskip("rdkit")
    put(tmp_path, "pose.sdf", sdf(*posed_ligand(SMALL, "ZYB")))
    (tmp_path / "huge.cif.gz").write_bytes(gzip.compress(b"\n" * 2**20, mtime=0) * 600)
    table, out = tmp_path / "t.csv", tmp_path / "out"
    rows = [
        f"{SMALL},pose.sdf,first",
        f"{SMALL},{'OCC' * 60},endless",
        "huge.cif.gz,pose.sdf,huge",
        f"{'C' * 300},pose.sdf,swapped",
        f"{SMALL},pose.sdf,last",
    ]
    table.write_text("\n".join(["protein,ligand,id", *rows]) + "\n")
    results = list(assemble_table(table, out, memory=0.5, seconds=2))
    found = {row.id: f"{row.file}{row.stage}: {row.reason}" for row in results if row}
    assert "C: no such file" in found.pop("swapped")
    assert found == {
        "first": "first.cif.gz: ",
        "endless": "limit: it takes longer than 2 seconds",
        "huge": "memory: needs more memory than its process may take",
        "last": "last.cif.gz: ",
    }


def test_the_exit_code_tells_of_failed_rows(tmp_path: Path) -> None:
    """Finished rows stay, and the next call makes the others only."""
    put(tmp_path, "pose.sdf", sdf(*posed_ligand(SMALL, "ZYB")))
    table, out = tmp_path / "t.csv", tmp_path / "out"
    words = ["data", "assemble", "--table", str(table), "--out", str(out)]

    def call(*rows: str) -> tuple[str, Exception | None]:
        table.write_text("\n".join(["protein,ligand,id", *rows]) + "\n")
        done = CliRunner().invoke(app, words)
        error = done.exception
        return done.output, error if isinstance(error, Exception) else None

    output, error = call(f"{SMALL},pose.sdf,good", "none.cif,pose.sdf,bad")
    assert "row 2 (bad): row: " in output and "2 rows: 1 assembled; see index-1-of-1" in output
    assert isinstance(error, TpfError) and error.exit_code == 1
    assert str(error).startswith("1 of 2 rows failed; see index-1-of-1.jsonl in ")
    assert [path.name for path in out.glob("*.cif.gz")] == ["good.cif.gz"]
    output, error = call(f"{SMALL},pose.sdf,good", f"{SMALL},pose.sdf,bad")
    assert "2 rows: 2 assembled (1 before)" in output and error is None
    assert "no longer" not in output
    output, error = call(f"{SMALL},pose.sdf,bad")
    assert "1 files in" in output and "such as good.cif.gz: training would read them" in output
    assert error is None
