"""From bytes to text: compression, encodings, and the formats that are refused."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import pytest
from cif_text import TEXT, equal

from tpf.data.load import load_tables
from tpf.errors import DataError


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("plain.cif", TEXT.encode()),
        ("packed.cif.gz", gzip.compress(TEXT.encode())),
        (
            "two_members.cif.gz",
            gzip.compress(TEXT[:900].encode()) + gzip.compress(TEXT[900:].encode()),
        ),
        ("trailing_zeros.cif.gz", gzip.compress(TEXT.encode()) + bytes(512)),
        ("twice.cif.gz", gzip.compress(gzip.compress(TEXT.encode()))),
        ("crlf.cif", TEXT.replace("\n", "\r\n").encode()),
        ("cr.cif", TEXT.replace("\n", "\r").encode()),
        ("bom.cif", b"\xef\xbb\xbf" + TEXT.encode()),
        ("unpacked.cif.gz", TEXT.encode()),
        (
            "latin1.cif",
            TEXT.replace("data_test\n", "data_test\n_struct.title caf\xe9\n").encode("l1"),
        ),
    ],
)
def test_unusual_but_readable_bytes(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / "reference.cif").write_text(TEXT)
    (tmp_path / name).write_bytes(data)
    assert equal(load_tables(tmp_path / name), load_tables(tmp_path / "reference.cif"))


@pytest.mark.parametrize(
    ("data", "stage", "reason"),
    [
        (b"", "read", "empty"),
        (b"\n \n", "read", "empty"),
        (gzip.compress(TEXT.encode())[:200], "read", "damaged gzip"),
        (gzip.compress(TEXT.encode())[:-6] + b"123456", "read", "damaged gzip"),
        (b"HEADER    HYDROLASE", "read", "PDB-format"),
        (b"ATOM      1  N   ALA A   1", "read", "PDB-format"),
        (b"\x1f\x9d\x90abc", "read", "compress"),
        (b"<html>", "read", "HTML"),
        (b">seq\nACDE", "read", "FASTA"),
        (b"\x00\x01\x02", "read", "binary"),
        (b"\x83\xaadataBlocks\x91\x00", "parse", "BinaryCIF"),
        (b"loop_\n_a.b\n1\n", "parse", "not valid CIF"),
        (b"data_x\nloop_\n_a.b\n_a.c\n1\n", "parse", "not valid CIF"),
        (b"data_x\n_a.b 1\n", "parse", "_atom_site is absent"),
        (b"data_x\n_atom_site.label_atom_id C\n", "parse", "Cartn"),
        (b"data_x\nloop_\n_atom_site_label\nC1\n", "parse", "small-molecule"),
    ],
)
def test_unreadable_files_name_stage_and_reason(
    tmp_path: Path, data: bytes, stage: str, reason: str
) -> None:
    path = tmp_path / "entry.cif"
    path.write_bytes(data)
    with pytest.raises(DataError) as caught:
        load_tables(path)
    assert caught.value.entry == "entry"
    assert caught.value.stage == stage
    assert reason.lower() in caught.value.reason.lower()


def test_missing_file_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="read: cannot open"):
        load_tables(tmp_path / "absent.cif")


def test_binary_cif_without_biotite_names_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "biotite.structure.io.pdbx", None)
    path = tmp_path / "entry.bcif"
    path.write_bytes(b"\x83\xaadataBlocks\x91\x00")
    with pytest.raises(
        DataError, match=r"read: BinaryCIF needs biotite: pip install 'tpf\[chem\]'"
    ):
        load_tables(path)
