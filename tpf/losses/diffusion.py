"""Diffusion training: noised copies of the ground truth, and the losses on their denoising.

Shapes: B batch, S copies, N tokens, A atoms. Everything runs in FP32 (FP64 for FP64 input).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.utils.checkpoint import checkpoint

from tpf.geometry import apply_rigid, kabsch, length, random_rotations

LOG_NOISE = (-1.2, 1.5)
"""Mean and standard deviation of log(t / sigma_data) in training (AF3 SI 3.7.1)."""
_LDDT_THRESHOLDS = (0.5, 1.0, 2.0, 4.0)
_LDDT_RADIUS, _LDDT_RADIUS_NUCLEOTIDE = 15.0, 30.0


class Noised(NamedTuple):
    """Copies of the ground truth for one training step."""

    positions: Tensor
    """Moved ground truth [B, S, A, 3]; 0 where unresolved."""
    noisy: Tensor
    """The same plus noise on the resolved atoms [B, S, A, 3]; 0 where unresolved."""
    t: Tensor
    """Noise levels [B, S], angstrom."""


def noise_levels(
    shape: tuple[int, ...],
    device: torch.device | str = "cpu",
    sigma_data: float = 16.0,
    log_noise: tuple[float, float] = LOG_NOISE,
) -> Tensor:
    """Draw noise levels in angstrom: sigma_data * exp(mean + sd * normal) (SI 3.7.1)."""
    mean, sd = log_noise
    return sigma_data * torch.exp(mean + sd * torch.randn(shape, device=device))


def noise_weight(t: Tensor, sigma_data: float = 16.0) -> Tensor:
    """Return (t^2 + sigma^2) / (t * sigma)^2, the loss weight of a noise level."""
    return (t.square() + sigma_data * sigma_data).div((t * sigma_data).square())


@torch.no_grad()
def noised_copies(
    positions: Tensor,
    resolved: Tensor,
    n_copies: int,
    sigma_data: float = 16.0,
    log_noise: tuple[float, float] = LOG_NOISE,
) -> Noised:
    """Make n_copies moved and noised copies of the ground truth (SI 3.7.1, Alg 19).

    positions [B, A, 3], resolved [B, A]. Each copy is centred on the resolved atoms, rotated at
    random and moved by N(0, 1) angstrom. Unresolved atoms enter the denoiser at the origin.
    """
    batch, device = positions.shape[0], positions.device
    mask = resolved.unsqueeze(-1)
    centre = (positions * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp_min(1)
    centred = (positions - centre).unsqueeze(1)
    rotation = random_rotations(batch * n_copies, device, positions.dtype)
    translation = torch.randn(batch, n_copies, 3, device=device, dtype=positions.dtype)
    moved = apply_rigid(centred, rotation.view(batch, n_copies, 3, 3), translation)
    moved = moved * mask.unsqueeze(1)
    t = noise_levels((batch, n_copies), device, sigma_data, log_noise).to(positions.dtype)
    noise = t[..., None, None] * torch.randn_like(moved)
    return Noised(moved, moved + noise * mask.unsqueeze(1), t)


def atom_flags(f: Mapping[str, Any], *names: str) -> Tensor:
    """Return a boolean [B, A]: the atom's token has any of the named flags (``is_dna``, ...)."""
    of_token = torch.stack([f[name] > 0 for name in names]).any(0)
    of_atom: Tensor = of_token.gather(1, f["atom_to_token_index"].long())
    return of_atom.logical_and(f["atom_mask"] > 0)


def mse_weights(f: Mapping[str, Any]) -> Tensor:
    """Return the atom weights 1 + 5 (nucleotide) + 10 (ligand) of the aligned MSE, [B, A]."""
    nucleotide = atom_flags(f, "is_dna", "is_rna")
    return 1.0 + 5.0 * nucleotide + 10.0 * atom_flags(f, "is_ligand")


