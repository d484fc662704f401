"""Features -> mmCIF -> features: what is written reads back to the same entry, number by number."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from sample_features import features_of
from test_dataset import same
from test_real_files import NOT_READ, REFUSED
from test_write_mmcif import differences

from tpf.config import DataConfig
from tpf.data import store
from tpf.data.cif import entry_name
from tpf.data.load import load_tables
from tpf.data.records import data_files
from tpf.data.store import Parsed
from tpf.data.tables import Tokens
from tpf.data.tokens import tokenize
from tpf.data.write import write_mmcif

CONFIG = DataConfig(conformers="ideal", max_templates=0)
LARGE = 3000
"""Tokens above which the tables are compared and no features, which grow with their square."""
SOME = [
    "general/1en2", "general/1gbt", "general/2dty", "general/4gxy", "general/6lu7", "general/1ema",
    "general/7x9k", "general/3hax", "kinase/7qhl", "kinase_from_pdb/4g5j",
    "torture/unk_every_fifth", "torture/models_differ_1v5a", "torture/phenix_output_cifpp",
    "torture/huge_chain_id",
]  # fmt: skip
"""Microheterogeneity, glycans, metals, chromophore, covalent inhibitors, own definitions."""


def changed(tokens: Tokens, again: Tokens) -> list[str]:
    """Return the names of the fields and features in which two entries differ, notes aside."""
    names = differences(tokens.tables, again.tables)
    if len(tokens) <= LARGE:
        first, second = (features_of(t, config=CONFIG, training=False) for t in (tokens, again))
        names += [
            key
            for key in first
            if not same(first[key], second[key])
            and not (key == "resolution" and np.isnan([first[key], second[key]]).all())
        ]
    return names


def check(path: Path, folder: Path) -> None:
    """Assert that an entry survives writing, and that what is written is written alike again."""
    tokens = tokenize(load_tables(path))
    text = write_mmcif(folder / "again.cif", tokens.tables)
    again = tokenize(load_tables(folder / "again.cif"))
    assert changed(tokens, again) == [], path.name
    assert write_mmcif(None, again.tables) == text, path.name


@pytest.mark.parametrize("path", data_files(None), ids=entry_name)
def test_examples(path: Path, tmp_path: Path) -> None:
    check(path, tmp_path)


@pytest.mark.parametrize("name", SOME)
def test_some_entries(name: str, shared_data: Path, tmp_path: Path) -> None:
    (path,) = shared_data.glob(f"{name}.*")
    check(path, tmp_path)


def test_the_cache_holds_the_same_entry(tmp_path: Path) -> None:
    for path in data_files(None)[:3]:
        tokens = tokenize(load_tables(path))
        stored = store.read_entry(tmp_path / store.write_entry(tmp_path, Parsed(tokens, {})))
        assert changed(tokens, stored.tokens) == []


def accepted(shared: Path) -> Iterator[Path]:
    for folder in ("general", "kinase", "kinase_from_pdb", "torture"):
        for path in sorted((shared / folder).iterdir()):
            if (folder, entry_name(path)) not in REFUSED and entry_name(path) not in NOT_READ:
                yield path


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_accepted_file(shared_data: Path, tmp_path: Path) -> None:
    files = list(accepted(shared_data))
    for path in files:
        check(path, tmp_path)
    assert len(files) == 246
