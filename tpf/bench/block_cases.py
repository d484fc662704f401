"""One Pairformer block in training and the calls of it that are measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tpf.bench.timing import Call
from tpf.config import ModelConfig
from tpf.kernels.pair_layers import add_attention, add_update
from tpf.model import graphs
from tpf.model.pairformer import (
    COLUMNS,
    ROWS,
    PairformerBlock,
    TriangleAttention,
    TriangleMultiplication,
)
from tpf.model.primitives import remat

FULL = ModelConfig()
"""c_z 128, c_s 384, 4 x 32 and 16 x 24 heads, dropout 0.25."""
TINY = ModelConfig(
    c_s=32, c_z=32, c_hidden_mul=32, tri_heads=2, tri_dim=16, single_heads=2, pairformer_blocks=1
)


@dataclass(frozen=True)
class BlockInputs:
    """Streams s [1, N, c_s], z [1, N, N, c_z], their gradients, and masks that keep all."""

    s: Tensor
    z: Tensor
    ds: Tensor
    dz: Tensor
    mask: Tensor
    pair_mask: Tensor


def make_block(device: torch.device, dropout: float | None = None) -> PairformerBlock:
    """Return a block with FP32 parameters none of which is zero; tiny without a GPU."""
    dims = FULL if device.type == "cuda" else TINY
    torch.manual_seed(0)
    block = PairformerBlock(dims)
    for name, p in block.named_parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=p.shape[-1] ** -0.5)
        else:
            nn.init.normal_(p, mean=float(name.endswith("weight")), std=0.1)
    if dropout is not None:
        block.pair_stack.dropout = dropout
    return block.to(device)


def make_block_inputs(
    n: int, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> BlockInputs:
    """Draw streams and gradients from N(0, 1), rounded to BF16 once, in ``dtype``."""
    dims = FULL if device.type == "cuda" else TINY
    generator = torch.Generator(device).manual_seed(n)

    def draw(*size: int) -> Tensor:
        x = torch.randn((1, *size), generator=generator, device=device)
        return x.to(torch.bfloat16).to(dtype)

    s, ds = draw(n, dims.c_s).requires_grad_(), draw(n, dims.c_s)
    z, dz = draw(n, n, dims.c_z).requires_grad_(), draw(n, n, dims.c_z)
    mask = torch.ones(1, n, dtype=torch.bool, device=device)
    return BlockInputs(s, z, ds, dz, mask, mask[:, :, None] & mask[:, None])


def _clear(block: PairformerBlock, x: BlockInputs) -> None:
    for leaf in (x.s, x.z, *block.parameters()):
        leaf.grad = None


def forward(
    block: PairformerBlock, x: BlockInputs, *, autocast: bool = True
) -> tuple[Tensor, Tensor]:
    """Run the block, by default under BF16 autocast, and return s, z.

    With CUDA graphs its backward computes it again, as in training.
    """
    with torch.autocast(x.z.device.type, dtype=torch.bfloat16, enabled=autocast):
        s, z = remat(block, x.s, x.z, x.mask, x.pair_mask, enabled=graphs.active() is not None)
    return s, z


def whole(block: PairformerBlock, x: BlockInputs) -> Call:
    """Return the call of the block, forward and backward, under BF16 autocast."""

    def call() -> None:
        s, z = forward(block, x)
        torch.autograd.backward([s, z], [x.ds, x.dz])
        _clear(block, x)

    return call


def sublayers(block: PairformerBlock, x: BlockInputs, fused: bool) -> dict[str, Call]:
    """Return each residual layer of the block, forward and backward, by name.

    ``fused``: as the fused layers run it; the arithmetic of ``PairStack.forward``.
    """
    stack, impl = block.pair_stack, block.impl

    def updated(layer: TriangleMultiplication | TriangleAttention, axis: int) -> _Layer:
        def run(z: Tensor) -> Tensor:
            if not fused:
                return z + stack._drop(layer(z, x.pair_mask), axis)
            scale = stack._scale(z, axis)
            if isinstance(layer, TriangleMultiplication):
                return add_update(z, layer(z, x.pair_mask), scale)
            weights, ending = layer.weights(), not layer.starting
            return add_attention(z, x.pair_mask, scale, weights, ending=ending)

        return run

    pair: dict[str, _Layer] = {
        "tri mul out": updated(stack.tri_mul_out, ROWS),
        "tri mul in": updated(stack.tri_mul_in, ROWS),
        "tri att start": updated(stack.tri_att_start, ROWS),
        "tri att end": updated(stack.tri_att_end, COLUMNS),
        "pair transition": lambda z: stack.pair_transition.add_to(z, x.pair_mask, impl),
    }
    single: dict[str, _Layer] = {
        "single attention": lambda s: s + block.attn_pair_bias(s, x.z, x.mask),
        "single transition": lambda s: block.single_transition.add_to(s, x.mask, impl),
    }

    def call(layer: _Layer, stream: Tensor, gradient: Tensor) -> Call:
        def run() -> None:
            with torch.autocast(x.z.device.type, dtype=torch.bfloat16):
                out = layer(stream)
            backward: Any = out.backward
            backward(gradient)
            _clear(block, x)

        return run

    calls = {name: call(layer, x.z, x.dz) for name, layer in pair.items()}
    return calls | {name: call(layer, x.s, x.ds) for name, layer in single.items()}


_Layer = Callable[[Tensor], Tensor]


def results(block: PairformerBlock, x: BlockInputs, *, autocast: bool) -> dict[str, Tensor]:
    """Return s, z, the gradients of both and of every parameter, by name."""
    s, z = forward(block, x, autocast=autocast)
    named = dict(block.named_parameters())
    grads = torch.autograd.grad([s, z], [x.s, x.z, *named.values()], [x.ds, x.dz])
    names = ["s", "z", "ds", "dz", *named]
    return {name: t.detach() for name, t in zip(names, (s, z, *grads), strict=True)}
