"""Agreement with OpenFold3 0.5.0 where it is installed: same random weights, same features, FP64.

The peer adds 1e-9 to atom counts before it divides, and its trunk runs the input embedder's
attention in FP32, which the tolerances of those parts allow for.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from features import random_features
from torch import Tensor

from tpf.config import ModelConfig, load, to_yaml
from tpf.losses import confidence, diffusion
from tpf.model import sample
from tpf.model.diffusion import Trunk
from tpf.model.model import Model
from tpf.weights import convert, files
from tpf.weights.names import map_names

_REASON = "openfold3 0.5.0 is not installed"
network = pytest.importorskip(
    "openfold3.projects.of3_all_atom.model", reason=_REASON, exc_type=ImportError
)

peer_config = importlib.import_module("openfold3_peer").peer_config

DTYPE = torch.float64
EPS_SUM = 5e-9
"""Relative error left by the peer's guard against empty tokens."""
FP32_ATTENTION = 5e-7


def own_state(peer: torch.nn.Module) -> dict[str, Tensor]:
    """Return the peer's state without the aliases of its sampler."""
    state = peer.state_dict().items()
    return {name: x for name, x in state if not name.startswith("sample_diffusion.")}


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Model]:
    """Both networks with the same random weights; none of them is zero."""
    preset = vars(load("tiny").model)
    cfg = ModelConfig(**preset | {"msa_blocks": 2, "template_blocks": 2, "c_hidden_mul": 24})
    g = torch.Generator().manual_seed(3)
    peer, ours = network.OpenFold3(peer_config(cfg)), Model(cfg)
    state = own_state(peer)
    for name, x in state.items():
        if "fourier" not in name and x.numel() > 3:
            scale = x.shape[1] ** -0.5 if x.dim() == 2 else 0.3
            start = 1 if x.dim() == 1 and name.endswith(".weight") else 0
            state[name] = start + scale * torch.randn(x.shape, generator=g)
    peer.load_state_dict(state, strict=False)
    ours.load_state_dict(state, strict=True)
    return peer.to(DTYPE).eval(), ours.to(DTYPE).eval()


def features(pad: int = 2) -> dict[str, Any]:
    f = random_features(n_tokens=24, n_rows=6, pad_tokens=pad, pad_rows=pad)
    return {name: x.to(DTYPE) if x.is_floating_point() else x for name, x in f.items()}


def with_samples(f: dict[str, Any]) -> dict[str, Any]:
    """Add the sample axis with which the peer's diffusion module and heads are called."""
    return {name: x.unsqueeze(1) for name, x in f.items()}


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DTYPE)


def random_trunk(cfg: ModelConfig, n: int) -> Trunk:
    return Trunk(randn(1, n, cfg.c_s_input), randn(1, n, cfg.c_s), randn(1, n, n, cfg.c_z))


def assert_same(ours: Tensor, peer: Tensor, mask: Tensor | float = 1.0, tol: float = 1e-12) -> None:
    if isinstance(mask, Tensor):
        mask = mask.reshape(*mask.shape, *(1,) * (peer.dim() - mask.dim())).to(peer.dtype)
    assert ours.shape == peer.shape
    assert ((ours - peer) * mask).abs().max() <= tol * (peer * mask).abs().max()


def masks(f: dict[str, Any]) -> tuple[Tensor, Tensor]:
    mask = f["token_mask"]
    return mask, mask[:, :, None] * mask[:, None]


def test_names_shapes_and_initial_spread() -> None:
    blocks = ("pairformer", "diffusion", "confidence", "template", "atom")
    cfg = ModelConfig(msa_blocks=2, **{f"{name}_blocks": 1 for name in blocks})
    ours, peer = Model(cfg).state_dict(), own_state(network.OpenFold3(peer_config(cfg)))
    assert ours.keys() == peer.keys()
    for name, x in ours.items():
        other = peer[name]
        assert (x.shape, x.dtype) == (other.shape, other.dtype), name
        if x.std() == 0 or other.std() == 0 or "fourier" in name:
            assert torch.equal(x, other), name
        else:
            assert float(x.std() / other.std()) == pytest.approx(
                1, rel=0.1 + 4 / x.numel() ** 0.5
            ), name


