"""Relative positions, atom windows, and the maps between tokens, atoms and windows."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from features import random_features, unzero

from tpf.config import load
from tpf.model.atoms import AtomEncoder
from tpf.model.embed import relative_position
from tpf.model.transformer import AtomTransformer, ConditionedAttention
from tpf.model.windows import AtomLayout, gather_rows, key_windows


def ids(**values: list[int]) -> dict[str, Any]:
    return {name: torch.tensor([value], dtype=torch.int32) for name, value in values.items()}


def test_relative_position_columns() -> None:
    f = ids(
        residue_index=[41, 1, 7, 7],
        token_index=[0, 5, 9, 10],
        asym_id=[1, 1, 2, 2],
        entity_id=[1, 1, 1, 1],
        sym_id=[1, 1, 3, 3],
    )
    relpos = relative_position(f, torch.float32)[0]
    assert relpos.shape == (4, 4, 139)
    columns = {
        (i, j): torch.nonzero(relpos[i, j])[:, 0].tolist() for i in range(4) for j in range(4)
    }
    assert columns[0, 1] == [64, 66 + 65, 132, 133 + 2]  # +40 residues, clipped
    assert columns[1, 0] == [0, 66 + 65, 132, 133 + 2]
    assert columns[0, 2] == [65, 66 + 65, 132, 133 + 0]  # other chain, same entity, sym 1 - 3
    assert columns[2, 0] == [65, 66 + 65, 132, 133 + 4]
    assert columns[2, 3] == [32, 66 + 31, 132, 133 + 2]  # two atoms of one residue


def test_relative_position_of_other_entities() -> None:
    f = ids(
        residue_index=[1, 1], token_index=[0, 1], asym_id=[1, 2], entity_id=[1, 2], sym_id=[1, 1]
    )
    relpos = relative_position(f, torch.float32)[0, 0, 1]
    assert torch.nonzero(relpos)[:, 0].tolist() == [65, 66 + 65, 133 + 5]


def test_cyclic_chains_wrap() -> None:
    n = 7
    f = ids(
        residue_index=list(range(1, n + 1)),
        token_index=list(range(n)),
        asym_id=[1] * n,
        entity_id=[1] * n,
        sym_id=[1] * n,
    )
    f["cyclic_mask"] = torch.ones(1, n, dtype=torch.bool)
    offset = relative_position(f, torch.float32)[0, ..., :66].argmax(-1) - 32
    assert offset[0].tolist() == [0, -1, -2, -3, 3, 2, 1]
    f["cyclic_mask"][:] = False
    assert (relative_position(f, torch.float32)[0, ..., :66].argmax(-1) - 32)[0, -1] == -6


def test_key_windows_of_130_and_40_atoms() -> None:
    keys, valid = key_windows(torch.tensor([130]), 5, 32, 128)
    first_last = [(int(row[0]), int(row[-1])) for row in keys[0]]
    assert first_last == [(0, 127), (0, 127), (2, 129), (2, 129), (2, 129)]
    assert valid.all()
    keys, valid = key_windows(torch.tensor([40]), 2, 32, 128)
    for row, slots in zip(keys[0], valid[0], strict=True):
        assert row[slots].tolist() == list(range(40))
        assert int((~slots).sum()) == 88


@pytest.mark.parametrize("length", [1, 31, 128, 129, 200, 512, 1000])
def test_key_windows_are_centred_or_at_an_end(length: int) -> None:
    n_windows = -(-length // 32)
    keys, valid = key_windows(torch.tensor([length]), n_windows, 32, 128)
    for w in range(n_windows):
        got = keys[0, w][valid[0, w]].tolist()
        start = min(max(32 * w - 48, 0), max(length - 128, 0))
        assert got == list(range(start, min(start + 128, length)))


def layout_of(f: dict[str, Any]) -> AtomLayout:
    return AtomLayout.build(f, 32, 128)


def test_maps_between_tokens_and_atoms() -> None:
    f = random_features(n_batch=2, n_tokens=13, pad_tokens=2, pad_atoms=9)
    layout = layout_of(f)
    x = torch.randn(2, 3, layout.mask.shape[1], 4, dtype=torch.float64, requires_grad=True)
    tokens = torch.randn(2, 3, 15, 4, dtype=torch.float64)
    mean = layout.mean_of_atoms(x)
    atoms = layout.to_atoms(tokens)
    for b in range(2):
        for token in range(15):
            members = [
                a
                for a in range(f["atom_mask"].shape[1])
                if f["atom_mask"][b, a] and f["atom_to_token_index"][b, a] == token
            ]
            expected = x[b, :, members].mean(1) if members else torch.zeros(3, 4)
            torch.testing.assert_close(mean[b, :, token], expected.to(mean))
            for a in members:
                assert torch.equal(atoms[b, :, a], tokens[b, :, token])
    assert torch.autograd.gradcheck(layout.mean_of_atoms, x[:, :1, :, :1].detach().requires_grad_())


def test_gather_rows_and_pairs() -> None:
    f = random_features(n_batch=2, n_tokens=9)
    layout = layout_of(f)
    z = torch.randn(2, 9, 9, 3)
    pairs = layout.gather_pairs(z)
    for b, w, q, k in ((0, 0, 3, 5), (1, 1, 31, 127), (1, 2, 0, 64)):
        token_q = layout.token[b, 32 * w + q]
        token_k = layout.token[b, layout.keys[b, w, k]]
        assert torch.equal(pairs[b, w, q, k], z[b, token_q, token_k])
    x = torch.randn(2, 4, 5, 3)
    index = torch.tensor([[4, 0], [2, 2]])
    taken = gather_rows(x, index)
    assert torch.equal(taken[1, 3, 1], x[1, 3, 2]) and torch.equal(taken[0, 2, 0], x[0, 2, 4])


def test_pair_features_match_a_loop() -> None:
    """p of AF3 Alg 5, atom pair by atom pair in FP64."""
    cfg = load("tiny").model
    encoder = AtomEncoder(cfg, cfg.c_token, noisy=False).double()
    f = random_features(n_tokens=20, pad_atoms=5)
    layout = layout_of(f)
    features = encoder.features(f, layout)
    ref = encoder.ref_atom_feature_embedder
    parts = {
        "pos": f["ref_pos"],
        "charge": torch.asinh(f["ref_charge"])[..., None],
        "mask": f["ref_mask"][..., None],
        "element": f["ref_element"],
    }
    chars = f["ref_atom_name_chars"].double().flatten(2) @ ref.linear_ref_atom_chars.weight.T
    c = chars + sum(
        x.double() @ ref.get_submodule(f"linear_ref_{name}").weight.T for name, x in parts.items()
    )
    torch.testing.assert_close(features.c[:, : c.shape[1]], c)
    pos, space, c = f["ref_pos"][0].double(), f["ref_space_uid"][0], c[0]
    for w, q, k in ((0, 0, 0), (0, 3, 2), (0, 31, 100), (1, 7, 50), (2, 1, 127), (3, 5, 90)):
        atom_l, atom_m = 32 * w + q, int(layout.keys[0, w, k])
        p = torch.zeros(cfg.c_atom_pair, dtype=torch.float64)
        if space[atom_l] == space[atom_m]:
            d = pos[atom_l] - pos[atom_m]
            p = ref.linear_ref_offset.weight @ d + ref.linear_valid_mask.weight[:, 0]
            p = p + ref.linear_inv_sq_dists.weight[:, 0] / (1 + d.square().sum())
        p = (
            p
            + encoder.linear_l.weight @ c[atom_l].relu()
            + encoder.linear_m.weight @ c[atom_m].relu()
        )
        hidden = p
        for i in (1, 3, 5):
            hidden = encoder.pair_mlp[i].weight @ hidden.relu()
        torch.testing.assert_close(features.p[0, w, q, k], p + hidden)


def test_windowed_attention_equals_masked_full_attention() -> None:
    """Windows give what attention over all atoms gives with all pairs outside them masked."""
    cfg = load("tiny").model
    f = random_features(n_tokens=24)
    layout = layout_of(f)
    n, length = int(layout.mask.sum()), layout.mask.shape[1]
    module = ConditionedAttention(32, 32, 8, 2, windowed=True).double()
    unzero(module)
    stack = AtomTransformer(32, 32, 8, blocks=1, heads=2, checkpoint=False).double()
    stack.blocks[0].attention_pair_bias = module
    a, c = torch.randn(1, 2, length, 32).double(), torch.randn(1, length, 32).double()
    p = torch.randn(1, length // 32, 32, 128, 8).double()
    modulations, biases = stack.condition(c, p, layout)
    got = module(a, modulations[0], biases[0], layout)

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:-1], 2, 16).transpose(-3, -2)

    def normed(x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    def ada(norm: Any) -> torch.Tensor:  # noqa: ANN401
        s = normed(c)[:, None] * norm.layer_norm_s.weight
        gate = torch.sigmoid(s @ norm.linear_g.weight.T + norm.linear_g.bias)
        return gate * normed(a) + s @ norm.linear_s.weight.T

    a_q, a_k = ada(module.layer_norm_a_q), ada(module.layer_norm_a_k)
    mha = module.mha
    q = heads(a_q @ mha.linear_q.weight.T + mha.linear_q.bias)
    k, v = heads(a_k @ mha.linear_k.weight.T), heads(a_k @ mha.linear_v.weight.T)
    logits = torch.full((1, 2, 2, length, length), -torch.inf, dtype=torch.float64)
    norm_p = normed(p) * stack.layer_norm_z.weight
    for w in range(length // 32):
        start = min(max(32 * w - 48, 0), max(n - 128, 0))
        size = min(128, n - start)
        rows, cols = slice(32 * w, 32 * w + 32), slice(start, start + size)
        pair = (norm_p[0, w, :, :size] @ module.linear_z.weight.T).permute(2, 0, 1)
        scores = q[:, :, :, rows] @ k[:, :, :, cols].transpose(-1, -2) / 4
        logits[:, :, :, rows, cols] = scores + pair
    o = (logits.softmax(-1) @ v).transpose(-3, -2).flatten(-2)
    out = (torch.sigmoid(a_q @ mha.linear_g.weight.T) * o) @ mha.linear_o.weight.T
    gate = c @ module.linear_ada_out.weight.T + module.linear_ada_out.bias
    expected = out * torch.sigmoid(gate)[:, None]
    torch.testing.assert_close(got[:, :, :n], expected[:, :, :n])
    assert cfg.n_query == 32 and cfg.n_key == 128


def test_unused_window_sizes_still_cover_all_atoms() -> None:
    cfg = dataclasses.replace(load("tiny").model, n_query=8, n_key=24)
    f = random_features(n_tokens=10)
    layout = AtomLayout.build(f, cfg.n_query, cfg.n_key)
    for w in range(layout.keys.shape[1]):
        own = set(range(8 * w, min(8 * w + 8, int(layout.mask.sum()))))
        assert own <= set(layout.keys[0, w].tolist())
