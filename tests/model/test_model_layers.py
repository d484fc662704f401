"""Trunk layers against FP64 loops written from the algorithms."""

from __future__ import annotations

import math

import pytest
import torch
from features import unzero
from torch import Tensor, nn

from tpf.config import load
from tpf.model.msa import MSAModule, OuterProductMean, PairWeightedAveraging
from tpf.model.pairformer import (
    COLUMNS,
    ROWS,
    AttentionPairBias,
    PairDims,
    PairformerStack,
    PairStack,
    TriangleAttention,
    TriangleMultiplication,
)
from tpf.model.primitives import LayerNorm, Linear, Transition, shared_dropout

N = 6
DIMS = PairDims(
    channels=8, c_hidden_mul=12, heads=2, head_dim=4, expansion=2, dropout=0.25, impl="torch"
)


def ready(module: nn.Module) -> nn.Module:
    unzero(module)
    return module.double().eval()


def pair_mask() -> Tensor:
    mask = torch.rand(2, N, N) < 0.8
    return mask | torch.eye(N, dtype=torch.bool)


def norm(layer: LayerNorm, x: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return x * layer.weight + layer.bias


@pytest.mark.parametrize("node", ["starting", "ending"])
def test_triangle_attention_matches_a_loop(node: str) -> None:
    """The bias of query i and key k at the ending node is that of the pair (i, k)."""
    module = ready(TriangleAttention(DIMS, node))
    z, mask = torch.randn(2, N, N, 8).double(), pair_mask()
    zn = norm(module.layer_norm, z)
    mha = module.mha
    q, k, v, g = (
        (zn @ getattr(mha, f"linear_{name}").weight.T).view(2, N, N, 2, 4) for name in "qkvg"
    )
    bias = zn @ module.linear_z.weight.T
    out = torch.zeros(2, N, N, 2, 4).double()
    for b in range(2):
        for x in range(N):  # the slice
            for y in range(N):  # the query
                for h in range(2):
                    logits = torch.full((N,), -torch.inf).double()
                    for w in range(N):  # the key
                        if node == "starting" and mask[b, x, w]:
                            logits[w] = q[b, x, y, h] @ k[b, x, w, h] / 2 + bias[b, y, w, h]
                        if node == "ending" and mask[b, w, x]:
                            logits[w] = q[b, y, x, h] @ k[b, w, x, h] / 2 + bias[b, y, w, h]
                    p = logits.softmax(0)
                    if node == "starting":
                        out[b, x, y, h] = p @ v[b, x, :, h]
                    else:
                        out[b, y, x, h] = p @ v[b, :, x, h]
    expected = (torch.sigmoid(g) * out).flatten(-2) @ mha.linear_o.weight.T
    torch.testing.assert_close(module(z, mask), expected)


def test_fully_masked_slices_are_finite() -> None:
    module = ready(TriangleAttention(DIMS, "ending"))
    z = torch.randn(1, N, N, 8).double().requires_grad_()
    mask = torch.ones(1, N, N, dtype=torch.bool)
    mask[:, :, 2] = False
    out = module(z, mask)
    out.sum().backward()
    assert (out[:, :, 2] == 0).all() and out.isfinite().all() and z.grad.isfinite().all()


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
def test_triangle_multiplication_matches_a_loop(direction: str) -> None:
    module = ready(TriangleMultiplication(DIMS, direction))
    z, mask = torch.randn(2, N, N, 8).double(), pair_mask()
    zn = norm(module.layer_norm_in, z)
    a, b = (
        torch.sigmoid(zn @ getattr(module, f"linear_{x}_g").weight.T)
        * (zn @ getattr(module, f"linear_{x}_p").weight.T)
        * mask[..., None]
        for x in "ab"
    )
    x = torch.zeros(2, N, N, 12).double()
    for i in range(N):
        for j in range(N):
            for k in range(N):
                if direction == "outgoing":
                    x[:, i, j] += a[:, i, k] * b[:, j, k]
                else:
                    x[:, i, j] += a[:, k, i] * b[:, k, j]
    gate = torch.sigmoid(zn @ module.linear_g.weight.T)
    expected = gate * (norm(module.layer_norm_out, x) @ module.linear_z.weight.T)
    torch.testing.assert_close(module(z, mask), expected)


def test_attention_with_pair_bias_matches_a_loop() -> None:
    module = ready(AttentionPairBias(12, 8, 3))
    s, z = torch.randn(2, N, 12).double(), torch.randn(2, N, N, 8).double()
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]) > 0
    sn, mha = norm(module.layer_norm_a, s), module.mha
    q = (sn @ mha.linear_q.weight.T + mha.linear_q.bias).view(2, N, 3, 4)
    k, v, g = ((sn @ getattr(mha, f"linear_{x}").weight.T).view(2, N, 3, 4) for x in "kvg")
    bias = norm(module.layer_norm_z, z) @ module.linear_z.weight.T
    out = torch.zeros(2, N, 3, 4).double()
    for b in range(2):
        keys = [j for j in range(N) if mask[b, j]]
        for i in range(N):
            for h in range(3):
                logits = torch.stack(
                    [q[b, i, h] @ k[b, j, h] / math.sqrt(4) + bias[b, i, j, h] for j in keys]
                )
                out[b, i, h] = logits.softmax(0) @ v[b, keys, h]
    expected = (torch.sigmoid(g) * out).flatten(-2) @ mha.linear_o.weight.T
    torch.testing.assert_close(module(s, z, mask), expected)


