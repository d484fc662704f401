"""Reference conformers and atom orders in the features of a crop."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from assemblies import make_tables, make_tokens
from sample_features import CONFIG, DICTIONARY, features_of

from tpf.data.chem import ATOMS
from tpf.data.features import featurize
from tpf.data.tables import LIGAND, PROTEIN, Tokens


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
