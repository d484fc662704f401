"""Distogram and confidence losses against loops over atoms and pairs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from synthetic import Chain, complex_features, pad

from tpf import geometry
from tpf.losses import confidence

F64 = torch.float64


@pytest.fixture
def case() -> tuple[dict[str, Any], torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features, prediction [1, 2, A, 3], ground truth and resolved flags; some atoms missing."""
    rng = np.random.default_rng(0)
    chains = [
        Chain(1, 1, "protein", 3).place(rng, 6),
        Chain(2, 1, "dna", 2).place(rng, 6),
        Chain(3, 1, "ligand", 4).place(rng, 6),
    ]
    f, x = complex_features(chains)
    truth = x.expand(1, 2, -1, -1).to(F64).clone()
    pred = truth + torch.randn(truth.shape, dtype=F64) * 1.5
    resolved = torch.ones(1, 2, truth.shape[2], dtype=F64)
    for atom in (6, 9, 16, 28):  # a CA, a CB, a C4' of DNA, a ligand atom
        resolved[:, :, atom] = 0
    resolved[:, 1, 0] = 0
    return f, pred, truth * resolved[..., None], resolved


def ce(logits: torch.Tensor, target: int) -> float:
    return float(-logits.double().log_softmax(-1)[target])


def closest(value: float, low: float, high: float, n: int) -> int:
    centres = [low + (high - low) / n * (k + 0.5) for k in range(n)]
    return min(range(n), key=lambda k: abs(centres[k] - value))


def dist(a: torch.Tensor, b: torch.Tensor) -> float:
    return math.sqrt(float(((a - b) ** 2).sum()))


@pytest.mark.parametrize(
    ("value", "expected"),
    [(-1, 0), (1.9, 0), (2.3, 0), (2.32, 1), (21.5, 62), (21.7, 63), (99, 63)],
)
def test_nearest_bin_of_the_distogram(value: float, expected: int) -> None:
    got = confidence.nearest_bin(torch.tensor(value), *confidence.DISTOGRAM_RANGE, 64)
    assert int(got) == expected == closest(value, 2.0, 22.0, 64)


def test_distogram_loss_against_a_loop(case: tuple[Any, ...]) -> None:
    f, _, truth, resolved = case
    rep = f["rep_atom_index"][0].tolist()
    n = len(rep)
    logits = torch.randn(1, n, n, 64)
    got = confidence.distogram_loss(f, logits, truth, resolved)
    for s in range(2):
        values = [
            ce(logits[0, i, j], closest(dist(truth[0, s, a], truth[0, s, b]), 2, 22, 64))
            for i, a in enumerate(rep)
            for j, b in enumerate(rep)
            if resolved[0, s, a] and resolved[0, s, b]
        ]
        assert len(values) < n * n
        assert float(got[0, s]) == pytest.approx(sum(values) / len(values), rel=1e-5)


def loop_lddt(
    f: dict[str, Any], x: torch.Tensor, y: torch.Tensor, m: torch.Tensor
) -> list[float | None]:
    partners = []
    for token, atom in enumerate(f["center_atom_index"][0].tolist()):
        if not f["is_atomized"][0, token]:
            partners.append((atom, 15.0 if f["is_protein"][0, token] else 30.0))
    scores: list[float | None] = []
    for i in range(len(x)):
        total, count = 0.0, 0
        for j, radius in partners:
            d_gt = dist(y[i], y[j])
            if i == j or not (m[i] and m[j]) or d_gt >= radius:
                continue
            error = abs(dist(x[i], x[j]) - d_gt)
            total += sum(error < t for t in (0.5, 1, 2, 4)) / 4
            count += 1
        scores.append(total / count if count else None)
    return scores


def test_plddt_loss_against_a_loop(case: tuple[Any, ...]) -> None:
    f, pred, truth, resolved = case
    logits = torch.randn(1, 2, pred.shape[2], 50)
    got = confidence.plddt_loss(f, logits, pred, truth, resolved)
    for s in range(2):
        scores = loop_lddt(f, pred[0, s], truth[0, s], resolved[0, s])
        values = [
            ce(logits[0, s, a], min(int(score * 50), 49))
            for a, score in enumerate(scores)
            if score is not None
        ]
        assert len({round(v, 6) for v in scores if v is not None}) > 5
        assert float(got[0, s]) == pytest.approx(sum(values) / len(values), rel=1e-5)


def test_lddt_targets_use_strict_limits_and_30_angstrom_for_nucleotides() -> None:
    rng = np.random.default_rng(0)
    chains = [Chain(1, 1, "protein", 1).place(rng), Chain(2, 1, "rna", 1).place(rng)]
    chains.append(Chain(3, 1, "ligand", 1).place(rng))
    f, x = complex_features(chains)
    truth = torch.zeros_like(x)
    truth[0, 0, :5, 0], truth[0, 0, 5:12, 0] = 15.0, -29.0
    score, known = confidence.lddt_targets(f, truth, truth, torch.ones_like(truth[..., 0]))
    assert known[0, 0, 12]  # 29 A from C1'; exactly 15 A from CA does not count
    assert score[0, 0, 12] == 1
    shifted = truth.clone()
    shifted[0, 0, 12, 0] = 0.75
    assert confidence.lddt_targets(f, shifted, truth, torch.ones(1, 1, 13))[0][0, 0, 12] == 0.75


