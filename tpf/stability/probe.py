"""What the study adds to the record of an update: digests of the inputs, sizes of the logits."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tpf.model.pairformer import PairformerStack, TriangleAttention
from tpf.model.primitives import head_bias
from tpf.stability import operators
from tpf.trainer import Trainer

EVERY = 25
"""Updates between two measurements of the magnitudes."""


def digest(value: Any) -> str:
    """Return a hash of a nested value: names, dtypes, shapes and every bit of its tensors."""
    hasher = hashlib.blake2b(digest_size=12)
    _feed(hasher.update, value)
    return hasher.hexdigest()


def _feed(update: Callable[[bytes], None], value: Any) -> None:
    if isinstance(value, Tensor):
        update(f"{value.dtype}{tuple(value.shape)}".encode())
        # A fresh copy has strides of its own; those of one element may be anything, also 0.
        flat = value.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
        update(flat.view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            update(f"{key}:".encode())
            _feed(update, value[key])
    elif isinstance(value, list | tuple):
        update(f"{len(value)};".encode())
        for item in value:
            _feed(update, item)
    else:
        update(repr(value).encode())


def attach(trainer: Trainer, start: int) -> None:
    """Add ``batch``, ``magnitudes`` and ``weights`` to the records of a run.

    ``start`` is the number of steps before the first update of the arm. ``batch`` is a digest of
    all features; ``weights`` one of the state dict before the first update; ``magnitudes`` stand in
    every ``EVERY``-th record.
    """
    if trainer.step == start:
        trainer.notes["weights"] = digest(trainer.model.state_dict())

    def note_batch(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        trainer.notes["batch"] = digest({k: v for k, v in inputs[0].items() if k != "skipped"})

    def note_magnitudes(stack: nn.Module, inputs: tuple[Any, ...]) -> None:
        last_cycle = torch.is_grad_enabled()
        if last_cycle and (trainer.step - start) % EVERY == 0:
            assert isinstance(stack, PairformerStack)
            trainer.notes["magnitudes"] = magnitudes(stack, inputs)

    trainer.model.input_embedder.register_forward_pre_hook(note_batch)
    trainer.model.pairformer_stack.register_forward_pre_hook(note_magnitudes)


def magnitudes(stack: PairformerStack, inputs: tuple[Any, ...]) -> dict[str, list[float | None]]:
    """Return max |q|, |k| and |bias| of triangle attention in each block; None if not finite.

    The stack runs once more for it, on the reference path and without dropout, which leaves the
    random generators alone. The fused layers of a backend would not show these tensors.
    """
    found: dict[str, list[float]] = {name: [0.0] * len(stack.blocks) for name in ("q", "k", "bias")}

    def keep(name: str, block: int, x: Tensor) -> None:
        found[name][block] = max(found[name][block], float(x.abs().max()), key=_nan_largest)

    def watch(layer: TriangleAttention, block: int) -> list[Any]:
        def q_hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            keep("q", block, output)

        def k_hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            keep("k", block, output)

        def norm_hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            keep("bias", block, head_bias(output, layer.linear_z.weight))

        hooks = (
            (layer.mha.linear_q, q_hook),
            (layer.mha.linear_k, k_hook),
            (layer.layer_norm, norm_hook),
        )
        return [module.register_forward_hook(hook) for module, hook in hooks]

    handles = []
    for number, block in enumerate(stack.blocks):
        for layer in (block.pair_stack.tri_att_start, block.pair_stack.tri_att_end):
            handles += watch(layer, number)
    try:
        with torch.no_grad(), _reference_path(stack):
            stack(*inputs)
    finally:
        torch.clear_autocast_cache()  # it may hold casts of weights, which carry no gradient
        for handle in handles:
            handle.remove()
    return {name: [_finite(v) for v in values] for name, values in found.items()}


def _nan_largest(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@contextmanager
def _reference_path(stack: nn.Module) -> Iterator[None]:
    """Let the modules of a stack run unfused, by the reference and without dropout."""
    device = next(stack.parameters()).device
    modules = [module for module in stack.modules() if hasattr(module, "impl")]
    before = [module.impl for module in modules]
    training = stack.training
    stack.eval()
    for module in modules:
        module.impl = "torch"  # type: ignore[assignment]
    try:
        with operators.REFERENCE.open(device).used():
            yield
    finally:
        stack.train(training)
        for module, impl in zip(modules, before, strict=True):
            module.impl = impl
