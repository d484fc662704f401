"""Diffusion losses against FP64 loops, worked numbers and invariances."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
from synthetic import Chain, complex_features

from tpf import geometry
from tpf.losses import diffusion

F64 = torch.float64


def test_noise_weight_check_values() -> None:
    w = diffusion.noise_weight(torch.tensor([1.0, 16.0, 160.0], dtype=F64))
    np.testing.assert_allclose(w, [1.003906, 0.0078125, 0.00394531], rtol=1e-5)


def test_noise_levels_are_lognormal() -> None:
    logs = (diffusion.noise_levels((100_000,)) / 16).log()
    assert logs.mean() == pytest.approx(-1.2, abs=0.02)
    assert logs.std() == pytest.approx(1.5, abs=0.02)


def test_noised_copies_are_centred_moved_and_masked() -> None:
    x = torch.randn(2, 30, 3) * 10 + 50
    resolved = torch.ones(2, 30)
    resolved[0, 5:9] = 0
    x[0, 5:9] = 0
    resolved[1, 28:] = 0
    made = diffusion.noised_copies(x, resolved, 400)
    assert made.noisy.shape == (2, 400, 30, 3)
    assert (made.positions[0, :, 5:9] == 0).all()
    assert (made.noisy[0, :, 5:9] == 0).all()
    assert (made.noisy[1, :, 28:] == 0).all()
    keep = resolved[0] > 0
    before = geometry.pair_distances(x[0, keep])
    after = geometry.pair_distances(made.positions[0][:, keep])
    torch.testing.assert_close(after, before.expand_as(after), atol=1e-3, rtol=1e-4)
    shift = made.positions[0][:, keep].mean(1)
    assert shift.std() == pytest.approx(1, abs=0.1)
    assert shift.mean() == pytest.approx(0, abs=0.1)
    noise = (made.noisy - made.positions)[0][:, keep] / made.t[0, :, None, None]
    assert noise.std() == pytest.approx(1, abs=0.02)


def test_noised_copies_without_a_resolved_atom_are_finite() -> None:
    made = diffusion.noised_copies(torch.zeros(1, 4, 3), torch.zeros(1, 4), 3)
    assert made.noisy.isfinite().all()
    assert (made.positions == 0).all()


# Aligned MSE ----------------------------------------------------------------------------------


def test_mse_weights_by_molecule_type() -> None:
    rng = np.random.default_rng(0)
    types = ("protein", "dna", "rna", "ligand")
    f, _ = complex_features([Chain(k, 1, t, 1).place(rng) for k, t in enumerate(types, 1)])
    sizes = f["num_atoms_per_token"][0]
    expected = torch.tensor([1.0, 6.0, 6.0, 11.0]).repeat_interleave(sizes)
    torch.testing.assert_close(diffusion.mse_weights(f)[0], expected)


def loop_mse(x: np.ndarray, y: np.ndarray, m: np.ndarray, w: np.ndarray) -> float:
    """Superpose y on x by Horn's quaternion method, then sum in loops."""
    total = sum(w * m)
    cx = sum(w[i] * m[i] * x[i] for i in range(len(x))) / total
    cy = sum(w[i] * m[i] * y[i] for i in range(len(x))) / total
    s = sum(w[i] * m[i] * np.outer(y[i] - cy, x[i] - cx) for i in range(len(x)))
    d = np.array([s[1, 2] - s[2, 1], s[2, 0] - s[0, 2], s[0, 1] - s[1, 0]])
    n = np.block(
        [[np.array([[np.trace(s)]]), d[None]], [d[:, None], s + s.T - np.trace(s) * np.eye(3)]]
    )
    q0, q = (v := np.linalg.eigh(n)[1][:, -1])[0], v[1:]
    cross = np.array([[0, -q[2], q[1]], [q[2], 0, -q[0]], [-q[1], q[0], 0]])
    rotation = (q0**2 - q @ q) * np.eye(3) + 2 * np.outer(q, q) + 2 * q0 * cross
    value = 0.0
    for i in range(len(x)):
        value += w[i] * m[i] * float(((x[i] - (rotation @ (y[i] - cy) + cx)) ** 2).sum())
    return value / (3 * (sum(m) + 1e-8))


def test_mse_against_a_quaternion_loop() -> None:
    x, y = torch.randn(2, 3, 9, 3, dtype=F64), torch.randn(2, 3, 9, 3, dtype=F64)
    m = (torch.rand(2, 9) > 0.3).to(F64)
    w = torch.rand(2, 9, dtype=F64) * 10
    got = diffusion.aligned_mse(x, y, m, w)
    for b in range(2):
        for s in range(3):
            expected = loop_mse(*(v.numpy() for v in (x[b, s], y[b, s], m[b], w[b])))
            assert float(got[b, s]) == pytest.approx(expected, rel=1e-9)


def test_mse_is_zero_for_a_moved_copy_and_not_for_a_mirror_image() -> None:
    y = torch.randn(1, 1, 20, 3) * 10
    x = geometry.apply_rigid(y, geometry.random_rotations(1)[None], torch.randn(1, 1, 3) * 30)
    ones = torch.ones(1, 20)
    assert diffusion.aligned_mse(x, y, ones, ones) < 1e-8
    assert diffusion.aligned_mse(y * torch.tensor([1.0, 1, -1]), y, ones, ones) > 1