def test_worked_lddt_of_four_collinear_atoms() -> None:
    chain = Chain(1, 1, "protein", 4)
    truth, pred = (0.0, 3.0, 6.0, 30.0), (0.0, 3.7, 6.0, 30.0)
    blocks = [np.tile([[v, 0.0, 0.0]], (5, 1)) for v in truth]
    chain.positions, chain.resolved = np.concatenate(blocks), np.ones(20)
    f, y = complex_features([chain])
    x = y.clone()
    x[0, 0, :, 0] = torch.tensor(pred).repeat_interleave(5)
    score, known = confidence.lddt_targets(f, x, y, torch.ones(1, 1, 20))
    centres = f["center_atom_index"][0].long()
    assert score[0, 0, centres[:3]].tolist() == pytest.approx([0.875, 0.75, 0.875])
    assert known[0, 0, centres].tolist() == [True, True, True, False]
    assert known[0, 0, 15]  # the N beside the fourth CA has that CA as partner


def test_pde_loss_against_a_loop(case: tuple[Any, ...]) -> None:
    f, pred, truth, resolved = case
    rep = f["rep_atom_index"][0].tolist()
    logits = torch.randn(1, 2, len(rep), len(rep), 64)
    got = confidence.pde_loss(f, logits, pred * 3, truth, resolved)
    for s in range(2):
        x, y = pred[0, s] * 3, truth[0, s]
        values = [
            ce(logits[0, s, i, j], closest(abs(dist(x[a], x[b]) - dist(y[a], y[b])), 0, 32, 64))
            for i, a in enumerate(rep)
            for j, b in enumerate(rep)
            if resolved[0, s, a] and resolved[0, s, b]
        ]
        assert float(got[0, s]) == pytest.approx(sum(values) / len(values), rel=1e-5)


def loop_frame(
    f: dict[str, Any], x: np.ndarray, present: np.ndarray, token: int
) -> tuple[np.ndarray, np.ndarray] | None:
    start = int(f["start_atom_index"][0, token])
    if f["is_protein"][0, token]:
        atoms = [start, start + 1, start + 2]
    elif f["is_dna"][0, token]:
        atoms = [start + 2, start + 3, start + 1]  # C3', C1', C4'
    else:
        others = [
            a
            for a in range(len(x))
            if a != start
            and present[a]
            and f["asym_id"][0, f["atom_to_token_index"][0, a]] == f["asym_id"][0, token]
        ]
        others.sort(key=lambda a: np.linalg.norm(x[a] - x[start]))
        atoms = [others[0], start, others[1]]
        u, v = x[atoms[0]] - x[start], x[atoms[2]] - x[start]
        cosine = u @ v / np.linalg.norm(u) / np.linalg.norm(v)
        if not 25 < math.degrees(math.acos(cosine)) < 155:
            return None
    if not present[atoms].all():
        return None
    a, b, c = x[atoms]
    w1, w2 = (a - b) / np.linalg.norm(a - b), (c - b) / np.linalg.norm(c - b)
    e1, e2 = w1 + w2, w2 - w1
    e1, e2 = e1 / np.linalg.norm(e1), e2 / np.linalg.norm(e2)
    return b, np.stack([e1, e2, np.cross(e1, e2)])


def test_pae_loss_against_a_loop(case: tuple[Any, ...]) -> None:
    f, pred, truth, resolved = case
    rep = f["rep_atom_index"][0].tolist()
    n = len(rep)
    logits = torch.randn(1, 2, n, n, 64)
    got = confidence.pae_loss(f, logits, pred, truth, resolved)
    for s in range(2):
        x, y, m = (v[0, s].numpy() for v in (pred, truth, resolved))
        values, frames = [], 0
        for i in range(n):
            one, two = loop_frame(f, x, np.ones(len(x)), i), loop_frame(f, y, m, i)
            if one is None or two is None:
                continue
            frames += 1
            for j, atom in enumerate(rep):
                if m[atom]:
                    error = one[1] @ (x[atom] - one[0]) - two[1] @ (y[atom] - two[0])
                    target = closest(float(np.linalg.norm(error)), 0, 32, 64)
                    values.append(ce(logits[0, s, i, j], target))
        assert 3 <= frames < n
        assert float(got[0, s]) == pytest.approx(sum(values) / len(values), rel=1e-5)


