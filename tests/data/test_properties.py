"""Laws that hold for every entry: crops, symmetric copies, samples by seed and position."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_features import features_of
from test_dataset import same

from tpf.config import DataConfig
from tpf.data.cache import EntryCache
from tpf.data.crop import draw_crop
from tpf.data.dataset import CropDataset, Loader
from tpf.data.prepare import prepare
from tpf.data.records import Entries, data_files
from tpf.data.tables import Tokens

CONFIG = DataConfig(conformers="ideal", max_templates=0)
CACHE = EntryCache(CONFIG)
EXAMPLES = {path.name[:4]: path for path in data_files(None)}
seeds = st.integers(0, 2**32 - 1)
some = settings(max_examples=15)


def entry(name: str) -> Tokens:
    return CACHE.get(str(EXAMPLES[name])).tokens


@some
@given(st.sampled_from(sorted(EXAMPLES)), st.integers(1, 500), seeds)
def test_a_crop_respects_the_budget_and_keeps_tokens_whole(
    name: str, budget: int, seed: int
) -> None:
    tokens = entry(name)
    index = draw_crop(tokens, budget, np.random.default_rng(seed)).index
    assert 0 < len(index) <= budget or len(index) == len(tokens) <= budget
    assert (np.diff(index) > 0).all() and index[0] >= 0 and index[-1] < len(tokens)
    f = features_of(tokens, index, config=CONFIG)
    # every atom of a token is there once, in order, and no other
    for k, n in enumerate(index[:: max(1, len(index) // 20)]):
        here = np.flatnonzero(f["token_index"] == n)
        assert len(here) == 1, k
        atoms = np.flatnonzero(f["atom_to_token_index"] == here[0])
        assert len(atoms) == tokens.num_atoms[n]
        assert atoms.tolist() == list(range(atoms[0], atoms[0] + len(atoms)))
        own = tokens.start_atom[n] + np.arange(len(atoms))
        elements = tokens.tables.element[own]
        np.testing.assert_array_equal(f["ref_element"][atoms].argmax(-1) + 1, elements)
    assert len(f["atom_mask"]) == tokens.num_atoms[index].sum()


@pytest.mark.parametrize("name", ["1a7g", "1a8o", "5i55"])
def test_symmetric_copies_have_equal_features(name: str) -> None:
    """Copies differ in their numbers and poses only."""
    tokens = entry(name)
    f = features_of(tokens, config=CONFIG)
    numbers = {"token_index", "asym_id", "sym_id", "mol_sym_id", "start_atom_index",
               "center_atom_index", "rep_atom_index"}  # fmt: skip
    compared = 0
    for entity in np.unique(f["mol_entity_id"]):
        mine = f["mol_entity_id"] == entity
        copies = [np.flatnonzero(mine & (f["mol_sym_id"] == s))
                  for s in np.unique(f["mol_sym_id"][mine])]  # fmt: skip
        for copy in copies[1:]:
            for key, value in f.items():
                if not isinstance(value, np.ndarray) or key in numbers:
                    continue
                if value.shape[:1] == (len(tokens),):
                    per_token = value[:, copy] if key == "token_bonds" else value
                    first = value[:, copies[0]] if key == "token_bonds" else value
                    np.testing.assert_array_equal(per_token[copy], first[copies[0]], key)
                    compared += 1
            atoms = [np.isin(f["atom_to_token_index"], c) for c in (copies[0], copy)]
            for key in ("ref_element", "ref_charge", "ref_atom_name_chars", "ref_mask"):
                np.testing.assert_array_equal(f[key][atoms[1]], f[key][atoms[0]], key)
    assert compared


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("prepared") / "cache"
    listing = out.parent / "list.txt"
    listing.write_text("\n".join(str(EXAMPLES[name]) for name in ("1ubq", "1a8o", "4cup", "5i55")))
    assert len(list(prepare(str(listing), out))) == 4
    return out


@settings(max_examples=4)
@given(seed=st.integers(0, 10**6), start=st.integers(0, 5), world=st.sampled_from([1, 2]))
def test_a_sample_is_a_function_of_seed_and_position(
    cache: Path, seed: int, start: int, world: int
) -> None:
    """In any order, in a new process state, on any rank, and after resuming at any step."""
    config = dataclasses.replace(CONFIG, path=str(cache), crop=48)

    def batches(first: int, rank: int = 0, ranks: int = 1) -> list[Any]:
        data = CropDataset(Entries(config), config, seed=seed)
        loader = Loader(data, batch_size=2, rank=rank, world=ranks, start_step=first, stop_step=6)
        return [batch for step in loader for batch in step]

    whole = batches(0)
    assert same(whole[2 * start :], batches(start))
    shares = [batches(start, rank, world) for rank in range(world)]
    interleaved = [batch for group in zip(*shares, strict=True) for batch in group]
    assert same(interleaved, whole[2 * start :])
    for batch in whole:
        assert batch["token_mask"].sum() > 0 and batch["atom_mask"].sum() > 0