@torch.no_grad()
def test_trunk_parts(pair: tuple[Any, Model]) -> None:
    peer, ours = pair
    f = features()
    mask, pairs = masks(f)
    n = mask.shape[1]
    embedded, expected = ours.input_embedder(f), peer.input_embedder(f)
    for x, y in zip(embedded, expected, strict=True):
        assert_same(x, y, tol=EPS_SUM)
    s, z = randn(1, n, ours.cfg.c_s), randn(1, n, n, ours.cfg.c_z)
    template = peer.template_embedder(batch=f, z=z, pair_mask=pairs)
    assert_same(ours.template_embedder(f, z, mask > 0), template, pairs)
    m, rows = ours.msa_module_embedder(f, embedded.s_input)
    module = peer.msa_module(m, z.clone(), msa_mask=rows.to(DTYPE), pair_mask=pairs)
    assert_same(ours.msa_module(m, z, rows, mask > 0), module, pairs)
    block = peer.pairformer_stack.blocks[0]
    expected = block(s.clone(), z.clone(), single_mask=mask, pair_mask=pairs)
    result = ours.pairformer_stack.blocks[0](s, z, mask > 0, pairs > 0)
    assert_same(result[0], expected[0], mask)
    assert_same(result[1], expected[1], pairs)


@torch.no_grad()
def test_whole_trunk(pair: tuple[Any, Model]) -> None:
    peer, ours = pair
    f = features()
    mask, pairs = masks(f)
    expected = peer.run_trunk(batch=f, num_cycles=2)
    for x, y, keep in zip(ours.trunk(f, 2), expected, (mask, mask, pairs), strict=True):
        assert_same(x, y.to(DTYPE), keep, FP32_ATTENTION)


@torch.no_grad()
def test_denoiser_and_heads(pair: tuple[Any, Model]) -> None:
    peer, ours = pair
    f = features()
    mask, pairs = masks(f)
    n_tokens, n_atoms = mask.shape[1], f["atom_mask"].shape[1]
    trunk = random_trunk(ours.cfg, n_tokens)
    batch, single, si_input = with_samples(f), trunk.s[:, None], trunk.s_input[:, None]
    x, t = 10 * randn(1, 3, n_atoms, 3), torch.tensor([[0.5, 8.0, 200.0]], dtype=DTYPE)
    resolved = f["atom_mask"] * (torch.rand(1, n_atoms) < 0.8)
    for atoms in (f["atom_mask"], resolved):  # unresolved atoms: positions of zero
        known = atoms[:, None]
        denoised = peer.diffusion_module(
            batch=batch,
            xl_noisy=x,
            token_mask=batch["token_mask"],
            atom_mask=known,
            t=t,
            si_input=si_input,
            si_trunk=single,
            zij_trunk=trunk.z[:, None],
            use_conditioning=True,
        )
        context = ours.prepare(f, trunk)
        assert_same(ours.denoise(context, x * known[..., None], t), denoised, known, EPS_SUM)
    parts = {
        "si_trunk": single,
        "zij_trunk": trunk.z[:, None],
        "atom_positions_predicted": x[:, :1],
    }
    logits = peer.aux_heads(
        batch=batch,
        si_input=si_input,
        output=parts,
        use_zij_trunk_embedding=True,
        pairformer_dtype=DTYPE,
    )
    found = ours.confidence(f, trunk, x[:, :1]) | {"distogram": ours.distogram(trunk)[:, None]}
    found["experimentally_resolved"] = found.pop("resolved")
    for name, value in found.items():
        keep = f["atom_mask"] if value.dim() == 4 else pairs
        assert_same(value, logits[f"{name}_logits"], keep[:, None])


