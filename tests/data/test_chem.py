"""The constant tables against the Chemical Component Dictionary and gemmi."""

from __future__ import annotations

from pathlib import Path

import gemmi
import pytest
from gemmi import cif

from tpf.data import chem
from tpf.data.ccd import Dictionary
from tpf.data.tables import DNA, PROTEIN, RNA


@pytest.fixture(scope="module")
def wwpdb() -> dict[str, cif.Block]:
    path = Path(__file__).resolve().parents[3] / "shared" / "data" / "ccd" / "ccd_subset.cif.gz"
    if not path.is_file():
        pytest.skip("the folder shared/data is not beside the repository")
    return {block.name: block for block in cif.read(str(path))}


def test_alphabet_has_32_residues_in_the_order_of_the_specification() -> None:
    assert len(chem.RESIDUES) == 32
    assert chem.RESIDUES.index("VAL") == 19
    assert chem.UNKNOWN == 20
    assert chem.RESIDUES[21:26] == ("A", "G", "C", "U", "N")
    assert chem.RESIDUES[26:31] == ("DA", "DG", "DC", "DT", "DN")
    assert chem.GAP == 31
    assert set(chem.ATOMS) == set(chem.RESIDUES[:31]) == set(chem.ONE_LETTER)


@pytest.mark.parametrize("code", chem.ATOMS)
def test_standard_residue_is_as_in_the_dictionary(code: str, wwpdb: dict[str, cif.Block]) -> None:
    block = wwpdb[code]
    table = block.find("_chem_comp_atom.", ["atom_id", "type_symbol", "charge"])
    heavy = [(cif.as_string(n), e, int(c)) for n, e, c in table if e not in ("H", "D")]
    inside = tuple(n for n, _, _ in heavy if n not in chem.TERMINAL_ATOMS)
    assert chem.ATOMS[code] == inside
    component = Dictionary().get(code)
    assert component is not None
    assert component.atom_names.tolist() == [n for n, _, _ in heavy]
    assert component.elements.tolist() == [gemmi.Element(e).atomic_number for _, e, _ in heavy]
    assert component.charges.tolist() == [c for _, _, c in heavy]
    bonds = block.find("_chem_comp_bond.", ["atom_id_1", "atom_id_2", "value_order"])
    names = {n for n, _, _ in heavy}
    expected = {
        (frozenset((cif.as_string(a), cif.as_string(b))), {"SING": 1, "DOUB": 2, "TRIP": 3}[o])
        for a, b, o in bonds
        if cif.as_string(a) in names and cif.as_string(b) in names
    }
    found = {
        (frozenset(component.atom_names[pair].tolist()), int(order))
        for pair, order in zip(component.bonds, component.bond_orders, strict=True)
    }
    assert found == expected


def test_elements_are_those_of_the_periodic_table() -> None:
    assert len(chem.ELEMENTS) == 119
    for z, symbol in enumerate(chem.ELEMENTS):
        assert z == 0 or gemmi.Element(symbol).atomic_number == z
    assert chem.atomic_number("Se") == 34
    assert chem.atomic_number("D") == 1
    assert chem.atomic_number("?") == 0


def test_representative_and_center_atoms_exist() -> None:
    for code, atoms in chem.ATOMS.items():
        assert chem.center_atom(code) in atoms
        assert chem.representative_atom(code) in atoms
        assert len(atoms) <= chem.MAX_TOKEN_ATOMS
    assert chem.representative_atom("GLY") == "CA"
    assert chem.representative_atom("UNK") == "CB"
    assert [chem.representative_atom(c) for c in ("A", "DG", "U", "DT")] == ["C4", "C4", "C2", "C2"]
    assert max(map(len, chem.ATOMS.values())) == chem.MAX_TOKEN_ATOMS


def test_molecule_types() -> None:
    assert [chem.molecule_type(c) for c in ("ALA", "UNK", "A", "N", "DA", "DN")] == [
        PROTEIN, PROTEIN, RNA, RNA, DNA, DNA,
    ]  # fmt: skip
    with pytest.raises(KeyError):
        chem.molecule_type("HEM")


def test_covalent_radii_against_gemmi() -> None:
    for z, radius in chem.COVALENT_RADIUS.items():
        assert radius == pytest.approx(gemmi.Element(chem.ELEMENTS[z]).covalent_r, abs=0.12)
