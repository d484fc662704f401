"""The network on a GPU: agreement with the CPU, mixed precision, repeatability."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from features import random_features, unzero

from tpf.config import load
from tpf.model.model import Model

pytestmark = pytest.mark.gpu

CONFIG = dataclasses.replace(
    load("tiny").model, dropout_pair=0.0, dropout_msa=0.0, msa_blocks=2, impl="torch"
)


def run(device: str, precision: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:  # noqa: ANN401
    """Return outputs and gradients of trunk, denoiser and heads on fixed inputs."""
    torch.manual_seed(0)
    model = Model(CONFIG)
    unzero(model)
    model.to(device)
    f = {name: x.to(device) for name, x in random_features(n_batch=2, n_tokens=40).items()}
    n_atoms = f["atom_mask"].shape[1]
    x = 8 * torch.randn(2, 3, n_atoms, 3, generator=torch.Generator().manual_seed(1)).to(device)
    t = torch.tensor([[0.5, 8.0, 200.0]] * 2, device=device)
    trunk = model.trunk(f, 2, precision)
    out = {
        "z": trunk.z,
        "s": trunk.s,
        "x": model.denoise(model.prepare(f, trunk), x, t),
        "distogram": model.distogram(trunk),
        **model.confidence(f, trunk, x[:, :1]),
    }
    sum(value.square().mean() for value in out.values()).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {name: value.detach() for name, value in out.items()}, grads


def test_gpu_agrees_with_cpu() -> None:
    for cpu, gpu in zip(run("cpu", "fp32"), run("cuda", "fp32"), strict=True):
        scale = max(value.norm() for value in cpu.values())
        for name, value in cpu.items():  # some gradients are zero but for rounding
            error = (gpu[name].cpu() - value).norm() / (value.norm() + 1e-4 * scale)
            assert error < 2e-3, f"{name}: relative error {error:.2e}"


def test_mixed_precision_on_gpu() -> None:
    full, _ = run("cuda", "fp32")
    mixed, grads = run("cuda", "bf16-mixed")
    assert all(grad is not None and grad.isfinite().all() for grad in grads.values())
    for name in ("z", "s", "distogram"):
        error = (mixed[name] - full[name]).norm() / full[name].norm()
        assert 0 < error < 0.03, f"{name}: relative error {error:.2e}"


def test_repeats_bitwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs always; gradients in deterministic mode, where attention does not split its keys."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    outputs = [run("cuda", "bf16-mixed")[0] for _ in range(2)]
    torch.use_deterministic_algorithms(True)
    try:
        gradients = [run("cuda", "bf16-mixed")[1] for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    for first, second in (outputs, gradients):
        assert [name for name in first if not torch.equal(first[name], second[name])] == []