def test_mse_gradient_treats_the_target_as_constant() -> None:
    x = torch.randn(1, 1, 6, 3, dtype=F64, requires_grad=True)
    y, m = torch.randn(1, 1, 6, 3, dtype=F64), torch.ones(1, 6, dtype=F64)
    w = torch.rand(1, 6, dtype=F64)
    diffusion.aligned_mse(x, y, m, w).sum().backward()
    target = geometry.apply_rigid(y, *geometry.kabsch(y, x.detach(), w[:, None]))
    expected = 2 * w[..., None] * (x.detach() - target) / (3 * 6)
    torch.testing.assert_close(x.grad, expected)


def test_mse_without_resolved_atoms_is_zero_with_zero_gradient() -> None:
    x = torch.randn(1, 2, 6, 3, requires_grad=True)
    loss = diffusion.aligned_mse(x, torch.zeros(1, 2, 6, 3), torch.zeros(1, 6), torch.ones(1, 6))
    loss.sum().backward()
    assert (loss == 0).all()
    assert (x.grad == 0).all()


# Bonds ----------------------------------------------------------------------------------------


def bonded_complex() -> tuple[dict, torch.Tensor]:
    """Two residues, atomised; a ligand of three atoms bonded to the first one's atom 0 and 1."""
    rng = np.random.default_rng(2)
    f, x = complex_features(
        [Chain(1, 1, "ligand", 4).place(rng), Chain(2, 1, "ligand", 3).place(rng)]
    )
    f["is_ligand"][0, :4], f["is_protein"][0, :4] = 0, 1
    for i, j in ((0, 4), (1, 5), (2, 3), (4, 6)):
        f["token_bonds"][0, i, j] = f["token_bonds"][0, j, i] = 1
    return f, x


def test_bond_loss_against_a_loop() -> None:
    f, x = bonded_complex()
    gt, resolved = x[:, 0].to(F64), torch.ones(1, 7, dtype=F64)
    pred = gt[:, None] + torch.randn(1, 2, 7, 3, dtype=F64)
    got = diffusion.bond_loss(pred, gt, resolved, f)
    for s in range(2):
        errors = []
        for i, j in ((0, 4), (1, 5)):  # 2-3 joins polymer atoms, 4-6 ligand atoms
            d = math.sqrt(float(((pred[0, s, i] - pred[0, s, j]) ** 2).sum()) + 1e-8)
            d_gt = math.sqrt(float(((gt[0, i] - gt[0, j]) ** 2).sum()) + 1e-8)
            errors.append((d - d_gt) ** 2)
        assert float(got[0, s]) == pytest.approx(sum(errors) / 2, rel=1e-12)
    assert (diffusion.bond_loss(gt[:, None], gt, resolved, f) == 0).all()
    resolved[0, 5] = 0
    one = diffusion.bond_loss(pred, gt, resolved, f)
    assert float(one[0, 1]) == pytest.approx(errors[0], rel=1e-12)


def test_bond_loss_without_bonds_is_zero_and_keeps_the_batch_shape() -> None:
    f, x = bonded_complex()
    f["token_bonds"].zero_()
    loss = diffusion.bond_loss(x.expand(-1, 5, -1, -1), x[:, 0], torch.ones(1, 7), f)
    assert loss.tolist() == [[0.0] * 5]


def test_bond_pairs_cover_all_atoms_of_unequal_tokens() -> None:
    rng = np.random.default_rng(0)
    f, _ = complex_features(
        [Chain(1, 1, "protein", 2).place(rng), Chain(2, 1, "ligand", 2).place(rng)]
    )
    f["token_bonds"][0, 1, 3] = f["token_bonds"][0, 3, 1] = 1
    left, right = diffusion.bonded_atoms(f, 0)
    assert left.tolist() == [5, 6, 7, 8, 9]
    assert right.tolist() == [11] * 5


# Smooth lDDT ----------------------------------------------------------------------------------


def loop_smooth_lddt(x: np.ndarray, y: np.ndarray, m: np.ndarray, nucleotide: np.ndarray) -> float:
    score, count = 0.0, 0
    for i in range(len(x)):
        for j in range(len(x)):
            d_gt = math.sqrt(((y[i] - y[j]) ** 2).sum())
            if i == j or not (m[i] and m[j]) or d_gt >= (30 if nucleotide[i] else 15):
                continue
            error = abs(math.sqrt(((x[i] - x[j]) ** 2).sum()) - d_gt)
            score += sum(1 / (1 + math.exp(error - c)) for c in (0.5, 1, 2, 4)) / 4
            count += 1
    return 1 - score / count


@pytest.fixture
def lddt_case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    y = torch.randn(2, 15, 3, dtype=F64) * 12
    x = y[:, None] + torch.randn(2, 5, 15, 3, dtype=F64) * 2
    resolved = (torch.rand(2, 15) > 0.2).to(F64)
    return x, y * resolved[..., None], resolved, torch.rand(2, 15) > 0.5


