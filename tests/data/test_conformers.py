"""Reference conformers and symmetry-equivalent atom orders."""

from __future__ import annotations

import dataclasses
import datetime
import itertools

import numpy as np
import pytest

from tpf.data import conformers
from tpf.data.ccd import Component, Dictionary
from tpf.data.chem import ATOMS
from tpf.data.conformers import atom_orders, random_rotation, reference_conformer
from tpf.data.symmetry import automorphisms
from tpf.errors import UsageError

DICTIONARY = Dictionary()


def orders(
    code: str, names: tuple[str, ...] | None = None, linked: tuple[str, ...] = ()
) -> list[list[str]]:
    component = DICTIONARY.get(code)
    names = names or tuple(component.atom_names.tolist())
    found = atom_orders(component, names, tuple(name in linked for name in names))
    return [[names[k] for k in row] for row in found]


@pytest.mark.parametrize("source", ["auto", "ideal"])
@pytest.mark.parametrize("code", ["ALA", "TRP", "DG", "ATP", "HEM"])
def test_bond_lengths_are_chemical(code: str, source: conformers.Source) -> None:
    component = DICTIONARY.get(code)
    pos, known = reference_conformer(component, source=source, rng=np.random.default_rng(1))
    assert known.all() and pos.dtype == np.float32
    length = np.linalg.norm(pos[component.bonds[:, 0]] - pos[component.bonds[:, 1]], axis=1)
    assert (length > 1.1).all() and (length < 2.4).all()


@pytest.mark.parametrize("code", [c for c in ATOMS if len(c) == 3 and c not in ("GLY", "UNK")])
def test_amino_acids_stay_left_handed(code: str) -> None:
    component = DICTIONARY.get(code)
    for seed in range(3):
        pos, _ = reference_conformer(component, source="auto", rng=np.random.default_rng(seed))
        n, ca, c, cb = (pos[component.index[name]] for name in ("N", "CA", "C", "CB"))
        assert np.dot(np.cross(n - ca, c - ca), cb - ca) > 0


def test_draws_depend_on_the_generator_only() -> None:
    component = DICTIONARY.get("LYS")
    first = [
        reference_conformer(component, source="auto", rng=np.random.default_rng(s))[0]
        for s in range(6)
    ]
    conformers.embedded_conformer.cache_clear()  # as in a new process
    again = [
        reference_conformer(component, source="auto", rng=np.random.default_rng(s))[0]
        for s in reversed(range(6))
    ]
    for a, b in zip(first, reversed(again), strict=True):
        np.testing.assert_array_equal(a, b)
    assert len({pos.tobytes() for pos in first}) > 1


def unembeddable(component: Component, **changes: object) -> Component:
    """A component that RDKit rejects: a carbon with five bonds of order three."""
    return dataclasses.replace(
        component, bond_orders=np.full(len(component.bonds), 3, np.int32), **changes
    )


def test_fallback_is_ideal_then_model_then_nothing() -> None:
    rng = np.random.default_rng(0)
    missing = np.full((len(DICTIONARY.get("TRP")), 3), np.nan, np.float32)
    broken = unembeddable(DICTIONARY.get("TRP"))
    pos, known = reference_conformer(broken, source="auto", rng=rng)
    np.testing.assert_array_equal(pos, broken.ideal)
    old = dataclasses.replace(broken, ideal=missing, date="1999-07-08")
    np.testing.assert_array_equal(reference_conformer(old, source="auto", rng=rng)[0], old.model)
    for date in ("2022-01-01", ""):
        late = dataclasses.replace(old, date=date)
        pos, known = reference_conformer(late, source="auto", rng=rng)
        assert not known.any() and np.isnan(pos).all()
    cutoff = datetime.date(2023, 1, 1)
    later = dataclasses.replace(old, date="2022-01-01")
    assert reference_conformer(later, source="auto", rng=rng, cutoff=cutoff)[1].all()


def test_ring_known_only_as_aromatic_gets_its_hydrogen() -> None:
    component = DICTIONARY.get("TRP")
    orders = np.where(component.bond_aromatic, 4, component.bond_orders)
    vague = dataclasses.replace(component, bond_orders=orders, code="vague")
    assert conformers.embedded_conformer(vague, 0) is not None


def test_partly_known_ideal_coordinates_are_kept() -> None:
    component = DICTIONARY.get("ALA")
    ideal = component.ideal.copy()
    ideal[2] = np.nan
    _, known = reference_conformer(
        dataclasses.replace(component, ideal=ideal), source="ideal", rng=np.random.default_rng(0)
    )
    assert known.sum() == len(component) - 1 and not known[2]


def test_absent_rdkit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformers, "_has_rdkit", lambda: False)
    component = DICTIONARY.get("SER")
    pos, _ = reference_conformer(component, source="auto", rng=np.random.default_rng(0))
    np.testing.assert_array_equal(pos, component.ideal)
    with pytest.raises(UsageError, match="pip install rdkit"):
        reference_conformer(component, source="rdkit", rng=np.random.default_rng(0))


