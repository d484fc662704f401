"""Own ligands joined with a protein: poses, SMILES, covalent bonds, PDB files, wrong input."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from joined import KINASE, SMALL, make, put, residue_of
from poses import EXAMPLES, analog, posed_ligand, sdf

from tpf.data.ccd import Dictionary
from tpf.data.check import check_file
from tpf.data.conformers import Conformers, rdkit_molecule
from tpf.data.identity import same_molecule
from tpf.data.ligands import define_ligand
from tpf.data.load import load_tables
from tpf.data.tables import LIGAND
from tpf.data.tokens import tokenize
from tpf.errors import DataError, TpfError, UsageError


def test_an_analog_takes_the_place_of_the_ligand(kinase: Path) -> None:
    row = check_file(kinase)
    assert row.ok and row.id == "src-analog" and row.ligand_chains == 1
    before = load_tables(KINASE)
    tables = load_tables(kinase)
    part, pos = analog(KINASE, "MPZ")
    own = residue_of(tables, "LIG")
    np.testing.assert_allclose(tables.pos[own], pos, atol=2e-3)
    assert tables.element[own].tolist() == part.elements.tolist()
    inside = tables.bonds[np.isin(tables.bonds, own).all(axis=1)] - own[0]
    assert inside.tolist() == part.bonds.tolist()
    protein = before.chain_type[before.res_chain[before.atom_residue]] != LIGAND
    np.testing.assert_array_equal(before.pos[protein], tables.pos[: protein.sum()])
    assert (before.release_date, before.method) == (tables.release_date, tables.method)
    assert any("LIG is the file's own; LIG of the dictionary is another" in n for n in tables.notes)


def test_a_smiles_is_placed_on_the_most_similar_ligand(tmp_path: Path) -> None:
    pytest.importorskip("rdkit")
    part, pos = posed_ligand(KINASE, "MPZ")
    smiles = "CC1CN(CCO1)Cc1ccc(cc1)C(=O)Nc1cccc(c1)Nc1nccc(n1)-c1cccnc1"
    result = make(tmp_path, KINASE, smiles, names=("DRG",))
    assert result.replaced == ("MPZ of chain A",)
    assert "placed on MPZ" in result.notes[0]
    tables = load_tables(result.out)
    own = residue_of(tables, "DRG")
    definition = define_ligand(smiles).component
    assert len(own) == len(definition)
    near = np.linalg.norm(tables.pos[own][:, None] - pos[None], axis=-1).min(axis=1)
    assert (near < 0.6).sum() >= 30
    bonds = tables.bonds[np.isin(tables.bonds, own).all(axis=1)]
    length = np.linalg.norm(tables.pos[bonds[:, 0]] - tables.pos[bonds[:, 1]], axis=1)
    assert length.min() > 1.1 and length.max() < 1.75
    others = np.setdiff1d(np.flatnonzero(np.isfinite(tables.pos).all(axis=1)), own)
    gap = np.linalg.norm(tables.pos[own][:, None] - tables.pos[others][None], axis=-1)
    assert (gap < 2.2).sum() == 0
    assert "stereo" in " ".join(result.notes)  # the morpholine's methyl group


def test_placing_is_repeatable(tmp_path: Path) -> None:
    pytest.importorskip("rdkit")
    chem = pytest.importorskip("rdkit.Chem")
    part, _ = posed_ligand(SMALL, "ZYB")
    smiles = chem.MolToSmiles(chem.RemoveHs(rdkit_molecule(part))).replace("F", "Cl")
    files = [make(tmp_path, SMALL, smiles, out=f"{k}.cif").out for k in (1, 2)]
    first, second = (load_tables(file) for file in files)
    np.testing.assert_array_equal(first.pos, second.pos)
    assert 17 in first.element.tolist()


def test_pdb_files_and_chains(tmp_path: Path) -> None:
    import gemmi

    structure = gemmi.read_structure(str(KINASE))
    structure.setup_entities()
    structure[0].add_chain(structure[0][0], pos=-1, unique_name=True)
    structure.write_pdb(str(tmp_path / "p.pdb"))
    pose = put(tmp_path, "p.sdf", sdf(*analog(KINASE, "MPZ")))
    result = make(tmp_path, tmp_path / "p.pdb", pose, chains=("A",))
    tables, before = load_tables(result.out), load_tables(KINASE)
    resolved = before.chain_type[before.res_chain] != LIGAND
    seen = np.isin(np.arange(len(resolved)), before.atom_residue[before.occupancy > 0])
    assert tables.res_name[:-1].tolist() == before.res_name[resolved & seen].tolist()
    assert tables.auth_chain.tolist() == ["A", "A"] and tables.res_name[-1] == "LIG"
    with pytest.raises(UsageError, match="no polymer chain Q .it has A, B"):
        make(tmp_path, tmp_path / "p.pdb", pose, chains=("Q",))
    (tmp_path / "bad.pdb").write_text("REMARK nothing\n")
    with pytest.raises(DataError, match="no atoms in the PDB format"):
        make(tmp_path, tmp_path / "bad.pdb", pose)


def test_a_covalent_pose_is_bonded(tmp_path: Path) -> None:
    tables = load_tables(KINASE)
    protein = tables.pos[np.isfinite(tables.pos).all(axis=1)]
    part, _ = posed_ligand(SMALL, "MOH")
    grid = np.random.default_rng(0).standard_normal((200, 3))
    best = (0.0, grid[0], 0)
    for atom in np.flatnonzero((tables.atom_name == "SG") & (tables.occupancy > 0)).tolist():
        for way in grid / np.linalg.norm(grid, axis=1, keepdims=True):
            end = tables.pos[atom] + 3.0 * way
            room = float(np.linalg.norm(protein - end, axis=1).min())
            best = max(best, (room, way, atom), key=lambda item: item[0])
    _, way, atom = best
    pose = np.array([tables.pos[atom] + 1.8 * way, tables.pos[atom] + 3.2 * way])
    result = make(tmp_path, KINASE, put(tmp_path, "c.sdf", sdf(part, pose)))
    assert any("LIG is bonded to SG of CYS" in note for note in result.notes)
    tokens = tokenize(load_tables(result.out))
    cysteine = tokens.tables.res_name[tokens.residue] == "CYS"
    assert (tokens.atomized & cysteine).sum() == 6


def moved(shift: float) -> str:
    part, pos = posed_ligand(SMALL, "ZYB")
    return sdf(part, pos + shift)


def buried() -> str:
    """A pose in the middle of the protein's most crowded place."""
    part, pos = posed_ligand(SMALL, "ZYB")
    tables = load_tables(SMALL)
    protein = tables.pos[np.isfinite(tables.pos).all(axis=1) & (tables.element > 1)]
    distance = np.linalg.norm(protein[:, None] - protein[None], axis=-1)
    return sdf(part, pos - pos.mean(0) + protein[np.argmax((distance < 6).sum(1))])


