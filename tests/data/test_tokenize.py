"""Tokenisation on small structures; entries of the archive are in test_real_files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cif_text import Row, cif, peptide, polymer, residue, write
from test_cleaning import LINK

from tpf.data import chem
from tpf.data.load import load_tables
from tpf.data.tables import DNA, LIGAND, PROTEIN, RNA
from tpf.data.tokens import tokenize
from tpf.errors import DataError

CODES = ["ALA", "GLY", "SEP", "CYS", "UNK"]
FAR = (0.0, 60.0, 0.0)


def test_protein_with_a_modified_residue_and_a_ligand(tmp_path: Path) -> None:
    rows = peptide("A", CODES) + residue("MOH", "B", ".", FAR)
    tokens = tokenize(load_tables(write(tmp_path, cif(rows, polymer("A", CODES)))))
    sep = 10  # heavy atoms, its OXT left with the peptide bond
    assert len(tokens) == 4 + sep + 2
    assert tokens.atomized.tolist() == [False] * 2 + [True] * sep + [False] * 2 + [True] * 2
    assert tokens.num_atoms.tolist() == [5, 4] + [1] * sep + [6, 6] + [1, 1]
    assert tokens.mol_type.tolist() == [PROTEIN] * (4 + sep) + [LIGAND] * 2
    names = [chem.RESIDUES[i] for i in tokens.restype]
    assert names == ["ALA", "GLY"] + ["UNK"] * sep + ["CYS", "UNK"] + ["UNK"] * 2
    atoms = tokens.tables.atom_name
    single = atoms[tokens.start_atom[tokens.atomized]].tolist()
    assert atoms[tokens.center_atom].tolist() == ["CA", "CA", *single[:sep], "CA", "CA", "C", "O"]
    assert atoms[tokens.rep_atom].tolist() == ["CB", "CA", *single[:sep], "CB", "CB", "C", "O"]
    # tokens tile the atoms
    ends = tokens.start_atom + tokens.num_atoms
    assert tokens.start_atom[0] == 0 and ends[-1] == len(atoms)
    assert (tokens.start_atom[1:] == ends[:-1]).all()


@pytest.mark.parametrize(
    ("codes", "kinds"),
    [
        (["A", "C", "G", "U", "N"], [RNA] * 5),
        (["DA", "DC", "DG", "DT", "DN"], [DNA] * 5),
        (["DA", "DC", "DG", "DT", "U"], [DNA] * 4 + [RNA]),
    ],
)
def test_nucleic_acids(tmp_path: Path, codes: list[str], kinds: list[int]) -> None:
    rows: list[Row] = []
    for i, code in enumerate(codes):
        # N and DN come last; UNK-only chains would be dropped
        rows += residue(code, "A", i + 1, (6.0 * i, 0, 0))
    tokens = tokenize(load_tables(write(tmp_path, cif(rows))))
    assert len(tokens) == 5
    assert tokens.mol_type.tolist() == kinds
    assert [chem.RESIDUES[i] for i in tokens.restype] == codes
    atoms = tokens.tables.atom_name
    assert set(atoms[tokens.center_atom].tolist()) == {"C1'"}
    expected = {"A": "C4", "G": "C4", "C": "C2", "U": "C2", "T": "C2", "N": "C1'"}
    assert atoms[tokens.rep_atom].tolist() == [expected[code[-1]] for code in codes]
    assert tokens.num_atoms.max() == (23 if "G" in codes else 22)


def test_a_covalent_inhibitor_atomises_its_cysteine(tmp_path: Path) -> None:
    rows = peptide("A", CODES)
    sulphur = next(row for row in rows if row["label_atom_id"] == "SG")
    place = [float(str(sulphur[f"Cartn_{axis}"])) for axis in "xyz"]
    rows += residue("MOH", "B", ".", [place[0], place[1] - 1.8, place[2]])
    record = polymer("A", CODES) + "\n" + LINK
    linked = record + "1 covale A CYS 4 SG 1_555 B MOH . C 1_555"
    free, bound = (
        tokenize(load_tables(write(tmp_path, cif(rows, extra)))) for extra in (record, linked)
    )
    assert len(bound) == len(free) + 5
    cys = bound.tables.res_name[bound.residue] == "CYS"
    assert bound.atomized[cys].all() and cys.sum() == 6
    assert {chem.RESIDUES[i] for i in bound.restype[cys]} == {"CYS"}
    assert set(bound.mol_type[cys].tolist()) == {PROTEIN}


@pytest.mark.parametrize(
    ("link", "atomized"),
    [
        ("1 disulf A CYS 1 SG 1_555 A CYS 4 SG 1_555", set()),  # removed by cleaning
        ("1 disulf A CYS 1 SG 1_555 B CYS 1 SG 1_555", set()),
        ("1 covale A CYS 4 C 1_555 A GLY 5 N 1_555", set()),  # the peptide bond, listed again
        ("1 covale A CYS 4 SG 1_555 A GLY 5 CA 1_555", {4, 5}),  # neighbours, by a side chain
    ],
)
def test_bonds_between_polymer_residues(tmp_path: Path, link: str, atomized: set[int]) -> None:
    codes = ["CYS", "ALA", "ALA", "CYS", "GLY"]
    rows = peptide("A", codes) + peptide("B", codes, FAR)
    names = set(link.split()) & {"SG", "C", "N", "CA"}
    for k, row in enumerate(r for r in rows if r["label_atom_id"] in names and "CYS" in str(r)):
        row.update(Cartn_x=0.3 * k, Cartn_y=4.0, Cartn_z=0.0)
    glycine = [r for r in rows if r["label_comp_id"] == "GLY" and r["label_atom_id"] in names]
    for row in glycine:
        row.update(Cartn_x=1.5, Cartn_y=4.0, Cartn_z=0.0)
    tables = load_tables(write(tmp_path, cif(rows, LINK + link)), filters=False)
    tokens = tokenize(tables)
    chain_a = tables.res_chain[tokens.residue] == 0
    found = tables.res_id[tokens.residue[tokens.atomized & chain_a]]
    assert set(found.tolist()) == atomized


def test_a_residue_without_its_centre_atom_is_an_error(tmp_path: Path) -> None:
    tables = load_tables(write(tmp_path, cif(peptide("A", CODES), polymer("A", CODES))))
    names = tables.atom_name.copy()
    names[1] = "CX"
    with pytest.raises(DataError, match="tokens: residue ALA lacks its centre"):
        tokenize(replace(tables, atom_name=names))
    wrong = np.zeros_like(tables.atom_residue)
    with pytest.raises(DataError, match="more than 23"):
        tokenize(
            replace(
                tables,
                atom_residue=wrong,
                res_name=tables.res_name[:1],
                res_standard=tables.res_standard[:1],
                res_chain=tables.res_chain[:1],
            )
        )