def aligned_mse(x: Tensor, x_gt: Tensor, resolved: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean squared distance after superposition, [B, S] (SI eq. 2-3).

    x, x_gt [B, S, A, 3], resolved and weights [B, A]. The ground truth is moved onto the
    prediction, without gradient. Divided by 3 times the number of resolved atoms.
    """
    weighted = (weights * resolved).unsqueeze(1)
    rotation, translation = kabsch(x_gt, x, weighted)
    target = apply_rigid(x_gt, rotation, translation)
    squared = (x - target).square().sum(-1)
    return (weighted * squared).sum(-1) / (3.0 * (resolved.sum(-1, keepdim=True) + 1e-8))


def bonded_atoms(f: Mapping[str, Any], b: int) -> tuple[Tensor, Tensor]:
    """Return atom pairs (polymer, ligand) of the bonded token pairs of batch entry b, [P] each."""
    polymer = (f["is_protein"][b] > 0) | (f["is_rna"][b] > 0) | (f["is_dna"][b] > 0)
    bonds = (f["token_bonds"][b] > 0) & polymer[:, None] & (f["is_ligand"][b] > 0)
    left, right = bonds.nonzero(as_tuple=True)
    start, count = f["start_atom_index"][b].long(), f["num_atoms_per_token"][b].long()
    width = int(count[torch.cat([left, right])].max()) if left.numel() else 0
    offset = torch.arange(width, device=left.device)
    real = (offset < count[left, None])[:, :, None] & (offset < count[right, None])[:, None, :]
    atom_left = (start[left, None] + offset)[:, :, None].expand_as(real)
    atom_right = (start[right, None] + offset)[:, None, :].expand_as(real)
    return atom_left[real], atom_right[real]


def bond_loss(x: Tensor, x_gt: Tensor, resolved: Tensor, f: Mapping[str, Any]) -> Tensor:
    """Return the mean squared error of polymer-ligand bond lengths, [B, S] (SI eq. 5).

    x [B, S, A, 3], x_gt [B, A, 3], resolved [B, A]; 0 without a resolved bond.
    """
    losses = []
    for b in range(x.shape[0]):
        left, right = bonded_atoms(f, b)
        both = (resolved[b, left] > 0) & (resolved[b, right] > 0)
        left, right = left[both], right[both]
        if not left.numel():
            losses.append(x.new_zeros(x.shape[1]))
            continue
        error = length(x[b][:, left] - x[b][:, right]) - length(x_gt[b, left] - x_gt[b, right])
        losses.append(error.square().mean(-1))
    return torch.stack(losses)


class _Pairs(NamedTuple):
    """Unordered atom pairs i < j sorted by i, and what their deterministic reduction needs."""

    i: Tensor
    j: Tensor
    count_i: Tensor
    """Pairs of every atom as i [A]."""
    by_j: Tensor
    """Order of the pairs that sorts them by j."""
    count_j: Tensor
    distance: Tensor
    """In the ground truth [P], angstrom."""
    weight: Tensor
    """How many of the ordered pairs (i, j), (j, i) are within the first atom's radius, [P]."""


def _lddt_pairs(x_gt: Tensor, resolved: Tensor, nucleotide: Tensor) -> _Pairs:
    n_atoms = x_gt.shape[0]
    distance = torch.cdist(x_gt, x_gt, compute_mode="donot_use_mm_for_euclid_dist")
    radius = torch.where(nucleotide, _LDDT_RADIUS_NUCLEOTIDE, _LDDT_RADIUS)
    near = (distance < radius[:, None]) & (resolved > 0)[:, None] & (resolved > 0)
    i, j = (near | near.T).triu(1).nonzero(as_tuple=True)
    return _Pairs(
        i,
        j,
        torch.bincount(i, minlength=n_atoms),
        torch.argsort(j, stable=True),
        torch.bincount(j, minlength=n_atoms),
        length(x_gt[i] - x_gt[j]),
        near[i, j].to(x_gt.dtype) + near[j, i].to(x_gt.dtype),
    )


class _PairDifference(torch.autograd.Function):
    """x[i] - x[j] over the first axis, with a backward pass that sums in a fixed order."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, pairs: _Pairs) -> Tensor:
        ctx.pairs = pairs  # type: ignore[attr-defined]
        return x.index_select(0, pairs.i) - x.index_select(0, pairs.j)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        pairs: _Pairs = ctx.pairs  # type: ignore[attr-defined]
        grad = grad.contiguous()
        by_j = grad.index_select(0, pairs.by_j)
        plus = torch.segment_reduce(grad, "sum", lengths=pairs.count_i, axis=0)
        minus = torch.segment_reduce(by_j, "sum", lengths=pairs.count_j, axis=0)
        return plus - minus, None


def _smooth_lddt_of(x: Tensor, pairs: _Pairs) -> Tensor:
    """Return 1 - smooth lDDT of samples x [S, A, 3], [S]."""
    atoms_first = x.transpose(0, 1).flatten(1)
    difference = _PairDifference.apply(atoms_first, pairs)  # type: ignore[no-untyped-call]
    distance = length(difference.unflatten(1, (x.shape[0], 3)))
    error = (distance - pairs.distance[:, None]).abs()
    score = torch.stack([torch.sigmoid(c - error) for c in _LDDT_THRESHOLDS]).mean(0)
    return 1.0 - (pairs.weight[:, None] * score).sum(0) / pairs.weight.sum()


def smooth_lddt(
    x: Tensor, x_gt: Tensor, resolved: Tensor, nucleotide: Tensor, chunk: int = 4
) -> Tensor:
    """Return the smooth lDDT loss, [B, S] (AF3 Alg 27); a perfect prediction scores 0.1959178.

    x [B, S, A, 3]; x_gt [B, A, 3]; resolved, nucleotide [B, A]. Pairs count if the ground truth
    distance is below 15 A (30 A if the first atom is a nucleotide's). ``chunk`` samples are
    evaluated at a time and recomputed in the backward pass. 0 without a pair.
    """
    losses = []
    for b in range(x.shape[0]):
        pairs = _lddt_pairs(x_gt[b], resolved[b], nucleotide[b])
        if not pairs.i.numel():
            losses.append(x.new_zeros(x.shape[1]))
            continue
        parts = [
            checkpoint(_smooth_lddt_of, part, pairs, use_reentrant=False)
            for part in torch.split(x[b], chunk)
        ]
        losses.append(torch.cat(parts))
    return torch.stack(losses)
