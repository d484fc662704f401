"""Weights, the resolution rule, left-out samples, and the whole chain from alignment to loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from synthetic import PHE_FLIP, Chain, complex_features

from tpf import geometry
from tpf.config import LossConfig
from tpf.losses import diffusion, total
from tpf.permutation import Aligned, align

FINE_TUNING = LossConfig(bond=4.0, smooth_lddt=0.0)


def weights(cfg: LossConfig = LossConfig(), **f: Any) -> dict[str, list[float]]:  # noqa: B008
    batch = len(f.get("resolution", [0]))
    got = total.sample_weights({"token_mask": torch.ones(batch, 4), **f}, cfg)
    return {name: [round(v, 8) for v in value.tolist()] for name, value in got.items()}


def test_stage_1_weights() -> None:
    got = weights(resolution=torch.tensor([2.0]))
    assert got == {
        "mse": [4.0],
        "bond": [0.0],
        "smooth_lddt": [4.0],
        "distogram": [0.03],
        "plddt": [1e-4],
        "pde": [1e-4],
        "pae": [1e-4],
        "resolved": [1e-4],
    }


def test_confidence_terms_need_a_resolution_in_range() -> None:
    resolution = torch.tensor([0.05, 0.1, 2.0, 4.0, 4.01, torch.nan, 0.0])
    got = weights(resolution=resolution)
    on = [0, 1, 1, 1, 0, 0, 0]
    for name in total.CONFIDENCE_TERMS:
        assert got[name] == [1e-4 * k for k in on]
    assert got["mse"] == [4.0] * 7
    assert weights()["pae"] == [0.0]


def test_loss_weight_features_replace_the_configuration() -> None:
    features = {"mse": torch.tensor([[0.5], [0.0]]), "experimentally_resolved": torch.ones(2, 1)}
    got = weights(resolution=torch.tensor([2.0, 9.0]), loss_weights=features)
    assert got["mse"] == [0.5, 0.0]
    assert got["resolved"] == [1.0, 0.0]
    assert got["plddt"] == [1e-4, 0.0]


def test_samples_with_weight_zero_are_left_out_of_the_mean() -> None:
    f = {"token_mask": torch.ones(3, 2), "resolution": torch.tensor([2.0, 9.0, 3.0])}
    terms = {"mse": torch.tensor([1.0, 2.0, 6.0]), "pae": torch.tensor([1.0, torch.nan, 3.0])}
    got = total.total(f, terms, LossConfig())
    assert got.total == pytest.approx(4 * 3 + 1e-4 * 2)
    got = total.total(f, terms, LossConfig(), valid=torch.tensor([True, True, False]))
    assert got.total == pytest.approx(4 * 1.5 + 1e-4)
    assert got.weights["mse"].tolist() == [4.0, 4.0, 0.0]


def test_terms_without_weight_leave_parameters_without_gradient() -> None:
    f = {"token_mask": torch.ones(1, 2), "resolution": torch.tensor([torch.nan])}
    head, trunk = (torch.ones(1, requires_grad=True) for _ in range(2))
    terms = {"mse": trunk * 2, "plddt": head * 3}
    total.total(f, terms, LossConfig()).total.backward()
    assert trunk.grad is not None
    assert head.grad is None
    nothing = total.total(f, terms, LossConfig(), valid=torch.tensor([False]))
    nothing.total.backward()
    assert nothing.total == 0


# From alignment to loss -----------------------------------------------------------------------


@pytest.fixture
def chains() -> list[Chain]:
    rng = np.random.default_rng(0)
    made = [Chain(1, k, "phe", 6).place(rng) for k in (1, 2)]
    made += [Chain(2, k, "ligand", 5).place(rng) for k in (1, 2)]
    made[0].resolved[3:5] = made[1].resolved[3:5] = 0
    return made


def features(chains: list[Chain]) -> tuple[dict[str, Any], torch.Tensor]:
    f, x = complex_features(chains, orders={"phe": PHE_FLIP})
    ligand_token, own_atoms_token = 12, 0
    f["token_bonds"][0, ligand_token, own_atoms_token] = 1
    f["token_bonds"][0, own_atoms_token, ligand_token] = 1
    return f, x


def evaluate(f: dict[str, Any], rollout: torch.Tensor, cfg: LossConfig) -> dict[str, torch.Tensor]:
    """All terms for denoised copies that are the rollout itself, with fixed logits."""
    aligned = align(f, rollout)
    positions, resolved = aligned.positions[:, 0], aligned.resolved[:, 0]
    copies = 3
    level = torch.tensor([[1.0, 16.0, 160.0]])
    truth = positions[:, None].expand(-1, copies, -1, -1)
    noised = diffusion.Noised(truth, truth, level)
    x = rollout.expand(-1, copies, -1, -1)
    terms = total.diffusion_loss(f, x, noised, positions, resolved, cfg)
    n, a = f["token_mask"].shape[1], rollout.shape[2]
    generator = torch.Generator().manual_seed(5)
    shapes = {"plddt": (a, 50), "resolved": (a, 2), "pae": (n, n, 64), "pde": (n, n, 64)}
    logits = {k: torch.randn(1, 1, *v, generator=generator) for k, v in shapes.items()}
    terms |= total.confidence_loss(f, logits, rollout, aligned)
    distogram = torch.randn(1, n, n, 64, generator=generator)
    return terms | total.distogram_loss(f, distogram, aligned)


def moved(x: torch.Tensor) -> torch.Tensor:
    return geometry.apply_rigid(x, geometry.random_rotations(1)[None], torch.randn(1, 1, 3) * 20)


@pytest.mark.parametrize("cfg", [LossConfig(), FINE_TUNING])
def test_perfect_prediction(chains: list[Chain], cfg: LossConfig) -> None:
    f, x = features(chains)
    terms = evaluate(f, moved(x), cfg)
    assert float(terms["mse"]) == pytest.approx(0, abs=1e-7)
    if cfg.bond:
        assert float(terms["bond"]) == pytest.approx(0, abs=1e-7)
        assert "smooth_lddt" not in terms
    else:
        assert float(terms["smooth_lddt"]) == pytest.approx(0.1959178, abs=1e-4)
        assert "bond" not in terms


def test_renaming_copies_and_symmetric_atoms_changes_no_term(chains: list[Chain]) -> None:
    f, x = features(chains)
    rollout = moved(x + torch.randn_like(x) * 0.3)
    before = evaluate(f, rollout, LossConfig(bond=1.0))
    for a, b in ((chains[0], chains[1]), (chains[2], chains[3])):
        a.positions, b.positions = b.positions, a.positions
    flip = np.arange(66).reshape(6, 11)
    flip[2] = flip[2][PHE_FLIP[1]]
    chains[1].positions = chains[1].positions[flip.ravel()]
    renamed, _ = features(chains)
    after = evaluate(renamed, rollout, LossConfig(bond=1.0))
    assert before.keys() == after.keys() == set(total.TERMS)
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, msg=name)


def test_moving_the_ground_truth_changes_no_term(chains: list[Chain]) -> None:
    f, x = features(chains)
    rollout = moved(x + torch.randn_like(x) * 0.3)
    before = evaluate(f, rollout, LossConfig())
    gt = f["ground_truth"]
    shift = moved(gt["atom_positions"][:, None])[:, 0]
    gt["atom_positions"] = shift * gt["atom_resolved_mask"][..., None]
    after = evaluate(f, rollout, LossConfig())
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, atol=2e-3, rtol=2e-3, msg=name)


def test_noise_weight_applies_to_mse_and_bond_only(chains: list[Chain]) -> None:
    f, x = features(chains)
    resolved = f["ground_truth"]["atom_resolved_mask"]
    pred = x + torch.randn_like(x)
    cfg = LossConfig(bond=1.0)
    values = {}
    for t in (1.0, 16.0):
        noised = diffusion.Noised(x, x, torch.tensor([[t]]))
        values[t] = total.diffusion_loss(f, pred, noised, x[:, 0], resolved, cfg)
    ratio = (1.003906 / 0.0078125, 1.003906 / 0.0078125, 1.0)
    for name, expected in zip(("mse", "bond", "smooth_lddt"), ratio, strict=True):
        assert float(values[1.0][name] / values[16.0][name]) == pytest.approx(expected, rel=1e-5)


def test_losses_stay_in_fp32_under_autocast(chains: list[Chain]) -> None:
    f, x = features(chains)
    rollout = moved(x + torch.randn_like(x) * 0.3)
    plain = evaluate(f, rollout, LossConfig(bond=1.0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = evaluate(f, rollout, LossConfig(bond=1.0))
    for name, value in plain.items():
        assert mixed[name].dtype == torch.float32
        assert torch.equal(mixed[name], value), name


def test_entry_that_could_not_be_matched_gives_zero_loss(chains: list[Chain]) -> None:
    f, x = features(chains)
    f["ground_truth"]["mol_entity_id"] += 5
    f["ground_truth"]["token_index"] += 500
    aligned: Aligned = align(f, x)
    terms = evaluate(f, x, LossConfig())
    assert all(value.isfinite().all() for value in terms.values())
    assert total.total(f, terms, LossConfig(), aligned.valid).total == 0


def test_gradient_reaches_only_resolved_atoms(chains: list[Chain]) -> None:
    f, x = features(chains)
    aligned = align(f, x)
    noised = diffusion.noised_copies(aligned.positions[:, 0], aligned.resolved[:, 0], 4)
    pred = (noised.positions + torch.randn_like(noised.noisy)).requires_grad_()
    cfg = LossConfig(bond=1.0)
    terms = total.diffusion_loss(
        f, pred, noised, aligned.positions[:, 0], aligned.resolved[:, 0], cfg, chunk=2
    )
    total.total(f, terms, cfg, aligned.valid).total.backward()
    size = pred.grad.abs().sum((0, 1, 3))
    resolved = aligned.resolved[0, 0] > 0
    assert (size[resolved] > 0).all()
    assert (size[~resolved] == 0).all()
