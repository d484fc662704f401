"""The whole network: recycling, padding, precision, checkpointing and gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from features import random_features, unzero
from torch import Tensor

from tpf.config import ModelConfig, load
from tpf.errors import UsageError
from tpf.model.diffusion import Trunk
from tpf.model.heads import distance_bins
from tpf.model.model import Model

TINY = load("tiny").model
QUIET = dataclasses.replace(TINY, dropout_pair=0.0, dropout_msa=0.0, msa_blocks=2)


def build(cfg: ModelConfig = QUIET) -> Model:
    torch.manual_seed(0)
    model = Model(cfg)
    unzero(model)
    return model


def everything(model: Model, f: dict[str, Any], trunk: Trunk) -> dict[str, Tensor]:
    """Denoiser and heads on fixed positions (real atoms only are non-zero)."""
    n_batch, n_atoms = f["atom_mask"].shape
    g = torch.Generator().manual_seed(4)
    x = 8 * torch.randn(n_batch, 2, 1000, 3, generator=g)[:, :, :n_atoms].to(trunk.z)
    x = x * f["atom_mask"][:, None, :, None]
    t = torch.tensor([[2.0, 30.0]]).expand(n_batch, 2).to(trunk.z)
    out = model.confidence(f, trunk, x)
    return out | {
        "x": model.denoise(model.prepare(f, trunk), x, t),
        "distogram": model.distogram(trunk),
        **trunk._asdict(),
    }


def total(out: dict[str, Tensor]) -> Tensor:
    return sum((x.square().mean() for x in out.values()), torch.zeros(()))


REAL_AXES = {
    "s_input": "bn", "s": "bn", "z": "bnn", "distogram": "bnn", "x": "bsa",
    "plddt": "bsa", "resolved": "bsa", "pae": "bsnn", "pde": "bsnn",
}  # fmt: skip


def crop(x: Tensor, axes: str, n: int, a: int) -> Tensor:
    for axis, name in enumerate(axes):
        x = x.narrow(axis, 0, {"n": n, "a": a}.get(name, x.shape[axis]))
    return x


def test_padding_changes_nothing() -> None:
    model = build().double().eval()
    f = random_features(n_tokens=20, n_rows=4)
    padded = random_features(n_tokens=20, n_rows=4, pad_tokens=5, pad_atoms=70, pad_rows=3)
    n_atoms = f["atom_mask"].shape[1]
    expected = everything(model, f, model.trunk(f, 2))
    got = everything(model, padded, model.trunk(padded, 2))
    for name, axes in REAL_AXES.items():
        torch.testing.assert_close(crop(got[name], axes, 20, n_atoms), expected[name], msg=name)
    assert (got["x"][:, :, n_atoms:] == 0).all()


def test_batch_entries_do_not_see_each_other() -> None:
    model = build().double().eval()
    f = random_features(n_batch=2, n_tokens=16)
    single = {name: value[1:] for name, value in f.items()}
    together = everything(model, f, model.trunk(f, 1))
    alone = everything(model, single, model.trunk(single, 1))
    for name in ("s_input", "s", "z", "distogram"):
        torch.testing.assert_close(together[name][1:], alone[name], msg=name)


def test_order_of_msa_rows_does_not_matter() -> None:
    model = build().double().eval()
    f = random_features(n_tokens=16, n_rows=6)
    order = torch.randperm(6)
    names = ("msa", "has_deletion", "deletion_value", "msa_mask")
    shuffled = f | {name: f[name][:, order] for name in names}
    for first, second in zip(model.trunk(f, 2), model.trunk(shuffled, 2), strict=True):
        torch.testing.assert_close(first, second)


def test_msa_rows_are_drawn_from_the_non_empty_ones() -> None:
    embedder = build(dataclasses.replace(TINY, msa_rows=4)).msa_module_embedder
    f = random_features(n_tokens=8, n_rows=10)
    f["has_deletion"] = torch.arange(10.0).view(1, 10, 1).expand(1, 10, 8)
    f["msa_mask"][:, 7:] = 0
    s_input = torch.zeros(1, 8, 97)
    seen: set[int] = set()
    embedder.linear_m.register_forward_pre_hook(
        lambda _, args: seen.update(args[0][0, :, 0, 32].int().tolist())
    )
    for _ in range(50):
        m, mask = embedder(f, s_input)
        assert m.shape[1] == 4 and mask.all()
    assert seen == set(range(7))
    f["msa_mask"][:, 2:] = 0
    _, mask = embedder(f, s_input)
    assert mask.any(-1).sum() == 2


def test_gradient_flows_through_the_last_cycle_only() -> None:
    model = build()
    f = random_features(n_tokens=12)
    grad_modes: list[bool] = []
    model.pairformer_stack.register_forward_pre_hook(
        lambda *_: grad_modes.append(torch.is_grad_enabled())
    )
    model.trunk(f, 3).z.square().mean().backward()
    assert grad_modes == [False, False, True]
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with torch.no_grad():
        before = model.trunk(f, 2)
    _, z = model._cycle(f, model.input_embedder(f), before.s, before.z)
    z.square().mean().backward()
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(grads[name], p.grad, msg=name)
    with pytest.raises(UsageError, match="0 cycles"):
        model.trunk(f, 0)


def gradients(model: Model, f: dict[str, Any], precision: Any) -> dict[str, Tensor | None]:  # noqa: ANN401
    torch.manual_seed(7)
    total(everything(model, f, model.trunk(f, 2, precision))).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_checkpointing_gives_equal_gradients() -> None:
    f = random_features(n_tokens=12)
    plain = gradients(build(TINY), f, "fp32")
    recomputed = gradients(build(dataclasses.replace(TINY, checkpoint=True)), f, "fp32")
    for name, grad in plain.items():
        torch.testing.assert_close(recomputed[name], grad, msg=name)


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_gradients_reach_every_parameter(precision: str) -> None:
    f = random_features(n_batch=2, n_tokens=16)
    cfg = dataclasses.replace(QUIET, checkpoint=precision == "bf16-mixed")
    grads = gradients(build(cfg), f, precision)
    assert [name for name, grad in grads.items() if grad is None] == []
    assert [name for name, grad in grads.items() if not grad.isfinite().all()] == []
    assert [name for name, grad in grads.items() if grad.abs().max() == 0] == []


def test_untrained_network_is_finite_in_bf16() -> None:
    torch.manual_seed(0)
    model = Model(TINY)
    f = random_features(n_tokens=16)
    trunk = model.trunk(f, 2, "bf16-mixed")
    x = model.rollout(model.prepare(f, trunk), 2, 4)
    assert x.shape == (1, 2, f["atom_mask"].shape[1], 3) and x.isfinite().all()
    out = everything(model, f, trunk)
    total(out).backward()
    assert all(value.isfinite().all() for value in out.values())
    assert [n for n, p in model.named_parameters() if p.grad is None] == []


def test_mixed_precision_keeps_what_must_be_full() -> None:
    model = build()
    f = random_features(n_tokens=16)
    dtypes: dict[str, set[torch.dtype]] = {}

    def record(name: str) -> Any:  # noqa: ANN401
        def hook(_module: object, _args: object, out: Any) -> None:  # noqa: ANN401
            outs = out if isinstance(out, tuple) else (out,)
            found = {x.dtype for x in outs if isinstance(x, Tensor)}
            dtypes.setdefault(name.split(".")[0], set()).update(found)
            if "atom_attn_enc" in name:
                dtypes.setdefault("atoms", set()).update(found)

        return hook

    for name, module in model.named_modules():
        module.register_forward_hook(record(name))
    trunk = model.trunk(f, 2, "bf16-mixed")
    assert dtypes["pairformer_stack"] == dtypes["msa_module"] == {torch.bfloat16}
    assert dtypes["atoms"] == {torch.float32}
    assert {x.dtype for x in trunk} == {torch.float32}
    full = model.trunk(f, 2)
    error = (trunk.z - full.z).norm() / full.z.norm()
    assert 0 < error < 0.03
    plain = everything(model, f, full)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ambient = everything(model, f, full)
    for name, value in plain.items():
        assert torch.equal(value, ambient[name]), name


def test_ambient_autocast_is_respected_and_fp16_refused() -> None:
    model, f = build(), random_features(n_tokens=12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ambient = model.trunk(f, 1)
    assert torch.equal(ambient.z, model.trunk(f, 1, "bf16-mixed").z)
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(UsageError, match="float16"):
        model.trunk(f, 1)


def test_double_stays_double() -> None:
    model, f = build(), random_features(n_tokens=12)
    single = everything(model.eval(), f, model.trunk(f, 2))
    narrow: list[str] = []

    def record(name: str) -> Any:  # noqa: ANN401
        def hook(_module: object, _args: object, out: Any) -> None:  # noqa: ANN401
            outs = out if isinstance(out, tuple) else (out,)
            if any(isinstance(x, Tensor) and x.dtype == torch.float32 for x in outs):
                narrow.append(name)

        return hook

    model.double()
    for name, module in model.named_modules():
        module.register_forward_hook(record(name))
    for precision in ("fp32", "bf16-mixed"):
        double = everything(model, f, model.trunk(f, 2, precision))  # type: ignore[arg-type]
        for name, value in double.items():
            torch.testing.assert_close(value.float(), single[name], atol=2e-3, rtol=2e-3, msg=name)
    assert narrow == []


def test_templates_can_be_left_out() -> None:
    f = random_features(n_tokens=12, n_templates=2)
    none = random_features(n_tokens=12, n_templates=0)
    model = build().eval()
    without = build(dataclasses.replace(QUIET, templates=False)).eval()
    with_templates = model.trunk(f, 1).z
    assert torch.equal(without.trunk(f, 1).z, model.trunk(none, 1).z)
    assert not torch.allclose(with_templates, model.trunk(none, 1).z)
    assert without.state_dict().keys() == model.state_dict().keys()


def test_templates_are_averaged_and_blind_across_chains() -> None:
    model = build().double().eval()
    f = random_features(n_tokens=12, n_templates=2)
    names = [name for name in f if name.startswith("template_")]
    swapped = f | {name: f[name].flip(1) for name in names}
    torch.testing.assert_close(model.trunk(swapped, 1).z, model.trunk(f, 1).z)
    twice = f | {name: f[name].repeat_interleave(2, 1) for name in names}
    torch.testing.assert_close(model.trunk(twice, 1).z, model.trunk(f, 1).z)
    other = (f["asym_id"][:, :, None] != f["asym_id"][:, None])[:, None, :, :, None]
    noisy = f | {
        name: f[name] + other * torch.randn_like(f[name])
        for name in ("template_distogram", "template_unit_vector")
    }
    torch.testing.assert_close(model.trunk(noisy, 1).z, model.trunk(f, 1).z)


def test_heads_are_symmetric_and_detached() -> None:
    model = build()
    f = random_features(n_tokens=12)
    trunk = Trunk(*(x.detach().requires_grad_() for x in model.trunk(f, 1)))
    x = torch.randn(1, 2, f["atom_mask"].shape[1], 3, requires_grad=True)
    out = model.confidence(f, trunk, x)
    torch.testing.assert_close(out["pde"], out["pde"].transpose(2, 3))
    assert not torch.allclose(out["pae"], out["pae"].transpose(2, 3))
    total(out).backward()
    assert x.grad is None and all(part.grad is None for part in trunk)
    distogram = model.distogram(trunk)
    assert torch.equal(distogram, distogram.transpose(1, 2))
    weight = model.aux_heads.distogram.linear.weight
    pair = trunk.z[0, 2, 5] + trunk.z[0, 5, 2]
    torch.testing.assert_close(distogram[0, 2, 5], weight @ pair, atol=1e-4, rtol=1e-4)
    distogram.square().mean().backward()
    assert trunk.z.grad is not None


def test_confidence_of_a_sample_does_not_depend_on_the_others() -> None:
    model = build().eval()
    f = random_features(n_tokens=12)
    trunk = model.trunk(f, 1)
    x = 10 * torch.randn(1, 3, f["atom_mask"].shape[1], 3)
    together = model.confidence(f, trunk, x)
    alone = model.confidence(f, trunk, x[:, 1:2])
    for name, value in alone.items():
        torch.testing.assert_close(together[name][:, 1:2], value)
    moved = model.confidence(f, trunk, x.roll(1, -1) * torch.tensor([1.0, -1, -1]))
    for name, value in moved.items():  # a rotation
        torch.testing.assert_close(together[name], value, atol=1e-4, rtol=1e-4)


def test_plddt_takes_the_row_of_each_atom() -> None:
    model = build()
    f = random_features(n_batch=2, n_tokens=12, pad_atoms=6)
    logits: list[Tensor] = []
    model.aux_heads.plddt.register_forward_hook(lambda *args: logits.append(args[2]))
    x = torch.randn(2, 1, f["atom_mask"].shape[1], 3)
    plddt = model.confidence(f, model.trunk(f, 1), x)["plddt"]
    for b in range(2):
        for token in range(12):
            first, count = f["start_atom_index"][b, token], f["num_atoms_per_token"][b, token]
            rows = logits[0][b, token].view(23, 50)[:count]
            assert torch.equal(plddt[b, 0, first : first + count], rows)


def test_distance_bins() -> None:
    x = torch.tensor([[[0.0, 0, 0], [3.0, 0, 0], [4.0, 0, 0], [60.0, 0, 0]]])
    bins = distance_bins(x)
    assert bins.shape == (1, 4, 4, 39)
    assert bins[0, 0, 1].sum() == 0  # below 3.25 Angstrom
    assert bins[0, 0, 2].argmax() == 0 and bins[0, 0, 2].sum() == 1
    assert bins[0, 0, 3].argmax() == 38 and bins[0, 0, 3].sum() == 1


def test_rollout_is_reproducible_and_masks_padding() -> None:
    model = build().eval()
    f = random_features(n_tokens=12, pad_atoms=40)
    trunk = model.trunk(f, 1)
    context = model.prepare(f, trunk)
    torch.manual_seed(1)
    first = model.rollout(context, 2, 3)
    torch.manual_seed(1)
    assert torch.equal(first, model.rollout(context, 2, 3))
    assert not first.requires_grad
    assert (first[:, :, -40:] == 0).all()
