"""Superposition, rotations, distances and token frames against worked cases and loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from synthetic import Chain, complex_features, pad

from tpf import geometry


def unit_weights(x: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(x[..., 0])


def fitted(mobile: torch.Tensor, target: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return geometry.apply_rigid(mobile, *geometry.kabsch(mobile, target, w))


def test_kabsch_recovers_a_quarter_turn_and_shift() -> None:
    x = torch.tensor([[0.0, 0, 0], [4, 0, 0], [0, 3, 0], [0, 0, 2]], dtype=torch.float64)
    turn = torch.tensor([[0.0, -1, 0], [1, 0, 0], [0, 0, 1]], dtype=torch.float64)
    moved = x @ turn.T + torch.tensor([1.0, 2, 3], dtype=torch.float64)
    rotation, translation = geometry.kabsch(x, moved, unit_weights(x))
    torch.testing.assert_close(rotation, turn)
    torch.testing.assert_close(translation, torch.tensor([1.0, 2, 3], dtype=torch.float64))
    assert rotation.dtype == torch.float64


def test_kabsch_never_reflects() -> None:
    x = torch.tensor([[0.0, 0, 0], [4, 0, 0], [0, 3, 0], [0, 0, 2]])
    mirror = x * torch.tensor([-1.0, 1, 1])
    rotation, _ = geometry.kabsch(x, mirror, unit_weights(x))
    assert torch.linalg.det(rotation) == pytest.approx(1, abs=1e-5)
    rmsd = (fitted(x, mirror, unit_weights(x)) - mirror).square().sum(-1).mean().sqrt()
    assert rmsd > 0.1


def test_kabsch_worked_rmsd() -> None:
    truth = torch.tensor([[0.0, 0, 0], [3, 0, 0], [6, 0, 0], [30, 0, 0]])
    pred = torch.tensor([[0.0, 0, 0], [3.7, 0, 0], [6, 0, 0], [30, 0, 0]])
    moved = fitted(pred, truth, unit_weights(pred))
    assert (moved - truth).square().sum(-1).mean().sqrt() == pytest.approx(0.303109, abs=1e-5)


def test_kabsch_is_the_best_rotation_of_a_search() -> None:
    x, y = torch.randn(12, 3, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64)
    w = torch.rand(12, dtype=torch.float64)
    best = (w * (fitted(x, y, w) - y).square().sum(-1)).sum()
    centred = y - (w[:, None] * y).sum(0) / w.sum()
    start = x - (w[:, None] * x).sum(0) / w.sum()
    trials = geometry.random_rotations(20_000, dtype=torch.float64)
    error = (w * (start @ trials.mT - centred).square().sum(-1)).sum(-1)
    assert best <= error.min()
    assert error.min() < 1.2 * best


def test_kabsch_ignores_atoms_without_weight() -> None:
    x = torch.randn(2, 6, 3)
    rotation = geometry.random_rotations(2)
    y = x @ rotation.mT
    w = torch.ones(2, 6)
    w[:, 4:] = 0
    x[:, 4:] += 100
    torch.testing.assert_close(geometry.kabsch(x, y, w)[0], rotation, atol=1e-5, rtol=0)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_kabsch_of_degenerate_sets_is_proper_and_exact(n: int) -> None:
    x = torch.randn(n, 3)
    y = x @ geometry.random_rotations(1)[0].T + 5
    rotation, _ = geometry.kabsch(x, y, unit_weights(x))
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(3), atol=1e-5, rtol=0)
    assert torch.linalg.det(rotation) > 0
    torch.testing.assert_close(fitted(x, y, unit_weights(x)), y, atol=1e-4, rtol=0)


def test_kabsch_falls_back_to_the_identity() -> None:
    x = torch.randn(3, 5, 3)
    y = torch.randn(3, 5, 3)
    y[1, 2, 0] = torch.nan
    w = torch.ones(3, 5)
    w[2] = 0
    rotation, translation = geometry.kabsch(x, y, w)
    for k in (1, 2):
        torch.testing.assert_close(rotation[k], torch.eye(3))
        torch.testing.assert_close(translation[k], torch.zeros(3))
    expected, _ = geometry.kabsch(x[0], y[0], w[0])
    torch.testing.assert_close(rotation[0], expected)


def test_kabsch_survives_a_failed_decomposition(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: torch.Tensor) -> None:
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "svd", fail)
    rotation, translation = geometry.kabsch(torch.randn(4, 3), torch.zeros(4, 3), torch.ones(4))
    torch.testing.assert_close(rotation, torch.eye(3))
    assert translation.isfinite().all()


def test_kabsch_of_low_precision_input_is_fp32_without_gradient() -> None:
    x = torch.randn(4, 3, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rotation, translation = geometry.kabsch(x, x, torch.ones(4))
    assert rotation.dtype == translation.dtype == torch.float32
    assert not rotation.requires_grad
    torch.testing.assert_close(rotation, torch.eye(3), atol=1e-6, rtol=0)


def test_random_rotations_are_proper_and_uniform() -> None:
    rotation = geometry.random_rotations(20_000, dtype=torch.float64)
    identity = torch.eye(3, dtype=torch.float64).expand_as(rotation)
    torch.testing.assert_close(rotation @ rotation.mT, identity)
    torch.testing.assert_close(torch.linalg.det(rotation), torch.ones(20_000, dtype=torch.float64))
    assert rotation.mean(0).abs().max() < 0.02
    trace = rotation.diagonal(dim1=-2, dim2=-1).sum(-1)
    angle = torch.arccos(((trace - 1) / 2).clamp(-1, 1))
    assert angle.mean() == pytest.approx(math.pi / 2 + 2 / math.pi, abs=0.02)  # Haar measure


def test_pair_distances_against_loops() -> None:
    x, y = np.random.randn(4, 3), np.random.randn(5, 3)
    expected = [[np.sqrt(((a - b) ** 2).sum() + 1e-8) for b in y] for a in x]
    got = geometry.pair_distances(torch.from_numpy(x), torch.from_numpy(y))
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12)


def test_distance_has_a_finite_gradient_at_zero() -> None:
    x = torch.zeros(3, 3, requires_grad=True)
    geometry.pair_distances(x).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_gathers_follow_batch_and_sample_axes() -> None:
    values, index = torch.randn(2, 3, 5, 3), torch.tensor([[4, 0], [1, -1]])
    taken = geometry.gather_atoms(values, index)
    torch.testing.assert_close(taken[0, 2, 0], values[0, 2, 4])
    torch.testing.assert_close(taken[1, 1, 0], values[1, 1, 1])
    flags = geometry.gather_flags(torch.ones(2, 3, 5), index)
    assert flags[1].tolist() == [[1.0, 0.0]] * 3


# Frames ---------------------------------------------------------------------------------------


def loop_frame(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    unit = lambda v: v / np.linalg.norm(v)  # noqa: E731
    w1, w2 = unit(a - b), unit(c - b)
    e1, e2 = unit(w1 + w2), unit(w2 - w1)
    return np.stack([e1, e2, np.cross(e1, e2)])


def test_frames_of_standard_tokens_use_the_named_atoms() -> None:
    rng = np.random.default_rng(0)
    chains = [Chain(1, 1, "protein", 3).place(rng), Chain(2, 1, "rna", 2).place(rng)]
    f, x = complex_features(chains)
    f = pad(f, 2, 5)
    x = torch.nn.functional.pad(x, (0, 0, 0, 5))
    frames = geometry.token_frames(f, x, f["atom_mask"][:, None])
    assert frames.valid[0, 0].tolist() == [True] * 5 + [False] * 2
    coords = x[0, 0].double().numpy()
    for token, names, start in ((1, (0, 1, 2), 5), (4, (2, 4, 1), 22)):
        a, b, c = (coords[start + k] for k in names)
        np.testing.assert_allclose(frames.origin[0, 0, token], b, atol=1e-5)
        np.testing.assert_allclose(frames.axes[0, 0, token], loop_frame(a, b, c), atol=1e-4)
    local = geometry.express_in_frames(x, frames)
    expected = loop_frame(*coords[[5, 6, 7]]) @ (coords[30] - coords[6])
    np.testing.assert_allclose(local[0, 0, 1, 30], expected, atol=1e-4)


def test_frames_do_not_change_under_rigid_motion() -> None:
    rng = np.random.default_rng(1)
    chains = [Chain(1, 1, "protein", 4).place(rng), Chain(2, 1, "ligand", 6).place(rng)]
    f, x = complex_features(chains)
    moved = geometry.apply_rigid(x, geometry.random_rotations(1)[None], torch.randn(1, 1, 3))
    present = f["atom_mask"][:, None]
    local = [
        geometry.express_in_frames(y, geometry.token_frames(f, y, present)) for y in (x, moved)
    ]
    torch.testing.assert_close(local[0], local[1], atol=1e-3, rtol=1e-4)


def ligand_frames(points: list[list[float]], present: list[float]) -> geometry.Frames:
    chains = [Chain(1, 1, "ligand", len(points)), Chain(2, 1, "ligand", 1)]
    chains[0].positions, chains[0].resolved = np.array(points), np.ones(len(points))
    chains[1].positions, chains[1].resolved = np.array([[0.1, 0.1, 0.0]]), np.ones(1)
    f, x = complex_features(chains)
    return geometry.token_frames(f, x, torch.tensor([[[*present, 1.0]]]))


def test_frames_of_atomised_tokens_use_the_nearest_atoms_of_the_chain() -> None:
    points = [[0.0, 0, 0], [1.0, 0, 0], [0, 1.2, 0], [0, 0, 1.5]]
    frames = ligand_frames(points, [1, 1, 1, 1])
    assert frames.valid[0, 0].tolist() == [True, True, True, True, False]
    expected = loop_frame(*np.array(points)[[1, 0, 2]])
    np.testing.assert_allclose(frames.axes[0, 0, 0], expected, atol=1e-5)
    without_first = ligand_frames(points, [1, 0, 1, 1])
    assert without_first.valid[0, 0].tolist() == [True, False, True, True, False]
    expected = loop_frame(*np.array(points)[[2, 0, 3]])
    np.testing.assert_allclose(without_first.axes[0, 0, 0], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("degrees", "valid"), [(20, False), (30, True), (150, True), (160, False), (180, False)]
)
def test_frames_of_atomised_tokens_have_angle_limits(degrees: float, valid: bool) -> None:
    angle = math.radians(degrees)
    points = [[0.0, 0, 0], [1.0, 0, 0], [1.1 * math.cos(angle), 1.1 * math.sin(angle), 0]]
    assert bool(ligand_frames(points, [1, 1, 1]).valid[0, 0, 0]) is valid
    lone = ligand_frames(points[:2], [1, 1])
    assert not lone.valid.any()