def assert_same_gradients(peer: torch.nn.Module, ours: Model, tol: float) -> None:
    """Compare the gradients of all parameters, then clear them."""
    theirs = {name: p.grad for name, p in peer.named_parameters() if p.grad is not None}
    found = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    assert len(found) > 60 and found.keys() == theirs.keys()
    largest = max(float(g.norm()) for g in theirs.values())
    for name, gradient in found.items():
        error = float((gradient - theirs[name]).norm())
        assert error <= tol * (float(theirs[name].norm()) + 1e-6 * largest), name
    for module in (peer, ours):
        module.zero_grad(set_to_none=True)


def test_gradients(pair: tuple[Any, Model]) -> None:
    """Of the whole trunk with one cycle, of one denoising step and of the confidence heads."""
    peer, ours = pair
    f = features(pad=0)
    n_tokens, n_atoms = f["token_mask"].shape[1], f["atom_mask"].shape[1]
    weights = [randn(*x.shape) for x in ours.trunk(f, 1)]
    for outputs in (ours.trunk(f, 1), peer.run_trunk(batch=f, num_cycles=1)):
        sum((x * w).sum() for x, w in zip(outputs, weights, strict=True)).backward()
    assert_same_gradients(peer, ours, 1e-5)

    trunk, batch = random_trunk(ours.cfg, n_tokens), with_samples(f)
    x, t, w = 10 * randn(1, 2, n_atoms, 3), torch.tensor([[0.5, 20.0]], dtype=DTYPE), randn(3)
    single = {"si_input": trunk.s_input[:, None], "si_trunk": trunk.s[:, None]}
    denoised = peer.diffusion_module(
        batch=batch,
        xl_noisy=x,
        token_mask=batch["token_mask"],
        atom_mask=batch["atom_mask"],
        t=t,
        zij_trunk=trunk.z[:, None],
        use_conditioning=True,
        **single,
    )
    for result in (denoised, ours.denoise(ours.prepare(f, trunk), x, t)):
        (result * w).square().sum().backward()
    assert_same_gradients(peer, ours, 1e-6)

    parts = single | {"zij_trunk": trunk.z[:, None], "atom_positions_predicted": x[:, :1]}
    logits = peer.aux_heads(
        batch=batch,
        si_input=parts.pop("si_input"),
        output=parts,
        use_zij_trunk_embedding=True,
        pairformer_dtype=DTYPE,
    )
    found = ours.confidence(f, trunk, x[:, :1]) | {"distogram": ours.distogram(trunk)}
    found["experimentally_resolved"] = found.pop("resolved")
    for name, value in found.items():
        value.square().sum().backward(retain_graph=True)
        logits[f"{name}_logits"].square().sum().backward(retain_graph=True)
    assert_same_gradients(peer, ours, 1e-9)


@pytest.mark.parametrize("form", ["averaged", "Lightning"])
def test_weights_go_there_and_back_bitwise(
    form: str, pair: tuple[Any, Model], tmp_path: Path
) -> None:
    """A file as the peer writes it becomes ours, and the peer loads what we give back."""
    loading = pytest.importorskip("openfold3.core.utils.checkpoint_loading_utils")
    average = importlib.import_module("openfold3.core.utils.exponential_moving_average")
    peer = network.OpenFold3(peer_config(pair[1].cfg))
    state = {k: x.float() for k, x in pair[0].state_dict().items()}
    peer.load_state_dict(state)
    content: dict[str, Any] = {"state_dict": {f"model.{k}": x for k, x in state.items()}}
    if form == "averaged":
        ema = average.ExponentialMovingAverage(peer, decay=0.999)
        ema.init_params(peer)
        content["ema"] = ema.state_dict()
    torch.save(content, tmp_path / "of3.pt")
    config = tmp_path / "model.yaml"
    config.write_text(to_yaml(dataclasses.replace(load("tiny"), model=pair[1].cfg)))
    ours, back = tmp_path / "ours.safetensors", tmp_path / "back.pt"
    convert.import_file(tmp_path / "of3.pt", ours, str(config), strict=True)
    mine = Model(pair[1].cfg)
    convert.start_from(mine, files.read(ours))
    assert mine.state_dict().keys() == own_state(peer).keys()
    assert all(torch.equal(x, state[k]) for k, x in mine.state_dict().items())
    convert.export_file(ours, back)
    found, _ = loading.get_state_dict_from_checkpoint(
        loading.load_checkpoint(back), init_from_ema_weights=True
    )
    assert found.keys() == {f"model.{name}" for name in state}
    fresh = network.OpenFold3(peer_config(pair[1].cfg))
    fresh.load_state_dict({k.removeprefix("model."): x for k, x in found.items()}, strict=True)
    assert all(torch.equal(x, state[k]) for k, x in fresh.state_dict().items())


