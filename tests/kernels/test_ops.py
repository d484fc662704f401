"""The operators on CPU: FP64 loops, finite differences, opcheck, chunks, masks and arguments."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tpf.kernels import library, reference
from tpf.kernels.ops import TriMulWeights, triangle_attention, triangle_multiplication


def attention_inputs(
    b: int = 1, o: int = 3, h: int = 2, n: int = 5, d: int = 4, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    q, k, v = (torch.randn(b, o, n, h, d, dtype=dtype).transpose(2, 3) for _ in range(3))
    return [q, k, v, torch.randn(b, 1, h, n, n, dtype=dtype)]


def attention_loops(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Evaluate the definition one query at a time."""
    out = torch.zeros_like(q)
    b, o, h, n, _ = q.shape
    for bi in range(b):
        for oi in range(o):
            keys = [j for j in range(n) if mask is None or bool(mask[bi, oi, 0, 0, j])]
            for hi in range(h):
                for i in range(n):
                    scores = [
                        scale * float(q[bi, oi, hi, i] @ k[bi, oi, hi, j])
                        + float(bias[bi, 0, hi, i, j])
                        for j in keys
                    ]
                    total = sum(math.exp(s) for s in scores)
                    for s, j in zip(scores, keys, strict=True):
                        out[bi, oi, hi, i] += math.exp(s) / total * v[bi, oi, hi, j]
    return out


def random_mask(b: int, o: int, n: int) -> Tensor:
    mask = torch.rand(b, o, 1, 1, n) > 0.4
    mask[:, 0] = False
    return mask


@pytest.mark.parametrize("masked", [False, True])
def test_attention_matches_the_definition(masked: bool) -> None:
    q, k, v, bias = attention_inputs(b=2)
    mask = random_mask(2, 3, 5) if masked else None
    out = triangle_attention(q, k, v, bias, mask, 0.7)
    torch.testing.assert_close(out, attention_loops(q, k, v, bias, mask, 0.7))
    assert out.transpose(2, 3).is_contiguous()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("limit", [1, 1 << 26])
def test_attention_gradcheck(masked: bool, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "CHUNK_BYTES", limit)
    inputs = [x.requires_grad_() for x in attention_inputs(n=4, d=3)]
    mask = random_mask(1, 3, 4) if masked else None
    assert torch.autograd.gradcheck(lambda *x: triangle_attention(*x, mask), inputs)


def test_chunks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [x.requires_grad_() for x in attention_inputs(o=7)]
    whole = triangle_attention(*inputs)
    whole_grads = torch.autograd.grad(whole.sin().sum(), inputs)
    monkeypatch.setattr(reference, "CHUNK_BYTES", 3 * 2 * 5 * 5 * 8)
    assert [s.stop - s.start for s in reference._chunks(inputs[0])] == [3, 3, 1]
    parts = triangle_attention(*inputs)
    torch.testing.assert_close(parts, whole)
    grads = torch.autograd.grad(parts.sin().sum(), inputs)
    for got, want in zip(grads, whole_grads, strict=True):
        torch.testing.assert_close(got, want)


def test_slice_without_keys_gives_zero_and_no_gradient() -> None:
    inputs = [x.requires_grad_() for x in attention_inputs(dtype=torch.float32)]
    mask = torch.ones(1, 3, 1, 1, 5, dtype=torch.bool)
    mask[:, 1] = False
    out = triangle_attention(*inputs, mask)
    assert torch.equal(out[:, 1], torch.zeros_like(out[:, 1]))
    out.sum().backward()
    for x in inputs:
        assert x.grad is not None and x.grad.isfinite().all()
    assert all(torch.equal(x.grad[:, 1], torch.zeros(1, 2, 5, 4)) for x in inputs[:3])


