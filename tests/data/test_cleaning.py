"""Each cleaning step of the specification (1.1) on a small structure made for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cif_text import Row, atom, cif, peptide, polymer, residue, write

from tpf.data.load import load_tables
from tpf.data.structure import close_pairs
from tpf.data.tables import Tables
from tpf.errors import DataError

SEQUENCE = ["ALA", "GLY", "SER", "CYS", "VAL"]
FAR = (0.0, 60.0, 0.0)


def load(folder: Path, rows: list[Row], extra: str = "") -> Tables:
    return load_tables(write(folder, cif(rows, extra)))


def of(tables: Tables, code: str) -> np.ndarray:
    return np.flatnonzero(tables.res_name[tables.atom_residue] == code)


def noted(tables: Tables, text: str) -> bool:
    return any(text in note for note in tables.notes)


def test_selenomethionine_becomes_methionine(tmp_path: Path) -> None:
    tables = load(tmp_path, peptide("A", [*SEQUENCE, "MSE"]), polymer("A", [*SEQUENCE, "MSE"]))
    assert tables.res_name.tolist() == [*SEQUENCE, "MET"]
    met = of(tables, "MET")
    assert tables.atom_name[met].tolist() == ["N", "CA", "C", "O", "CB", "CG", "SD", "CE"]
    assert tables.element[met[6]] == 16
    assert np.isfinite(tables.pos[met]).all()
    assert tables.res_standard.all()
    assert noted(tables, "1 residue MSE became MET")


@pytest.mark.parametrize("swapped", [False, True])
def test_arginine_nh1_is_nearer_to_cd(tmp_path: Path, swapped: bool) -> None:
    codes = ["ALA", "GLY", "SER", "ARG"]
    rows = peptide("A", codes)
    arg = {row["label_atom_id"]: row for row in rows if row["label_comp_id"] == "ARG"}
    if swapped:
        arg["NH1"]["label_atom_id"], arg["NH2"]["label_atom_id"] = "NH2", "NH1"
    tables = load(tmp_path, rows, polymer("A", codes))
    own = of(tables, "ARG")
    at = dict(zip(tables.atom_name[own].tolist(), tables.pos[own], strict=True))
    near, far = (np.linalg.norm(at[name] - at["CD"]) for name in ("NH1", "NH2"))
    assert near < far
    # NH1 of the dictionary's ideal coordinates is the far one
    assert noted(tables, "NH1 and NH2 of 1 arginine") != swapped


def test_waters_go(tmp_path: Path) -> None:
    rows = peptide("A", SEQUENCE)
    for i, code in enumerate(("HOH", "DOD", "HOH")):
        rows.append(atom("O", code, "W", ".", (0, 30 + 5 * i, 0), auth_seq_id=i))
    tables = load(tmp_path, rows, polymer("A", SEQUENCE))
    assert tables.chain_id.tolist() == ["A"]
    assert noted(tables, "3 waters dropped")


@pytest.mark.parametrize(
    ("method", "kept"),
    [("X-RAY DIFFRACTION", False), ("ELECTRON MICROSCOPY", True), ("", True)],
)
def test_crystal_aids_go_from_x_ray_entries(tmp_path: Path, method: str, kept: bool) -> None:
    rows = [*peptide("A", SEQUENCE), *residue("GOL", "B", ".", FAR)]
    extra = polymer("A", SEQUENCE) + (f"\n_exptl.method '{method}'" if method else "")
    tables = load(tmp_path, rows, extra)
    assert ("GOL" in tables.res_name) == kept
    assert noted(tables, "1 crystallisation aid dropped (GOL)") != kept


def test_hydrogens_and_deuterium_go(tmp_path: Path) -> None:
    rows = peptide("A", SEQUENCE)
    rows.append(atom("H", "ALA", "A", 1, (1, 1, 1)))
    rows.append(atom("DA", "ALA", "A", 1, (1, 1, 2), type_symbol="D"))
    tables = load(tmp_path, rows, polymer("A", SEQUENCE))
    assert (tables.element > 1).all()
    assert noted(tables, "2 hydrogens dropped")


@pytest.mark.parametrize(("resolved", "kept"), [(3, False), (4, True)])
def test_polymers_with_three_resolved_residues_go(
    tmp_path: Path, resolved: int, kept: bool
) -> None:
    rows = [*peptide("A", SEQUENCE), *peptide("B", SEQUENCE[:resolved], FAR)]
    extra = cif_records("A", "B")
    tables = load(tmp_path, rows, extra)
    assert ("B" in tables.chain_id) == kept


def cif_records(*chains: str, sequence: list[str] = SEQUENCE) -> str:
    lines = ["loop_\n_entity.id\n_entity.type", *(f"{c} polymer" for c in chains)]
    lines += ["loop_\n_entity_poly.entity_id\n_entity_poly.type"]
    lines += [f"{c} polypeptide(L)" for c in chains]
    lines += ["loop_\n_entity_poly_seq.entity_id\n_entity_poly_seq.num\n_entity_poly_seq.mon_id"]
    lines += [f"{c} {i + 1} {code}" for c in chains for i, code in enumerate(sequence)]
    return "\n".join(lines)


def test_polymers_of_unknown_residues_go(tmp_path: Path) -> None:
    rows = [*peptide("A", ["UNK"] * 5), *peptide("B", ["ALA"] + ["UNK"] * 4, FAR)]
    tables = load(tmp_path, rows)
    assert tables.chain_id.tolist() == ["B"]
    assert noted(tables, "every residue unknown (A)")


@pytest.mark.parametrize(
    ("shift", "dropped"),
    [((0.5, 0, 0), "B"), ((1.65, 0, 0), "B"), ((0, 8.0, 0), ""), ((0, 40.0, 0), "")],
)
def test_of_two_clashing_chains_one_goes(
    tmp_path: Path, shift: tuple[float, float, float], dropped: str
) -> None:
    rows = [*peptide("A", SEQUENCE), *peptide("B", SEQUENCE, shift)]
    tables = load(tmp_path, rows, cif_records("A", "B"))
    assert tables.chain_id.tolist() == [c for c in "AB" if c != dropped]


def test_the_chain_with_the_larger_clashing_share_goes(tmp_path: Path) -> None:
    rows = [*peptide("A", SEQUENCE), *residue("ZN", "0", ".", (0.1, 0.1, 0))]
    rows += peptide("B", SEQUENCE * 2, (0.2, 0, 0))
    tables = load(tmp_path, rows)
    # the ion lies in A wholly and goes; half of B overlaps A, all of A overlaps B
    assert tables.chain_id.tolist() == ["B"]


def test_close_pairs_are_those_of_the_distance_matrix() -> None:
    rng = np.random.default_rng(0)
    pos = rng.uniform(-9, 9, (300, 3))
    distance = np.linalg.norm(pos[:, None] - pos[None], axis=-1)
    expected = {(int(i), int(j)) for i, j in np.argwhere(distance < 1.7) if i != j}
    found = [
        pair for i, j in close_pairs(pos, 1.7) for pair in zip(i.tolist(), j.tolist(), strict=True)
    ]
    assert len(found) == len(set(found))
    assert set(found) == expected


def test_atoms_that_the_definition_lacks_go(tmp_path: Path) -> None:
    rows = peptide("A", SEQUENCE)
    rows.insert(2, atom("CX", "ALA", "A", 1, (1, 1, 1)))
    tables = load(tmp_path, rows, polymer("A", SEQUENCE))
    assert "CX" not in tables.atom_name
    assert noted(tables, "1 atom dropped that the definition of ALA lacks")


def test_atoms_take_the_order_of_the_definition(tmp_path: Path) -> None:
    rows = peptide("A", SEQUENCE)
    expected = load(tmp_path, rows, polymer("A", SEQUENCE))
    shuffled = []
    for i in range(1, 6):
        shuffled += [row for row in rows if row["label_seq_id"] == i][::-1]
    tables = load(tmp_path, shuffled, polymer("A", SEQUENCE))
    assert tables.atom_name.tolist() == expected.atom_name.tolist()
    np.testing.assert_array_equal(tables.pos, expected.pos)


@pytest.mark.parametrize(("gap", "kept"), [(9.0, True), (11.0, False)])
def test_proteins_with_a_long_step_between_neighbours_go(
    tmp_path: Path, gap: float, kept: bool
) -> None:
    rows = peptide("A", SEQUENCE) + peptide("B", SEQUENCE, FAR)
    ca = {r["label_seq_id"]: r for r in rows if r["label_atom_id"] == "CA"}  # those of chain B
    ca[3]["Cartn_x"] = float(str(ca[2]["Cartn_x"])) + gap
    ca[3]["Cartn_y"], ca[3]["Cartn_z"] = ca[2]["Cartn_y"], ca[2]["Cartn_z"]
    ca[4]["Cartn_x"] = float(str(ca[3]["Cartn_x"])) + 1
    ca[5]["Cartn_x"] = float(str(ca[4]["Cartn_x"])) + 1
    tables = load(tmp_path, rows, cif_records("A", "B"))
    assert ("B" in tables.chain_id) == kept


def test_a_gap_in_the_numbering_is_no_long_step(tmp_path: Path) -> None:
    rows = peptide("A", ["ALA"] * 20)
    rows = [row for row in rows if not 5 <= int(str(row["label_seq_id"])) <= 15]
    tables = load(tmp_path, rows, polymer("A", ["ALA"] * 20))
    assert len(tables.res_name) == 20


LINK = """loop_
_struct_conn.id
_struct_conn.conn_type_id
_struct_conn.ptnr1_label_asym_id
_struct_conn.ptnr1_label_comp_id
_struct_conn.ptnr1_label_seq_id
_struct_conn.ptnr1_label_atom_id
_struct_conn.ptnr1_symmetry
_struct_conn.ptnr2_label_asym_id
_struct_conn.ptnr2_label_comp_id
_struct_conn.ptnr2_label_seq_id
_struct_conn.ptnr2_label_atom_id
_struct_conn.ptnr2_symmetry
"""


def _linked(tables: Tables) -> set[frozenset[str]]:
    residues = tables.atom_residue[tables.bonds]
    between = tables.bonds[residues[:, 0] != residues[:, 1]]
    labels = [
        f"{tables.chain_id[tables.res_chain[r]]}{tables.res_id[r]}{name}"
        for r, name in zip(tables.atom_residue, tables.atom_name, strict=True)
    ]
    return {frozenset((labels[i], labels[j])) for i, j in between.tolist()}


@pytest.mark.parametrize(
    ("kind", "symmetry", "distance", "kept"),
    [
        ("covale", "1_555", 1.8, True),
        ("covale", "1_555", 2.5, False),
        ("covale", "2_655", 1.8, False),
        ("metalc", "1_555", 1.8, False),
        ("hydrog", "1_555", 1.8, False),
        ("disulf", "1_555", 2.0, True),
    ],
)
def test_links_between_a_polymer_and_a_ligand(
    tmp_path: Path, kind: str, symmetry: str, distance: float, kept: bool
) -> None:
    rows = peptide("A", SEQUENCE)
    sulphur = next(row for row in rows if row["label_atom_id"] == "SG")
    place = [float(str(sulphur[f"Cartn_{axis}"])) for axis in "xyz"]
    place[1] -= distance
    rows += residue("MOH", "B", ".", place)
    record = f"1 {kind} A CYS 4 SG 1_555 B MOH . C {symmetry}"
    tables = load(tmp_path, rows, polymer("A", SEQUENCE) + "\n" + LINK + record)
    assert (frozenset(("A4SG", "B1C")) in _linked(tables)) == kept


def test_links_between_polymers_go_unless_neighbours(tmp_path: Path) -> None:
    codes = ["CYS", "CYS", "GLY", "CYS", "ALA"]
    rows = peptide("A", codes)
    sulphurs = [row for row in rows if row["label_atom_id"] == "SG"]
    for k, row in enumerate(sulphurs):
        row.update(Cartn_x=2.0 * k, Cartn_y=3.0, Cartn_z=0.0)
    records = (
        "1 disulf A CYS 1 SG 1_555 A CYS 2 SG 1_555\n2 disulf A CYS 2 SG 1_555 A CYS 4 SG 1_555"
    )
    tables = load(tmp_path, rows, polymer("A", codes) + "\n" + LINK + records)
    linked = _linked(tables)
    assert frozenset(("A1SG", "A2SG")) in linked
    assert frozenset(("A2SG", "A4SG")) not in linked
    assert noted(tables, "1 polymer cross-link removed")


def test_bonds_longer_than_the_limit_go(tmp_path: Path) -> None:
    rows = peptide("A", SEQUENCE)
    short = load(tmp_path, rows, polymer("A", SEQUENCE))
    cb = next(row for row in rows if row["label_atom_id"] == "CB")
    cb["Cartn_z"] = float(str(cb["Cartn_z"])) + 9
    long = load(tmp_path, rows, polymer("A", SEQUENCE))
    assert len(long.bonds) == len(short.bonds) - 1


def test_unresolved_residues_and_atoms_are_inserted(tmp_path: Path) -> None:
    codes = ["MET", *SEQUENCE, "TRP"]
    rows = [
        row | {"label_seq_id": int(str(row["label_seq_id"])) + 1}
        for row in peptide("A", SEQUENCE)
        if row["label_atom_id"] != "OG"
    ]
    tables = load(tmp_path, rows, polymer("A", codes))
    assert tables.res_name.tolist() == codes
    assert tables.res_id.tolist() == list(range(1, 8))
    missing = tables.occupancy == 0
    assert np.isnan(tables.pos[missing]).all() and np.isfinite(tables.pos[~missing]).all()
    assert missing.sum() == 8 + 14 + 1
    assert tables.atom_name[missing & (tables.res_name[tables.atom_residue] == "SER")] == ["OG"]
    # the bonds of what is missing are there too: MET 7, TRP 15, SER CB-OG
    assert {frozenset(("A1C", "A2N")), frozenset(("A6C", "A7N"))} <= _linked(tables)


def test_a_ligand_is_completed_from_its_definition(tmp_path: Path) -> None:
    ligand = residue("GOL", "B", ".", FAR)[:-1]
    tables = load(tmp_path, peptide("A", SEQUENCE) + ligand, polymer("A", SEQUENCE))
    own = of(tables, "GOL")
    assert tables.atom_name[own].tolist() == ["C1", "O1", "C2", "O2", "C3", "O3"]
    assert tables.occupancy[own].tolist() == [1, 1, 1, 1, 1, 0]


def test_terminal_atoms_of_standard_residues_go(tmp_path: Path) -> None:
    rows = peptide("A", SEQUENCE)
    rows.append(atom("OXT", "VAL", "A", 5, (16, 1, 1)))
    tables = load(tmp_path, rows, polymer("A", SEQUENCE))
    assert "OXT" not in tables.atom_name


def test_filters_can_be_left_out(tmp_path: Path) -> None:
    rows = [*peptide("A", SEQUENCE[:2]), *residue("GOL", "B", ".", FAR)]
    path = write(tmp_path, cif(rows, "_exptl.method 'X-RAY DIFFRACTION'"))
    with pytest.raises(DataError, match="clean: nothing is left"):
        load_tables(path)
    tables = load_tables(path, filters=False)
    assert tables.res_name.tolist() == ["ALA", "GLY", "GOL"]