def test_fused_multiplication_splits_into_ours(pair: tuple[Any, Model]) -> None:
    """The peer's fused triangle multiplication with joined weights is ours with them split."""
    layers = pytest.importorskip("openfold3.core.model.layers.triangular_multiplicative_update")
    mask = torch.rand(9, 9) < 0.8
    for name, kind in (
        ("tri_mul_out", layers.FusedTriangleMultiplicationOutgoing),
        ("tri_mul_in", layers.FusedTriangleMultiplicationIncoming),
    ):
        own = getattr(pair[1].pairformer_stack.blocks[0].pair_stack, name)
        fused = kind(c_z=pair[1].cfg.c_z, c_hidden=pair[1].cfg.c_hidden_mul).to(DTYPE)
        fused.load_state_dict({k: randn(*x.shape) for k, x in fused.state_dict().items()})
        stored = {f"x.{name}.{k}": x for k, x in fused.state_dict().items()}
        wanted = {f"x.{name}.{k}": tuple(x.shape) for k, x in own.state_dict().items()}
        mapped = map_names(stored, wanted)
        assert mapped.problem() is None and mapped.split == 2
        split = copy.deepcopy(own)
        split.load_state_dict({k.removeprefix(f"x.{name}."): x for k, x in mapped.tensors.items()})
        z = randn(1, 9, 9, pair[1].cfg.c_z)
        with torch.no_grad():
            expected = fused(z.clone(), mask=mask[None].to(DTYPE))
            assert_same(split(z, mask[None]), expected)


def test_sampler_draws_the_same_from_the_same_seed() -> None:
    structure = pytest.importorskip("openfold3.core.model.structure.diffusion_module")
    levels = sample.noise_schedule(12, 16.0)
    pull = torch.linspace(0.5, 1.2, 20, dtype=DTYPE)[:, None]

    def denoise(x: Tensor, t: Tensor) -> Tensor:
        centre = x.mean(-2, keepdim=True)
        return centre + pull / (1 + t[..., None, None] / 100) * (x - centre)

    class Denoiser(torch.nn.Module):
        def forward(self, *, xl_noisy: Tensor, t: Tensor, **_: object) -> Tensor:
            return denoise(xl_noisy, t.reshape(1, -1))

    sampler = structure.SampleDiffusion(0.8, 1.0, 1.003, 1.5, Denoiser())
    empty = dict.fromkeys(("si_input", "si_trunk", "zij_trunk"), torch.zeros(1, 1, 5, 4))
    batch = {"atom_mask": torch.ones(1, 1, 20, dtype=DTYPE), "token_mask": torch.ones(1, 1, 5)}
    schedule = torch.tensor(levels, dtype=DTYPE)
    torch.manual_seed(1)
    expected = sampler(batch=batch, noise_schedule=schedule, no_rollout_samples=1, **empty)
    torch.manual_seed(1)
    mask = torch.ones(1, 20, dtype=torch.bool)
    assert_same(sample.sample(denoise, mask, 1, levels, DTYPE), expected)