def test_smooth_lddt_against_loops(lddt_case: tuple[torch.Tensor, ...]) -> None:
    x, y, m, nucleotide = lddt_case
    got = diffusion.smooth_lddt(x, y, m, nucleotide, chunk=2)
    for b in range(2):
        for s in range(5):
            arrays = (v.numpy() for v in (x[b, s], y[b], m[b], nucleotide[b]))
            assert float(got[b, s]) == pytest.approx(loop_smooth_lddt(*arrays), rel=1e-6)


def test_smooth_lddt_of_a_perfect_prediction() -> None:
    y = torch.randn(1, 40, 3) * 8
    x = geometry.apply_rigid(y[:, None], geometry.random_rotations(1)[None], torch.ones(1, 1, 3))
    loss = diffusion.smooth_lddt(x, y, torch.ones(1, 40), torch.zeros(1, 40, dtype=torch.bool))
    assert float(loss) == pytest.approx(0.1959178, abs=2e-6)


def test_smooth_lddt_gradient(lddt_case: tuple[torch.Tensor, ...]) -> None:
    x, y, m, nucleotide = lddt_case
    x = x[:, :3, :8].clone().requires_grad_()

    def loss(v: torch.Tensor) -> torch.Tensor:
        return diffusion.smooth_lddt(v, y[:, :8], m[:, :8], nucleotide[:, :8], chunk=2)

    assert torch.autograd.gradcheck(loss, (x,))


def test_smooth_lddt_does_not_depend_on_the_chunk_size() -> None:
    y = torch.randn(1, 30, 3) * 8
    results = []
    for chunk in (1, 3, 7):
        torch.manual_seed(1)
        x = (y[:, None] + torch.randn(1, 7, 30, 3)).requires_grad_()
        none = torch.zeros(1, 30, dtype=torch.bool)
        loss = diffusion.smooth_lddt(x, y, torch.ones(1, 30), none, chunk)
        loss.sum().backward()
        results.append((loss.detach(), x.grad))
    for loss, grad in results[1:]:
        torch.testing.assert_close(loss, results[0][0])
        torch.testing.assert_close(grad, results[0][1])


@pytest.mark.parametrize("case", ["unresolved", "one atom", "far apart", "same place"])
def test_smooth_lddt_is_finite_without_usable_pairs(case: str) -> None:
    n = 1 if case == "one atom" else 4
    y = torch.zeros(1, n, 3)
    if case == "far apart":
        y[0, :, 0] = torch.arange(4.0) * 100
    resolved = torch.zeros(1, n) if case == "unresolved" else torch.ones(1, n)
    x = torch.zeros(1, 2, n, 3, requires_grad=True)
    loss = diffusion.smooth_lddt(x, y, resolved, torch.zeros(1, n, dtype=torch.bool))
    (loss.sum() + x.sum() * 0).backward()
    assert x.grad.isfinite().all()
    assert torch.allclose(loss, torch.tensor(0.1959178 if case == "same place" else 0.0))


def test_smooth_lddt_keeps_no_pairs_for_the_backward_pass() -> None:
    """Only the denoised copies and the pair list may stay alive between the two passes."""
    y = torch.randn(1, 200, 3) * 8
    x = torch.randn(1, 8, 200, 3, requires_grad=True)
    kept: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        none = torch.zeros(1, 200, dtype=torch.bool)
        diffusion.smooth_lddt(x, y, torch.ones(1, 200), none, chunk=1).sum()
    pairs = int((geometry.pair_distances(y) < 15).sum()) // 2
    assert sum(kept.values()) < 4 * pairs * 8


def test_smooth_lddt_is_quick_at_the_size_of_a_small_crop() -> None:
    y = torch.randn(1, 500, 3) * 10
    x = (y[:, None] + torch.randn(1, 4, 500, 3)).requires_grad_()
    none = torch.zeros(1, 500, dtype=torch.bool)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        diffusion.smooth_lddt(x, y, torch.ones(1, 500), none).sum().backward()
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.2  # about 0.015 on a free core; the margin is for busy machines


def test_losses_do_not_change_under_rigid_motion_of_the_prediction() -> None:
    f, x = bonded_complex()
    gt, resolved = x[:, 0].to(F64), torch.ones(1, 7, dtype=F64)
    pred = gt[:, None] + torch.randn(1, 3, 7, 3, dtype=F64)
    rotation = geometry.random_rotations(3, dtype=F64)[None]
    moved = geometry.apply_rigid(pred, rotation, torch.randn(1, 3, 3, dtype=F64) * 20)
    none, w = torch.zeros(1, 7, dtype=torch.bool), diffusion.mse_weights(f).to(F64)
    for loss in (
        lambda v: diffusion.aligned_mse(v, gt[:, None].expand_as(v), resolved, w),
        lambda v: diffusion.bond_loss(v, gt, resolved, f),
        lambda v: diffusion.smooth_lddt(v, gt, resolved, none),
    ):
        torch.testing.assert_close(loss(moved), loss(pred))
