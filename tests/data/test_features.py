"""The feature table, ground truth and molecules."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import pytest
from assemblies import make_tables, make_tokens

from tpf.config import DataConfig, LossConfig
from tpf.data.ccd import Dictionary
from tpf.data.chem import ATOMS, GAP, RESTYPE
from tpf.data.crop import crop
from tpf.data.features import featurize
from tpf.data.molecules import find_molecules
from tpf.data.records import data_files
from tpf.data.store import load_tokens
from tpf.data.tables import DNA, LIGAND, PROTEIN, RNA, Tables, Tokens

CONFIG = DataConfig(max_templates=2, conformers="ideal")
DICTIONARY = Dictionary()
PEPTIDE = ["MET", "PHE", "CYS", "GLY", "ASP", "ARG"]


def features_of(tokens: Tokens, crop: Any = None, seed: int = 0, **options: Any) -> dict[str, Any]:
    index = np.arange(len(tokens)) if crop is None else np.asarray(crop)
    options = {"config": CONFIG} | options
    return featurize(tokens, index, DICTIONARY, np.random.default_rng(seed), **options)


@pytest.fixture(scope="module")
def mixed() -> Tokens:
    """Protein with a modified residue, DNA, RNA, a ligand on an atomized cysteine, an ion."""
    peptide = [*PEPTIDE, "PTR", "ALA"]
    tables = make_tables(
        [
            (PROTEIN, peptide),
            (DNA, ["DA", "DC"]),
            (RNA, ["G", "U"]),
            (LIGAND, ["ATP"]),
            (LIGAND, ["MG"]),
        ],
        links=[((0, 2, "SG"), (3, 0, "C8"))],
    )
    return make_tokens(tables, atomized=[2])


@pytest.fixture(scope="module")
def mixed_features(mixed: Tokens) -> dict[str, Any]:
    return features_of(mixed)


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


@pytest.mark.parametrize("source", ["ideal", "auto"])
def test_every_residue_has_its_own_pose_and_keeps_its_shape(mixed: Tokens, source: Any) -> None:
    config = dataclasses.replace(CONFIG, conformers=source)
    f = features_of(mixed, config=config)
    pos, uid = f["ref_pos"], f["ref_space_uid"]
    names = np.array(mixed.tables.atom_name)
    np.testing.assert_array_equal(uid, mixed.tables.atom_residue)
    assert (f["ref_mask"] == 1).all()
    for residue, code in enumerate(mixed.tables.res_name.tolist()):
        here = np.flatnonzero(uid == residue)
        assert np.linalg.norm(pos[here].mean(0)) < 8.0  # centred, then moved by N(0, 1)
        if source == "ideal" and len(here) > 1:
            component = DICTIONARY.get(code)
            ideal = component.ideal[[component.index[name] for name in names[here]]]
            own = np.linalg.norm(pos[here][:, None] - pos[here][None], axis=-1)
            np.testing.assert_allclose(
                own, np.linalg.norm(ideal[:, None] - ideal[None], axis=-1), atol=1e-4
            )
    again = features_of(mixed, seed=1, config=config)["ref_pos"]
    assert not np.allclose(pos, again)


def test_poses_of_equal_residues_differ() -> None:
    f = features_of(make_tokens(make_tables([(PROTEIN, ["ALA"] * 3)])))
    a, b, _ = np.split(f["ref_pos"], 3)
    assert np.abs(a - b).max() > 0.1


def test_atoms_without_reference_have_mask_and_position_zero() -> None:
    tables = make_tables([(LIGAND, ["SO4"])])
    sulfate = DICTIONARY.get("SO4")
    ideal = sulfate.ideal.copy()
    ideal[2] = np.nan
    partial = DICTIONARY.with_own({"SO4": dataclasses.replace(sulfate, ideal=ideal)})
    index = np.arange(5)
    tokens = make_tokens(tables)
    f = featurize(tokens, index, partial, np.random.default_rng(0), config=CONFIG)
    assert f["ref_mask"].tolist() == [1, 1, 0, 1, 1]
    assert (f["ref_pos"][2] == 0).all() and (f["ref_pos"][1] != 0).all()


def test_a_component_that_no_dictionary_fits_is_taken_from_the_entry() -> None:
    tables = make_tables([(LIGAND, ["SO4"])])
    unknown = dataclasses.replace(tables, res_name=np.array(["no such"]))
    renamed = dataclasses.replace(tables, atom_name=np.array(["S", "OA", "OB", "OC", "OD"]))
    for other in (unknown, renamed):
        f = features_of(make_tokens(other))
        assert (f["ref_mask"] == 0).all() and (f["ref_pos"] == 0).all()  # no leak of coordinates
        assert len(f["ref_space_uid_to_perm"][0]) == 24  # from the bonds of the entry
        f = features_of(make_tokens(other), config=dataclasses.replace(CONFIG, conformers="rdkit"))
        bond = np.linalg.norm(f["ref_pos"][1:] - f["ref_pos"][0], axis=1)
        assert (bond > 1.3).all() and (bond < 1.8).all()


def test_permutations_are_of_the_atoms_in_the_crop(mixed: Tokens) -> None:
    ptr = np.flatnonzero(mixed.tables.res_name[mixed.residue] == "PTR")
    phosphate = [
        t for t in ptr if mixed.tables.atom_name[mixed.start_atom[t]] in ("P", "O1P", "O2P")
    ]
    f = features_of(mixed, [1, *phosphate])
    perm = f["ref_space_uid_to_perm"]
    assert perm[0].shape == (2, len(ATOMS["PHE"]))
    assert perm[1].tolist() == [[0, 1, 2], [0, 2, 1]]


def test_covalent_site_keeps_its_place(mixed: Tokens, mixed_features: dict[str, Any]) -> None:
    free = features_of(make_tokens(make_tables([(LIGAND, ["PO4"])])))
    assert len(free["ref_space_uid_to_perm"][0]) == 24
    tables = make_tables(
        [(PROTEIN, ["SER", "ALA"]), (LIGAND, ["PO4"])], links=[((0, 0, "OG"), (1, 0, "O2"))]
    )
    bound = features_of(make_tokens(tables, atomized=[0]))
    assert len(bound["ref_space_uid_to_perm"][2]) == 6


def homodimer(**options: Any) -> Tables:
    peptide = ["ALA", "PHE", "GLY", "ASP"]
    chains = [(PROTEIN, peptide), (PROTEIN, peptide), (LIGAND, ["SO4"]), (LIGAND, ["SO4"])]
    return make_tables(chains, **options)


def test_ground_truth_holds_every_copy_of_what_is_cropped() -> None:
    tokens = make_tokens(homodimer())
    f = features_of(tokens, [1, 2])  # PHE and GLY of chain A
    truth = f["ground_truth"]
    assert truth["token_index"].tolist() == [1, 2, 5, 6]
    assert truth["asym_id"].tolist() == [1, 1, 2, 2]
    assert truth["mol_sym_id"].tolist() == [1, 1, 2, 2]
    assert truth["num_atoms_per_token"].tolist() == [11, 4, 11, 4]
    assert len(truth["atom_positions"]) == 30
    full = features_of(tokens, [1, 6])["ground_truth"]
    assert full["token_index"].tolist() == [1, 2, 5, 6]  # the union over the copies
    assert truth["ref_space_uid"].tolist() == np.repeat([0, 1, 2, 3], [11, 4, 11, 4]).tolist()


def test_swapped_copies_map_by_molecule_and_place() -> None:
    """The counterpart of each predicted token carries the coordinates of the right copy."""
    tables = homodimer()
    tokens = make_tokens(tables)
    f = features_of(tokens, [4, 5, 6, 7])
    truth = f["ground_truth"]
    place = {
        (e, s, t): k
        for k, (e, s, t) in enumerate(
            zip(
                truth["mol_entity_id"].tolist(),
                truth["mol_sym_id"].tolist(),
                truth["mol_sym_token_index"].tolist(),
                strict=True,
            )
        )
    }
    for copy in (1, 2):
        for n in range(4):
            k = place[f["mol_entity_id"][n], copy, f["mol_sym_token_index"][n]]
            first = truth["start_atom_index"][k]
            count = truth["num_atoms_per_token"][k]
            assert count == f["num_atoms_per_token"][n]
            original = tokens.start_atom[n + 4 * (copy - 1)]
            np.testing.assert_array_equal(
                truth["atom_positions"][first : first + count],
                tables.pos[original : original + count],
            )


def test_unresolved_atoms_are_zero_and_masked() -> None:
    tables = homodimer()
    pos, occupancy = tables.pos.copy(), tables.occupancy.copy()
    pos[3], occupancy[3] = np.nan, 0
    occupancy[4], occupancy[5] = 0.3, 0
    truth = features_of(
        make_tokens(dataclasses.replace(tables, pos=pos, occupancy=occupancy)), [0, 1]
    )["ground_truth"]
    assert truth["atom_resolved_mask"][:7].tolist() == [1, 1, 1, 0, 1, 0, 1]
    assert (truth["atom_positions"][3] == 0).all()
    assert np.isfinite(truth["atom_positions"]).all()


def test_joined_chains_are_one_molecule_and_copies_agree() -> None:
    """Two proteins with two sugars each, whose chains come in different orders."""
    peptide, sugar = ["ALA", "ASN", "GLY", "ASN"], ["NAG"]
    chains = [(PROTEIN, peptide)] * 2 + [(LIGAND, sugar)] * 4
    tables = make_tables(
        chains,
        links=[
            ((0, 1, "ND2"), (2, 0, "C1")),
            ((0, 3, "ND2"), (3, 0, "C1")),
            ((1, 3, "ND2"), (4, 0, "C1")),
            ((1, 1, "ND2"), (5, 0, "C1")),
        ],
    )
    tokens = make_tokens(tables, atomized=[1, 3, 5, 7])
    molecules = find_molecules(tokens)
    chain = tables.res_chain[tokens.residue]
    assert (molecules.entity == 1).all()
    assert [set(molecules.sym[chain == c]) for c in range(6)] == [{1}, {2}, {1}, {1}, {2}, {2}]
    assert [set(molecules.component[chain == c]) for c in range(6)] == [
        {1},
        {1},
        {2},
        {3},
        {3},
        {2},
    ]
    first, second = (np.flatnonzero(molecules.sym == copy) for copy in (1, 2))
    first, second = (k[np.argsort(molecules.token[k])] for k in (first, second))
    np.testing.assert_array_equal(molecules.token[first], np.arange(len(first)))
    for a, b in zip(first, second, strict=True):
        assert tables.atom_name[tokens.start_atom[a]] == tables.atom_name[tokens.start_atom[b]]
        assert tables.res_name[tokens.residue[a]] == tables.res_name[tokens.residue[b]]


def test_a_copy_with_a_bound_ligand_is_another_molecule() -> None:
    peptide = ["ALA", "CYS", "GLY"]
    chains = [(PROTEIN, peptide), (PROTEIN, peptide), (LIGAND, ["ATP"])]
    tokens = make_tokens(make_tables(chains, links=[((1, 1, "SG"), (2, 0, "C8"))]), atomized=[4])
    molecules = find_molecules(tokens)
    assert len(set(molecules.entity)) == 2
    assert (molecules.sym == 1).all()


def test_copies_have_equal_features() -> None:
    tokens = make_tokens(homodimer())
    f = features_of(tokens)
    chain = f["asym_id"]
    for name in (
        "restype", "residue_index", "is_protein", "num_atoms_per_token", "entity_id",
        "mol_entity_id", "mol_sym_token_index", "profile",
    ):  # fmt: skip
        np.testing.assert_array_equal(f[name][chain == 1], f[name][chain == 2])
    atom_chain = chain[f["atom_to_token_index"]]
    for name in ("ref_element", "ref_charge", "ref_atom_name_chars", "ref_mask"):
        np.testing.assert_array_equal(f[name][atom_chain == 1], f[name][atom_chain == 2])
    assert f["sym_id"].tolist() == [1] * 4 + [2] * 4 + [1] * 5 + [2] * 5


def test_equal_generators_give_equal_features(mixed: Tokens) -> None:
    a, b = (features_of(mixed, range(10), seed=3) for _ in range(2))
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
    tokens = load_tokens(str(path))
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