def test_losses() -> None:
    peer = pytest.importorskip("openfold3.core.loss.diffusion")
    heads = pytest.importorskip("openfold3.core.loss.confidence")
    f = features()
    n_tokens, n_atoms = f["token_mask"].shape[1], f["atom_mask"].shape[1]
    ligand = int(f["is_ligand"][0].argmax())
    f["token_bonds"][0, ligand, 2] = f["token_bonds"][0, 2, ligand] = 1
    resolved = (torch.rand(1, n_atoms) < 0.85) * f["atom_mask"]
    walk = (2.2 * randn(1, n_tokens, 3)).cumsum(1)[:, f["atom_to_token_index"][0].long()]
    truth = (walk + 1.3 * randn(1, n_atoms, 3)) * resolved[..., None]
    x = truth[:, None] + randn(1, 2, n_atoms, 3) * torch.tensor([0.3, 2.0])[None, :, None, None]
    known, targets = resolved[:, None].expand(1, 2, -1), truth[:, None].expand_as(x)
    batch = with_samples(f)
    positions = {"atom_positions": targets, "atom_resolved_mask": known}
    batch["ground_truth"] = with_samples(f) | positions
    eps = {"eps": 1e-8}
    tokens = batch["token_mask"]
    weights = {"dna_weight": 5.0, "rna_weight": 5.0, "ligand_weight": 10.0}
    mse = peer.mse_loss(x=x, batch=batch, loss_token_mask=tokens, **weights, **eps)
    found = diffusion.aligned_mse(x, targets, resolved, diffusion.mse_weights(f))
    assert_same(found, mse)
    assert_same(diffusion.bond_loss(x, truth, resolved, f), peer.bond_loss(x=x, batch=batch, **eps))
    lddt = peer.smooth_lddt_loss(x=x, batch=batch, loss_token_mask=tokens, **eps)
    nucleotide = diffusion.atom_flags(f, "is_dna", "is_rna")
    assert_same(diffusion.smooth_lddt(x, truth, resolved, nucleotide), lddt, tol=1e-7)

    common: dict[str, Any] = {"batch": batch, "x": x, **eps}
    pair_logits = randn(1, 2, n_tokens, n_tokens, 64)
    bins = {"logits": pair_logits, "no_bins": 64, "bin_min": 0.0, "bin_max": 32.0}
    pde, pae = heads.pde_loss, heads.pae_loss
    known_pairs = (f, pair_logits, x, targets, known)
    assert_same(confidence.pde_loss(*known_pairs), pde(**bins, **common), tol=1e-6)
    expected = pae(**bins, **common, angle_threshold=25.0, inf=1e9)
    assert_same(confidence.pae_loss(*known_pairs), expected, tol=1e-6)
    distances = importlib.import_module("openfold3.core.loss.distogram")
    batch["loss_weights"] = {"distogram": torch.ones(1, 1)}
    expected, _ = distances.all_atom_distogram_loss(
        batch=batch, logits=pair_logits[:, :1], no_bins=64, bin_min=2.0, bin_max=22.0, **eps
    )
    found = confidence.distogram_loss(f, pair_logits[:, 0], targets, known)
    assert_same(found, expected.expand_as(found), tol=1e-6)
    logits = randn(1, 2, n_atoms, 2)
    expected = heads.all_atom_experimentally_resolved_loss(
        batch=batch, logits=logits, no_bins=2, **eps
    )
    assert_same(confidence.resolved_loss(f, logits, known), expected, tol=1e-6)
    # A score on the edge of two bins may go to either, so the logits must not tell them apart.
    score, _ = confidence.lddt_targets(f, x, targets, known)
    edge = (score * 50 - (score * 50).round()).abs() < 1e-3
    logits = randn(1, 2, n_atoms, 50).masked_fill(edge[..., None], 0)
    expected = heads.all_atom_plddt_loss(
        logits=logits, no_bins=50, bin_min=0.0, bin_max=1.0, **common
    )
    assert_same(confidence.plddt_loss(f, logits, x, targets, known), expected, tol=1e-6)
