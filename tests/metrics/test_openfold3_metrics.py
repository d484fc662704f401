"""Agreement with the metrics of OpenFold3 0.5.0, where installed: same tensors, same values."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tpf.data.chem import RESIDUES
from tpf.metrics.confidence import contact_probability, gpde
from tpf.metrics.confidence import expected as expected_value
from tpf.metrics.dockq import dockq_pairs
from tpf.metrics.evaluate import evaluate_samples, make_samples
from tpf.metrics.selection import model_selection, select, selection_weights
from tpf.metrics.structure import Scored, decode_names, from_features, unbatch

_REASON = "openfold3 0.5.0 is not installed"
quality = pytest.importorskip(
    "openfold3.core.metrics.quality", reason=_REASON, exc_type=ImportError
)
sys.path.append(str(Path(__file__).resolve().parents[1] / "model"))
random_features = importlib.import_module("features").random_features

N_TOKENS, N_SAMPLES = 40, 3
ELEMENTS = {"C": 6, "N": 7, "O": 8, "S": 16, "P": 15}
OURS_ALONE = {"disorder", "has_clash", "lddt_inter_ligand_dna_15", "lddt_inter_ligand_rna_15"}
"""Names that the peer's validation metrics lack; the first two stand in its confidence scores."""

Features = dict[str, Any]


def with_samples(f: Features) -> Features:
    return {name: x.unsqueeze(1) for name, x in f.items()}


def expand(x: Tensor) -> Tensor:
    return x.expand(1, N_SAMPLES, *x.shape[2:])


@pytest.fixture(scope="module")
def case() -> tuple[Features, Features, Tensor, Tensor, Tensor]:
    """Features for us and for the peer, predictions [1, S, A, 3], ground truth, resolved [1, S, A].

    Residues are walks of 3 Angstrom, atoms lie 1.3 Angstrom around them; some are unresolved.
    """
    torch.manual_seed(4)
    f = random_features(n_tokens=N_TOKENS)
    token = f["atom_to_token_index"][0].long()
    names = decode_names(f["ref_atom_name_chars"][0].numpy())
    numbers = torch.tensor([ELEMENTS[name[0]] for name in names])
    f["ref_element"] = torch.nn.functional.one_hot(numbers - 1, 119)[None]
    n = len(token)
    walk = (1.5 * torch.randn(1, 1, N_TOKENS, 3)).cumsum(2)[:, :, token]
    truth = expand(walk + 1.3 * torch.randn(1, 1, n, 3))
    x = truth + torch.tensor([0.4, 1.0, 2.0]).view(1, N_SAMPLES, 1, 1) * torch.randn(
        1, N_SAMPLES, n, 3
    )
    known = (torch.rand(1, 1, n) < 0.9).float() * (token >= 3)
    known = expand(known * ~((token >= 6) & (token < 8)))
    batch = with_samples(f) | {"atom_array": [atom_array(f, names, known)], "pdb_id": ["test"]}
    batch["ground_truth"] = with_samples(f) | {
        "atom_positions": truth,
        "atom_resolved_mask": known,
        "intra_filter_atomized": torch.ones(1, N_SAMPLES, n, dtype=torch.bool),
        "inter_filter_atomized": torch.ones(1, N_SAMPLES, n, n, dtype=torch.bool),
    }
    return f, batch, x, truth, known


def atom_array(f: Features, names: np.ndarray, known: Tensor) -> Any:
    """Return the atoms in the form from which the peer computes exposed areas."""
    struc = pytest.importorskip("biotite.structure")
    token = f["atom_to_token_index"][0].long()
    array = struc.AtomArray(len(token))
    array.chain_id = np.array([str(int(c)) for c in f["asym_id"][0][token]])
    array.res_id = f["residue_index"][0][token].numpy()
    array.res_name = np.array([RESIDUES[int(c)] for c in f["restype"][0].argmax(-1)[token]])
    array.atom_name = names
    array.element = np.array([name[0] for name in names])
    array.set_annotation("molecule_type_id", f["mol_type"][0][token].numpy())
    array.set_annotation("occupancy", known[0, 0].numpy())
    return array


def test_validation_metrics(case: tuple[Features, Features, Tensor, Tensor, Tensor]) -> None:
    f, batch, x, truth, known = case
    outputs = {
        "atom_positions_predicted": x,
        "plddt_logits": torch.randn(1, N_SAMPLES, x.shape[2], 50),
    }
    theirs = quality.get_metrics(batch, outputs, compute_extra_val_metrics=True)
    theirs = {k: v for k, v in theirs.items() if not k.startswith(("dockq", "plddt"))}
    ours = evaluate_samples(f, x, (truth, known))
    assert ours[0].keys() - theirs.keys() == OURS_ALONE and theirs.keys() <= ours[0].keys()
    assert len(theirs) > 30
    for name, values in theirs.items():
        found = torch.tensor([sample[name] for sample in ours])
        torch.testing.assert_close(found, values[0].float(), rtol=3e-5, atol=1e-6, msg=name)
    assert 0 < ours[0]["rasa"] < 1 and ours[2]["clash_intra_protein"] > 0


