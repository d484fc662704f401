"""The feature table."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import pytest
from assemblies import make_tables, make_tokens
from sample_features import CONFIG, PEPTIDE, features_of

from tpf.config import DataConfig, LossConfig
from tpf.data.cache import read
from tpf.data.chem import ATOMS, GAP, RESTYPE
from tpf.data.crop import crop
from tpf.data.records import data_files
from tpf.data.tables import PROTEIN, Tokens


def test_table_of_features(mixed: Tokens, mixed_features: dict[str, Any]) -> None:
    n, t, m = len(mixed), 2, 1
    a = int(mixed.num_atoms.sum())
    i32, f32 = np.int32, np.float32
    expected: dict[str, tuple[tuple[int, ...], type]] = {
        **{
            name: ((n,), i32)
            for name in (
                "residue_index", "token_index", "asym_id", "entity_id", "sym_id", "is_protein",
                "is_rna", "is_dna", "is_ligand", "is_atomized", "num_atoms_per_token",
                "start_atom_index", "mol_entity_id", "mol_sym_id", "mol_sym_component_id",
                "mol_sym_token_index", "center_atom_index", "rep_atom_index", "mol_type",
            )
        },
        "restype": ((n, 32), i32),
        "token_mask": ((n,), f32),
        "token_bonds": ((n, n), i32),
        "atom_to_token_index": ((a,), i32),
        "atom_mask": ((a,), f32),
        "cyclic_mask": ((n,), np.bool_),
        "ref_pos": ((a, 3), f32),
        "ref_mask": ((a,), i32),
        "ref_element": ((a, 119), i32),
        "ref_charge": ((a,), f32),
        "ref_atom_name_chars": ((a, 4, 64), i32),
        "ref_space_uid": ((a,), i32),
        "msa": ((m, n, 32), i32),
        "has_deletion": ((m, n), f32),
        "deletion_value": ((m, n), f32),
        "profile": ((n, 32), f32),
        "deletion_mean": ((n,), f32),
        "msa_mask": ((m, n), f32),
        "num_paired_seqs": ((1,), i32),
        "template_restype": ((t, n, 32), i32),
        "template_pseudo_beta_mask": ((t, n), f32),
        "template_backbone_frame_mask": ((t, n), f32),
        "template_distogram": ((t, n, n, 39), f32),
        "template_unit_vector": ((t, n, n, 3), f32),
        "resolution": ((), f32),
    }  # fmt: skip
    nested = {"id", "ground_truth", "loss_weights", "ref_space_uid_to_perm"}
    assert set(mixed_features) == set(expected) | nested
    for name, (shape, dtype) in expected.items():
        assert mixed_features[name].shape == shape, name
        assert mixed_features[name].dtype == dtype, name
    truth = mixed_features["ground_truth"]
    assert truth["atom_positions"].shape == (a, 3) and truth["atom_positions"].dtype == f32
    assert truth["atom_resolved_mask"].shape == (a,) and truth["atom_resolved_mask"].dtype == f32
    for value in mixed_features["ref_space_uid_to_perm"].values():
        assert value.dtype == i32 and value.ndim == 2


def test_one_hot_features(mixed: Tokens, mixed_features: dict[str, Any]) -> None:
    f = mixed_features
    for name in ("restype", "ref_element", "ref_atom_name_chars", "msa", "template_restype"):
        assert (f[name].sum(-1) == 1).all(), name
    np.testing.assert_array_equal(f["restype"].argmax(-1), mixed.restype)
    assert f["restype"][0].argmax() == RESTYPE["MET"]
    np.testing.assert_array_equal(f["ref_element"].argmax(-1) + 1, mixed.tables.element)
    assert (f["template_restype"][..., GAP] == 1).all()
    np.testing.assert_array_equal(f["msa"][0], f["restype"])
    np.testing.assert_array_equal(f["profile"], f["restype"])


def test_atom_names_are_left_justified(mixed_features: dict[str, Any]) -> None:
    codes = mixed_features["ref_atom_name_chars"].argmax(-1)
    text = ["".join(chr(c + 32) for c in row) for row in codes]
    assert text[:4] == ["N   ", "CA  ", "C   ", "O   "]


def test_unknown_element_is_the_wildcard() -> None:
    tables = make_tables([(PROTEIN, ["ALA", "GLY"])])
    element = tables.element.copy()
    element[1] = 0
    f = features_of(make_tokens(dataclasses.replace(tables, element=element)))
    assert f["ref_element"][1].argmax() == 118


def test_flags(mixed: Tokens, mixed_features: dict[str, Any]) -> None:
    f = mixed_features
    flags = np.stack([f[f"is_{k}"] for k in ("protein", "rna", "dna", "ligand")])
    assert (flags.sum(0) == 1).all()
    modified = np.isin(mixed.tables.res_name[mixed.residue], ["PTR", "CYS"])
    assert f["is_protein"][modified].all() and f["is_atomized"][modified].all()
    assert (f["is_atomized"] >= f["is_ligand"]).all()
    assert f["asym_id"].min() == 1 and f["asym_id"].max() == 5


def test_atoms_lie_in_their_tokens(mixed: Tokens) -> None:
    crop = [0, 3, 4, 9, 20, 21, 25, len(mixed) - 1]
    f = features_of(mixed, crop)
    start, count = f["start_atom_index"], f["num_atoms_per_token"]
    np.testing.assert_array_equal(np.repeat(np.arange(len(crop)), count), f["atom_to_token_index"])
    np.testing.assert_array_equal(np.cumsum(count) - count, start)
    names = np.array(["".join(chr(c + 32) for c in r) for r in f["ref_atom_name_chars"].argmax(-1)])
    for k, token in enumerate(crop):
        atoms = slice(mixed.start_atom[token], mixed.start_atom[token] + mixed.num_atoms[token])
        own = [name.strip() for name in names[start[k] : start[k] + count[k]]]
        assert own == mixed.tables.atom_name[atoms].tolist()
        assert (
            names[f["center_atom_index"][k]].strip()
            == (mixed.tables.atom_name[mixed.center_atom[token]])
        )
        assert (
            names[f["rep_atom_index"][k]].strip() == mixed.tables.atom_name[mixed.rep_atom[token]]
        )
    np.testing.assert_array_equal(f["token_index"], crop)


def test_token_bonds_join_atomized_tokens_only(
    mixed: Tokens, mixed_features: dict[str, Any]
) -> None:
    bonds = mixed_features["token_bonds"]
    np.testing.assert_array_equal(bonds, bonds.T)
    assert (np.diag(bonds) == 0).all()
    i, j = np.nonzero(bonds)
    assert mixed.atomized[i].all() and mixed.atomized[j].all()
    tables = mixed.tables
    owner = {int(a): k for k in range(len(mixed)) for a in [mixed.start_atom[k]]}
    expected = sum(
        int(a) in owner
        and int(b) in owner
        and mixed.atomized[owner[int(a)]]
        and mixed.atomized[owner[int(b)]]
        for a, b in tables.bonds
    )
    assert bonds.sum() == 2 * expected
    names = tables.atom_name[mixed.start_atom]
    link = [(str(names[a]), str(names[b])) for a, b in zip(i, j, strict=True)]
    assert ("SG", "C8") in link  # the covalent ligand


def test_bonds_between_neighbouring_modified_residues_are_left_out() -> None:
    tokens = make_tokens(make_tables([(PROTEIN, ["ALA", "PTR", "PTR", "ALA"])]))
    bonds = features_of(tokens)["token_bonds"]
    residue = tokens.residue
    i, j = np.nonzero(bonds)
    assert len(i) and (residue[i] == residue[j]).all()


def test_equal_generators_give_equal_features(mixed: Tokens) -> None:
    a, b, other = (features_of(mixed, range(10), seed=seed) for seed in (3, 3, 4))
    assert a.keys() == b.keys() and not np.array_equal(a["ref_pos"], other["ref_pos"])
    for name, value in a.items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(value, b[name], err_msg=name)


@pytest.mark.parametrize(
    ("resolution", "trusted"),
    [(2.0, True), (4.0, True), (4.01, False), (0.1, True), (0.05, False), (None, False)],
)
def test_confidence_losses_need_a_trusted_resolution(resolution: float, trusted: bool) -> None:
    tokens = make_tokens(make_tables([(PROTEIN, PEPTIDE)], resolution=resolution))
    f = features_of(tokens, loss=LossConfig(bond=4.0))
    weights = f["loss_weights"]
    assert set(weights) == {
        "bond", "smooth_lddt", "mse", "distogram", "experimentally_resolved", "plddt", "pae", "pde",
    }  # fmt: skip
    assert all(w.shape == (1,) and w.dtype == np.float32 for w in weights.values())
    assert weights["bond"][0] == 4 and weights["mse"][0] == 4
    for name in ("experimentally_resolved", "plddt", "pae", "pde"):
        assert weights[name][0] == pytest.approx(1e-4 if trusted else 0)
    assert np.isnan(f["resolution"]) == (resolution is None)


def test_no_template_rows_on_request() -> None:
    config = dataclasses.replace(CONFIG, max_templates=0)
    f = features_of(make_tokens(make_tables([(PROTEIN, PEPTIDE)])), config=config)
    assert f["template_distogram"].shape == (0, 6, 6, 39)
    assert f["template_restype"].shape == (0, 6, 32)


@pytest.mark.parametrize("name", ["1y57", "2q2k", "4zey", "4cup", "5i55", "3jqh"])
def test_built_in_examples(name: str) -> None:
    """Kinase with an inhibitor, protein with DNA, selenomethionine, ligands, peptides."""
    path = next(p for p in data_files(None) if p.name.startswith(name))
    tokens = read(str(path), None, None).tokens
    f = features_of(tokens, crop(tokens, 200, np.random.default_rng(1)))
    n, a = len(f["token_mask"]), len(f["atom_mask"])
    assert (f["ref_mask"] == 1).all() and np.isfinite(f["ref_pos"]).all()
    assert f["num_atoms_per_token"].sum() == a and f["num_atoms_per_token"].max() <= 23
    assert f["atom_to_token_index"].tolist() == sorted(f["atom_to_token_index"])
    assert (f["num_atoms_per_token"][f["is_atomized"] == 1] == 1).all()
    i, j = np.nonzero(f["token_bonds"])
    assert f["is_atomized"][i].all() and f["is_atomized"][j].all()
    start = f["start_atom_index"]
    for which in ("center_atom_index", "rep_atom_index"):
        assert ((f[which] >= start) & (f[which] < start + f["num_atoms_per_token"])).all()
    sizes = np.bincount(f["ref_space_uid"])
    for uid, orders in f["ref_space_uid_to_perm"].items():
        assert orders.shape[1] == sizes[uid]
        assert (np.sort(orders, axis=1) == np.arange(sizes[uid])).all()
        elements = f["ref_element"].argmax(-1)[f["ref_space_uid"] == uid]
        assert (elements[orders] == elements).all()
    truth = f["ground_truth"]
    own = np.isin(truth["token_index"], f["token_index"])
    assert own.sum() == n
    np.testing.assert_array_equal(truth["num_atoms_per_token"][own], f["num_atoms_per_token"])


def test_a_crop_of_384_takes_less_than_half_a_second() -> None:
    names = [c for c in ATOMS if len(c) == 3 and c != "UNK"]
    tokens = make_tokens(make_tables([(PROTEIN, [names[k % 20] for k in range(384)])]))
    config = DataConfig(conformers="ideal")
    features_of(tokens, config=config)
    start = time.perf_counter()
    features_of(tokens, config=config)
    assert time.perf_counter() - start < 0.5
