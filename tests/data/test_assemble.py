"""Own ligands: joined with a protein, read back as what they are, never mixed up by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cif_text import SEQUENCE, cif, peptide, polymer, residue, write
from poses import EXAMPLES, analog, ends, posed_ligand, sdf, without
from sample_features import features_of

from tpf.config import DataConfig
from tpf.data.assemble import Assembled, Order, assemble
from tpf.data.assemble_table import Row, assemble_table
from tpf.data.ccd import Dictionary
from tpf.data.check import check_file
from tpf.data.conformers import Conformers, rdkit_molecule
from tpf.data.identity import graph_digest, same_molecule
from tpf.data.ligands import define_ligand
from tpf.data.load import load_tables
from tpf.data.records import Entries
from tpf.data.tables import LIGAND, Tables
from tpf.data.tokens import tokenize
from tpf.errors import DataError, TpfError, UsageError

KINASE = EXAMPLES / "1y57.cif.gz"
SMALL = EXAMPLES / "4cup.cif.gz"
FAR = (0.0, 60.0, 0.0)
FLUORINE = 9


def put(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def make(
    folder: Path, protein: Path, *ligands: str, out: str = "x.cif", **more: object
) -> Assembled:
    order = Order(protein=protein, ligands=ligands, out=folder / out, **more)  # type: ignore[arg-type]
    return assemble(order)


def residue_of(tables: Tables, code: str) -> np.ndarray:
    (found,) = np.flatnonzero(tables.res_name == code)
    return np.flatnonzero(tables.atom_residue == found)


@pytest.fixture(scope="module")
def kinase(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SRC whose inhibitor is replaced by an analog without a methyl group, under the name LIG."""
    folder = tmp_path_factory.mktemp("kinase")
    pose = put(folder, "analog.sdf", sdf(*analog(KINASE, "MPZ")))
    result = make(folder, KINASE, pose, out="src-analog.cif.gz")
    assert result.ligands == ("LIG",) and result.replaced == ("MPZ of chain A",)
    return result.out


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


def test_the_analog_has_its_own_symmetry_and_conformer(kinase: Path) -> None:
    chem = pytest.importorskip("rdkit.Chem")
    tokens = tokenize(load_tables(kinase))
    own = residue_of(tokens.tables, "LIG")
    crop = np.flatnonzero(np.isin(tokens.start_atom, own))
    features = features_of(tokens, crop, config=DataConfig(max_templates=0))
    assert features["ref_mask"].all()
    (orders,) = features["ref_space_uid_to_perm"].values()
    part, _ = analog(KINASE, "MPZ")
    plain = chem.RWMol()
    for z in part.elements.tolist():
        plain.AddAtom(chem.Atom(int(z)))
    for (i, j), aromatic in zip(part.bonds.tolist(), part.bond_aromatic.tolist(), strict=True):
        plain.AddBond(i, j, chem.BondType.AROMATIC if aromatic else chem.BondType.SINGLE)
    expected = plain.GetSubstructMatches(plain, uniquify=False, maxMatches=1000)
    assert len(orders) == len(expected) > 1
    assert {tuple(order) for order in orders.tolist()} == set(expected)


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


