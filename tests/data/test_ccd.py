"""Component look-up: order of sources, reading formats, the on-disk index, inference."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path

import numpy as np
import pytest

from tpf.data import ccd, ccd_index
from tpf.data.ccd import Dictionary
from tpf.errors import UsageError

USER = """\
data_ALA
_chem_comp.id ALA
_chem_comp.name "not alanine"
_chem_comp.type "L-PEPTIDE LINKING"
_chem_comp.pdbx_initial_date 2020-02-02
loop_
_chem_comp_atom.comp_id
_chem_comp_atom.atom_id
_chem_comp_atom.type_symbol
_chem_comp_atom.charge
_chem_comp_atom.pdbx_aromatic_flag
_chem_comp_atom.pdbx_leaving_atom_flag
_chem_comp_atom.pdbx_model_Cartn_x_ideal
_chem_comp_atom.pdbx_model_Cartn_y_ideal
_chem_comp_atom.pdbx_model_Cartn_z_ideal
ALA N  N 1 N N 0.0 0.0 0.0
ALA H  H 0 N Y 0.0 1.0 0.0
ALA CL Cl -1 Y Y 1.5 0.0 ?
loop_
_chem_comp_bond.comp_id
_chem_comp_bond.atom_id_1
_chem_comp_bond.atom_id_2
_chem_comp_bond.value_order
_chem_comp_bond.pdbx_aromatic_flag
ALA CL N  DOUB N
ALA H  N  SING N

data_ZZ9
_chem_comp.id ZZ9
loop_
_chem_comp_atom.comp_id
_chem_comp_atom.atom_id
_chem_comp_atom.type_symbol
ZZ9 FE FE
"""


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TPF_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "user.cif"
    path.write_text(USER)
    return path


def _check_user(dictionary: Dictionary) -> None:
    ala = dictionary.get("ALA")
    assert ala is not None
    assert ala.name == "not alanine"
    assert ala.atom_names.tolist() == ["N", "CL"]
    assert ala.elements.tolist() == [7, 17]
    assert ala.charges.tolist() == [1, -1]
    assert ala.leaving.tolist() == [False, True]
    assert ala.aromatic.tolist() == [False, True]
    assert ala.bonds.tolist() == [[0, 1]]
    assert ala.bond_orders.tolist() == [2]
    assert ala.date == "2020-02-02"
    np.testing.assert_array_equal(ala.ideal, np.float32([[0, 0, 0], [1.5, 0, np.nan]]))
    assert np.isnan(ala.model).all()
    iron = dictionary.get("ZZ9")
    assert iron is not None
    assert iron.elements.tolist() == [26]
    assert iron.bonds.shape == (0, 2)
    glycine = dictionary.get("GLY")
    assert glycine is not None and glycine.name == "GLYCINE"


def test_user_dictionary_comes_before_the_subset(user: Path) -> None:
    _check_user(Dictionary(str(user)))


def test_user_dictionary_compressed(user: Path) -> None:
    packed = user.with_name("packed.cif.gz")
    packed.write_bytes(gzip.compress(USER.encode()))
    _check_user(Dictionary(str(packed)))


def test_large_user_dictionary_is_indexed_once(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ccd, "LARGE_DICTIONARY", 10)
    _check_user(Dictionary(str(user.rename(user.with_name("large.cif")))))
    (folder,) = (user.parent / "cache" / "ccd").iterdir()
    assert sorted(p.name for p in folder.iterdir()) == ["atoms.npy", "bonds.npy", "codes.npy"]


def test_index_without_a_writable_cache_stays_in_memory(
    user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocker = user.with_name("file")
    blocker.write_text("")
    monkeypatch.setenv("TPF_CACHE", str(blocker))
    index = ccd_index.of_file(user)
    record = index.get("ZZ9")
    assert record is not None and record.atoms["element"].tolist() == [26]
    assert index.get("AAA") is None
    assert index.get("ZZZ") is None


def test_own_definitions_come_first_and_survive_pickling(user: Path) -> None:
    zinc = Dictionary().get("ZN")
    assert zinc is not None
    dictionary = Dictionary(str(user)).with_own({"ALA": zinc})
    assert dictionary.get("ALA") is zinc
    copy = pickle.loads(pickle.dumps(dictionary))
    found = copy.get("ALA")
    assert found is not None and found.atom_names.tolist() == ["ZN"]


@pytest.mark.parametrize("text", ["data_x\n_a.b c\n", "loop_ nothing"])
def test_unusable_user_dictionary_is_a_usage_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / f"bad{len(text)}.cif"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"data\.ccd is"):
        Dictionary(str(path)).get("QQQ")
    with pytest.raises(UsageError, match="no such file"):
        Dictionary(str(tmp_path / "absent.cif")).get("QQQ")


def test_subset_has_all_components_of_the_real_entries(shared_data: Path) -> None:
    from gemmi import cif

    dictionary = ccd._subset_blocks()
    for block in cif.read(str(shared_data / "ccd" / "ccd_subset.cif.gz")):
        assert block.name in dictionary


def test_components_have_unique_sorted_bonds() -> None:
    for code in ccd._subset_blocks():
        part = Dictionary().get(code)
        if part is None:
            assert code == "UNL"
            continue
        n = len(part)
        assert part.ideal.shape == part.model.shape == (n, 3)
        assert len({*part.atom_names.tolist()}) == n
        assert (part.elements != 1).all()
        pairs = part.bonds.tolist()
        assert pairs == sorted(pairs)
        assert all(0 <= i < j < n for i, j in pairs)
        assert len(part.bond_orders) == len(part.bond_aromatic) == len(pairs)


@pytest.mark.slow
def test_installed_dictionary_against_the_subset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("biotite")
    monkeypatch.setenv("TPF_CACHE", str(tmp_path))
    ccd._installed_source.cache_clear()
    index = ccd._installed_source()
    assert index is not None and len(index.codes) > 40_000
    for code in ("ALA", "ATP", "HEM", "STI", "DG", "NAG"):
        ours, theirs = Dictionary().get(code), ccd._from_index(index, code)
        assert ours is not None and theirs is not None
        assert ours.atom_names.tolist() == theirs.atom_names.tolist()
        np.testing.assert_array_equal(ours.bonds, theirs.bonds)
        np.testing.assert_array_equal(ours.bond_orders, theirs.bond_orders)
        np.testing.assert_allclose(ours.ideal, theirs.ideal, atol=1e-3)
    ccd._installed_source.cache_clear()
