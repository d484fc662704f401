"""One code path for validation (features) and file scoring (tokens)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tpf.config import DataConfig
from tpf.data.batch import to_torch
from tpf.data.ccd import Dictionary
from tpf.data.features import featurize
from tpf.data.load import load_tables
from tpf.data.tables import Tokens
from tpf.data.tokens import tokenize
from tpf.metrics.evaluate import evaluate, evaluate_samples
from tpf.metrics.schema import SeedResult
from tpf.metrics.structure import MODIFIED, Sample, from_features, from_tokens, take, unbatch
from tpf.permutation import align

SAMPLES = 3


@pytest.fixture(scope="module", params=["3ptb", "1bna", "1igy"])
def entry(request: pytest.FixtureRequest, shared_data: Path) -> tuple[Tokens, dict[str, Any]]:
    path = shared_data / "general" / f"{request.param}.cif.gz"
    if not path.is_file():
        pytest.skip(f"{path.name} is not in shared/data/general")
    tokens = tokenize(load_tables(path))
    config = DataConfig(conformers="ideal", max_templates=0)
    keep = np.arange(min(len(tokens), 300))
    features = featurize(
        tokens, keep, config=config, dictionary=Dictionary(), rng=np.random.default_rng(0)
    )
    return tokens, to_torch(features)


def test_features_and_tokens_give_the_same_structure(entry: tuple[Tokens, dict[str, Any]]) -> None:
    tokens, batch = entry
    left = from_features(unbatch(batch))
    right = from_tokens(tokens, np.arange(batch["token_mask"].shape[1]))
    for name in ("kind", "chain", "residue", "token", "element", "asym_id", "entity_id"):
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name), err_msg=name)
    for name in ("chain_type", "chain_polymer", "atom_name", "token_start", "res_chain"):
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name), err_msg=name)
    standard = ~np.isin(left.kind, (3, MODIFIED))
    np.testing.assert_array_equal(
        left.res_name[left.residue[standard]], right.res_name[right.residue[standard]]
    )


def test_padding_does_not_change_the_structure(entry: tuple[Tokens, dict[str, Any]]) -> None:
    features = unbatch(entry[1])
    per_token = {"token_mask", "is_protein", "is_rna", "is_dna", "is_atomized", "restype"}
    per_token |= {"asym_id", "entity_id"}
    per_atom = {"atom_mask", "atom_to_token_index", "ref_space_uid", "ref_element"}
    per_atom |= {"ref_atom_name_chars"}
    padded = dict(features)
    for name in per_token | per_atom:
        value = features[name]
        padded[name] = torch.cat([value, torch.zeros_like(value[:7])])
    left, right = from_features(features), from_features(padded)
    np.testing.assert_array_equal(left.atom_name, right.atom_name)
    np.testing.assert_array_equal(left.token, right.token)
    np.testing.assert_array_equal(left.asym_id, right.asym_id)


def test_samples_of_a_batch_with_confidence(entry: tuple[Tokens, dict[str, Any]]) -> None:
    _, batch = entry
    n, a = batch["token_mask"].shape[1], batch["atom_mask"].shape[1]
    truth = batch["ground_truth"]["atom_positions"][:, :a]
    noise = torch.tensor([0.0, 0.5, 2.0])[:, None, None]
    x = truth[:, None] + noise * torch.randn(1, SAMPLES, a, 3)
    aligned = align(batch, x)
    heads = {
        "plddt": torch.zeros(1, SAMPLES, a, 50),
        "pae": torch.zeros(1, SAMPLES, n, n, 64),
        "pde": torch.zeros(1, SAMPLES, n, n, 64),
    }
    heads["pde"][0, 1, ..., 0] = 5.0  # the second sample is the most confident
    distogram = torch.zeros(1, n, n, 64)
    found = evaluate_samples(
        batch, x, (aligned.positions, aligned.resolved), heads, distogram, extras=True
    )
    assert len(found) == SAMPLES
    assert found[0]["rmsd"] < 1e-3 < found[1]["rmsd"] < found[2]["rmsd"]
    assert found[0]["lddt_intra_complex"] == 1.0 > found[2]["lddt_intra_complex"]
    assert {"gpde", "ptm", "iptm", "sample_ranking_score", "plddt_complex"} <= found[0].keys()
    assert all(np.isfinite(v) for sample in found for v in sample.values())
    chosen = SeedResult.build(0, found)
    assert chosen.top1["rmsd"] == found[1]["rmsd"] and chosen.best["rmsd"] == found[0]["rmsd"]


def test_both_paths_score_alike(entry: tuple[Tokens, dict[str, Any]]) -> None:
    tokens, batch = entry
    n, a = batch["token_mask"].shape[1], batch["atom_mask"].shape[1]
    truth = batch["ground_truth"]["atom_positions"][0, :a].numpy()
    resolved = batch["ground_truth"]["atom_resolved_mask"][0, :a].numpy()
    sample = Sample.make(truth + np.random.normal(0, 0.7, truth.shape), truth, resolved)
    left = evaluate(from_features(unbatch(batch)), sample)
    right = evaluate(from_tokens(tokens, np.arange(n)), sample)
    assert left == pytest.approx(right)


def test_take_keeps_tokens_consecutive(entry: tuple[Tokens, dict[str, Any]]) -> None:
    structure = from_features(unbatch(entry[1]))
    keep = structure.token % 3 != 1
    part = take(structure, keep)
    assert part.n_atoms == keep.sum() and part.n_tokens == len(np.unique(structure.token[keep]))
    assert (np.diff(part.token) <= 1).all() and part.token[0] == 0
    whole = set(part.automorphisms)
    assert whole <= set(structure.automorphisms) - set(structure.residue[~keep].tolist())
