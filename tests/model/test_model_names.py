"""Parameter counts, names and shapes of the presets (spec model.md sections 8 and 9)."""

from __future__ import annotations

import pytest
import torch

from tpf.config import load
from tpf.model.model import Model

COUNTS = {"tiny": 522_996, "compact": 24_153_820, "full": 368_293_788}
SPLIT = {
    "input_embedder": 1_345_568,
    "template_embedder": 255_872,
    "msa_module_embedder": 30_912,
    "msa_module": 2_970_112,
    "pairformer_stack": 147_400_704,
    "diffusion_module": 203_236_540,
    "diffusion_module.diffusion_transformer": 198_340_736,
    "aux_heads": 12_889_216,
    "pairformer_stack.blocks.0": 3_070_848,
    "pairformer_stack.blocks.0.pair_stack": 559_872,
}

Shapes = dict[str, tuple[int, ...]]


def build(preset: str) -> Model:
    with torch.device("meta"):
        return Model(load(preset).model)


@pytest.fixture(scope="module")
def full() -> Model:
    return build("full")


def norm(prefix: str, channels: int, *, bias: bool = True) -> Shapes:
    names = ("weight", "bias") if bias else ("weight",)
    return {f"{prefix}.{name}": (channels,) for name in names}


def linears(prefix: str, names: str, c_out: int, c_in: int) -> Shapes:
    return {f"{prefix}.linear_{name}.weight": (c_out, c_in) for name in names.split()}


def transition(prefix: str, c: int, n: int) -> Shapes:
    return (
        norm(f"{prefix}.layer_norm", c)
        | linears(f"{prefix}.swiglu", "a b", n * c, c)
        | linears(prefix, "out", c, n * c)
    )


def pair_stack(prefix: str, c: int, heads: int, n: int) -> Shapes:
    shapes: Shapes = {}
    for name in ("tri_mul_out", "tri_mul_in"):
        shapes |= norm(f"{prefix}.{name}.layer_norm_in", c)
        shapes |= norm(f"{prefix}.{name}.layer_norm_out", c)
        shapes |= linears(f"{prefix}.{name}", "a_p a_g b_p b_g g z", c, c)
    for name in ("tri_att_start", "tri_att_end"):
        shapes |= norm(f"{prefix}.{name}.layer_norm", c)
        shapes |= linears(f"{prefix}.{name}", "z", heads, c)
        shapes |= linears(f"{prefix}.{name}.mha", "q k v g o", c, c)
    return shapes | transition(f"{prefix}.pair_transition", c, n)


def pairformer_block(prefix: str) -> Shapes:
    shapes = pair_stack(f"{prefix}.pair_stack", 128, 4, 4)
    shapes |= norm(f"{prefix}.attn_pair_bias.layer_norm_a", 384)
    shapes |= norm(f"{prefix}.attn_pair_bias.layer_norm_z", 128)
    shapes |= linears(f"{prefix}.attn_pair_bias", "z", 16, 128)
    shapes |= linears(f"{prefix}.attn_pair_bias.mha", "q k v g o", 384, 384)
    shapes[f"{prefix}.attn_pair_bias.mha.linear_q.bias"] = (384,)
    return shapes | transition(f"{prefix}.single_transition", 384, 4)


def ada_norm(prefix: str, c_a: int, c_s: int) -> Shapes:
    return (
        norm(f"{prefix}.layer_norm_s", c_s, bias=False)
        | linears(prefix, "g s", c_a, c_s)
        | {f"{prefix}.linear_g.bias": (c_a,)}
    )