def test_end_node_reads_transposed_views_and_gradients_keep_their_layout() -> None:
    z = torch.randn(1, 5, 5, 2, 4, dtype=torch.float64)
    q = z.transpose(1, 2).transpose(2, 3).requires_grad_()  # [B, O=j, H, N=i, D]
    bias = torch.randn(1, 5, 5, 2, dtype=torch.float64).permute(0, 3, 1, 2)[:, None]
    bias.requires_grad_()
    out = triangle_attention(q, q, q, bias)
    torch.testing.assert_close(
        out, attention_loops(*(x.detach() for x in (q, q, q, bias)), None, 0.5)
    )
    dq, dbias = torch.autograd.grad(out.sum(), [q, bias])
    assert dq.stride() == q.stride()
    assert dbias.shape == bias.shape


def test_bf16_is_computed_in_fp32_with_a_residual() -> None:
    q, k, v, bias = attention_inputs(n=9, dtype=torch.bfloat16)
    wide = [x.float() for x in (q, k, v, bias[:, 0])]
    exact, _, none = reference.attention_forward(*wide, None, 0.5, False)
    out, lse, residual = library.tri_attn_fwd(q, k, v, bias[:, 0], None, 0.5, True, "torch")
    assert none.numel() == 0 and lse.dtype == torch.float32
    torch.testing.assert_close(out, exact.bfloat16())
    restored = out.float() + residual.float()
    assert (restored - exact).norm() < 0.02 * (out.float() - exact).norm()


def test_residual_changes_neither_out_nor_dv() -> None:
    q, k, v, bias = attention_inputs(n=9, dtype=torch.bfloat16)
    dout = torch.randn_like(q)
    grads, outs = [], []
    for save in (True, False):
        out, lse, residual = library.tri_attn_fwd(q, k, v, bias[:, 0], None, 0.5, save, "torch")
        grads.append(
            library.tri_attn_bwd(dout, q, k, v, bias[:, 0], None, 0.5, out, lse, residual, "torch")
        )
        outs.append(out)
    assert torch.equal(outs[0], outs[1]) and torch.equal(grads[0][2], grads[1][2])
    assert not torch.equal(grads[0][0], grads[1][0])


def test_lse_is_in_base_two() -> None:
    q, k, v, bias = attention_inputs()
    mask = random_mask(1, 3, 5)
    lse = library.tri_attn_fwd(q, k, v, bias[:, 0], mask[:, :, 0, 0], 0.5, False, "torch")[1]
    scores = (q @ k.mT * 0.5 + bias).masked_fill(~mask, -math.inf)
    torch.testing.assert_close(lse[:, 1:], scores.logsumexp(-1)[:, 1:] / math.log(2))
    assert (lse[:, 0] == math.inf).all()


def test_leading_axes_and_shared_bias() -> None:
    q, k, v, bias = attention_inputs(b=4)
    many = [x.reshape(2, 2, *x.shape[1:]) for x in (q, k, v)]
    shared = bias[:1].reshape(1, 1, *bias.shape[1:]).requires_grad_()
    out = triangle_attention(*many, shared)
    want = triangle_attention(q, k, v, bias[:1].expand_as(bias))
    torch.testing.assert_close(out.flatten(0, 1), want)
    out.sum().backward()
    assert shared.grad is not None and shared.grad.shape == shared.shape
    single = triangle_attention(q[0], k[0], v[0], bias[0])
    torch.testing.assert_close(single, triangle_attention(q, k, v, bias)[0])


@pytest.mark.parametrize("shape", [(0, 3, 2, 5, 4), (1, 0, 2, 5, 4), (1, 3, 2, 0, 4)])
def test_empty_batch(shape: tuple[int, ...]) -> None:
    b, _, h, n, _ = shape
    q = torch.randn(shape).requires_grad_()
    out = triangle_attention(q, q, q, torch.randn(b, 1, h, n, n))
    assert out.shape == shape
    out.sum().backward()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_opcheck(masked: bool, dtype: torch.dtype) -> None:
    q, k, v, bias = (x.requires_grad_() for x in attention_inputs(dtype=dtype))
    mask = random_mask(1, 3, 5)[:, :, 0, 0] if masked else None
    args: tuple[Any, ...] = (q, k, v, bias[:, 0], mask, 0.5)
    torch.library.opcheck(library.tri_attn_fwd, (*args, True, "torch"))
    out, lse, residual = library.tri_attn_fwd(*args, True, "torch")
    detached = [x.detach() if isinstance(x, Tensor) else x for x in (*args, out, lse, residual)]
    torch.library.opcheck(library.tri_attn_bwd, (torch.randn_like(out), *detached, "torch"))


