"""The loss of one training sample: trunk, rollout, confidence, alignment, diffusion (AF3 Alg 1).

Every random draw follows from (seed, step, index) alone, so a resumed or re-run step is the same
step, whatever was drawn before it and however many ranks there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tpf.config import Config, TrainConfig
from tpf.losses.diffusion import noised_copies
from tpf.losses.total import (
    CONFIDENCE_TERMS,
    confidence_loss,
    diffusion_loss,
    distogram_loss,
    sample_weights,
    total,
)
from tpf.model.model import Model
from tpf.permutation import align

_TORCH_STREAM, _CYCLE_STREAM = 1, 2


@dataclass(frozen=True)
class Draws:
    """The random state of one sample's step."""

    step: int
    index: int
    """Sample number over the whole run."""
    seed: int
    """Seed of torch's generators."""
    cycles: int
    """Trunk cycles, the same for all samples of a step."""


def draws(cfg: TrainConfig, step: int, index: int) -> Draws:
    """Return the random state of sample ``index`` in step ``step`` (counted from 0)."""
    stream = np.random.SeedSequence([cfg.seed, _TORCH_STREAM, step, index])
    cycles = np.random.default_rng([cfg.seed, _CYCLE_STREAM, step]).integers(cfg.max_recycles + 1)
    return Draws(step, index, int(stream.generate_state(1, np.uint64)[0] >> 1), int(cycles) + 1)


@dataclass(frozen=True)
class SampleLoss:
    """The loss of one sample, its unweighted terms, and what went wrong in the alignment."""

    total: Tensor
    terms: dict[str, Tensor]
    events: list[str]


def sample_loss(model: Model, batch: dict[str, Any], config: Config, draw: Draws) -> SampleLoss:
    """Return the training loss of a batch of one sample (spec model.md sections 2.1 and 5)."""
    cfg, sigma = config.train, config.model.sigma_data
    torch.manual_seed(draw.seed)
    trunk = model.trunk(batch, draw.cycles, cfg.precision)
    context = model.prepare(batch, trunk)
    x = model.rollout(context, 1, cfg.rollout_steps)
    aligned = align(batch, x)
    terms = distogram_loss(batch, model.distogram(trunk), aligned)
    weights = sample_weights(batch, config.loss, aligned.valid)
    if any(float(weights[name].sum()) > 0 for name in CONFIDENCE_TERMS):
        terms |= confidence_loss(batch, model.confidence(batch, trunk, x), x, aligned)
    positions, resolved = aligned.positions[:, 0], aligned.resolved[:, 0]
    log_noise = (cfg.noise_mean, cfg.noise_sd)
    copies = noised_copies(positions, resolved, cfg.diffusion_samples, sigma, log_noise)
    denoised = model.denoise(context, copies.noisy, copies.t)
    terms |= diffusion_loss(
        batch,
        denoised,
        copies,
        positions,
        resolved,
        config.loss,
        sigma_data=sigma,
        chunk=cfg.diffusion_chunk,
    )
    loss = total(batch, terms, config.loss, aligned.valid)
    return SampleLoss(
        loss.total,
        {name: term.detach().mean() for name, term in loss.terms.items()},
        list(aligned.events),
    )
