"""Polymers that programs write and the archive hardly has: traces, D-peptides, many long chains."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cif_text import COLUMNS, SEQUENCE, cif, equal, peptide, polymer, write

from tpf.data.load import load_tables
from tpf.data.tables import LIGAND, PROTEIN
from tpf.data.tokens import tokenize

NAKED = [name for name in COLUMNS if name not in ("label_entity_id",)]


def test_a_trace_of_ca_atoms_is_completed_with_unresolved_atoms(tmp_path: Path) -> None:
    rows = [row for row in peptide("A", SEQUENCE) if row["label_atom_id"] == "CA"]
    tokens = tokenize(load_tables(write(tmp_path, cif(rows, polymer("A", SEQUENCE)))))
    tables = tokens.tables
    assert len(tokens) == len(SEQUENCE) and not tokens.atomized.any()
    assert tables.atom_name[tables.occupancy > 0].tolist() == ["CA"] * len(SEQUENCE)
    assert len(tables.atom_name) > 4 * len(SEQUENCE)


def test_d_peptides_are_protein_of_modified_residues(tmp_path: Path) -> None:
    """DAL, DSN... are no standard residues: one token per atom, in a protein chain."""
    codes = ["DAL", "GLY", "DSN", "DAL", "GLY"]
    text = cif(peptide("A", codes), polymer("A", codes, "polypeptide(D)"))
    tokens = tokenize(load_tables(write(tmp_path, text)))
    assert tokens.tables.chain_type.tolist() == [PROTEIN]
    assert (tokens.mol_type == PROTEIN).all()
    split = tokens.tables.res_name[np.unique(tokens.residue[tokens.atomized])].tolist()
    assert split == ["DAL", "DSN", "DAL"]


@pytest.mark.parametrize("declared", [True, False])
def test_unknown_residues_inside_a_chain_are_kept(tmp_path: Path, declared: bool) -> None:
    codes = ["ALA", "UNK", "UNK", "GLY", "SER", "ALA"]
    rows = peptide("A", ["ALA", "ALA", "ALA", "GLY", "SER", "ALA"])
    for row in rows:
        row["label_comp_id"] = codes[int(str(row["label_seq_id"])) - 1]
    extra, columns = (polymer("A", codes), COLUMNS) if declared else ("", NAKED)
    tokens = tokenize(load_tables(write(tmp_path, cif(rows, extra, columns))))
    assert tokens.tables.res_name.tolist() == codes
    assert len(tokens) == 6 and not tokens.atomized.any()


def test_sixty_chains_with_long_names(tmp_path: Path) -> None:
    names = [f"Chain_{k:02d}-heavy" for k in range(60)]
    rows = [
        row
        for k, name in enumerate(names)
        for row in peptide(name, SEQUENCE, (0, 40.0 * (k % 8), 40.0 * (k // 8)))
    ]
    tables = load_tables(write(tmp_path, cif(rows, columns=NAKED)))
    assert tables.chain_id.tolist() == names
    assert tables.auth_chain.tolist() == names
    assert tables.chain_sym.tolist() == list(range(1, 61))
    assert any("No sequence record" in note for note in tables.notes)


def test_binary_cif_gives_the_tables_of_the_text(tmp_path: Path) -> None:
    pdbx = pytest.importorskip("biotite.structure.io.pdbx")
    text = cif(peptide("A", SEQUENCE), polymer("A", SEQUENCE))
    path = write(tmp_path, text)
    source = pdbx.CIFFile.read(str(path))
    binary = pdbx.BinaryCIFFile()
    block = pdbx.BinaryCIFBlock()
    for name, category in source.block.items():
        columns = {key: column.as_array(str) for key, column in category.items()}
        block[name] = pdbx.BinaryCIFCategory(columns)
    binary["test"] = block
    binary.write(str(tmp_path / "test.bcif"))
    assert equal(load_tables(tmp_path / "test.bcif"), load_tables(path))


def test_a_model_without_records_says_what_was_inferred(tmp_path: Path) -> None:
    """As PyMOL, ChimeraX and ColabFold write it: coordinates only, hetero groups in the chain."""
    rows = peptide("A", SEQUENCE) + peptide("B", SEQUENCE, (0, 60, 0))
    columns = [n for n in COLUMNS if n not in ("label_entity_id", "label_seq_id", "occupancy")]
    tables = load_tables(write(tmp_path, cif(rows, columns=columns)))
    assert tables.chain_entity.tolist() == [1, 1]
    assert LIGAND not in tables.chain_type
    assert sum("No sequence record" in note for note in tables.notes) == 2
