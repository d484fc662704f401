"""The fused layers of the pair block against the reference modules in FP64.

On the CPU the kernels run in the emulator; the same checks run on a GPU at real sizes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.kernels.emulate import emulated
from tpf.kernels import (
    jit,
    norm,
    pair_kernels,
    pair_layers,
    pair_transition,
    reference,
    tri_attn,
    tri_attn_bwd,
)
from tpf.model.pairformer import COLUMNS, ROWS, PairDims, PairStack, TriangleAttention
from tpf.model.primitives import LayerNorm, Transition, dropout_scale, remat

REASON = jit.compiler_available()
needs_compiler = pytest.mark.skipif(REASON is not None, reason=str(REASON))

Layer = Callable[[Tensor], Tensor]


def context(device: str) -> object:
    return emulated() if device == "cpu" else nullcontext()


def randomise(module: nn.Module) -> nn.Module:
    """Replace the zeros and ones of the initialisation."""
    for name, p in module.named_parameters():
        nn.init.normal_(p, std=p.shape[-1] ** -0.5 if p.dim() > 1 else 0.3)
        if name.endswith("norm.weight"):
            p.data += 1
    return module


def dims(channels: int, heads: int, head_dim: int) -> PairDims:
    return PairDims(
        channels=channels, c_hidden_mul=channels, heads=heads, head_dim=head_dim, expansion=4,
        dropout=0.25, impl="torch",
    )  # fmt: skip


def random_mask(n: int, device: str) -> Tensor:
    kept = torch.rand(1, n, device=device) > 0.2
    kept[:, 0] = True
    return kept[:, :, None] & kept[:, None]


def gradients(layer: Layer, module: nn.Module, z: Tensor, dout: Tensor) -> dict[str, Tensor]:
    """Return the result of a layer and the gradients of its input and of all parameters."""
    z = z.detach().requires_grad_()
    out = layer(z)
    names = [name for name, _ in module.named_parameters()]
    grads = torch.autograd.grad(out, [z, *module.parameters()], dout.to(out.dtype))
    return {"out": out.detach(), **dict(zip(["z", *names], grads, strict=True))}


def compare(
    fused: Callable[[nn.Module, Tensor], Tensor],
    plain: Callable[[nn.Module, Tensor], Tensor],
    module: nn.Module,
    z: Tensor,
    device: str,
) -> None:
    """Check result and gradients: at most twice the error of the plain BF16 layer, repeatable."""
    dout = torch.randn_like(z)
    with context(device):
        got = gradients(lambda x: fused(module, x), module, z, dout)
        again = gradients(lambda x: fused(module, x), module, z, dout)
    with torch.autocast(device, dtype=torch.bfloat16):
        usual = gradients(lambda x: plain(module, x), module, z, dout)
    exact_module = copy.deepcopy(module).double()
    exact = gradients(lambda x: plain(exact_module, x), exact_module, z.double(), dout.double())
    for name, want in exact.items():
        assert got[name].dtype == (torch.bfloat16 if name in ("out", "z") else torch.float32), name
        assert torch.equal(got[name], again[name]), f"{name} differs between two calls"
        error, limit = ((x[name] - want).norm() / want.norm() for x in (got, usual))
        assert error <= 2 * limit + 1e-4, f"{name}: {error:.2e}, the plain layer {limit:.2e}"


def check_attention(
    n: int, node: str, size: tuple[int, int, int], dropout: bool, device: str = "cpu"
) -> None:
    module = randomise(TriangleAttention(dims(*size), node)).to(device)
    z = torch.randn(1, n, n, size[0], device=device).bfloat16()
    mask = random_mask(n, device)
    scale = dropout_scale(z, 0.25, ROWS if node == "starting" else COLUMNS, dropout)

    def fused(layer: nn.Module, x: Tensor) -> Tensor:
        return pair_layers.add_attention(x, mask, scale, layer.weights(), ending=node == "ending")

    def plain(layer: nn.Module, x: Tensor) -> Tensor:
        update = layer(x, mask)
        return x + (update if scale is None else update * scale.to(update.dtype))

    compare(fused, plain, module, z, device)


def check_transition(n: int, channels: int, device: str = "cpu") -> None:
    module = randomise(Transition(channels, 4)).to(device)
    z = torch.randn(1, n, n, channels, device=device).bfloat16()
    mask = random_mask(n, device)
    compare(
        lambda layer, x: pair_layers.add_transition(x, mask, layer.weights()),
        lambda layer, x: x + layer(x, mask),
        module,
        z,
        device,
    )


@pytest.fixture
def reference_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the reference in the place of the attention kernels, which have tests of their own."""

    def backward(*args: Tensor, into: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        *inputs, dout = args
        *grads, dbias = reference.attention_backward(dout, *inputs)
        for place, grad in zip(into, grads, strict=True):
            place.copy_(grad)
        return *into, dbias

    monkeypatch.setattr(tri_attn, "tri_attn_fwd", reference.attention_forward)
    monkeypatch.setattr(tri_attn_bwd, "tri_attn_bwd", backward)


@pytest.mark.parametrize("node", ["starting", "ending"])
@pytest.mark.parametrize(("n", "dropout"), [(5, True), (5, False), (17, True)])
def test_attention(n: int, node: str, dropout: bool) -> None:
    check_attention(n, node, (16, 2, 8), dropout)


@pytest.mark.usefixtures("reference_attention")
@pytest.mark.parametrize("node", ["starting", "ending"])
@pytest.mark.parametrize(("n", "size"), [(17, (24, 4, 16)), (65, (16, 2, 8))])
def test_attention_around_the_operator(n: int, node: str, size: tuple[int, int, int]) -> None:
    check_attention(n, node, size, dropout=True)


@pytest.mark.parametrize(("n", "channels"), [(5, 32), (17, 8), (65, 16), (5, 128), (17, 64)])
def test_transition(n: int, channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_layers, "CHUNK_BYTES", 100_000)
    check_transition(n, channels)


@pytest.mark.parametrize("channels", [8, 24, 128, 384])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layer_norm(channels: int, dtype: torch.dtype) -> None:
    """Rows with gaps between them; a mean far from zero."""
    layer = randomise(LayerNorm(channels))
    wide = (3 + torch.randn(40, channels + 8)).to(dtype)
    x = wide[:, :channels].detach().requires_grad_()
    dy = torch.randn(40, channels).bfloat16()
    inputs = [x, layer.weight, layer.bias]
    with emulated():
        y = norm.layer_norm(*inputs)
        grads = torch.autograd.grad(y, inputs, dy)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    want = nn.functional.layer_norm(exact[0], (channels,), exact[1], exact[2])
    exact_grads = torch.autograd.grad(want, exact, dy.double())
    assert (y - want).norm() < 2e-3 * want.norm()
    for grad, exact_grad in zip(grads, exact_grads, strict=True):
        limit = 2.5e-3 if grad.dtype == torch.bfloat16 else 1e-5
        assert (grad - exact_grad).norm() <= limit * exact_grad.norm()


def test_rows_without_keys_are_finite() -> None:
    module = randomise(TriangleAttention(dims(16, 2, 8), "ending"))
    z = torch.randn(1, 5, 5, 16).bfloat16().requires_grad_()
    mask = torch.ones(1, 5, 5, dtype=torch.bool)
    mask[:, :, 2] = False
    with emulated():
        out = pair_layers.add_attention(z, mask, None, module.weights(), ending=True)
        out.float().sum().backward()
    assert torch.equal(out[:, :, 2], z[:, :, 2])
    assert z.grad is not None and z.grad.isfinite().all()


@pytest.mark.usefixtures("reference_attention")
def test_pair_stack_takes_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same seed drops the same entries on both paths, with and without checkpoints."""
    stack = randomise(PairStack(dims(16, 2, 8)))
    z, mask = torch.randn(1, 9, 9, 16).bfloat16(), random_mask(9, "cpu")
    dout = torch.randn_like(z)

    def run(impl: str, checkpoint: bool) -> dict[str, Tensor]:
        torch.manual_seed(3)
        stack.impl = impl
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return gradients(lambda x: remat(stack, x, mask, enabled=checkpoint), stack, z, dout)

    plain = run("torch", False)
    monkeypatch.setattr(pair_layers, "_is_hopper", lambda device: True)
    with emulated():
        fused, again = run("cuda", False), run("cuda", True)
    for name, want in plain.items():
        assert torch.equal(fused[name], again[name]), name
        assert (fused[name] - want).norm() <= 0.04 * want.norm(), name
        assert not torch.equal(fused[name], want), name


def test_layers_name_what_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_layers, "_is_hopper", lambda device: device.type == "cpu")
    attention = TriangleAttention(dims(16, 2, 8), "starting").weights()
    transition = Transition(16, 4).weights()
    z, mask = torch.zeros(1, 3, 3, 16).bfloat16(), random_mask(3, "cpu")
    assert pair_layers.fusable(z, mask, "auto", attention, transition)
    assert not pair_layers.fusable(z, mask, "torch", attention)
    assert not pair_layers.fusable(z.float(), mask, "cuda", attention)
    assert not pair_layers.fusable(z, mask.float(), "cuda", attention)
    assert not pair_layers.fusable(z[:, :0], mask, "cuda", attention)
    narrow = TriangleAttention(dims(16, 4, 4), "starting").weights()
    assert not pair_layers.fusable(z, mask, "cuda", narrow)
    half = transition._replace(out=transition.out.bfloat16())
    assert not pair_layers.fusable(z, mask, "cuda", half)


def test_transition_walks_several_tiles_in_a_block() -> None:
    check_transition(23, 64)


def test_transition_cuts_rows_evenly() -> None:
    parts = list(pair_layers._chunks(768 * 768, 512))
    assert [end for _, end in parts[:-1]] == [start for start, _ in parts[1:]]
    assert parts[0][0] == 0 and parts[-1][1] == 768 * 768
    assert max(4 * 512 * (end - start) for start, end in parts) <= pair_layers.CHUNK_BYTES


@needs_compiler
@pytest.mark.parametrize(
    ("channels", "heads", "wide"),
    [(128, 4, False), (128, 0, False), (64, 4, False), (256, 8, True), (512, 0, True)],
)
def test_norm_compiles_without_spills(
    channels: int, heads: int, wide: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TPF_CACHE", str(tmp_path))
    for name in ("pair_norm_fwd", "pair_norm_bwd"):
        binary = jit.build(name, norm.defines(channels, heads, wide))
        assert binary.spill_bytes == 0 and not binary.warnings, binary.log
        threads = norm.FORWARD_THREADS if name == "pair_norm_fwd" else norm.BACKWARD_THREADS
        blocks = 2 if heads > 4 else 3
        assert binary.registers * threads * blocks <= 65536, binary.log


@needs_compiler
@pytest.mark.parametrize("channels", pair_transition.CHANNELS)
def test_transition_compiles_without_spills(
    channels: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TPF_CACHE", str(tmp_path))
    for name in ("pair_transition_fwd", "pair_transition_bwd"):
        defines = pair_transition.defines(channels, name == "pair_transition_bwd")
        binary = jit.build(name, defines)
        assert binary.spill_bytes == 0 and not binary.warnings, binary.log
        assert defines["TPF_SHARED"] <= tri_attn.MAX_SHARED


@needs_compiler
@pytest.mark.parametrize(
    "name",
    ["pair_residual", "pair_gate_fwd", "pair_gate_bwd", "pair_swiglu_fwd", "pair_swiglu_bwd"],
)
def test_elementwise_kernels_fill_a_multiprocessor(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TPF_CACHE", str(tmp_path))
    binary = jit.build(name, {"TPF_VECTORS": 16})
    assert binary.spill_bytes == 0 and not binary.warnings, binary.log
    assert binary.registers <= 32, binary.log


def check_weight_gradient(rows: int, k: int, c: int, device: str) -> None:
    """Compare products of small integers, which FP32 holds exactly, with FP64 on the CPU."""
    dy, x = (torch.randint(-3, 4, (rows, width)).bfloat16() for width in (k, c))
    exact = dy.double().t() @ x.double()
    strided = torch.cat((dy, dy), 1).to(device)[:, k:]  # as the gradient of a gate
    for given in (dy.to(device), strided):
        got = pair_kernels.weight_gradient(given, x.to(device))
        assert got.dtype == torch.float32 and torch.equal(got.cpu().double(), exact)
    reference_of_other_tests = strided.double().t() @ x.to(device).double()
    assert torch.equal(reference_of_other_tests.cpu(), exact)


@pytest.mark.parametrize("rows", [1, 255, 256, 257, 700])
def test_weight_gradient(rows: int) -> None:
    check_weight_gradient(rows, 16, 24, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [8450, 16641, 4900, 8448])
@pytest.mark.parametrize(
    ("k", "c"), [(256, 64), (64, 256), (128, 256), (256, 256), (256, 192), (384, 256), (1024, 128)]
)
def test_weight_gradient_loses_no_row_on_gpu(rows: int, k: int, c: int) -> None:
    check_weight_gradient(rows, k, c, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("node", ["starting", "ending"])
@pytest.mark.parametrize("n", [64, 129, 384])
def test_attention_on_gpu(n: int, node: str) -> None:
    check_attention(n, node, (128, 4, 32), dropout=True, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [64, 128, 384])
@pytest.mark.parametrize("n", [64, 129, 384])
def test_transition_on_gpu(n: int, channels: int) -> None:
    check_transition(n, channels, device="cuda")


@pytest.mark.gpu
def test_layer_norm_on_gpu() -> None:
    layer = randomise(LayerNorm(384)).cuda()
    x, dy = torch.randn(2, 1000, 384, device="cuda").bfloat16().unbind()
    inputs = [x.requires_grad_(), layer.weight, layer.bias]
    grads = torch.autograd.grad(norm.layer_norm(*inputs), inputs, dy)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    want = nn.functional.layer_norm(exact[0], (384,), exact[1], exact[2])
    for grad, exact_grad in zip(grads, torch.autograd.grad(want, exact, dy.double()), strict=True):
        assert (grad - exact_grad).norm() <= 2.5e-3 * exact_grad.norm()