def test_autocast_does_not_lower_the_precision() -> None:
    inputs = attention_inputs(dtype=torch.float32)
    want = triangle_attention(*inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(triangle_attention(*inputs), want)


def test_double_backward_of_the_bias_alone_is_refused() -> None:
    q, k, v, bias = attention_inputs()
    bias.requires_grad_()
    out = triangle_attention(q, k, v, bias).sum()
    (dbias,) = torch.autograd.grad(out, [bias], create_graph=True)
    with pytest.raises(Exception, match="second derivatives are not supported"):
        dbias.sum().backward()


def test_double_backward_is_refused() -> None:
    inputs = [x.requires_grad_() for x in attention_inputs()]
    (dq,) = torch.autograd.grad(triangle_attention(*inputs).sum(), inputs[:1], create_graph=True)
    with pytest.raises(Exception, match="second derivatives are not supported"):
        dq.sum().backward()


def test_multiplication_double_backward_is_refused() -> None:
    z = torch.randn(1, 4, 4, 3, requires_grad=True)
    out = triangle_multiplication(z, None, weights(dtype=torch.float32), "outgoing")
    (dz,) = torch.autograd.grad(out.sum(), [z], create_graph=True)
    with pytest.raises(Exception, match="second derivatives are not supported"):
        dz.sum().backward()


def test_compiled_graph_holds_one_opaque_node() -> None:
    inputs = attention_inputs(dtype=torch.float32)
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> Any:  # noqa: ANN401
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    compiled = torch.compile(triangle_attention, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), triangle_attention(*inputs))
    assert sum("tri_attn_fwd" in target for target in seen) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(1, 3, 2, 5, 3)}, "k is"),
        ({"v": torch.zeros(1, 3, 2, 5, 4, dtype=torch.bfloat16)}, "v is"),
        ({"bias": torch.zeros(1, 3, 2, 5, 5)}, "bias has shape"),
        ({"bias": torch.zeros(1, 1, 2, 5, 5, dtype=torch.int32)}, "bias is"),
        ({"mask": torch.zeros(1, 3, 1, 1, 5)}, "mask is"),
        ({"mask": torch.zeros(1, 3, 1, 5, 5, dtype=torch.bool)}, "mask has shape"),
        ({"q": torch.zeros(3, 4)}, "q is"),
        ({"impl": "cuda"}, "q is torch.float32; the CUDA kernels take torch.bfloat16"),
        ({"impl": "flex"}, "needs a GPU"),
        ({"impl": "fast"}, "impl is 'fast'"),
    ],
)
def test_attention_arguments(change: dict[str, Any], message: str) -> None:
    q, k, v, bias = attention_inputs(dtype=torch.float32)
    arguments = {"q": q, "k": k, "v": v, "bias": bias} | change
    with pytest.raises(ValueError, match=message):
        triangle_attention(**arguments)


# ---------------------------------------------------------------- multiplicative update


def weights(c: int = 3, hidden: int = 2, dtype: torch.dtype = torch.float64) -> TriMulWeights:
    shapes = {"linear_g": (c, c), "linear_z": (c, hidden)}
    for name in ("layer_norm_in_weight", "layer_norm_in_bias"):
        shapes[name] = (c,)  # type: ignore[assignment]
    for name in ("layer_norm_out_weight", "layer_norm_out_bias"):
        shapes[name] = (hidden,)  # type: ignore[assignment]
    return TriMulWeights(
        *(torch.randn(shapes.get(f, (hidden, c)), dtype=dtype) for f in TriMulWeights._fields)
    )


