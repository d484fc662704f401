"""Reading: the rows of a file to atoms, residues and conformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cif_text import COLUMNS, SEQUENCE, TEXT, atom, cif, equal, peptide, polymer, residue, write

from tpf.data.atom_site import guess_element
from tpf.data.load import load_tables
from tpf.data.tables import LIGAND, PROTEIN
from tpf.errors import DataError

FAR = (0.0, 60.0, 0.0)


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
    for line in ("", "_entry.id XXXX\n", "_entry.id model\n", "_entry.id default\n"):
        path = write(tmp_path, TEXT.replace("_entry.id TEST\n", line), "stem.cif")
        assert load_tables(path).id == "stem"
    bare = load_tables(path)
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


def test_values_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    rows = peptide("A", SEQUENCE)
    rows[3]["Cartn_y"] = 1e9
    with pytest.raises(DataError, match="parse: coordinates span more than"):
        load_tables(write(tmp_path, cif(rows)))
