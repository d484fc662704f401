"""Ground truth and molecules: every copy of what is cropped."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from assemblies import make_tables, make_tokens
from sample_features import features_of

from tpf.data.molecules import find_molecules
from tpf.data.tables import LIGAND, PROTEIN, Tables


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