def test_outer_product_mean_matches_a_loop() -> None:
    module = ready(OuterProductMean(6, 3, 5))
    m, mask = torch.randn(2, 4, N, 6).double(), torch.rand(2, 4, N) < 0.7
    mn = norm(module.layer_norm, m)
    a, b = mn @ module.linear_1.weight.T, mn @ module.linear_2.weight.T
    expected = torch.zeros(2, N, N, 5).double()
    for x in range(2):
        for i in range(N):
            for j in range(N):
                total, count = torch.zeros(3, 3).double(), 0
                for row in range(4):
                    if mask[x, row, i] and mask[x, row, j]:
                        total += torch.outer(a[x, row, i], b[x, row, j])
                        count += 1
                update = module.linear_out.weight @ total.flatten() + module.linear_out.bias
                expected[x, i, j] = update / (count + 1e-3)
    torch.testing.assert_close(module(m, mask), expected)


def test_pair_weighted_averaging_matches_a_loop() -> None:
    module = ready(PairWeightedAveraging(6, 8, 2, 3))
    m, z = torch.randn(2, 4, N, 6).double(), torch.randn(2, N, N, 8).double()
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]]) > 0
    mn = norm(module.layer_norm_m, m)
    logits = norm(module.layer_norm_z, z) @ module.linear_z.weight.T
    v = (mn @ module.linear_v.weight.T).view(2, 4, N, 2, 3)
    out = torch.zeros(2, 4, N, 2, 3).double()
    for b in range(2):
        keys = [j for j in range(N) if mask[b, j]]
        for i in range(N):
            for h in range(2):
                weight = logits[b, i, keys, h].softmax(0)
                for row in range(4):
                    out[b, row, i, h] = weight @ v[b, row, keys, h]
    gate = torch.sigmoid(mn @ module.linear_g.weight.T)
    expected = (gate * out.flatten(-2)) @ module.linear_o.weight.T
    torch.testing.assert_close(module(m, z, mask), expected)


def test_transition_formula() -> None:
    module = ready(Transition(8, 4))
    x, mask = torch.randn(3, 8).double(), torch.tensor([True, False, True])
    xn = norm(module.layer_norm, x)
    a, b = xn @ module.swiglu.linear_a.weight.T, xn @ module.swiglu.linear_b.weight.T
    expected = (a * torch.sigmoid(a) * b) @ module.linear_out.weight.T * mask[:, None]
    torch.testing.assert_close(module(x, mask), expected)


def test_dropout_masks_are_shared_along_one_axis() -> None:
    x = torch.ones(2, 30, 20, 8)
    rows, columns = shared_dropout(x, 0.25, ROWS, True), shared_dropout(x, 0.25, COLUMNS, True)
    assert torch.equal(rows, rows[:, :1].expand_as(x))
    assert torch.equal(columns, columns[:, :, :1].expand_as(x))
    assert sorted(rows.unique().tolist()) == pytest.approx([0, 4 / 3])
    assert float((rows == 0).float().mean()) == pytest.approx(0.25, abs=0.08)
    assert len(rows[0, 0].unique(dim=0)) > 1 and len(columns[0, :, 0].unique(dim=0)) > 1
    assert shared_dropout(x, 0.25, ROWS, False) is x


def test_pair_stack_order_and_dropout_axes() -> None:
    """Each update sees the sum of those before it; only the ending node drops by columns."""
    stack = ready(PairStack(DIMS))
    z, mask = torch.randn(2, N, N, 8).double(), pair_mask()
    expected = z
    for name in ("tri_mul_out", "tri_mul_in", "tri_att_start", "tri_att_end", "pair_transition"):
        expected = expected + stack.get_submodule(name)(expected, mask)
    torch.testing.assert_close(stack(z, mask), expected)
    axes: list[int] = []
    stack._drop = lambda update, axis: axes.append(axis) or update  # type: ignore[method-assign]
    stack(z, mask)
    assert axes == [ROWS, ROWS, ROWS, COLUMNS]


def test_last_msa_block_has_no_msa_update() -> None:
    module = MSAModule(load("compact").model)
    names = [{name for name, _ in block.named_children()} for block in module.blocks]
    assert names[-1] == {"outer_product_mean", "pair_stack"}
    assert names[0] == {"outer_product_mean", "pair_stack", "msa_att_row", "msa_transition"}


def test_pairformer_follows_a_permutation_of_the_tokens() -> None:
    stack = ready(PairformerStack(load("tiny").model, 2))
    s, z = torch.randn(1, 9, 32).double(), torch.randn(1, 9, 9, 32).double()
    mask = torch.tensor([[True] * 7 + [False] * 2])
    order = torch.randperm(9)
    s_out, z_out = stack(s, z, mask)
    s_perm, z_perm = stack(s[:, order], z[:, order][:, :, order], mask[:, order])
    torch.testing.assert_close(s_perm, s_out[:, order])
    torch.testing.assert_close(z_perm, z_out[:, order][:, :, order])


def test_layer_norm_computes_in_fp32_and_casts_back() -> None:
    layer = LayerNorm(64)
    nn.init.normal_(layer.weight), nn.init.normal_(layer.bias)
    x = (100 + torch.randn(5, 64)).bfloat16()
    out = layer(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, norm(layer, x.float()).bfloat16())
    assert layer.double()(x.double()).dtype == torch.float64


def test_linear_has_a_bias_only_on_request() -> None:
    assert set(dict(Linear(3, 4).named_parameters())) == {"weight"}
    assert set(dict(Linear(3, 4, bias=True).named_parameters())) == {"weight", "bias"}
