"""``tpf score``: files against themselves, renamed, moved, cut and incomplete copies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gemmi
import numpy as np
import pytest

from tpf.errors import DataError
from tpf.score import score_files

Row = gemmi.cif.Table.Row
HOMODIMER = "1k6p"
"""HIV protease: chains A and B of one entity, an inhibitor."""
SYMMETRIC_LIGAND = "3ptb"
"""Trypsin with benzamidine, whose ring and amidine can be flipped."""
KINASE_DIMER = "7siu"
"""HPK1: two copies of the kinase domain, each with its inhibitor (9ID)."""
COLUMNS = [
    "label_asym_id",
    "auth_asym_id",
    "label_comp_id",
    "label_atom_id",
    "label_seq_id",
    "Cartn_x",
    "Cartn_y",
    "Cartn_z",
]
CHAIN, AUTHOR, RESIDUE, ATOM, NUMBER, X = range(6)


@pytest.fixture
def edited(shared_data: Path, tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Return (edited copy, original) of an entry; ``change`` edits a row, False drops it."""

    def make(
        entry: str, change: Callable[[list[str]], bool | None], atoms_only: bool = False
    ) -> tuple[Path, Path]:
        folder = "kinase" if entry == KINASE_DIMER else "general"
        source = shared_data / folder / f"{entry}.cif.gz"
        if not source.is_file():
            pytest.skip(f"{source.name} is not in shared/data/{folder}")
        block = gemmi.cif.read(str(source)).sole_block()
        table = block.find("_atom_site.", COLUMNS)
        dropped = []
        for k, row in enumerate(table):
            values = [row.str(c) for c in range(len(COLUMNS))]
            if change(values) is False:
                dropped.append(k)
            for c, value in enumerate(values):
                row[c] = gemmi.cif.quote(value) if value else "."
        for k in reversed(dropped):
            table.remove_row(k)
        if atoms_only:
            for name in block.get_mmcif_category_names():
                if name not in ("_atom_site.", "_chem_comp."):
                    block.find_mmcif_category(name).erase()
        path = tmp_path / f"{entry}-edited.cif"
        path.write_text(block.as_string())
        return path, source

    return make


def perfect(result: dict[str, dict[str, float]]) -> None:
    for name, value in result["metrics"].items():
        if name.startswith(("lddt", "gdt", "dockq", "ligand_success")):
            assert value == pytest.approx(1.0, abs=1e-6), name
        if name.startswith(("rmsd", "drmsd", "ligand_rmsd")):
            assert value == pytest.approx(0.0, abs=2e-3), name


def swap(*pairs: tuple[str, str]) -> dict[str, str]:
    return {a: b for x, y in pairs for a, b in ((x, y), (y, x))}


@pytest.mark.parametrize("entry", [HOMODIMER, SYMMETRIC_LIGAND, "1bna"])
def test_a_file_against_itself(shared_data: Path, entry: str) -> None:
    path = shared_data / "general" / f"{entry}.cif.gz"
    if not path.is_file():
        pytest.skip(f"{path.name} is not in shared/data/general")
    result = score_files(path, path)
    perfect(result)
    matched = result["matched"]
    assert matched["resolved_atoms"] == matched["reference_resolved_atoms"] > 100
    assert result["notes"] == []
    assert result["metrics"]["lddt_intra_complex"] == pytest.approx(1.0)


def test_exchanged_copies_of_a_homodimer_score_alike(
    edited: Callable[..., tuple[Path, Path]],
) -> None:
    names = swap(("A", "B"))

    def exchange(row: list[str]) -> None:
        for column in (CHAIN, AUTHOR):
            row[column] = names.get(row[column], row[column])

    copy, original = edited(HOMODIMER, exchange)
    result = score_files(copy, original)
    perfect(result)
    assert "lddt_inter_protein_protein" in result["metrics"]


@pytest.mark.parametrize("names", [swap(("A", "B")), swap(("C", "D"))], ids=["kinases", "ligands"])
def test_copies_of_a_kinase_and_its_ligand_are_paired_by_place(
    edited: Callable[..., tuple[Path, Path]], names: dict[str, str]
) -> None:
    """Exchanging one kind of copy only leaves each kinase with the ligand of the other name."""

    def exchange(row: list[str]) -> None:
        row[CHAIN] = names.get(row[CHAIN], row[CHAIN])

    copy, original = edited(KINASE_DIMER, exchange)
    result = score_files(copy, original)
    perfect(result)
    assert result["metrics"]["ligand_success"] == 1.0
    assert "lddt_inter_protein_ligand" in result["metrics"]