@pytest.mark.parametrize(
    ("code", "moved"),
    [
        ("PHE", {"CD1", "CD2", "CE1", "CE2"}),
        ("TYR", {"CD1", "CD2", "CE1", "CE2"}),
        ("ASP", {"OD1", "OD2"}),
        ("GLU", {"OE1", "OE2"}),
        ("ARG", {"NH1", "NH2"}),
        ("LEU", {"CD1", "CD2"}),
        ("VAL", {"CG1", "CG2"}),
        ("DA", {"OP1", "OP2"}),
    ],
)
def test_standard_residues_have_two_orders(code: str, moved: set[str]) -> None:
    found = orders(code, ATOMS[code])
    assert found[0] == list(ATOMS[code])
    assert len(found) == 2
    assert {a for a, b in zip(*found, strict=True) if a != b} == moved


@pytest.mark.parametrize("code", ["ALA", "ASN", "GLN", "HIS", "ILE", "TRP", "THR", "MET", "GLY"])
def test_residues_without_symmetry_have_one_order(code: str) -> None:
    assert len(orders(code, ATOMS[code])) == 1


def test_orders_of_small_molecules() -> None:
    assert len(orders("SO4")) == 24
    assert len(orders("ATP")) == 3 * 2 * 1 * 2 * 2


def test_linked_and_absent_atoms_break_symmetry() -> None:
    assert len(orders("SO4", linked=("O1",))) == 6
    assert len(orders("SO4", names=("S", "O1", "O2"))) == 2
    assert len(orders("SO4", names=("O3", "S"))) == 1
    free = orders("ASP", (*ATOMS["ASP"], "OXT"))
    assert len(free) == 4  # the terminal carboxylate too


def test_atoms_in_other_order_than_the_dictionary() -> None:
    names = ("OD2", "CG", "CB", "OD1", "CA")
    assert orders("ASP", names) == [list(names), ["OD1", "CG", "CB", "OD2", "CA"]]


def test_unknown_atom_keeps_its_place() -> None:
    assert orders("ASP", ("OD1", "OD2", "XX")) == [["OD1", "OD2", "XX"], ["OD2", "OD1", "XX"]]


def brute_force(n: int, bonds: list[tuple[int, int]], colours: list[int]) -> set[tuple[int, ...]]:
    edges = {frozenset(b) for b in bonds}
    return {
        p
        for p in itertools.permutations(range(n))
        if all(colours[p[i]] == colours[i] for i in range(n))
        and all(frozenset((p[i], p[j])) in edges for i, j in bonds)
    }


@pytest.mark.parametrize("seed", range(25))
def test_automorphisms_equal_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 8))
    pairs = [p for p in itertools.combinations(range(n), 2) if rng.random() < 0.35]
    colours = rng.integers(0, 2, n).tolist()
    bonds = np.array(pairs, np.int32).reshape(-1, 2)
    found = automorphisms(colours, bonds, [1] * len(pairs), np.ones(n, bool), 10_000)
    assert found[0].tolist() == list(range(n))
    assert {tuple(row) for row in found.tolist()} == brute_force(n, pairs, colours)
    present = rng.random(n) < 0.6
    if present.any():
        kept = np.flatnonzero(present)
        part = automorphisms(colours, bonds, [1] * len(pairs), present, 10_000)
        tagged = [2 * c + int(p) for c, p in zip(colours, present, strict=True)]
        place = {int(k): i for i, k in enumerate(kept)}
        expected = {tuple(place[p[k]] for k in kept) for p in brute_force(n, pairs, tagged)}
        assert {tuple(row) for row in part.tolist()} == expected
        assert len(part) == len(expected)


def test_a_ring_of_six_has_twelve_orders() -> None:
    ring = np.array([(k, (k + 1) % 6) for k in range(6)], np.int32)
    assert len(automorphisms([6] * 6, ring, [4] * 6, np.ones(6, bool))) == 12
    assert len(automorphisms([6] * 6, ring, [1, 2] * 3, np.ones(6, bool))) == 6


def test_number_of_orders_is_bounded() -> None:
    star = np.array([(0, k) for k in range(1, 9)], np.int32)
    found = automorphisms([0] * 9, star, [1] * 8, np.ones(9, bool))
    assert found.shape == (1000, 9)
    assert len(np.unique(found, axis=0)) == 1000


def test_random_rotations_are_proper_and_uniform() -> None:
    rng = np.random.default_rng(0)
    many = np.stack([random_rotation(rng) for _ in range(2000)])
    np.testing.assert_allclose(
        many @ many.transpose(0, 2, 1), np.eye(3)[None] + 0 * many, atol=1e-12
    )
    np.testing.assert_allclose(np.linalg.det(many), 1)
    assert np.abs(many.mean(0)).max() < 0.05
    np.testing.assert_allclose((many**2).mean(0), 1 / 3, atol=0.03)


def test_ligands_get_a_new_conformer_at_every_visit() -> None:
    pytest.importorskip("rdkit")
    rng = np.random.default_rng(0)

    def distinct(code: str, visits: int) -> int:
        component = DICTIONARY.get(code)
        drawn = (reference_conformer(component, source="rdkit", rng=rng) for _ in range(visits))
        return len({pos.tobytes() for pos, _ in drawn})

    assert distinct("PTR", 12) == 12
    assert distinct("GLY", 100) <= conformers.POOL