def test_a_table_goes_on_where_it_stopped(tmp_path: Path) -> None:
    part, pos = posed_ligand(SMALL, "ZYB")
    lighter = without(part, pos, ends(part, FLUORINE)[0])
    put(tmp_path, "series.sdf", sdf(part, pos, "one") + sdf(*lighter, "two"))
    rows = [
        f"{SMALL},series.sdf#one,first,",
        f"{SMALL},series.sdf#2,second,DRG",
        f"{SMALL},series.sdf#three,third,",
        f"{SMALL},series.sdf#1,first,",
        "absent.cif,series.sdf#1,,",
        f"{SMALL},,fifth,",
    ]
    table, out = tmp_path / "t.csv", tmp_path / "out"

    def go(lines: list[str]) -> list[Row | None]:
        table.write_text("\n".join(["Protein,ligand,id,name", *lines]) + "\n")
        return list(assemble_table(table, out))

    table.write_text("\n".join(["protein,ligand,id,name", *rows]) + "\n")
    running = assemble_table(table, out)
    first = next(running)
    running.close()  # as by an interruption
    assert first is not None and first.file == "first.cif.gz" and first.ligands == ("LIG",)
    stamp = (out / "first.cif.gz").stat().st_mtime_ns
    results = go(rows)
    assert results[0] is None and len(results) == len(rows)
    made = [row for row in results if row is not None]
    assert [row.id for row in made if row.file] == ["second"]
    assert made[0].ligands == ("DRG",)
    reasons = {row.row: f"{row.stage}: {row.reason}" for row in made if not row.file}
    assert reasons.keys() == {3, 4, 5, 6}
    assert "has no molecule three" in reasons[3] and "earlier row" in reasons[4]
    assert "no such file" in reasons[5] and "no ligand" in reasons[6]
    assert (out / "first.cif.gz").stat().st_mtime_ns == stamp
    lines = (out / "index-1-of-1.jsonl").read_text().splitlines()
    assert all(json.loads(line)["id"] for line in lines)
    # a changed row is made anew, and leaves no old file behind if it fails now
    changed = go([rows[0].replace("#one", "#two"), rows[1].replace("#2", "#9")])
    assert [bool(row and row.file) for row in changed] == [True, False]
    assert sorted(p.name for p in out.glob("*.cif.gz")) == ["first.cif.gz"]
    assert len(residue_of(load_tables(out / "first.cif.gz"), "LIG")) == len(part) - 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("protein,smiles\na,b\n", "no column ligand"),
        ("protein,ligand\n", "no rows"),
        (None, "no such"),
    ],
)
def test_a_wrong_table_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    table = tmp_path / "t.csv"
    if text is not None:
        table.write_text(text)
    with pytest.raises(UsageError, match=message):
        list(assemble_table(table, tmp_path / "out"))


def test_what_is_no_fault_of_the_rows(tmp_path: Path) -> None:
    table, out = tmp_path / "t.csv", tmp_path / "out"
    table.write_text("protein,ligand,id\nnone.cif,CCO,a\nnone.cif,CCO,a\n")
    with pytest.raises(UsageError, match="data.ccd is none; no such file"):
        list(assemble_table(table, out, ccd="none"))
    with pytest.raises(UsageError, match="cannot make the folder"):
        list(assemble_table(table, table))
    out.mkdir()
    (out / "index-1-of-1.jsonl").write_text('rubbish\n{"id": "b", "file": ""}\n')
    with pytest.raises(UsageError, match="line 1 is damaged"):
        list(assemble_table(table, out))


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


RECIPE = [
    "train.diffusion_samples=2",
    "train.rollout_steps=2",
    "validate.samples=1",
    "validate.sampling_steps=2",
    "validate.recycles=0",
    "validate.extras=true",
]


def trained(folder: Path, out: Path, *overrides: str) -> dict[str, Any]:
    """Train the tiny preset on a folder; return what the last validation wrote."""
    from tpf.cli.display import Silent
    from tpf.config import load
    from tpf.train import Options, train

    config = load("tiny", [f"data.path={folder}", *RECIPE, *overrides])
    train(config, Options(out), Silent())
    last = out / "validation" / f"step-{config.train.steps:06d}" / "metrics.json"
    result: dict[str, Any] = json.loads(last.read_text())
    return result


def test_training_and_validation_take_the_new_ligand(tmp_path: Path) -> None:
    pose = put(tmp_path, "p.sdf", sdf(*posed_ligand(SMALL, "ZYB")))
    folder = tmp_path / "data"
    folder.mkdir()
    make(folder, SMALL, pose, out="brd-analog.cif", names=("DRG",))
    result = trained(folder, tmp_path / "run", "train.steps=2", "data.crop=32")
    (target,) = result["targets"]
    assert target["id"] == "brd-analog" and not result["skipped"]
    ligand = next(row for row in target["ligands"] if row["component"] == "DRG")
    assert np.isfinite(ligand["rmsd"]).all()
    predicted = next((tmp_path / "run" / "validation").rglob("brd-analog*.cif"))
    assert "DRG" in load_tables(predicted, filters=False).res_name.tolist()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_kinase_series_is_trained_on_and_validated(tmp_path: Path, kinase: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / kinase.name).write_bytes(kinase.read_bytes())
    smiles = "CC1CN(CCO1)Cc1ccc(cc1)C(=O)Nc1cccc(c1)Nc1nccc(n1)-c1cccnc1"
    make(folder, KINASE, smiles, out="src-morpholine.cif.gz")  # another molecule called LIG
    overrides = ("train.steps=20", "data.crop=64", "validate.max_tokens=512")
    result = trained(folder, tmp_path / "run", *overrides)
    assert [target["id"] for target in result["targets"]] == ["src-analog", "src-morpholine"]
    for target in result["targets"]:
        (ligand,) = target["ligands"]
        assert ligand["component"] == "LIG" and np.isfinite(ligand["rmsd"]).all()
