"""Writing: what is written reads back to the same tables, by tpf and by other readers."""

from __future__ import annotations

import dataclasses
import gzip
from pathlib import Path

import gemmi
import numpy as np
import pytest
from cif_text import cif, peptide, polymer, residue, write

from tpf.data.ccd import Dictionary, component_of
from tpf.data.load import load_tables
from tpf.data.tables import Tables
from tpf.data.write import write_mmcif
from tpf.errors import UsageError

CODES = ["ALA", "GLY", "SEP", "CYS", "VAL", "TRP"]


def differences(a: Tables, b: Tables) -> list[str]:
    """Return the names of the fields that differ, notes aside."""
    names = []
    for field in dataclasses.fields(a):
        left, right = getattr(a, field.name), getattr(b, field.name)
        if isinstance(left, np.ndarray):
            same = left.dtype.kind == right.dtype.kind and np.array_equal(
                left, right, equal_nan=left.dtype.kind == "f"
            )
        else:
            same = left == right
        if not same and field.name != "notes":
            names.append(field.name)
    return names


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    rows = [row for row in peptide("A", CODES) if row["label_seq_id"] not in (1, 6)]
    for row in rows:
        if row["label_seq_id"] == 3:
            row.update(auth_seq_id=52, pdbx_PDB_ins_code="A")
    rows += residue("ATP", "B", ".", (0, 60, 0)) + residue("ZN", "C", ".", (0, 40, 0), occupancy=0)
    ligand = residue("BEN", "D", ".", (0, 90, 0))
    rows += [row | {"label_comp_id": "LIG"} for row in ligand]
    extra = (
        polymer("A", CODES)
        + """
_exptl.method 'ELECTRON MICROSCOPY'
_em_3d_reconstruction.resolution 3.25
_pdbx_audit_revision_history.revision_date 2020-01-31
"""
    )
    return load_tables(write(tmp_path, cif(rows, extra)))


@pytest.mark.parametrize("name", ["out.cif", "out.cif.gz"])
def test_round_trip(tmp_path: Path, tables: Tables, name: str) -> None:
    text = write_mmcif(tmp_path / name, tables)
    data = (tmp_path / name).read_bytes()
    assert (gzip.decompress(data) if name.endswith("gz") else data).decode() == text
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([name, "test.cif"])
    assert differences(tables, load_tables(tmp_path / name)) == []


def test_other_readers_see_the_same(tables: Tables) -> None:
    text = write_mmcif(None, tables)
    st = gemmi.make_structure_from_block(gemmi.cif.read_string(text)[0])
    st.setup_entities()
    assert [e.entity_type.name for e in st.entities] == [
        "Polymer", "NonPolymer", "NonPolymer", "NonPolymer",
    ]  # fmt: skip
    assert st.entities[0].full_sequence == CODES
    seen = [a for chain in st[0] for r in chain for a in r if np.isfinite(a.pos.x)]
    assert len(seen) == int((tables.occupancy > 0).sum())
    assert st.resolution == 3.25
    residue_52 = next(r for r in st[0]["A"] if r.name == "SEP")
    assert (residue_52.seqid.num, residue_52.seqid.icode, residue_52.label_seq) == (52, "A", 3)


def test_prediction(tmp_path: Path, tables: Tables) -> None:
    rng = np.random.default_rng(0)
    positions = rng.normal(size=(len(tables.pos), 3)) * 20
    positions[3] = np.nan
    plddt = rng.uniform(0, 100, len(tables.pos))
    write_mmcif(tmp_path / "p.cif", tables, positions, plddt)
    back = load_tables(tmp_path / "p.cif", filters=False)
    assert back.atom_name.tolist() == tables.atom_name.tolist()
    assert np.isnan(back.pos[3]).all()
    seen = np.arange(len(positions)) != 3
    np.testing.assert_allclose(back.pos[seen], positions[seen], atol=6e-4)
    np.testing.assert_allclose(back.b_factor[seen], plddt[seen], atol=6e-4)
    assert (back.occupancy[seen] == 1).all()


def test_wrong_shapes_are_refused(tmp_path: Path, tables: Tables) -> None:
    with pytest.raises(UsageError, match="positions have shape"):
        write_mmcif(None, tables, np.zeros((2, 3)))
    with pytest.raises(UsageError, match="b_factors have shape"):
        write_mmcif(None, tables, None, np.zeros(2))
    with pytest.raises(UsageError, match="cannot write"):
        write_mmcif(tmp_path / "absent" / "x.cif", tables)
    assert not (tmp_path / "absent").exists()


def test_given_components_take_precedence_over_the_dictionary(
    tmp_path: Path, tables: Tables
) -> None:
    own = component_of(tables, len(tables.res_name) - 1)
    assert own.code == "LIG" and len(own) == 9 and len(own.bonds) == 9
    known = Dictionary().get("LIG")
    assert known is not None and len(known) != 9
    renamed = dataclasses.replace(own, bond_orders=np.full(9, 2, dtype=np.int32))
    write_mmcif(tmp_path / "c.cif", tables, components={"LIG": renamed})
    back = load_tables(tmp_path / "c.cif")
    assert set(back.bond_order[-9:].tolist()) == {2}
    assert any("LIG is the file's own" in note for note in back.notes)


def test_components_of_links_charges_and_aromatic_bonds_survive(
    tmp_path: Path, tables: Tables
) -> None:
    aromatic = tables.bond_order.copy()
    aromatic[-9:] = 4
    charge = tables.charge.copy()
    charge[-1] = 1
    edited = dataclasses.replace(tables, bond_order=aromatic, charge=charge)
    write_mmcif(tmp_path / "a.cif", edited)
    assert differences(edited, load_tables(tmp_path / "a.cif")) == []