def conditioned_block(prefix: str, c_a: int, c_s: int, c_z: int, heads: int, norms: str) -> Shapes:
    att, tran = f"{prefix}.attention_pair_bias", f"{prefix}.conditioned_transition"
    shapes: Shapes = {}
    for name in norms.split():
        shapes |= ada_norm(f"{att}.{name}", c_a, c_s)
    shapes |= linears(att, "ada_out", c_a, c_s) | {f"{att}.linear_ada_out.bias": (c_a,)}
    shapes |= linears(att, "z", heads, c_z) | linears(f"{att}.mha", "q k v g o", c_a, c_a)
    shapes[f"{att}.mha.linear_q.bias"] = (c_a,)
    shapes |= ada_norm(f"{tran}.layer_norm", c_a, c_s)
    shapes |= linears(f"{tran}.swiglu", "a b", 2 * c_a, c_a) | linears(tran, "out", c_a, 2 * c_a)
    return shapes | linears(tran, "g", c_a, c_s) | {f"{tran}.linear_g.bias": (c_a,)}


def atom_stack(prefix: str) -> Shapes:
    shapes = norm(f"{prefix}.layer_norm_z", 16, bias=False)
    for i in range(3):
        name = f"{prefix}.blocks.{i}"
        shapes |= conditioned_block(name, 128, 128, 16, 4, "layer_norm_a_q layer_norm_a_k")
    return shapes


def atom_encoder(prefix: str, c_token: int) -> Shapes:
    ref = f"{prefix}.ref_atom_feature_embedder"
    shapes: Shapes = {}
    for name, c_in in (("pos", 3), ("charge", 1), ("mask", 1), ("element", 119)):
        shapes |= linears(ref, f"ref_{name}", 128, c_in)
    shapes |= linears(ref, "ref_atom_chars", 128, 256) | linears(ref, "ref_offset", 16, 3)
    shapes |= linears(ref, "inv_sq_dists valid_mask", 16, 1) | linears(prefix, "l m", 16, 128)
    shapes |= {f"{prefix}.pair_mlp.{i}.weight": (16, 16) for i in (1, 3, 5)}
    shapes[f"{prefix}.linear_q.0.weight"] = (c_token, 128)
    return shapes | atom_stack(f"{prefix}.atom_transformer")


def trunk_shapes() -> Shapes:
    shapes: Shapes = {"version_tensor": (3,)}
    shapes |= atom_encoder("input_embedder.atom_attn_enc", 384)
    shapes |= linears("input_embedder", "s", 384, 449) | linears(
        "input_embedder", "z_i z_j", 128, 449
    )
    shapes |= linears("input_embedder", "relpos", 128, 139)
    shapes |= linears("input_embedder", "token_bonds", 128, 1)
    shapes |= norm("layer_norm_z", 128) | norm("layer_norm_s", 384)
    shapes |= {"linear_z.weight": (128, 128), "linear_s.weight": (384, 384)}
    template = "template_embedder.template_pair_embedder"
    for name, c_in in (("dgram", 39), ("pseudo_beta_mask", 1), ("x", 1), ("y", 1), ("z", 1)):
        shapes[f"{template}.{name}_linear.weight"] = (64, c_in)
    shapes[f"{template}.backbone_mask_linear.weight"] = (64, 1)
    shapes |= {f"{template}.aatype_linear_{i}.weight": (64, 32) for i in (1, 2)}
    shapes |= norm(f"{template}.layer_norm_z", 128) | linears(template, "z", 64, 128)
    for i in range(2):
        shapes |= pair_stack(f"template_embedder.template_pair_stack.blocks.{i}", 64, 4, 2)
    shapes |= norm("template_embedder.template_pair_stack.layer_norm", 64)
    shapes |= linears("template_embedder", "t", 128, 64)
    shapes |= linears("msa_module_embedder", "m", 64, 34)
    shapes |= linears("msa_module_embedder", "s_input", 64, 449)
    for i in range(4):
        name = f"msa_module.blocks.{i}"
        if i < 3:
            row = f"{name}.msa_att_row"
            shapes |= norm(f"{row}.layer_norm_m", 64) | norm(f"{row}.layer_norm_z", 128)
            shapes |= linears(row, "z", 8, 128) | linears(row, "v g o", 64, 64)
            shapes |= transition(f"{name}.msa_transition", 64, 4)
        opm = f"{name}.outer_product_mean"
        shapes |= norm(f"{opm}.layer_norm", 64) | linears(opm, "1 2", 32, 64)
        shapes |= linears(opm, "out", 128, 1024) | {f"{opm}.linear_out.bias": (128,)}
        shapes |= pair_stack(f"{name}.pair_stack", 128, 4, 4)
    for i in range(48):
        shapes |= pairformer_block(f"pairformer_stack.blocks.{i}")
    return shapes