def test_equivalent_atoms_of_residues_and_ligands_may_be_exchanged(
    edited: Callable[..., tuple[Path, Path]],
) -> None:
    ring = swap(("CD1", "CD2"), ("CE1", "CE2"))
    carboxylate = swap(("OD1", "OD2"))
    benzamidine = swap(("C2", "C6"), ("C3", "C5"), ("N1", "N2"))
    rename = {"PHE": ring, "TYR": ring, "ASP": carboxylate, "BEN": benzamidine}

    def flip(row: list[str]) -> None:
        row[ATOM] = rename.get(row[RESIDUE], {}).get(row[ATOM], row[ATOM])

    copy, original = edited(SYMMETRIC_LIGAND, flip)
    perfect(score_files(copy, original))


def test_a_rigid_motion_changes_nothing(edited: Callable[..., tuple[Path, Path]]) -> None:
    turn = np.array([[0.6, -0.8, 0], [0.8, 0.6, 0], [0, 0, 1]])

    def move(row: list[str]) -> None:
        x = turn @ np.array([float(v) for v in row[X : X + 3]]) + [30, -7, 11]
        row[X : X + 3] = [f"{v:.3f}" for v in x]

    copy, original = edited(SYMMETRIC_LIGAND, move)
    perfect(score_files(copy, original))


def test_parts_without_prediction_are_counted(edited: Callable[..., tuple[Path, Path]]) -> None:
    backbone = {"N", "CA", "C", "O"}

    def cut(row: list[str]) -> bool:
        if row[CHAIN] == "B" or (row[CHAIN] == "A" and row[NUMBER] in ("10", "11", "12")):
            return False
        return row[NUMBER] != "30" or row[ATOM] in backbone

    copy, original = edited(HOMODIMER, cut, atoms_only=True)
    result = score_files(copy, original)
    perfect(result)
    matched = result["matched"]
    assert matched["chains"] == matched["reference_chains"] - 1
    assert matched["resolved_atoms"] < matched["reference_resolved_atoms"]
    assert any(note.startswith("reference chains without prediction") for note in result["notes"])
    assert any("resolved reference atoms have no prediction" in note for note in result["notes"])
    assert "lddt_inter_protein_protein" not in result["metrics"]


def test_predicted_chains_without_counterpart_are_named(
    edited: Callable[..., tuple[Path, Path]],
) -> None:
    copy, original = edited(HOMODIMER, lambda row: row[CHAIN] != "B", atoms_only=True)
    result = score_files(original, copy)
    assert result["matched"]["predicted_chains"] == result["matched"]["chains"] + 1
    assert any(note.startswith("predicted chains without counterpart") for note in result["notes"])
    perfect(result)


def test_a_moved_ligand_keeps_the_protein_scores(
    edited: Callable[..., tuple[Path, Path]],
) -> None:
    def shift(row: list[str]) -> None:
        if row[RESIDUE] == "BEN":
            row[X] = f"{float(row[X]) + 3.0:.3f}"

    copy, original = edited(SYMMETRIC_LIGAND, shift)
    found = score_files(copy, original)["metrics"]
    assert found["ligand_rmsd_pocket"] == pytest.approx(3.0, abs=1e-2)
    assert found["ligand_success"] == 0.0
    assert found["lddt_intra_protein"] == 1.0 == found["lddt_intra_ligand"]
    assert 0.2 < found["lddt_inter_protein_ligand"] < 0.6
    assert found["lddt_pocket"] <= found["lddt_inter_protein_ligand"] + 0.1


def test_unrelated_files_are_refused(shared_data: Path) -> None:
    paths = [shared_data / "general" / f"{entry}.cif.gz" for entry in ("1bna", "1aki")]
    if not all(path.is_file() for path in paths):
        pytest.skip("entries are not in shared/data/general")
    with pytest.raises(DataError, match="no atom of 1aki is predicted"):
        score_files(*paths)
