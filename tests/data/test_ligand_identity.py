"""Ligands are what their atoms say: own symmetry and conformers, never mixed up by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cif_text import SEQUENCE, cif, peptide, polymer, residue, write
from joined import FLUORINE, KINASE, SMALL, make, put, residue_of, symmetries
from poses import analog, ends, posed_ligand, sdf, without
from sample_features import features_of

from tpf.config import DataConfig
from tpf.data.ccd import Dictionary
from tpf.data.conformers import Conformers
from tpf.data.identity import graph_digest
from tpf.data.load import load_tables
from tpf.data.records import Entries
from tpf.data.tokens import tokenize

FAR = (0.0, 60.0, 0.0)


def test_the_analog_has_its_own_symmetry_and_conformer(kinase: Path) -> None:
    pytest.importorskip("rdkit")
    tokens = tokenize(load_tables(kinase))
    own = residue_of(tokens.tables, "LIG")
    crop = np.flatnonzero(np.isin(tokens.start_atom, own))
    features = features_of(tokens, crop, config=DataConfig(max_templates=0))
    assert features["ref_mask"].all()
    (orders,) = features["ref_space_uid_to_perm"].values()
    part, _ = analog(KINASE, "MPZ")
    expected = symmetries(part)
    assert len(orders) == len(expected) > 1
    np.testing.assert_array_equal(np.unique(orders, axis=0), np.unique(expected, axis=0))


def test_ideal_coordinates_serve_without_rdkit(kinase: Path) -> None:
    tables = load_tables(kinase)
    own = residue_of(tables, "LIG")
    assert np.isfinite(tables.ideal[own]).all() and np.isnan(tables.ideal[: own[0]]).all()
    conformers = Conformers(Dictionary(), "ideal")
    part = conformers.component(tables, int(tables.atom_residue[own[0]]), own)
    names = tuple(tables.atom_name[own].tolist())
    pos, known = conformers.draw(part, names, np.random.default_rng(0))
    assert known.all()
    np.testing.assert_array_equal(pos, tables.ideal[own])
    shape = np.linalg.norm(pos[:, None] - pos[None], axis=-1)
    answer = np.linalg.norm(tables.pos[own][:, None] - tables.pos[own][None], axis=-1)
    assert np.abs(shape - answer).max() > 0.5  # not the pose, which would give the answer away


def test_two_molecules_of_one_name_stay_two(tmp_path: Path) -> None:
    part, pos = posed_ligand(SMALL, "ZYB")
    lighter = without(part, pos, ends(part, FLUORINE)[0])
    texts = {"whole": sdf(part, pos), "lighter": sdf(*lighter)}
    tables = {}
    for name, text in texts.items():
        make(tmp_path, SMALL, put(tmp_path, f"{name}.sdf", text), out=f"{name}.cif")
        tables[name] = load_tables(tmp_path / f"{name}.cif")
    records = Entries(DataConfig(path=str(tmp_path))).records
    assert [record.id for record in records] == ["lighter", "whole"]
    keys = [
        [key for key in record.chain_keys if key not in records[0].chain_keys] for record in records
    ]
    assert len(keys[1]) == 1  # the protein is the same, its LIG is not
    conformers = Conformers(Dictionary())
    for name, expected in (("whole", part), ("lighter", lighter[0])):
        own = residue_of(tables[name], "LIG")
        found = conformers.component(tables[name], int(tables[name].atom_residue[own[0]]), own)
        assert graph_digest(found.elements, found.bonds) == graph_digest(
            expected.elements, expected.bonds
        )


def test_a_name_that_another_molecule_has_is_not_shared(tmp_path: Path) -> None:
    part, pos = posed_ligand(SMALL, "ZYB")
    beside = pos + [0, 0, 12]
    first = put(tmp_path, "a.sdf", sdf(part, pos))
    same = put(tmp_path, "b.sdf", sdf(part, beside))
    other = put(tmp_path, "c.sdf", sdf(*without(part, beside, ends(part, FLUORINE)[0])))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tpf.data.scene.FARTHEST", 1e3)
        patch.setattr("tpf.data.scene.CLASH_FRACTION", 1.0)
        assert make(tmp_path, SMALL, first, same, out="1.cif").ligands == ("LIG", "LIG")
        result = make(tmp_path, SMALL, first, other, out="2.cif")
        assert result.ligands == ("LIG", "LIG2")
        assert any("LIG is another molecule here; named LIG2" in note for note in result.notes)
        again = make(
            tmp_path, tmp_path / "1.cif", other, out="3.cif"
        )  # LIG stays at the first place
    assert again.ligands == ("LIG2",) and again.replaced == ("LIG of chain A",)
    tables = load_tables(tmp_path / "3.cif", filters=False)
    assert len(residue_of(tables, "LIG")) == len(residue_of(tables, "LIG2")) + 1
    # the same molecule under the name that the protein file gave it
    assert make(tmp_path, tmp_path / "1.cif", first, out="4.cif").ligands == ("LIG",)


def test_a_dictionary_code_used_for_another_molecule(tmp_path: Path) -> None:
    """Without definitions in the file, distances decide; equal atom names are no proof."""
    known = Dictionary().get("LIG")
    assert known is not None
    other = Dictionary().get("BEN")
    assert other is not None
    # benzamidine under names that LIG has, in an order that its bonds do not follow
    carbons = [
        n for n, z in zip(known.atom_names.tolist(), known.elements.tolist(), strict=True) if z == 6
    ]
    nitrogens = [
        n for n, z in zip(known.atom_names.tolist(), known.elements.tolist(), strict=True) if z == 7
    ]
    names = [(carbons if z == 6 else nitrogens).pop() for z in other.elements.tolist()]
    rows = residue("BEN", "B", ".", FAR)
    for row, name in zip(rows, names, strict=True):
        row.update(label_comp_id="LIG", label_atom_id=name)
    text = cif(peptide("A", SEQUENCE) + rows, polymer("A", SEQUENCE))
    tables = load_tables(write(tmp_path, text))
    own = residue_of(tables, "LIG")
    bonds = tables.bonds[np.isin(tables.bonds, own).all(axis=1)] - own[0]
    assert graph_digest(tables.element[own], bonds) == graph_digest(other.elements, other.bonds)
    assert any("LIG does not match its definition" in note for note in tables.notes)


def test_two_molecules_of_one_name_in_one_file(tmp_path: Path) -> None:
    rows = peptide("A", SEQUENCE)
    for k, code in enumerate(("BEN", "GOL", "BEN")):
        ligand = residue(code, "BCD"[k], ".", (0, 60, 20.0 * k))
        rows += [row | {"label_comp_id": "LG9"} for row in ligand]
    tables = load_tables(write(tmp_path, cif(rows, polymer("A", SEQUENCE))))
    names = tables.res_name[-3:].tolist()
    assert names == ["LG9", "LG92", "LG9"]
    assert [
        int((tables.atom_residue == r).sum()) for r in range(len(SEQUENCE), len(SEQUENCE) + 3)
    ] == [9, 6, 9]
    assert any("1 residue called LG9 show another molecule" in note for note in tables.notes)


def test_a_file_without_coordinates_of_its_definition_still_comes_first(tmp_path: Path) -> None:
    """The dictionary's GOL has other bonds than the one that the file defines."""
    rows = peptide("A", SEQUENCE) + residue("GOL", "B", ".", FAR)
    part = Dictionary().get("GOL")
    assert part is not None
    for order, note in (("SING", False), ("DOUB", True)):
        lines = ["loop_", *(f"_chem_comp_atom.{c}" for c in ("comp_id", "atom_id", "type_symbol"))]
        lines += [f"GOL {name} {name[0]}" for name in part.atom_names.tolist()]
        lines += ["loop_", *(f"_chem_comp_bond.{c}" for c in
                             ("comp_id", "atom_id_1", "atom_id_2", "value_order"))]  # fmt: skip
        for i, j in part.bonds.tolist():
            both = {part.elements[i], part.elements[j]} == {6}
            lines.append(
                f"GOL {part.atom_names[i]} {part.atom_names[j]} {order if both else 'SING'}"
            )
        text = cif(rows, polymer("A", SEQUENCE) + "\n" + "\n".join(lines))
        tables = load_tables(write(tmp_path, text))
        assert any("GOL is the file's own" in n for n in tables.notes) == note
        own = residue_of(tables, "GOL")
        inside = np.isin(tables.bonds, own).all(axis=1)
        assert (2 in tables.bond_order[inside].tolist()) == note


def test_a_defined_ligand_called_unl_is_no_unknown_one(tmp_path: Path) -> None:
    pose = put(tmp_path, "p.sdf", sdf(*posed_ligand(SMALL, "ZYB")))
    result = make(tmp_path, SMALL, pose, names=("UNL",))
    assert result.ligands == ("UNL",)
    assert len(residue_of(load_tables(result.out), "UNL")) > 0
