"""Cropping and proximity."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from assemblies import make_tables, make_tokens

from tpf.data.crop import contiguous, crop, draw_crop, nearest
from tpf.data.proximity import close_groups, close_pairs, near_any
from tpf.data.tables import DNA, LIGAND, PROTEIN, Tables, Tokens
from tpf.errors import DataError

ALA30, SER20 = ["ALA"] * 30, ["SER"] * 20


def small_complex(**changes: object) -> Tokens:
    tables = make_tables([(PROTEIN, ALA30), (PROTEIN, SER20), (DNA, ["DA"] * 6), (LIGAND, ["ATP"])])
    return make_tokens(dataclasses.replace(tables, **changes))


def unresolve(tables: Tables, chain: int, residues: slice = slice(None)) -> Tables:
    """Return the tables with some residues of a chain unresolved."""
    numbers = np.flatnonzero(tables.res_chain == chain)[residues]
    gone = np.isin(tables.atom_residue, numbers)
    return dataclasses.replace(
        tables,
        pos=np.where(gone[:, None], np.nan, tables.pos),
        occupancy=np.where(gone, 0, tables.occupancy).astype(np.float32),
    )


@pytest.mark.parametrize("strategy", [0, 1, 2])
@pytest.mark.parametrize("budget", [1, 7, 40, 86])
def test_budget_order_and_uniqueness(strategy: int, budget: int) -> None:
    tokens = small_complex()
    weights = np.eye(3)[strategy]
    for seed in range(10):
        index = crop(tokens, budget, np.random.default_rng(seed), weights)
        assert 0 < len(index) <= budget
        assert (np.diff(index) > 0).all() and index[0] >= 0 and index[-1] < len(tokens)
        if strategy:
            assert len(index) == budget


def test_an_entry_within_the_budget_is_kept_whole() -> None:
    tokens = small_complex()
    drawn = draw_crop(tokens, len(tokens), np.random.default_rng(0))
    assert drawn.strategy == "whole"
    np.testing.assert_array_equal(drawn.index, np.arange(len(tokens)))


def test_equal_generators_give_equal_crops() -> None:
    tokens = small_complex()
    for seed in range(5):
        crops = [crop(tokens, 30, np.random.default_rng(seed), preferred=[0]) for _ in range(2)]
        np.testing.assert_array_equal(*crops)


@pytest.mark.parametrize("seed", range(40))
def test_contiguous_takes_runs_and_fills_the_budget(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 30, rng.integers(1, 6))
    chain = np.repeat(np.arange(len(sizes)), sizes).astype(np.int32)
    budget = int(rng.integers(1, 60))
    index = contiguous(chain, np.ones(len(chain), bool), budget, rng)
    assert len(index) == min(budget, len(chain))  # the lower bound leaves no room unused
    for c in range(len(sizes)):
        run = index[chain[index] == c]
        assert len(run) == 0 or (np.diff(run) == 1).all()


def test_contiguous_sizes_have_the_range_of_the_algorithm() -> None:
    """Two chains of 10 with a budget of 12: the first one visited takes 2 to 10, evenly."""
    chain = np.repeat([0, 1], 10).astype(np.int32)
    sizes = []
    for seed in range(3000):
        rng = np.random.default_rng(seed)
        first = np.random.default_rng(seed).permutation(2)[0]
        index = contiguous(chain, np.ones(20, bool), 12, rng)
        sizes.append(int((chain[index] == first).sum()))
    counts = np.bincount(sizes, minlength=11)
    assert counts[:2].sum() == 0
    np.testing.assert_allclose(counts[2:] / 3000, 1 / 9, atol=0.02)


def test_nearest_equals_a_sorted_list() -> None:
    rng = np.random.default_rng(0)
    centre = rng.normal(size=(50, 3)).astype(np.float32)
    centre[::7] = np.nan
    kept = rng.random(50) < 0.8
    reference = int(np.flatnonzero(kept & np.isfinite(centre[:, 0]))[3])
    usable = [i for i in range(50) if kept[i] and np.isfinite(centre[i, 0])]
    usable.sort(key=lambda i: float(((centre[i] - centre[reference]) ** 2).sum()))
    assert nearest(centre, kept, reference, 9).tolist() == sorted(usable[:9])
    assert len(nearest(centre, kept, reference, 1000)) == len(usable)


def test_spatial_crop_is_around_the_preferred_chain() -> None:
    tokens = small_complex()
    chain = tokens.tables.res_chain[tokens.residue]
    for seed in range(10):
        index = crop(tokens, 5, np.random.default_rng(seed), (0, 1, 0), preferred=[3])
        assert (chain[index] == 3).any()


def test_interface_crop_starts_near_the_partner() -> None:
    """Two long chains that meet at one end only: the crop holds that end."""
    tables = make_tables([(PROTEIN, ["ALA"] * 60), (PROTEIN, ["ALA"] * 60)], spacing=3.8)
    second = tables.res_chain[tables.atom_residue] == 1
    pos = tables.pos.copy()
    pos[second, 0] = -pos[second, 0]  # the chains run apart from x = 0
    tokens = make_tokens(dataclasses.replace(tables, pos=pos))
    for seed in range(10):
        for preferred in ([0], [0, 1]):
            drawn = draw_crop(tokens, 10, np.random.default_rng(seed), (0, 0, 1), preferred)
            assert drawn.strategy == "interface" and not drawn.notes
            number = tokens.tables.res_id[tokens.residue[drawn.index]]
            assert number.max() <= 15


def test_interface_falls_back_to_spatial_with_a_note() -> None:
    tokens = make_tokens(make_tables([(PROTEIN, ALA30)]))
    drawn = draw_crop(tokens, 8, np.random.default_rng(0), (0, 0, 1), [0])
    assert drawn.strategy == "spatial" and len(drawn.index) == 8
    assert "interface" in drawn.notes[0]


def test_unresolved_preferred_chain_falls_back_with_a_note() -> None:
    tables = unresolve(make_tables([(PROTEIN, ALA30), (PROTEIN, SER20)]), 1)
    tokens = make_tokens(tables)
    drawn = draw_crop(tokens, 8, np.random.default_rng(0), (0, 1, 0), [1])
    assert "preferred" in drawn.notes[0]
    assert (tables.res_chain[tokens.residue[drawn.index]] == 0).all()


def test_spatial_takes_resolved_centres_only_and_contiguous_needs_one() -> None:
    tables = unresolve(make_tables([(PROTEIN, ALA30)]), 0, slice(0, 28))
    tokens = make_tokens(tables)
    assert crop(tokens, 8, np.random.default_rng(0), (0, 1, 0)).tolist() == [28, 29]
    for seed in range(20):
        assert (crop(tokens, 3, np.random.default_rng(seed), (1, 0, 0)) >= 28).any()


def test_nothing_resolved_is_an_error() -> None:
    tokens = make_tokens(unresolve(make_tables([(PROTEIN, ALA30)]), 0))
    for budget in (8, 100):
        with pytest.raises(DataError, match="crop: no token has a resolved centre"):
            crop(tokens, budget, np.random.default_rng(0))


def test_many_chains_are_cut_to_the_nearest_twenty() -> None:
    chains = [(PROTEIN, ["ALA"] * 5)] * 25 + [(LIGAND, ["SO4"])] * 2
    tables = make_tables(chains)
    pos = tables.pos.copy()
    atom_chain = tables.res_chain[tables.atom_residue]
    pos[atom_chain == 25] = pos[np.flatnonzero(atom_chain == 2)[0]] + 2.0  # touches chain 2
    pos[atom_chain == 26] += 500.0
    tokens = make_tokens(dataclasses.replace(tables, pos=pos))
    chain = tables.res_chain[tokens.residue]
    index = crop(tokens, 120, np.random.default_rng(0), (1, 0, 0), preferred=[0])
    assert set(chain[index]) == {*range(20), 25}
    index = crop(tokens, 120, np.random.default_rng(0), (1, 0, 0), preferred=[24])
    assert set(chain[index]) == set(range(5, 25))


@pytest.mark.parametrize("seed", range(8))
def test_close_pairs_equal_all_distances(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.normal(scale=6, size=(60, 3)), rng.normal(scale=9, size=(45, 3))
    a[3] = np.nan
    cutoff = float(rng.uniform(0.5, 8))
    distance = np.linalg.norm(a[:, None] - b[None], axis=-1)
    expected = {(int(i), int(j)) for i, j in np.argwhere(distance < cutoff)}
    found = [(int(i), int(j)) for p, q in close_pairs(a, b, cutoff) for i, j in zip(p, q)]  # noqa: B905
    assert len(found) == len(set(found)) and set(found) == expected
    np.testing.assert_array_equal(near_any(a, b, cutoff), (distance < cutoff).any(1))
    group = rng.integers(0, 5, 60)
    own = np.linalg.norm(a[:, None] - a[None], axis=-1)
    pairs = {(int(group[i]), int(group[j])) for i, j in np.argwhere(own < cutoff)}
    assert close_groups(a, group, cutoff) == sorted(p for p in pairs if p[0] < p[1])


def test_proximity_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    points = np.random.default_rng(0).normal(size=(80, 3))
    whole = sorted((i, j) for p, q in close_pairs(points, points, 1.0) for i, j in zip(p, q))  # noqa: B905
    monkeypatch.setattr("tpf.data.proximity._CHUNK", 50)
    parts = sorted((i, j) for p, q in close_pairs(points, points, 1.0) for i, j in zip(p, q))  # noqa: B905
    assert whole == parts


def test_proximity_of_nothing() -> None:
    empty = np.zeros((0, 3))
    assert near_any(empty, np.zeros((2, 3)), 1.0).shape == (0,)
    assert not near_any(np.zeros((2, 3)), empty, 1.0).any()
