"""Definitions from SMILES and SDF: reading, chemistry, identity."""

from __future__ import annotations

import dataclasses
import gzip
from pathlib import Path

import numpy as np
import pytest
from poses import sdf

from tpf.data import conformers
from tpf.data.ccd import Component, Dictionary
from tpf.data.identity import agrees, graph_digest, same_molecule
from tpf.data.ligands import define_ligand
from tpf.errors import DataError, TpfError, UsageError


def known(code: str) -> Component:
    part = Dictionary().get(code)
    assert part is not None
    return part


@pytest.fixture(params=["rdkit", "bare"])
def rdkit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether RDKit is there; without it, SDF still works."""
    if request.param == "rdkit":
        pytest.importorskip("rdkit")
        return True
    monkeypatch.setattr(conformers, "_has_rdkit", lambda: False)
    return False


@pytest.mark.parametrize("code", ["ATP", "STI", "HC4", "NAG"])
@pytest.mark.parametrize("v3000", [False, True])
def test_an_sdf_record_gives_the_component_that_it_shows(
    tmp_path: Path, rdkit: bool, code: str, v3000: bool
) -> None:
    part = known(code)
    pos = part.ideal.astype(float)
    path = tmp_path / "x.sdf"
    path.write_text(sdf(part, pos, code, v3000).replace("\n", "\r\n"))
    ligand = define_ligand(str(path), "DRG")
    found = ligand.component
    assert ligand.pose is not None
    np.testing.assert_allclose(ligand.pose, pos, atol=1e-4)
    assert found.code == "DRG" and found.name == code
    assert len(set(found.atom_names.tolist())) == len(found)
    assert same_molecule(dataclasses.replace(found, atom_names=part.atom_names), part)
    assert found.charges.tolist() == part.charges.tolist()
    assert np.isfinite(found.ideal).all() == rdkit
    assert bool(ligand.notes) != rdkit
    if rdkit:
        # the dictionary also calls the bond between two rings of imatinib aromatic
        differ = found.bond_aromatic != part.bond_aromatic
        assert differ.sum() == (code == "STI") and part.bond_aromatic[differ].all()


def test_a_smiles_gives_the_component_of_the_dictionary() -> None:
    pytest.importorskip("rdkit")
    imatinib = "Cc1ccc(NC(=O)c2ccc(cc2)CN2CCN(C)CC2)cc1Nc1nccc(n1)-c1cccnc1"
    found, sti = define_ligand(imatinib).component, known("STI")
    assert graph_digest(found.elements, found.bonds) == graph_digest(sti.elements, sti.bonds)
    assert found.bond_aromatic.sum() == 24
    other_way = "c1(cccnc1)-c1ccnc(Nc2cc(ccc2C)NC(=O)c2ccc(CN3CCN(C)CC3)cc2)n1"
    again = define_ligand(other_way).component
    assert same_molecule(found, again)
    np.testing.assert_array_equal(found.ideal, again.ideal)


def test_stereo_survives() -> None:
    chem = pytest.importorskip("rdkit.Chem")
    for smiles in ("C[C@H](N)C(=O)O", "C[C@@H](N)C(=O)O", "F/C=C/Cl", "F/C=C\\Cl"):
        part = define_ligand(smiles).component
        mol = chem.RemoveHs(conformers.rdkit_molecule(part))
        assert chem.MolToSmiles(mol) == chem.CanonSmiles(smiles)
        assert not define_ligand(smiles).notes
    assert "1 stereo element not specified" in define_ligand("CC(N)C(=O)O").notes[0]


def test_records_are_found_by_number_and_title(tmp_path: Path) -> None:
    texts = [sdf(known(code), known(code).ideal, title) for code, title in
             (("BEN", "first"), ("GOL", "7"), ("BEN", "twin"), ("BEN", "twin"))]  # fmt: skip
    path = tmp_path / "x.sdf.gz"
    path.write_bytes(gzip.compress("".join(texts).encode()))
    assert len(define_ligand(f"{path}#first").component) == 9
    assert len(define_ligand(f"{path}#7").component) == 6
    assert len(define_ligand(f"{path}#2").component) == 6
    for record, message in (("twin", "2 molecules .* twin"), ("9", "has no molecule 9")):
        with pytest.raises(DataError, match=message):
            define_ligand(f"{path}#{record}")
    with pytest.raises(DataError, match="holds 4 molecules"):
        define_ligand(str(path))


GLYCEROL = sdf(known("GOL"), known("GOL").ideal)
FLAT = known("GOL").ideal * [1, 1, 0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no molecule"),
        ("a\nb\n", "it ends too early"),
        (GLYCEROL[: len(GLYCEROL) // 2], "fewer lines than"),
        (GLYCEROL.replace("V2000", "V4000"), "V4000"),
        (GLYCEROL.replace(" O  ", " R# ", 1), "'R#', which is no element"),
        (GLYCEROL.replace("  1  2  1", "  1 99  1"), "bond 1-99 joins no two"),
        (GLYCEROL.replace("  1  2  1", "  1  2  8"), "type 8"),
        (sdf(known("GOL"), FLAT), "it is a drawing"),
        (GLYCEROL.replace("  1  3  1  0\n", "").replace("  6  5", "  6  4"), "it has 2 parts"),
    ],
)
def test_a_damaged_record_is_one_clear_line(
    tmp_path: Path, rdkit: bool, text: str, message: str
) -> None:
    path = tmp_path / "bad.sdf"
    path.write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        define_ligand(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("C(C)(C)(C)(C)C", "RDKit refuses it .*valence"),
        ("c1cccc1", "RDKit refuses it .*kekulize"),
        ("CCO.Cl", "2 parts"),
        ("xx", "not a valid SMILES"),
        ("x" * 300, "not a valid SMILES"),
        ("*CC", "no element"),
        ("[H][H]", "no heavy atoms"),
        ("absent.sdf", "no such file"),
        (__file__, "not an SDF file by its name"),
    ],
)
def test_a_wrong_source_is_one_clear_line(source: str, message: str) -> None:
    pytest.importorskip("rdkit")
    with pytest.raises(TpfError, match=message) as caught:
        define_ligand(source)
    assert "\n" not in str(caught.value)


def test_a_smiles_without_rdkit_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformers, "_has_rdkit", lambda: False)
    with pytest.raises(UsageError, match=r"pip install 'tpf\[chem\]', or give an SDF file"):
        define_ligand("CCO")


@pytest.mark.parametrize("code", ["", "TOOBIG", "A B", "ALA", "HOH", "DA"])
def test_codes_that_mean_something_else_are_refused(code: str) -> None:
    with pytest.raises(UsageError, match="name"):
        define_ligand("CCO", code)


def test_identity_looks_at_atoms_and_bonds() -> None:
    benzamidine = known("BEN")
    assert same_molecule(benzamidine, benzamidine)
    # the other Kekule form, without aromatic flags
    ring = benzamidine.bond_aromatic
    flipped = dataclasses.replace(
        benzamidine,
        bond_orders=np.where(ring, 3 - benzamidine.bond_orders, benzamidine.bond_orders),
        bond_aromatic=np.zeros(len(ring), dtype=bool),
    )
    assert same_molecule(benzamidine, flipped) and same_molecule(flipped, benzamidine)
    saturated = dataclasses.replace(flipped, bond_orders=np.where(ring, 1, flipped.bond_orders))
    assert not same_molecule(benzamidine, saturated)
    nitrogen = benzamidine.elements.copy()
    nitrogen[1] = 7
    assert not same_molecule(benzamidine, dataclasses.replace(benzamidine, elements=nitrogen))
    opened = dataclasses.replace(
        benzamidine,
        bonds=benzamidine.bonds[1:],
        bond_orders=benzamidine.bond_orders[1:],
        bond_aromatic=benzamidine.bond_aromatic[1:],
    )
    assert not same_molecule(opened, benzamidine)
    assert not agrees(opened, benzamidine) and not agrees(benzamidine, opened)
    stretched = opened.ideal.copy()
    stretched[benzamidine.bonds[0, 0]] += 5
    assert agrees(dataclasses.replace(opened, model=stretched), benzamidine)


def test_the_digest_tells_isomers_apart_in_any_order() -> None:
    rng = np.random.default_rng(0)
    digests = set()
    for code in ("STI", "ATP", "BEN", "CIT", "NAG"):
        part = known(code)
        order = rng.permutation(len(part))
        moved = np.argsort(order)[part.bonds]
        digest = graph_digest(part.elements, part.bonds)
        assert digest == graph_digest(part.elements[order], moved)
        digests.add(digest)
    chain = np.array([[i, i + 1] for i in range(5)])
    branched = np.array([[0, 1], [1, 2], [2, 3], [3, 4], [1, 5]])
    carbons = np.full(6, 6)
    digests |= {graph_digest(carbons, chain), graph_digest(carbons, branched)}
    assert len(digests) == 7