def test_confidence_and_ranking(case: tuple[Features, Features, Tensor, Tensor, Tensor]) -> None:
    f, batch, x, truth, known = case
    ranking = importlib.import_module("openfold3.core.metrics.aggregate_confidence_ranking")
    config = importlib.import_module("openfold3.projects.of3_all_atom.config.model_config")
    pairs = (1, N_SAMPLES, N_TOKENS, N_TOKENS, 64)
    heads = {
        "plddt": torch.randn(1, N_SAMPLES, x.shape[2], 50),
        "pae": 2 * torch.randn(pairs),
        "pde": 2 * torch.randn(pairs),
    }
    distogram = 2 * torch.randn(1, N_TOKENS, N_TOKENS, 64)
    outputs = {f"{name}_logits": value for name, value in heads.items()}
    outputs |= {"atom_positions_predicted": x, "distogram_logits": distogram[:, None]}
    theirs = ranking.get_confidence_scores(batch, outputs, config.model_config)
    ours = evaluate_samples(f, x, (truth, known), heads, distogram)
    for name in ("gpde", "ptm", "iptm", "disorder", "has_clash", "sample_ranking_score"):
        found = torch.tensor([sample[name] for sample in ours])
        torch.testing.assert_close(found, theirs[name][0].float(), rtol=3e-5, atol=1e-6, msg=name)
    classes = quality.get_metrics(batch, outputs, compute_extra_val_metrics=True)
    for name in ("complex", "protein", "ligand", "rna", "dna"):
        found = torch.tensor([sample[f"plddt_{name}"] / 100 for sample in ours])
        expected = classes[f"plddt_{name}"][0].float()
        torch.testing.assert_close(found, expected, rtol=3e-5, atol=1e-6, msg=name)


def test_dockq(case: tuple[Features, Features, Tensor, Tensor, Tensor]) -> None:
    """Of the pairs of polymers that stand alone in their class; the peer averages over samples."""
    f, batch, x, truth, known = case
    outputs = {"atom_positions_predicted": x, "plddt_logits": torch.zeros(*x.shape[:3], 50)}
    theirs = quality.get_metrics(batch, outputs, compute_extra_val_metrics=True)
    structure = from_features(unbatch(f))
    samples = make_samples(structure, x, (truth, known))
    scores = [
        {pair.chains: pair.score for pair in dockq_pairs(structure, sample, scored)}
        for sample in samples
        for scored in [Scored.everything(structure)]
    ]
    for name, chains in (("protein_protein", (1, 2)), ("rna_dna", (3, 4))):
        expected = float(theirs[f"dockq_{name}_uw"].mean())
        assert np.mean([score[chains] for score in scores]) == pytest.approx(expected, rel=1e-4)


def test_selection_of_samples_and_models() -> None:
    selection = importlib.import_module("openfold3.core.metrics.model_selection")
    config = importlib.import_module("openfold3.projects.of3_all_atom.config.model_config")
    rng = np.random.default_rng(5)
    weights = selection_weights("fine-tuning")
    names = sorted(weights)
    samples = [{name: float(rng.random()) for name in names} for _ in range(N_SAMPLES)]
    logits = {
        "atom_positions_predicted": torch.zeros(1, N_SAMPLES, 9, 3),
        "pde_logits": torch.tensor(rng.normal(size=(1, N_SAMPLES, 9, 9, 64))).float(),
        "distogram_logits": torch.tensor(rng.normal(size=(1, 1, 9, 9, 64))).float(),
    }
    for sample, pde in zip(samples, logits["pde_logits"][0], strict=True):
        contact = contact_probability(logits["distogram_logits"][0, 0])
        sample["gpde"] = gpde(contact, expected_value(pde, (0.0, 32.0)))
    theirs = selection.compute_valid_model_selection_metrics(
        config.model_config.confidence,
        logits,
        {name: torch.tensor([[sample[name] for sample in samples]]) for name in names},
    )
    ours = select(samples).reported
    for name in names:
        assert ours[name] == pytest.approx(float(theirs[name]), rel=1e-5), name
    score = selection.compute_final_model_selection_metric(
        {f"val/{name}": torch.tensor(ours[name]) for name in names}, weights
    )
    means = {name: ours[name] for name in names}
    assert model_selection(means).value == pytest.approx(float(score), rel=1e-5)