def plain_multiplication(
    z: Tensor, mask: Tensor | None, w: TriMulWeights, direction: str
) -> Tensor:
    """Follow the algorithm with einsum and autograd, as a second implementation."""

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias

    zn = norm(z, w.layer_norm_in_weight, w.layer_norm_in_bias)
    keep = 1.0 if mask is None else mask[..., None].to(z.dtype)
    a = keep * torch.sigmoid(zn @ w.linear_a_g.mT) * (zn @ w.linear_a_p.mT)
    b = keep * torch.sigmoid(zn @ w.linear_b_g.mT) * (zn @ w.linear_b_p.mT)
    rule = "bikc,bjkc->bijc" if direction == "outgoing" else "bkic,bkjc->bijc"
    x = norm(torch.einsum(rule, a, b), w.layer_norm_out_weight, w.layer_norm_out_bias)
    return torch.sigmoid(zn @ w.linear_g.mT) * (x @ w.linear_z.mT)


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
@pytest.mark.parametrize("masked", [False, True])
def test_multiplication_matches_a_second_implementation(direction: str, masked: bool) -> None:
    z = torch.randn(2, 4, 4, 3, dtype=torch.float64, requires_grad=True)
    w = TriMulWeights(*(x.requires_grad_() for x in weights()))
    mask = (torch.rand(2, 4, 4) > 0.3) if masked else None
    got = triangle_multiplication(z, mask, w, direction)  # type: ignore[arg-type]
    want = plain_multiplication(z, mask, w, direction)
    torch.testing.assert_close(got, want)
    dout = torch.randn_like(got)
    for name, a, b in zip(
        ("z", *TriMulWeights._fields),
        torch.autograd.grad(got, [z, *w], dout),
        torch.autograd.grad(want, [z, *w], dout),
        strict=True,
    ):
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")


def test_multiplication_opcheck_and_leading_axes() -> None:
    z = torch.randn(2, 4, 4, 3, requires_grad=True)
    w = [x.requires_grad_() for x in weights(dtype=torch.float32)]
    mask = torch.rand(2, 4, 4).round()
    torch.library.opcheck(library.tri_mul_fwd, (z, mask, w, "outgoing", "torch"))
    detached = [x.detach() for x in w]
    gradients = (
        torch.randn_like(z),
        z.detach(),
        mask,
        detached,
        "incoming",
        z.new_empty(0),
        "torch",
    )
    for train_weights in (True, False):
        torch.library.opcheck(library.tri_mul_bwd, (*gradients, train_weights))
    one = triangle_multiplication(z[0], mask[0], TriMulWeights(*w), "outgoing")
    both = triangle_multiplication(z, mask, TriMulWeights(*w), "outgoing")
    torch.testing.assert_close(one, both[0])


def test_multiplication_bf16_keeps_weight_gradients_in_fp32() -> None:
    z = torch.randn(1, 6, 6, 16, dtype=torch.bfloat16, requires_grad=True)
    w = TriMulWeights(*(x.requires_grad_() for x in weights(16, 16, torch.float32)))
    out = triangle_multiplication(z, None, w, "incoming")
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert z.grad is not None and z.grad.dtype == torch.bfloat16
    assert all(x.grad is not None and x.grad.dtype == torch.float32 for x in w)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"z": torch.zeros(1, 4, 5, 3)}, "z is"),
        ({"mask": torch.zeros(1, 4)}, "mask has shape"),
        ({"direction": "inward"}, "direction is 'inward'"),
        ({"impl": "cuda"}, "z is torch.float32; the CUDA kernels take torch.bfloat16"),
        ({"weights": weights(c=4)}, "weights.layer_norm_in_weight has shape"),
    ],
)
def test_multiplication_arguments(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "z": torch.zeros(1, 4, 4, 3), "mask": None, "weights": weights(), "direction": "outgoing"
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        triangle_multiplication(**(arguments | change))
