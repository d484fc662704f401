"""Component definitions and links: from the file, a dictionary or distances."""

from __future__ import annotations

from pathlib import Path

from cif_text import SEQUENCE, atom, cif, peptide, polymer, residue, write

from tpf.data.load import load_tables
from tpf.data.mmcif import read_structure

FAR = (0.0, 60.0, 0.0)


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
