"""Reading: bytes to text, records to chains, what is inferred and what is refused."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest
from cif_text import COLUMNS, Row, atom, cif, peptide, polymer, residue, write

from tpf.data.assembly import parse_expression
from tpf.data.atom_site import guess_element
from tpf.data.load import load_tables
from tpf.data.mmcif import read_structure
from tpf.data.tables import DNA, LIGAND, PROTEIN, RNA, Tables
from tpf.errors import DataError

SEQUENCE = ["ALA", "GLY", "SER", "CYS", "VAL"]
FAR = (0.0, 60.0, 0.0)
TEXT = cif(peptide("A", SEQUENCE), polymer("A", SEQUENCE))


def equal(a: Tables, b: Tables) -> bool:
    same = a.atom_name.tolist() == b.atom_name.tolist() and np.array_equal(
        a.pos, b.pos, equal_nan=True
    )
    return same and a.res_id.tolist() == b.res_id.tolist() and a.bonds.tolist() == b.bonds.tolist()


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


def test_metadata(tmp_path: Path) -> None:
    extra = """loop_
_exptl.method
'X-ray diffraction'
'NEUTRON DIFFRACTION'
_refine.ls_d_res_high 1.95
loop_
_pdbx_audit_revision_history.ordinal
_pdbx_audit_revision_history.data_content_type
_pdbx_audit_revision_history.revision_date
1 'Structure model' 2011-07-13
2 'Structure model' 2008-05-01
3 'Chemical component' 2001-01-01
"""
    text = TEXT.replace("_entry.id TEST", "_entry.id 1ABC\n" + extra)
    tables = load_tables(write(tmp_path, text))
    assert tables.id == "1abc"
    assert tables.method == "X-RAY DIFFRACTION; NEUTRON DIFFRACTION"
    assert tables.resolution == 1.95
    assert str(tables.release_date) == "2008-05-01"
    bare = load_tables(write(tmp_path, TEXT.replace("_entry.id TEST\n", ""), "stem.cif"))
    assert (bare.id, bare.method, bare.resolution, bare.release_date) == ("stem", "", None, None)


def test_the_conformer_of_highest_occupancy_is_taken_whole(tmp_path: Path) -> None:
    rows = [row for row in peptide("A", SEQUENCE) if row["label_comp_id"] != "SER"]
    serine = [row for row in peptide("A", SEQUENCE) if row["label_comp_id"] == "SER"]
    for row in serine:
        if row["label_atom_id"] in ("N", "C"):
            rows.append(row)
            continue
        for alt, occupancy, shift in (("A", 0.3, 0.0), ("B", 0.6, 0.5), ("C", 0.1, 1.0)):
            x = float(str(row["Cartn_x"])) + shift
            rows.append(row | {"label_alt_id": alt, "occupancy": occupancy, "Cartn_x": x})
    tables = load_tables(write(tmp_path, cif(rows, polymer("A", SEQUENCE))))
    own = np.flatnonzero(tables.res_name[tables.atom_residue] == "SER")
    assert tables.occupancy[own] == pytest.approx([1, 0.6, 1, 0.6, 0.6, 0.6])
    expected = [float(str(r["Cartn_x"])) + (r["label_atom_id"] not in "NC") * 0.5 for r in serine]
    assert tables.pos[own, 0] == pytest.approx(expected, abs=1e-5)


def test_microheterogeneity_takes_the_residue_of_highest_occupancy(tmp_path: Path) -> None:
    rows = [row for row in peptide("A", SEQUENCE) if row["label_seq_id"] != 3]
    for code, alt, occupancy in (("SER", "A", 0.4), ("THR", "B", 0.6)):
        rows += residue(code, "A", 3, (7.6, 0, 0), label_alt_id=alt, occupancy=occupancy)
    record = polymer("A", SEQUENCE).replace("A 3 SER", "A 3 SER\nA 3 THR")
    tables = load_tables(write(tmp_path, cif(rows, record)))
    assert tables.res_name.tolist() == ["ALA", "GLY", "THR", "CYS", "VAL"]
    assert any("1 alternative residue of chain A" in note for note in tables.notes)


def test_negative_numbers_and_insertion_codes(tmp_path: Path) -> None:
    rows = peptide("A", SEQUENCE)
    author = {1: (-2, "?"), 2: (-1, "?"), 3: (52, "?"), 4: (52, "A"), 5: (52, "B")}
    for row in rows:
        number, insertion = author[int(str(row["label_seq_id"]))]
        row.update(auth_seq_id=number, pdbx_PDB_ins_code=insertion)
    tables = load_tables(write(tmp_path, cif(rows, polymer("A", SEQUENCE))))
    assert tables.res_id.tolist() == [1, 2, 3, 4, 5]
    assert tables.auth_seq.tolist() == ["-2", "-1", "52", "52A", "52B"]
    # the same without label numbers: insertion codes leave only a running number
    for row in rows:
        row["label_seq_id"] = "."
    bare = load_tables(write(tmp_path, cif(rows)))
    assert bare.res_id.tolist() == [1, 2, 3, 4, 5]
    assert bare.res_name.tolist() == SEQUENCE


def test_only_the_first_model_is_taken(tmp_path: Path) -> None:
    rows = peptide("A", SEQUENCE)
    second = [row | {"pdbx_PDB_model_num": 2, "Cartn_z": 99} for row in rows]
    tables = load_tables(write(tmp_path, cif(rows + second, polymer("A", SEQUENCE))))
    assert np.nanmax(tables.pos[:, 2]) < 50
    assert "The first of 2 models was taken." in tables.notes


def test_columns_may_be_missing_or_in_any_order(tmp_path: Path) -> None:
    reference = load_tables(write(tmp_path, TEXT))
    rows = peptide("A", SEQUENCE)
    for drop in (
        ("auth_seq_id", "auth_asym_id"),
        ("group_PDB", "pdbx_PDB_model_num"),
        ("occupancy", "B_iso_or_equiv", "label_alt_id"),
        ("type_symbol",),
        ("label_entity_id",),
        ("label_asym_id", "label_entity_id"),
    ):
        columns = [name for name in reversed(COLUMNS) if name not in drop]
        text = cif(rows, polymer("A", SEQUENCE), columns)
        assert equal(load_tables(write(tmp_path, text)), reference), drop


def test_only_author_columns(tmp_path: Path) -> None:
    rows = peptide("A", SEQUENCE) + residue("ATP", "A", ".", FAR, auth_seq_id=301)
    rows.append(atom("O", "HOH", "A", ".", (0, 90, 0), auth_seq_id=401))
    rows = [row | {"auth_comp_id": row["label_comp_id"]} for row in rows]
    rows = [row | {"auth_atom_id": row["label_atom_id"]} for row in rows]
    columns = [name for name in COLUMNS if not name.startswith("label_")]
    tables = load_tables(
        write(tmp_path, cif(rows, columns=[*columns, "auth_comp_id", "auth_atom_id"]))
    )
    assert tables.chain_id.tolist() == ["A", "A.1"]
    assert tables.chain_type.tolist() == [PROTEIN, LIGAND]
    assert tables.res_name.tolist() == [*SEQUENCE, "ATP"]
    assert any("No sequence record" in note for note in tables.notes)


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


def test_assembly_expansion(tmp_path: Path) -> None:
    generator = """loop_
