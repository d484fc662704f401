"""Calls of triangle attention in a real training step, kept for replay."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tpf import checkpoint
from tpf.bench.cases import Inputs, Settings
from tpf.bench.step import join
from tpf.bench.swap import Choice
from tpf.config import Config
from tpf.data.batch import Batch, to_device
from tpf.data.dataset import CropDataset, Loader
from tpf.data.records import Entries
from tpf.data.sampling import read_clusters
from tpf.errors import UsageError
from tpf.kernels.ops import triangle_attention
from tpf.model.pairformer import TriangleAttention
from tpf.step import draws, sample_loss
from tpf.trainer import Trainer

CALLS = 32
"""Calls that are kept, taken evenly from the layers of the step."""


class Keeper:
    """The reference attention that keeps every ``stride``-th call whose gradient arrives."""

    def __init__(self, stride: int) -> None:
        self.stride = stride
        self.seen = 0
        self.kept: dict[int, Inputs] = {}

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None
    ) -> Tensor:
        out = triangle_attention(q, k, v, bias, mask, impl="torch")
        if out.requires_grad:
            if self.seen % self.stride == 0:
                self._keep(self.seen, out, (q, k, v, bias), mask)
            self.seen += 1
        return out

    def _keep(
        self, number: int, out: Tensor, operands: tuple[Tensor, ...], mask: Tensor | None
    ) -> None:
        q, k, v, bias = (x.detach().to(torch.bfloat16).requires_grad_() for x in operands)

        def hook(dout: Tensor) -> None:
            if dout.any():  # layers that training has not reached have no gradient to compare
                self.kept[number] = Inputs(q, k, v, bias, mask, dout.to(torch.bfloat16))

        out.register_hook(hook)  # type: ignore[no-untyped-call]

    def calls(self) -> list[Inputs]:
        """Return the calls in the order of the forward."""
        return [self.kept[number] for number in sorted(self.kept)]


def capture(run: Path, settings: Settings) -> list[Inputs]:
    """Return calls of the training step that follows the newest checkpoint of a run.

    Weights, sample and random draws are those of the run; the layers run by the reference. Raises
    ``UsageError`` if the folder holds no checkpoint, or one whose attention has no gradient yet.
    """
    saved = checkpoint.load(checkpoint.resolve(run))
    config = _by_reference(saved.config)
    world = join(settings, config)
    trainer = Trainer.build(config, world)
    trainer.restore(saved)
    features = _next_sample(config, trainer.step)
    draw = draws(config.train, trainer.step, features["position"][0])
    layers = sum(isinstance(module, TriangleAttention) for module in trainer.model.modules())
    keeper = Keeper(-(-layers // CALLS))
    operators = dataclasses.replace(Choice("torch", "torch").open(world.device), attention=keeper)
    trainer.model.train()
    with operators.used():
        loss = sample_loss(trainer.model, to_device(features, world.device), config, draw)
        loss.total.backward()  # type: ignore[no-untyped-call]
    if not keeper.kept:
        raise UsageError(
            f"--capture {run}: no gradient reaches the attention at step {trainer.step}; "
            "give a run that has trained for a while"
        )
    return keeper.calls()


def _by_reference(config: Config) -> Config:
    model = dataclasses.replace(config.model, impl="torch")
    return dataclasses.replace(config, model=model)


def _next_sample(config: Config, step: int) -> Batch:
    clusters = read_clusters(Path(config.data.clusters)) if config.data.clusters else None
    dataset = CropDataset(
        Entries(config.data),
        config.data,
        loss=config.loss,
        seed=config.train.seed,
        clusters=clusters,
    )
    loader = Loader(
        dataset, batch_size=config.train.batch_size, start_step=step, stop_step=step + 1
    )
    return next(iter(loader))[0]


def save_calls(calls: list[Inputs], path: Path) -> None:
    """Write calls in the form that ``tpf.bench.captured.read_capture`` reads."""
    tensors = {}
    for i, call in enumerate(calls):
        named = {"q": call.q, "k": call.k, "v": call.v, "bias": call.bias, "dout": call.dout}
        if call.mask is not None:
            named["mask"] = call.mask
        for name, x in named.items():
            tensors[f"{i}.{name}"] = x.detach().cpu().contiguous()
    save_file(tensors, path)