def diffusion_shapes() -> Shapes:
    top = "diffusion_module"
    cond, enc, dec = (
        f"{top}.{name}" for name in ("diffusion_conditioning", "atom_attn_enc", "atom_attn_dec")
    )
    shapes = norm(f"{cond}.layer_norm_z", 267, bias=False) | linears(cond, "z", 128, 267)
    shapes |= norm(f"{cond}.layer_norm_s", 833, bias=False) | linears(cond, "s", 384, 833)
    shapes |= {f"{cond}.fourier_emb.w": (256,), f"{cond}.fourier_emb.b": (256,)}
    shapes |= norm(f"{cond}.layer_norm_n", 256, bias=False) | linears(cond, "n", 384, 256)
    for i in range(2):
        shapes |= transition(f"{cond}.transition_z.{i}", 128, 2)
        shapes |= transition(f"{cond}.transition_s.{i}", 384, 2)
    shapes |= atom_encoder(enc, 768)
    noisy = f"{enc}.noisy_position_embedder"
    shapes |= norm(f"{noisy}.layer_norm_s", 384, bias=False) | linears(noisy, "s", 128, 384)
    shapes |= norm(f"{noisy}.layer_norm_z", 128, bias=False) | linears(noisy, "z", 16, 128)
    shapes |= linears(noisy, "r", 128, 3)
    shapes |= norm(f"{top}.layer_norm_s", 384, bias=False) | linears(top, "s", 768, 384)
    stack = f"{top}.diffusion_transformer"
    shapes |= norm(f"{stack}.layer_norm_z", 128, bias=False)
    for i in range(24):
        shapes |= conditioned_block(f"{stack}.blocks.{i}", 768, 384, 128, 16, "layer_norm_a")
    shapes |= norm(f"{top}.layer_norm_a", 768, bias=False) | linears(dec, "q_in", 128, 768)
    shapes |= atom_stack(f"{dec}.atom_transformer")
    return shapes | norm(f"{dec}.layer_norm", 128, bias=False) | linears(dec, "q_out", 3, 128)


def head_shapes() -> Shapes:
    embedding = "aux_heads.pairformer_embedding"
    shapes = linears(embedding, "i j", 128, 449) | linears(embedding, "distance", 128, 39)
    for i in range(4):
        shapes |= pairformer_block(f"{embedding}.pairformer_stack.blocks.{i}")
    heads = {"pae": (128, 64), "pde": (128, 64), "plddt": (384, 1150)}
    for name, (c, n) in (heads | {"experimentally_resolved": (384, 46)}).items():
        shapes |= norm(f"aux_heads.{name}.layer_norm", c)
        shapes[f"aux_heads.{name}.linear.weight"] = (n, c)
    return shapes | {"aux_heads.distogram.linear.weight": (64, 128)}


@pytest.mark.parametrize("preset", COUNTS)
def test_parameter_count(preset: str) -> None:
    assert sum(p.numel() for p in build(preset).parameters()) == COUNTS[preset]


def test_split(full: Model) -> None:
    counts = {name: sum(p.numel() for p in full.get_submodule(name).parameters()) for name in SPLIT}
    assert counts == SPLIT


def test_names_and_shapes(full: Model) -> None:
    expected = trunk_shapes() | diffusion_shapes() | head_shapes()
    found = {name: tuple(x.shape) for name, x in full.state_dict().items()}
    assert sorted(expected.items() - found.items()) == []
    assert sorted(found.items() - expected.items()) == []
    assert len(found) == 4150
    assert len(pairformer_block("")) == 57


