"""Noise schedule and sampler of the diffusion rollout (AF3 Alg 18, 19)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tpf.errors import UsageError
from tpf.geometry import apply_rigid, random_rotations

S_MAX, S_MIN, RHO = 160.0, 4e-4, 7
"""Largest and smallest noise level in units of sigma_data, and the exponent of the schedule."""
GAMMA, GAMMA_MIN = 0.8, 1.0
"""Noise is raised by the factor 1 + GAMMA before steps to levels above GAMMA_MIN (Angstrom)."""
NOISE_SCALE, STEP_SCALE = 1.003, 1.5
TRANSLATION = 1.0
"""Standard deviation of the random translation in each step, Angstrom."""


def noise_schedule(n_steps: int, sigma_data: float) -> list[float]:
    """Return the n_steps + 1 noise levels from high to low, in Angstrom."""
    if n_steps < 1:
        raise UsageError(f"the sampler got {n_steps} steps; give at least 1")
    high, low = S_MAX ** (1 / RHO), S_MIN ** (1 / RHO)
    return [sigma_data * (high + i / n_steps * (low - high)) ** RHO for i in range(n_steps + 1)]


def center_random_augmentation(x: Tensor, mask: Tensor) -> Tensor:
    """Centre, rotate and translate each sample at random (AF3 Alg 19).

    x [B, S, A, 3], mask [B, A] bool; masked atoms become zero.
    """
    n_batch, n_samples = x.shape[:2]
    keep = mask[:, None, :, None]
    center = (x * keep).sum(2, keepdim=True) / keep.sum(2, keepdim=True).clamp_min(1)
    rotation = random_rotations(n_batch * n_samples, x.device, x.dtype)
    rotation = rotation.view(n_batch, n_samples, 3, 3)
    shift = TRANSLATION * torch.randn(n_batch, n_samples, 3, device=x.device, dtype=x.dtype)
    return apply_rigid(x - center, rotation, shift) * keep


def sample(
    denoise: Callable[[Tensor, Tensor], Tensor],
    mask: Tensor,
    n_samples: int,
    levels: list[float],
    dtype: torch.dtype,
) -> Tensor:
    """Draw structures [B, S, A, 3] (AF3 Alg 18).

    denoise: (x [B, S, A, 3], t [B, S]) -> [B, S, A, 3]; mask: [B, A] bool, real atoms; levels: from
    ``noise_schedule``.
    """
    shape = (len(mask), n_samples, mask.shape[1], 3)
    x = levels[0] * torch.randn(shape, device=mask.device, dtype=dtype) * mask[:, None, :, None]
    for previous, level in zip(levels[:-1], levels[1:], strict=True):
        x = center_random_augmentation(x, mask)
        raised = previous * (1 + (GAMMA if level > GAMMA_MIN else 0))
        noise = NOISE_SCALE * math.sqrt(raised**2 - previous**2)
        x = x + noise * torch.randn_like(x) * mask[:, None, :, None]
        denoised = denoise(x, x.new_full(shape[:2], raised))
        x = x + STEP_SCALE * (level - raised) / raised * (x - denoised)
    return x
