"""Sequence records, the kinds of chains, entities and their copies."""

from __future__ import annotations

from pathlib import Path

import pytest
from cif_text import SEQUENCE, Row, cif, peptide, polymer, residue, write

from tpf.data.load import load_tables
from tpf.data.tables import DNA, PROTEIN, RNA

FAR = (0.0, 60.0, 0.0)


def test_sequence_records_in_order_of_preference(tmp_path: Path) -> None:
    rows = peptide("A", SEQUENCE)
    scheme = "loop_\n" + "\n".join(
        f"_pdbx_poly_seq_scheme.{name}" for name in ("asym_id", "seq_id", "mon_id", "pdb_seq_num")
    )
    scheme += "".join(f"\nA {i + 1} {code} {i + 11}" for i, code in enumerate([*SEQUENCE, "TRP"]))
    one = "_entity.id A\n_entity.type polymer\n_entity_poly.entity_id A\n"
    one += "_entity_poly.type polypeptide(L)\n_entity_poly.pdbx_seq_one_letter_code AGSCV(SEP)M\n"
    for extra, tail in (
        (polymer("A", SEQUENCE) + "\n" + scheme, ["TRP"]),
        (one, ["SEP", "MET"]),
        ("", []),
    ):
        tables = load_tables(write(tmp_path, cif(rows, extra)))
        assert tables.res_name.tolist() == SEQUENCE + tail
    dots = [
        row | {"label_seq_id": ".", "auth_seq_id": int(str(row["auth_seq_id"])) + 10}
        for row in rows
    ]
    for extra, how in (
        (polymer("A", SEQUENCE) + "\n" + scheme, "author numbers"),
        (one, "alignment"),
    ):
        tables = load_tables(write(tmp_path, cif(dots, extra)))
        assert tables.res_id.tolist()[:5] == [1, 2, 3, 4, 5]
        assert any(how in note for note in tables.notes)


def test_coordinates_win_over_the_sequence_record(tmp_path: Path) -> None:
    record = polymer("A", ["ALA", "GLY", "TRP", "CYS"])
    tables = load_tables(write(tmp_path, cif(peptide("A", SEQUENCE), record)))
    assert tables.res_name.tolist() == SEQUENCE
    assert "1 residue of chain A not as in the sequence record." in tables.notes
    assert "1 residue of chain A outside the sequence record." in tables.notes


@pytest.mark.parametrize(
    ("declared", "codes", "expected"),
    [
        ("polypeptide(D)", ["ALA"] * 4, PROTEIN),
        ("polyribonucleotide", ["A", "C", "G", "U"], RNA),
        ("polydeoxyribonucleotide", ["DA", "DC", "DG", "DT"], DNA),
        ("'polydeoxyribonucleotide/polyribonucleotide hybrid'", ["DA", "DC", "DG", "U"], DNA),
        ("other", ["A", "C", "G", "U"], RNA),
    ],
)
def test_chain_types(tmp_path: Path, declared: str, codes: list[str], expected: int) -> None:
    rows: list[Row] = []
    for i, code in enumerate(codes):
        rows += residue(code, "A", i + 1, (5.0 * i, 0, 0))
    tables = load_tables(write(tmp_path, cif(rows, polymer("A", codes, declared))))
    assert tables.chain_type.tolist() == [expected]
    assert tables.res_standard.all()


def test_entities_and_copies_are_numbered_over_sorted_chains(tmp_path: Path) -> None:
    rows = peptide("C", SEQUENCE) + peptide("A", ["ALA"] * 5, FAR)
    rows += peptide("B", SEQUENCE, (0, 120, 0))
    rows += residue("MOH", "E", ".", (0, 20, 0)) + residue("MOH", "D", ".", (0, 30, 0))
    tables = load_tables(write(tmp_path, cif(rows)))
    assert tables.chain_id.tolist() == ["A", "B", "C", "D", "E"]
    assert tables.chain_entity.tolist() == [1, 2, 2, 3, 3]
    assert tables.chain_sym.tolist() == [1, 1, 2, 1, 2]
    assert tables.res_chain.tolist() == [0] * 5 + [1] * 5 + [2] * 5 + [3, 4]


def test_a_polymer_of_modified_residues_only(tmp_path: Path) -> None:
    codes = ["SEP", "TPO", "PTR", "SEP", "02J"]  # the last one is no monomer by its type
    rows = [row | {"group_PDB": "HETATM"} for row in peptide("A", codes)]
    tables = load_tables(write(tmp_path, cif(rows, polymer("A", codes))))
    assert tables.chain_id.tolist() == ["A"] and tables.chain_type.tolist() == [PROTEIN]
    assert tables.res_name.tolist() == codes and not tables.res_standard.any()
