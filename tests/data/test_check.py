"""The file checker, the search for files, and the built-in entries."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from cif_text import cif, peptide, polymer, residue, write
from gemmi import cif as gemmi_cif
from typer.testing import CliRunner

from tpf.cli.app import app
from tpf.data.check import check_file, check_paths, shared_ids
from tpf.data.load import find_files, load_tables
from tpf.data.reduce import reduce, reduce_component, write_gzip
from tpf.data.tokens import tokenize
from tpf.errors import UsageError

DATA = Path(__file__).resolve().parents[2] / "data"
CODES = ["ALA", "GLY", "SEP", "CYS", "VAL"]
TEXT = cif(
    peptide("A", CODES) + residue("MOH", "B", ".", (0, 40, 0)),
    polymer("A", CODES) + "\n_exptl.method 'SOLUTION NMR'",
)


def test_a_good_and_a_bad_file(tmp_path: Path) -> None:
    row = check_file(write(tmp_path, TEXT))
    assert row.ok and (row.stage, row.reason) == ("", "")
    assert (row.id, row.method, row.resolution, row.release_date) == (
        "test", "SOLUTION NMR", None, None,
    )  # fmt: skip
    assert (row.polymer_chains, row.ligand_chains) == (1, 1)
    assert row.tokens == (4 + 10, 0, 0, 2)
    assert (row.n_tokens, row.atomized_residues) == (16, 1)
    assert (row.atoms, row.resolved_atoms) == (34, 34)
    bad = check_file(write(tmp_path, "HEADER    X", "bad.cif"))
    assert not bad.ok and (bad.id, bad.stage) == ("bad", "read")
    assert "PDB-format" in bad.reason


@pytest.mark.parametrize("name", ["x.pdb", "x.ent", "x.cif.Z", "x.txt", "absent.cif"])
def test_named_files_are_refused_aloud(tmp_path: Path, name: str) -> None:
    if name != "absent.cif":
        write(tmp_path, "some text", name)
    (row,) = check_paths([tmp_path / name])
    assert not row.ok and row.reason


def test_folders_are_walked_in_order(tmp_path: Path) -> None:
    for name in ("b/2.cif", "b/1.CIF", "a/z.cif.gz", "c.bcif", "notes.txt", "x.pdb"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path, "data_x\n", name)
    names = [str(row.path.relative_to(tmp_path)) for row in check_paths([tmp_path])]
    assert names == ["c.bcif", "a/z.cif.gz", "b/1.CIF", "b/2.cif"]


def test_find_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    one, two = write(tmp_path, TEXT, "1abc.cif"), write(tmp_path / "sub", TEXT, "2ABC.cif.gz")
    write(tmp_path, "", "other.txt")
    assert find_files(tmp_path) == [one, two]
    assert find_files(one) == [one]
    listing = write(tmp_path, "# comment\n1abc\nsub/2ABC.cif.gz  # path\n\n2abc\n", "list.txt")
    assert find_files(listing) == [one, two, two]
    elsewhere = write(tmp_path / "sub", "1ABC\n", "list.lst")
    assert find_files(elsewhere, tmp_path) == [one]
    (tmp_path / "empty").mkdir()
    for path, words in (
        (tmp_path / "absent", "no such file or folder"),
        (tmp_path / "empty", "has no structure files"),
        (tmp_path / "other.txt", "the list is empty"),
        (elsewhere, "no file for '1ABC'"),
    ):
        with pytest.raises(UsageError, match=words):
            find_files(path)


def test_reduction_keeps_what_the_reader_uses(tmp_path: Path) -> None:
    path = write(tmp_path, TEXT + "_software.name X\n")
    document = gemmi_cif.read(str(path))
    reduced = reduce(document)
    assert not reduced[0].find_mmcif_category("_software.")
    for name in ("a.cif.gz", "b.cif.gz"):
        write_gzip(reduced, tmp_path / name)
    assert (tmp_path / "a.cif.gz").read_bytes() == (tmp_path / "b.cif.gz").read_bytes()
    before, after = load_tables(path), load_tables(tmp_path / "a.cif.gz")
    assert before.notes == after.notes
    np.testing.assert_array_equal(before.pos, after.pos)
    np.testing.assert_array_equal(before.bonds, after.bonds)


def test_reduced_component_has_no_hydrogens() -> None:
    text = """data_MOH