def test_aligned_errors_vanish_for_a_moved_copy_and_see_a_hinge() -> None:
    rng = np.random.default_rng(3)
    f, y = complex_features([Chain(1, 1, "protein", 6).place(rng)])
    x = geometry.apply_rigid(y, geometry.random_rotations(1)[None], torch.randn(1, 1, 3) * 9)
    ones = torch.ones_like(y[..., 0])
    error, mask = confidence.aligned_errors(f, x, y, ones)
    assert mask.all()
    assert error.max() < 1e-2
    x[:, :, 15:] += 5.0
    error, _ = confidence.aligned_errors(f, x, y, ones)
    assert error[0, 0, :3, :3].max() < 1e-2
    torch.testing.assert_close(
        error[0, 0, :3, 3:], torch.full((3, 3), 5 * 3**0.5), atol=0.01, rtol=0
    )


def test_frames_must_be_valid_in_both_structures() -> None:
    chain = Chain(1, 1, "ligand", 3)
    chain.positions = np.array([[0.0, 0, 0], [1.5, 0, 0], [0, 1.6, 0]])
    chain.resolved = np.ones(3)
    f, bent = complex_features([chain])
    straight = bent.clone()
    straight[0, 0, 2] = torch.tensor([-1.6, 0, 0])
    ones = torch.ones(1, 1, 3)
    for x, y, valid in ((bent, bent, True), (straight, bent, False), (bent, straight, False)):
        _, mask = confidence.aligned_errors(f, x, y, ones)
        assert bool(mask[0, 0, 0].all()) is bool(mask[0, 0, 0].any()) is valid


def test_resolved_loss_against_a_loop(case: tuple[Any, ...]) -> None:
    f, _, _, resolved = case
    n = resolved.shape[2]
    f = pad(f, 3, 7)
    logits = torch.randn(1, 2, n + 7, 2)
    got = confidence.resolved_loss(f, logits, torch.nn.functional.pad(resolved, (0, 7)))
    for s in range(2):
        values = [ce(logits[0, s, a], int(resolved[0, s, a])) for a in range(n)]
        assert float(got[0, s]) == pytest.approx(sum(values) / n, rel=1e-5)


def losses(
    f: dict[str, Any], logits: dict[str, torch.Tensor], x: Any, y: Any, m: Any
) -> list[torch.Tensor]:
    return [
        confidence.distogram_loss(f, logits["distogram"], y, m),
        confidence.plddt_loss(f, logits["plddt"], x, y, m),
        confidence.pde_loss(f, logits["pde"], x, y, m),
        confidence.pae_loss(f, logits["pae"], x, y, m),
        confidence.resolved_loss(f, logits["resolved"], m),
    ]


def random_logits(n: int, a: int) -> dict[str, torch.Tensor]:
    return {
        "distogram": torch.randn(1, n, n, 64),
        "plddt": torch.randn(1, 2, a, 50),
        "pde": torch.randn(1, 2, n, n, 64),
        "pae": torch.randn(1, 2, n, n, 64),
        "resolved": torch.randn(1, 2, a, 2),
    }


def test_padding_and_rigid_motion_do_not_change_the_losses(case: tuple[Any, ...]) -> None:
    f, x, y, m = case
    n, a = f["token_mask"].shape[1], x.shape[2]
    wide = random_logits(n + 3, a + 7)
    cut = {
        "distogram": wide["distogram"][:, :n, :n],
        "plddt": wide["plddt"][:, :, :a],
        "pde": wide["pde"][:, :, :n, :n],
        "pae": wide["pae"][:, :, :n, :n],
        "resolved": wide["resolved"][:, :, :a],
    }
    rotation = geometry.random_rotations(2, dtype=F64)[None]
    moved = geometry.apply_rigid(x, rotation, torch.randn(1, 2, 3, dtype=F64))
    grow = torch.nn.functional.pad
    padded = losses(
        pad(f, 3, 7), wide, grow(moved, (0, 0, 0, 7)), grow(y, (0, 0, 0, 7)), grow(m, (0, 7))
    )
    for one, two in zip(losses(f, cut, x, y, m), padded, strict=True):
        torch.testing.assert_close(one, two)


def test_losses_are_finite_when_nothing_is_resolved(case: tuple[Any, ...]) -> None:
    f, x, y, m = case
    logits = random_logits(f["token_mask"].shape[1], x.shape[2])
    for value in logits.values():
        value.requires_grad_()
    values = losses(f, logits, x, y * 0, m * 0)
    torch.stack([v.sum() for v in values]).sum().backward()
    for name, value in zip(logits, values, strict=True):
        assert value.isfinite().all()
        assert (value == 0).all() or name == "resolved"
        assert logits[name].grad is not None
        assert logits[name].grad.isfinite().all()


def test_logits_that_put_all_mass_on_the_target_score_zero(case: tuple[Any, ...]) -> None:
    f, _, truth, resolved = case
    rep = f["rep_atom_index"].long()
    target = confidence.nearest_bin(geometry.pair_distances(truth[:, 0][:, rep[0]]), 2, 22, 64)
    logits = torch.nn.functional.one_hot(target, 64) * 100.0
    assert confidence.distogram_loss(f, logits, truth, resolved)[0, 0] < 1e-6
    flat = confidence.distogram_loss(f, torch.zeros_like(logits), truth, resolved)[0, 0]
    assert float(flat) == pytest.approx(math.log(64), rel=1e-6)