_pdbx_struct_assembly_gen.assembly_id
_pdbx_struct_assembly_gen.oper_expression
_pdbx_struct_assembly_gen.asym_id_list
1 1,2 A
1 (2) C
2 1 B
loop_
_pdbx_struct_oper_list.id
"""
    names = [f"matrix[{i}][{j}]" for i in (1, 2, 3) for j in (1, 2, 3)]
    names += [f"vector[{i}]" for i in (1, 2, 3)]
    generator += "\n".join(f"_pdbx_struct_oper_list.{name}" for name in names)
    generator += "\n1 1 0 0 0 1 0 0 0 1 0 0 0\n2 -1 0 0 0 -1 0 0 0 1 0 200 5\n"
    rows = peptide("A", SEQUENCE) + peptide("B", SEQUENCE, FAR) + residue("ZN", "C", ".", (0, 9, 9))
    tables = load_tables(write(tmp_path, cif(rows, generator)))
    assert tables.chain_id.tolist() == ["A", "A-2", "C"]
    assert tables.chain_entity.tolist() == [1, 1, 2]
    first, second = (tables.res_chain[tables.atom_residue] == c for c in (0, 1))
    moved = tables.pos[first] * [-1, -1, 1] + [0, 200, 5]
    np.testing.assert_allclose(tables.pos[second], moved, atol=1e-4)
    np.testing.assert_allclose(tables.pos[-1], [0, 191, 14], atol=1e-4)
    assert "1 chain not in assembly 1." in tables.notes
    assert "1 chain of assembly 1 made by symmetry." in tables.notes
    broken = generator.replace("2 -1 0 0", "2 ? 0 0")
    with pytest.raises(DataError, match="assembly: operator 2 lacks numbers"):
        load_tables(write(tmp_path, cif(rows, broken)))
    with pytest.raises(DataError, match="assembly: operator 7 is not in the file"):
        load_tables(write(tmp_path, cif(rows, generator.replace("1 1,2 A", "1 1,7 A"))))
    with pytest.raises(DataError, match="more than 300 polymer chains"):
        load_tables(
            write(
                tmp_path,
                cif(rows, generator.replace("1 1,2 A", "1 (1,2)(1-200) A")).replace(
                    "\n1 1 0 0 0 1",
                    "".join(f"\n{k} 1 0 0 0 1 0 0 0 1 0 0 0" for k in range(3, 201))
                    + "\n1 1 0 0 0 1",
                ),
            )
        )


def test_a_copy_does_not_take_the_name_of_another_chain(tmp_path: Path) -> None:
    names = ["id", *(f"matrix[{i}][{j}]" for i in (1, 2, 3) for j in (1, 2, 3))]
    names += [f"vector[{i}]" for i in (1, 2, 3)]
    records = (
        "_pdbx_struct_assembly_gen.assembly_id 1\n_pdbx_struct_assembly_gen.asym_id_list A,A-2\n"
    )
    records += "_pdbx_struct_assembly_gen.oper_expression 1,2\nloop_\n"
    records += "\n".join(f"_pdbx_struct_oper_list.{name}" for name in names)
    records += "\n1 1 0 0 0 1 0 0 0 1 0 0 0\n2 1 0 0 0 1 0 0 0 1 0 0 99\n"
    rows = peptide("A", SEQUENCE) + peptide("A-2", SEQUENCE, FAR)
    tables = load_tables(write(tmp_path, cif(rows, records)))
    assert tables.chain_id.tolist() == ["A", "A-2", "A-2-2", "A-3"]
    assert tables.chain_sym.tolist() == [1, 2, 3, 4]


def test_a_polymer_of_modified_residues_only(tmp_path: Path) -> None:
    codes = ["SEP", "TPO", "PTR", "SEP", "02J"]  # the last one is no monomer by its type
    rows = [row | {"group_PDB": "HETATM"} for row in peptide("A", codes)]
    tables = load_tables(write(tmp_path, cif(rows, polymer("A", codes))))
    assert tables.chain_id.tolist() == ["A"] and tables.chain_type.tolist() == [PROTEIN]
    assert tables.res_name.tolist() == codes and not tables.res_standard.any()


def test_operator_expressions() -> None:
    assert parse_expression("1") == [("1",)]
    assert parse_expression("1,2, 3") == [("1",), ("2",), ("3",)]
    assert parse_expression("(1-3)") == [("1",), ("2",), ("3",)]
    assert parse_expression("(X0)(1-2,P)") == [("X0", "1"), ("X0", "2"), ("X0", "P")]
    with pytest.raises(ValueError, match="names no operator"):
        parse_expression("( )")


def test_ligands_without_numbers_are_split_at_repeated_atoms(tmp_path: Path) -> None:
    rows = peptide("A", SEQUENCE)
    for k in range(2):
        rows += residue("MOH", "B", ".", (0, 20.0 + 9 * k, 0), auth_seq_id="?")
    tables = load_tables(write(tmp_path, cif(rows)))
    assert tables.res_name.tolist() == [*SEQUENCE, "MOH", "MOH"]
    assert tables.res_id.tolist()[-2:] == [1, 2]


def test_repeated_atoms_are_dropped(tmp_path: Path) -> None:
    rows = peptide("A", SEQUENCE)
    tables = load_tables(write(tmp_path, cif([*rows, rows[0], rows[7]], polymer("A", SEQUENCE))))
    assert equal(tables, load_tables(write(tmp_path, TEXT)))
    assert "2 repeated atoms dropped." in tables.notes


def test_unknown_component_is_inferred_from_distances(tmp_path: Path) -> None:
    ligand = residue("BEN", "B", ".", FAR)  # benzamidine under a name that no dictionary has
    rows = peptide("A", SEQUENCE) + [row | {"label_comp_id": "L:1"} for row in ligand]
    tables = load_tables(write(tmp_path, cif(rows, polymer("A", SEQUENCE))))
    known = load_tables(
        write(tmp_path, cif(peptide("A", SEQUENCE) + ligand, polymer("A", SEQUENCE)))
    )
    assert tables.bonds.tolist() == known.bonds.tolist()
    assert set(tables.bond_order[-9:].tolist()) == {0}
    assert "Component L:1 is in no dictionary; bonds were inferred from distances." in tables.notes


def test_a_code_that_means_something_else_is_not_taken_from_the_dictionary(tmp_path: Path) -> None:
    ligand = [row | {"label_comp_id": "GOL"} for row in residue("BEN", "B", ".", FAR)]
    tables = load_tables(write(tmp_path, cif(peptide("A", SEQUENCE) + ligand)))
    assert (tables.res_name[tables.atom_residue] == "GOL").sum() == len(ligand)
    assert any("does not match its definition" in note for note in tables.notes)


def test_definitions_in_the_file(tmp_path: Path) -> None:
    rows = peptide("A", SEQUENCE)
    rows += [atom(n, "ZN", "B", ".", (3.0 * i, 60, 0)) for i, n in enumerate(("C1", "O1"))]
    bonds = (
        "_chem_comp_bond.comp_id ZN\n_chem_comp_bond.atom_id_1 C1\n_chem_comp_bond.atom_id_2 O1\n"
    )
    atoms = "loop_\n_chem_comp_atom.comp_id\n_chem_comp_atom.atom_id\n_chem_comp_atom.type_symbol\n"
    with_xyz = atoms + "".join(f"_chem_comp_atom.model_Cartn_{a}\n" for a in "xyz")
    for extra in (
        bonds + "_chem_comp_bond.value_order DOUB\n",
        bonds + "_chem_comp_bond.value_order DOUB\n" + atoms + "ZN C1 C\nZN O1 O\n",
        bonds + "_chem_comp_bond.value_order DOUB\n" + with_xyz + "ZN C1 C 0 0 0\nZN O1 O 1 0 0\n",
    ):
        for row in rows[-2:]:
            row["Cartn_x"] = 0.0 if row["label_atom_id"] == "C1" else 1.2
        tables = load_tables(write(tmp_path, cif(rows, polymer("A", SEQUENCE) + "\n" + extra)))
        assert tables.atom_name[-2:].tolist() == ["C1", "O1"]
        assert tables.bonds[-1].tolist() == [len(tables.pos) - 2, len(tables.pos) - 1]
        assert tables.bond_order[-1] == 2


def test_links_are_inferred_only_where_the_file_records_none(tmp_path: Path) -> None:
    rows = peptide("A", SEQUENCE)
    sulphur = next(row for row in rows if row["label_atom_id"] == "SG")
    place = [float(str(sulphur[f"Cartn_{axis}"])) for axis in "xyz"]
    rows += residue("MOH", "B", ".", [place[0], place[1] - 1.8, place[2]])
    rows += residue("ZN", "C", ".", [place[0], place[1], place[2] + 2.1])
    archive = "_database_2.database_id PDB"
    for extra, found in (("", 1), (archive, 0)):
        structure, _ = read_structure(write(tmp_path, cif(rows, extra)))
        assert len(structure.links) == found
        assert structure.notes[-1:] == (
            ("1 link between residues inferred from distances.",) if found else structure.notes[-1:]
        )


def test_odd_values(tmp_path: Path) -> None:
    reference = load_tables(write(tmp_path, TEXT))
    rows = peptide("A", SEQUENCE)
    far = [row | {"Cartn_x": float(str(row["Cartn_x"])) + 98_000} for row in rows]
    moved = load_tables(write(tmp_path, cif(far, polymer("A", SEQUENCE))))
    assert np.abs(moved.pos).max() < 100
    np.testing.assert_allclose(
        moved.pos - moved.pos[0], reference.pos - reference.pos[0], atol=1e-4
    )
    zero = load_tables(
        write(tmp_path, cif([row | {"occupancy": 0} for row in rows], polymer("A", SEQUENCE)))
    )
    assert equal(zero, reference) and (zero.occupancy == 1).all()
    rows[3]["Cartn_y"], rows[4]["occupancy"], rows[5]["occupancy"] = "nan", 0, -1
    holes = load_tables(write(tmp_path, cif(rows, polymer("A", SEQUENCE))))
    assert np.flatnonzero(holes.occupancy == 0).tolist() == [3, 4, 5]
    assert np.isnan(holes.pos[3:6]).all()


@pytest.mark.parametrize(
    ("name", "comp", "element"),
    [("CA", "ALA", 6), ("CA", "CA", 20), ("N1", "ATP", 7), ("CL1", "LIG", 17), ("ZN", "ZN", 30),
     ("1HB", "ALA", 1), ("*", "LIG", 0), ("SE", "MSE", 34)],
)  # fmt: skip
def test_elements_from_atom_names(name: str, comp: str, element: int) -> None:
    assert guess_element(name, comp) == element


EDITS = (
    "?",
    ".",
    "0",
    "-1",
    "1e9",
    "nan",
    "inf",
    "abc",
    "UNK",
    "HOH",
    "999999999999",
    "(1-",
    "SEP",
)


def test_random_edits_give_tables_or_a_data_error(tmp_path: Path) -> None:
    """Erase, blank and overwrite columns of a small entry; nothing but ``DataError`` may come."""
    from gemmi import cif as gemmi_cif

    examples = Path(__file__).resolve().parents[2] / "data" / "examples"
    texts = [gzip.decompress(f.read_bytes()).decode() for f in sorted(examples.iterdir())[:4]]
    rng = np.random.default_rng(7)
    outcomes = {"ok": 0, "refused": 0}
    for k in range(80):
        block = (document := gemmi_cif.read_string(texts[k % len(texts)]))[0]
        for _ in range(int(rng.integers(1, 4))):
            category = str(rng.choice(block.get_mmcif_category_names()))
            columns = block.get_mmcif_category(category, raw=True)
            name = str(rng.choice(list(columns)))
            action = rng.integers(4)
            if action == 0:
                block.find_mmcif_category(category).erase()
            elif action == 1 and len(columns) > 1:
                columns.pop(name)
            else:
                share = rng.uniform() ** 3
                value = str(rng.choice(EDITS))
                columns[name] = [value if rng.uniform() < share else v for v in columns[name]]
            if action:
                block.set_mmcif_category(category, columns, raw=True)
        try:
            load_tables(write(tmp_path, document.as_string()))
            outcomes["ok"] += 1
        except DataError:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 0


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


def test_values_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    rows = peptide("A", SEQUENCE)
    rows[3]["Cartn_y"] = 1e9
    with pytest.raises(DataError, match="parse: coordinates span more than"):
        load_tables(write(tmp_path, cif(rows)))