@pytest.mark.parametrize(
    ("text", "more", "error", "message"),
    [
        (moved(80.0), {}, DataError, "Angstrom from the protein; is the frame the same"),
        (buried(), {}, DataError, "overlap the protein; training would drop it"),
        (moved(0.0), {"chains": ("Q",)}, UsageError, "no polymer chain Q .it has A"),
        (moved(0.0), {"names": ("LIG", "DRG")}, UsageError, "2 names for 1 ligands"),
        (moved(0.0), {"names": ("GLY",)}, UsageError, "no ligand's name"),
        (moved(0.0), {"templates": ("ZYB",)}, UsageError, "no SMILES left"),
        (moved(0.0), {"protein": Path("absent.cif")}, UsageError, "no such file"),
        (moved(0.0), {"protein": Path(__file__)}, DataError, "not valid CIF"),
        ("CCO", {}, DataError, "shares . atoms? with ZYB"),
        ("CCO", {"templates": ("ATP",)}, DataError, "no ligand ATP to place it on"),
        ("CCO", {"templates": ("A:B:C:D",)}, UsageError, "write CODE, CHAIN:CODE"),
        ("CCO", {"protein": EXAMPLES / "1ubq.cif.gz"}, DataError, "no ligand to place it on"),
    ],
)
def test_wrong_input_is_one_clear_line(
    tmp_path: Path, text: str, more: dict[str, object], error: type[TpfError], message: str
) -> None:
    if "\n" not in text:
        pytest.importorskip("rdkit")
    ligand = put(tmp_path, "p.sdf", text) if "\n" in text else text
    protein = more.pop("protein", SMALL) if "protein" in more else SMALL
    with pytest.raises(error, match=message) as caught:
        make(tmp_path, Path(str(protein)), ligand, **more)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "x.cif").exists()


def test_kinase_entries(tmp_path: Path, shared_data: Path) -> None:
    """Analogs from SDF under the name LIG in kinases of several families."""
    for name in ("7opg", "8aem"):
        path = shared_data / "kinase" / f"{name}.cif.gz"
        tables = load_tables(path)
        sizes = np.bincount(tables.atom_residue)
        ligands = [r for r in np.flatnonzero(~tables.res_standard).tolist() if sizes[r] > 12]
        code = str(tables.res_name[ligands[0]])
        part, pos = analog(path, code)
        chain = str(tables.auth_chain[tables.res_chain[tables.res_name == code][0]])
        pose = put(tmp_path, f"{name}.sdf", sdf(part, pos))
        result = make(tmp_path, path, pose, out=f"{name}.cif", chains=(chain,))
        assert result.replaced == (f"{code} of chain {chain}",)
        row = check_file(result.out)
        assert row.ok and row.tokens[LIGAND] >= len(part)
        found = load_tables(result.out)
        own = residue_of(found, "LIG")
        assert len(own) == len(part)
        shown = Conformers(Dictionary()).component(found, int(found.atom_residue[own[0]]), own)
        renamed = dataclasses.replace(shown, atom_names=part.atom_names)
        assert same_molecule(renamed, dataclasses.replace(part, charges=shown.charges))