loop_\n_chem_comp_atom.comp_id\n_chem_comp_atom.atom_id\n_chem_comp_atom.type_symbol
MOH C C\nMOH H1 H\nMOH O O\nMOH D1 D
loop_\n_chem_comp_bond.comp_id\n_chem_comp_bond.atom_id_1\n_chem_comp_bond.atom_id_2
MOH C O\nMOH C H1\nMOH D1 O
"""
    block = reduce_component(gemmi_cif.read_string(text)[0])
    assert list(block.find_values("_chem_comp_atom.atom_id")) == ["C", "O"]
    assert len(block.find_values("_chem_comp_bond.atom_id_1")) == 1


EXAMPLES = {  # tokens, chains, copies by symmetry, atomised components
    "1a7g": (164, 2, set()),
    "1a8o": (140, 2, set()),
    "1ubq": (76, 1, set()),
    "1y57": (488, 2, {"MPZ"}),
    "2q2k": (396, 6, {"5IU"}),
    "3jqh": (167, 1, set()),
    "3zee": (84, 1, set()),
    "4cup": (268, 10, {"ZYB", "MOH"}),
    "4zey": (84, 1, set()),
    "5i55": (440, 20, set()),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_built_in_entries(name: str) -> None:
    tokens = tokenize(load_tables(DATA / "examples" / f"{name}.cif.gz"))
    tables = tokens.tables
    n, chains, atomized = EXAMPLES[name]
    assert (tables.id, len(tokens), len(tables.chain_id)) == (name, n, chains)
    assert set(tables.res_name[tokens.residue[tokens.atomized]].tolist()) == atomized
    assert tables.release_date is not None and tables.resolution is not None


def test_built_in_entries_are_small_and_listed() -> None:
    files = sorted((DATA / "examples").glob("*.cif.gz"))
    assert [f.name[:4] for f in files] == sorted(EXAMPLES)
    assert sum(f.stat().st_size for f in files) < 1_000_000
    train = find_files(DATA / "splits" / "examples-train.txt")
    holdout = find_files(DATA / "splits" / "examples-holdout.txt")
    assert sorted(p.resolve() for p in train + holdout) == files
    readme = (DATA / "README.md").read_text()
    assert all(f"| {name} |" in readme for name in EXAMPLES)
    for file in files:
        assert gzip.decompress(file.read_bytes())[:5] == b"data_"
        assert file.read_bytes()[4:8] == bytes(4), "no time stamp"


def test_kinase_lists_are_disjoint_and_complete(shared_data: Path) -> None:
    train = find_files(DATA / "splits" / "kinase-train.txt", shared_data / "kinase")
    holdout = find_files(DATA / "splits" / "kinase-holdout.txt", shared_data / "kinase")
    assert not set(train) & set(holdout)
    assert sorted(train + holdout) == sorted((shared_data / "kinase").iterdir())


def test_component_subset_is_small() -> None:
    path = Path(__file__).resolve().parents[2] / "tpf" / "data" / "ccd_subset.cif.gz"
    assert path.stat().st_size < 300_000


@pytest.mark.parametrize(
    ("command", "message"),
    [("check", "no structure files"), ("show", "is a folder; name one of its files")],
)
def test_a_folder_without_what_is_asked_for(tmp_path: Path, command: str, message: str) -> None:
    """A mistyped folder must not pass a check with --strict."""
    done = CliRunner().invoke(app, ["data", command, str(tmp_path)])
    assert isinstance(done.exception, UsageError) and message in str(done.exception)


def test_ids_of_several_files_are_named(tmp_path: Path) -> None:
    """Exports of one program often have the same id in every file."""
    write(tmp_path, TEXT, "a.cif")
    write(tmp_path, TEXT.replace("SOLUTION NMR", "X-RAY DIFFRACTION"), "b.cif")
    for words in (["check"], ["prepare", "--out", str(tmp_path / "out")]):
        done = CliRunner().invoke(app, ["data", *words, str(tmp_path)])
        assert "ids of several files: test (2); " in done.output, done.output
    assert shared_ids(["a", "b"]) == ""
    many = shared_ids([str(k // 2) for k in range(20)])
    assert "4 (2) and 5 others; " in many
