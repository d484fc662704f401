"""Diffusion: conditioning, token blocks, preconditioning, schedule and sampler."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from features import random_features, unzero
from torch import Tensor

from tpf.config import load
from tpf.errors import UsageError
from tpf.model import sample as sampler
from tpf.model.diffusion import DiffusionModule, Trunk
from tpf.model.embed import relative_position
from tpf.model.sample import center_random_augmentation, noise_schedule, sample
from tpf.model.transformer import ConditionedBlock


@pytest.fixture(scope="module")
def module() -> DiffusionModule:
    torch.manual_seed(0)
    module = DiffusionModule(load("tiny").model)
    unzero(module)
    return module.double()


@pytest.fixture(scope="module")
def f() -> dict[str, Any]:
    return random_features(n_tokens=16, pad_tokens=2, pad_atoms=4)


@pytest.fixture(scope="module")
def trunk() -> Trunk:
    g = torch.Generator().manual_seed(2)
    shapes = ((1, 18, 97), (1, 18, 32), (1, 18, 18, 32))
    return Trunk(*(torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes))


def norm(x: Tensor, weight: Tensor | float = 1.0, bias: Tensor | float = 0.0) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias


def transition(layer: Any, x: Tensor) -> Tensor:  # noqa: ANN401
    xn = norm(x, layer.layer_norm.weight, layer.layer_norm.bias)
    a, b = xn @ layer.swiglu.linear_a.weight.T, xn @ layer.swiglu.linear_b.weight.T
    return (a * torch.sigmoid(a) * b) @ layer.linear_out.weight.T


def test_conditioning_formula(module: DiffusionModule, f: dict[str, Any], trunk: Trunk) -> None:
    cond = module.diffusion_conditioning
    mask = f["token_mask"] > 0
    pair_mask = mask[:, :, None] & mask[:, None]
    z = torch.cat([trunk.z, relative_position(f, torch.float64)], -1)
    z = norm(z, cond.layer_norm_z.weight) @ cond.linear_z.weight.T
    for layer in cond.transition_z:
        z = z + transition(layer, z) * pair_mask[..., None]
    torch.testing.assert_close(cond.pair(f, trunk.z, pair_mask), z)
    t = torch.tensor([[0.5, 40.0]]).double()
    s = norm(torch.cat([trunk.s, trunk.s_input], -1), cond.layer_norm_s.weight)
    s = s @ cond.linear_s.weight.T
    level = torch.log(t / 16)[..., None] / 4
    n = torch.cos(2 * math.pi * (level * cond.fourier_emb.w + cond.fourier_emb.b))
    s = s[:, None] + (norm(n, cond.layer_norm_n.weight) @ cond.linear_n.weight.T)[:, :, None]
    for layer in cond.transition_s:
        s = s + transition(layer, s) * mask[:, None, :, None]
    torch.testing.assert_close(cond.noise(cond.single(trunk), t, mask), s)


def test_token_block_matches_a_loop() -> None:
    block = ConditionedBlock(8, 6, 5, 2, windowed=False).double()
    unzero(block)
    n = 5
    a, s = torch.randn(1, 3, n, 8).double(), torch.randn(1, 3, n, 6).double()
    bias = torch.randn(1, 2, n, n).double()
    mask = torch.tensor([[True] * 4 + [False]])
    bias[..., 4] = -1e9
    got = block.conditioned(a, s, bias, mask[:, None])

    def ada(layer: Any, a: Tensor) -> Tensor:  # noqa: ANN401
        sn = norm(s, layer.layer_norm_s.weight)
        gate = torch.sigmoid(sn @ layer.linear_g.weight.T + layer.linear_g.bias)
        return gate * norm(a) + sn @ layer.linear_s.weight.T

    att, mha, tran = (
        block.attention_pair_bias,
        block.attention_pair_bias.mha,
        block.conditioned_transition,
    )
    an = ada(att.layer_norm_a, a)
    q = (an @ mha.linear_q.weight.T + mha.linear_q.bias).view(1, 3, n, 2, 4)
    k, v, g = ((an @ getattr(mha, f"linear_{x}").weight.T).view(1, 3, n, 2, 4) for x in "kvg")
    out = torch.zeros_like(q)
    for x in range(3):
        for i in range(n):
            for h in range(2):
                logits = torch.stack(
                    [q[0, x, i, h] @ k[0, x, j, h] / 2 + bias[0, h, i, j] for j in range(n)]
                )
                out[0, x, i, h] = logits[:4].softmax(0) @ v[0, x, :4, h]
    out = (torch.sigmoid(g) * out).flatten(-2) @ mha.linear_o.weight.T
    expected = a + out * torch.sigmoid(s @ att.linear_ada_out.weight.T + att.linear_ada_out.bias)
    hidden = ada(tran.layer_norm, expected)
    x_a, x_b = hidden @ tran.swiglu.linear_a.weight.T, hidden @ tran.swiglu.linear_b.weight.T
    update = (x_a * torch.sigmoid(x_a) * x_b) @ tran.linear_out.weight.T
    update = update * torch.sigmoid(s @ tran.linear_g.weight.T + tran.linear_g.bias)
    expected = expected + update * mask[:, None, :, None]
    torch.testing.assert_close(got, expected)


def test_preconditioning(module: DiffusionModule, f: dict[str, Any], trunk: Trunk) -> None:
    """r = x / sqrt(t^2 + sigma^2) goes in; x = c_skip x + c_out update comes out."""
    seen: dict[str, Tensor] = {}
    hooks = [
        module.atom_attn_enc.noisy_position_embedder.linear_r.register_forward_pre_hook(
            lambda _, args: seen.update(r=args[0])
        ),
        module.atom_attn_dec.register_forward_hook(lambda *args: seen.update(update=args[2])),
    ]
    n_atoms = f["atom_mask"].shape[1]
    x = 20 * torch.randn(1, 2, n_atoms, 3).double()
    t = torch.tensor([[3.0, 100.0]]).double()
    out = module(module.prepare(f, trunk), x, t)
    for hook in hooks:
        hook.remove()
    mask = f["atom_mask"][0].double()[:, None]
    for i, level in enumerate(t[0].tolist()):
        root = math.sqrt(level**2 + 256)
        torch.testing.assert_close(seen["r"][0, i, :n_atoms], x[0, i] * mask / root)
        skip = 256 / (256 + level**2) * x[0, i]
        expected = skip + 16 * level / root * seen["update"][0, i, :n_atoms]
        torch.testing.assert_close(out[0, i], expected * mask)
    assert seen["update"].abs().max() > 0


def test_samples_do_not_see_each_other(
    module: DiffusionModule, f: dict[str, Any], trunk: Trunk
) -> None:
    x = 10 * torch.randn(1, 3, f["atom_mask"].shape[1], 3).double()
    t = torch.tensor([[1.0, 10.0, 100.0]]).double()
    context = module.prepare(f, trunk)
    together = module(context, x, t)
    for i in range(3):
        torch.testing.assert_close(
            module(context, x[:, i : i + 1], t[:, i : i + 1])[:, 0], together[:, i]
        )


def test_conformer_translations_do_not_change_atom_pairs(
    module: DiffusionModule, f: dict[str, Any], trunk: Trunk
) -> None:
    """Atom pairs see conformers through differences inside one reference space only."""
    context = module.prepare(f, trunk)
    shift = torch.randn(int(f["ref_space_uid"].max()) + 1, 3)
    moved = {**f, "ref_pos": f["ref_pos"] + shift[f["ref_space_uid"].long()]}
    embedder = module.atom_attn_enc.ref_atom_feature_embedder
    p, p_moved = (embedder(x, context.layout)[1] for x in (f, moved))
    torch.testing.assert_close(p, p_moved, atol=1e-5, rtol=1e-5)


def test_everything_but_noise_and_positions_is_computed_once(
    module: DiffusionModule, f: dict[str, Any], trunk: Trunk
) -> None:
    cond, calls = module.diffusion_conditioning, []
    hook = cond.linear_z.register_forward_hook(lambda *_: calls.append(1))
    context = module.prepare(f, trunk)
    shape = (1, 1, f["atom_mask"].shape[1], 3)
    for _ in range(3):
        module(context, torch.randn(shape).double(), torch.ones(1, 1).double())
    hook.remove()
    assert len(calls) == 1
    assert [bias.shape for bias in context.token_biases] == [(1, 4, 18, 18)] * 2


def test_schedule_values() -> None:
    levels = noise_schedule(20, 16.0)
    assert len(levels) == 21
    expected = {0: 2560.0, 1: 1894.7, 10: 55.975, 19: 0.033303, 20: 0.0064}
    assert {i: levels[i] for i in expected} == pytest.approx(expected, rel=3e-5)
    levels = noise_schedule(200, 16.0)
    expected = {1: 2485.5, 100: 55.975, 199: 0.0076895}
    assert {i: levels[i] for i in expected} == pytest.approx(expected, rel=3e-5)
    with pytest.raises(UsageError, match="0 steps"):
        noise_schedule(0, 16.0)


def test_sampler_matches_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps in FP64 numpy; the last level lies below 1 Angstrom, where no noise is added."""
    monkeypatch.setattr(sampler, "center_random_augmentation", lambda x, _: x)
    levels = [80.0, 6.0, 1.01, 0.5]
    mask = torch.tensor([[True, True, True, False]])
    seen: list[float] = []

    def denoise(x: Tensor, t: Tensor) -> Tensor:
        seen.append(float(t[0, 0]))
        return 0.6 * x + 1.0

    torch.manual_seed(3)
    got = sample(denoise, mask, 2, levels, torch.float64)
    torch.manual_seed(3)
    draws = [torch.randn(1, 2, 4, 3, dtype=torch.float64).numpy() for _ in range(4)]
    keep = mask.numpy()[:, None, :, None]
    x = 80.0 * draws[0] * keep
    raised_levels = []
    for i in range(3):
        gamma = 0.8 if levels[i + 1] > 1.0 else 0.0
        raised = levels[i] * (1 + gamma)
        raised_levels.append(raised)
        x = x + 1.003 * np.sqrt(raised**2 - levels[i] ** 2) * draws[i + 1] * keep
        x = x + 1.5 * (levels[i + 1] - raised) * (x - (0.6 * x + 1.0)) / raised
    np.testing.assert_allclose(got[:, :, :3].numpy(), x[:, :, :3], rtol=1e-12)
    assert seen == pytest.approx(raised_levels)
    assert raised_levels == pytest.approx([144.0, 10.8, 1.01])


def test_augmentation_is_a_rigid_motion_about_the_centre() -> None:
    mask = torch.tensor([[True] * 5 + [False] * 2])
    x = torch.randn(1, 400, 7, 3).double() + 50
    y = center_random_augmentation(x, mask)
    assert (y[:, :, 5:] == 0).all()
    torch.testing.assert_close(
        torch.cdist(y[0, :, :5], y[0, :, :5]), torch.cdist(x[0, :, :5], x[0, :, :5])
    )
    center = y[0, :, :5].mean(1)
    assert center.mean(0).abs().max() < 0.25
    assert center.std(0).sub(1).abs().max() < 0.15
    volume = torch.linalg.det(y[0, :, 1:4] - y[0, :, :1])
    torch.testing.assert_close(volume, torch.linalg.det(x[0, :, 1:4] - x[0, :, :1]))
