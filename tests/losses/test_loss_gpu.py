"""Losses and alignment on a GPU: the CPU's values, the same bits every time, bounded memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from synthetic import PHE_FLIP, Chain, complex_features

from tpf.losses import confidence, diffusion
from tpf.permutation import align

pytestmark = pytest.mark.gpu


def to_cuda(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cuda()
    return {k: to_cuda(v) for k, v in value.items()} if isinstance(value, dict) else value


def ball(n_atoms: int) -> torch.Tensor:
    """Return positions at the density of a protein, [1, n_atoms, 3]."""
    radius = (n_atoms / 0.05 * 3 / (4 * torch.pi)) ** (1 / 3)
    direction = torch.nn.functional.normalize(torch.randn(n_atoms, 3), dim=-1)
    return (direction * torch.rand(n_atoms, 1) ** (1 / 3) * radius)[None].cuda()


def test_alignment_and_confidence_targets_agree_with_the_cpu() -> None:
    rng = np.random.default_rng(0)
    chains = [Chain(1, k, "phe", 8).place(rng) for k in (1, 2)]
    chains.append(Chain(2, 1, "ligand", 6).place(rng))
    _, x = complex_features(chains)
    chains[0].positions, chains[1].positions = chains[1].positions, chains[0].positions
    f, _ = complex_features(chains, orders={"phe": PHE_FLIP})
    x = x + torch.randn_like(x) * 0.3
    host, device = align(f, x), align(to_cuda(f), x.cuda())
    torch.testing.assert_close(device.positions.cpu(), host.positions)
    for function in (confidence.aligned_errors, confidence.lddt_targets):
        want = function(f, x, host.positions, host.resolved)
        got = function(to_cuda(f), x.cuda(), device.positions, device.resolved)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a.cpu(), b, atol=1e-3, rtol=1e-3)


def test_smooth_lddt_gradient_repeats_bit_by_bit_and_agrees_with_the_cpu() -> None:
    y = ball(700)
    noise = torch.randn(1, 6, 700, 3, device="cuda")
    results = []
    for device in ("cuda", "cuda", "cpu"):
        truth = y.to(device)
        x = (truth[:, None] + noise.to(device)).requires_grad_()
        ones = torch.ones(1, 700, device=device)
        diffusion.smooth_lddt(x, truth, ones, ones > 1).sum().backward()
        assert x.grad is not None
        results.append(x.grad)
    assert torch.equal(results[0], results[1])
    torch.testing.assert_close(results[0].cpu(), results[2], atol=1e-5, rtol=1e-4)


def test_smooth_lddt_of_48_copies_of_3000_atoms_stays_below_2_gb() -> None:
    y = ball(3000)
    x = (y[:, None] + torch.randn(1, 48, 3000, 3, device="cuda")).requires_grad_()
    ones = torch.ones(1, 3000, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    diffusion.smooth_lddt(x, y, ones, ones > 1).mean().backward()
    assert torch.cuda.max_memory_allocated() - before < 2 * 2**30