def with_aliases(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return an OpenFold3 state dict: the diffusion module stands in it twice."""
    twice = {f"sample_diffusion.{k}": v for k, v in state.items() if k.startswith("diffusion_")}
    return state | twice


def test_openfold3_names_load_strictly() -> None:
    """All 4890 entries of the full preset, their names and shapes from the tables above."""
    expected = trunk_shapes() | diffusion_shapes() | head_shapes()
    entries = with_aliases({k: torch.empty(s, device="meta") for k, s in expected.items()})
    assert len(entries) == 4890
    build("full").load_state_dict(entries, strict=True, assign=True)


def test_state_dict_round_trip() -> None:
    model = Model(load("tiny").model)
    assert model.version_tensor.tolist() == [2, 0, 0]
    wanted = {name: torch.randn_like(x) for name, x in model.state_dict().items()}
    model.load_state_dict(with_aliases(wanted), strict=True)
    found = model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], x) for name, x in wanted.items())
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({k: x for k, x in wanted.items() if "linear_z" not in k})


def test_fourier_buffers_do_not_depend_on_the_seed() -> None:
    torch.manual_seed(5)
    first = Model(load("tiny").model).diffusion_module.diffusion_conditioning.fourier_emb
    second = Model(load("tiny").model).diffusion_module.diffusion_conditioning.fourier_emb
    assert torch.equal(first.w, second.w) and torch.equal(first.b, second.b)
    assert 0 <= first.b.min() and first.b.max() <= 1 and first.w.min() < 0


def test_initial_values() -> None:
    """Default weights have variance 1/fan_in, SwiGLU 2/fan_in; gates, ends and AdaLN constants."""
    torch.manual_seed(0)
    model = Model(load("tiny").model)
    parameters = dict(model.named_parameters())

    def variance(name: str, scale: float) -> None:
        weight = parameters[name].detach()
        assert float(weight.var()) * weight.shape[1] == pytest.approx(scale, rel=0.15)
        assert float(weight.abs().max()) <= 2.28 * (scale / weight.shape[1]) ** 0.5

    block, diffusion = (
        "pairformer_stack.blocks.0",
        "diffusion_module.diffusion_transformer.blocks.0",
    )
    variance(f"{block}.pair_stack.tri_att_end.mha.linear_q.weight", 1)
    variance(f"{block}.pair_stack.tri_mul_in.linear_b_p.weight", 1)
    variance(f"{block}.single_transition.swiglu.linear_a.weight", 2)
    variance(f"{diffusion}.attention_pair_bias.mha.linear_o.weight", 1)
    variance(f"{diffusion}.conditioned_transition.linear_out.weight", 1)
    zero = (
        f"{block}.pair_stack.tri_att_start.mha.linear_o.weight",
        f"{block}.pair_stack.tri_att_start.mha.linear_g.weight",
        f"{block}.pair_stack.tri_mul_out.linear_z.weight",
        f"{block}.pair_stack.tri_mul_out.linear_a_g.weight",
        f"{block}.pair_stack.pair_transition.linear_out.weight",
        f"{diffusion}.attention_pair_bias.layer_norm_a.linear_s.weight",
        f"{diffusion}.attention_pair_bias.layer_norm_a.linear_g.bias",
        f"{diffusion}.attention_pair_bias.linear_ada_out.weight",
        "msa_module.blocks.0.outer_product_mean.linear_out.bias",
        "linear_z.weight",
        "linear_s.weight",
        "diffusion_module.linear_s.weight",
        "diffusion_module.atom_attn_enc.noisy_position_embedder.linear_z.weight",
        "diffusion_module.atom_attn_dec.linear_q_out.weight",
        "aux_heads.plddt.linear.weight",
    )
    assert [name for name in zero if parameters[name].abs().max() > 0] == []
    for name in ("attention_pair_bias.linear_ada_out", "conditioned_transition.linear_g"):
        assert (parameters[f"{diffusion}.{name}.bias"] == -2).all()
