"""The memory of a device against what a configuration needs there, and what to say about it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import torch

from tpf.config import Config
from tpf.memory import ATOM_SHAPES, GIB, Estimate, Sizes, estimate

USABLE = 0.92
"""Share of a GPU's memory that tensors can fill; the rest is the context and fragments."""
CROP_STEP = 32


def _count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


class Budget:
    """The memory of one device against what a configuration needs there."""

    def __init__(
        self, config: Config, parameters: int, device: torch.device, *, ranks: int = 1,
        copied: int = 0,
    ) -> None:  # fmt: skip
        """Take a model's parameters, the ranks of the job, and parameters that graphs copy."""
        graphs = config.train.graphs and device.type == "cuda"
        if graphs:  # whose backward computes blocks again
            model = dataclasses.replace(config.model, checkpoint=True)
            config = dataclasses.replace(config, model=model)
        elif config.train.graphs:
            train = dataclasses.replace(config.train, graphs=False)
            config = dataclasses.replace(config, train=train)
        self.parameters = parameters
        self._config, self._device = config, device
        self._ranks = ranks if config.train.shard else 1
        self._copied = copied
        impl = config.model.impl in ("auto", "cuda") and not config.train.compile
        hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
        self._fused = impl and hopper and config.train.precision == "bf16-mixed"

    @classmethod
    def of_model(
        cls, config: Config, model: torch.nn.Module, device: torch.device, ranks: int = 1
    ) -> Budget:
        """Return the budget of a model that has been built."""
        blocks = [m for name, m in model.named_modules() if name.endswith(".blocks.0")]
        copied = 2 * sum(map(_count, blocks))  # operands and their gradients
        copied += ATOM_SHAPES * _count(model.get_submodule("diffusion_module"))
        return cls(config, _count(model), device, ranks=ranks, copied=copied)

    def of(self, sizes: Sizes) -> Estimate:
        """Return the estimate for a sample."""
        return estimate(
            self._config, self.parameters, sizes, self._device.type, self._fused,
            ranks=self._ranks, copied=self._copied,
        )  # fmt: skip

    def expected(self, crop: int | None = None) -> Estimate:
        """Return the estimate for a full crop, by default of the configured size."""
        return self.of(Sizes.expected(self._config, crop or self._config.data.crop))

    def available(self) -> int:
        """Return the bytes that this process can use."""
        if self._device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self._device)
            return int((free + torch.cuda.memory_reserved(self._device)) * USABLE)
        return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * USABLE)

    def largest_crop(self, available: int) -> int:
        """Return the largest multiple of ``CROP_STEP`` that fits, 0 if none does."""
        crop = self._config.data.crop // CROP_STEP * CROP_STEP
        while crop and self.expected(crop).peak > available:
            crop -= CROP_STEP
        return crop

    def warning(self) -> str | None:
        """Return what to say before the first step if the configured crop may not fit."""
        need, available = self.expected(), self.available()
        if need.peak <= available:
            return None
        text = f"a step at crop {self._config.data.crop} needs about {need.gib:.1f} GiB"
        return (
            f"{text}; {self._device} has {available / GIB:.1f} GiB left. {self._way_out(available)}"
        )

    def out_of_memory(self, step: int, batch: Mapping[str, Any]) -> str:
        """Return the report of a step that ran out of memory: the sample, its sizes, a way out."""
        sizes, available = Sizes.of(batch), self.available()
        templates = f", {sizes.templates} templates" if sizes.templates else ""
        return (
            f"step {step}, sample {', '.join(batch['id'])} ({sizes.tokens} tokens, {sizes.atoms} "
            f"atoms, {sizes.msa_rows} MSA rows{templates}): out of GPU memory; it needs about "
            f"{self.of(sizes).gib:.1f} GiB of {available / GIB:.1f}. {self._way_out(available)}"
        )

    def _way_out(self, available: int) -> str:
        """Say what makes a step fit: recomputation, a smaller crop, or fewer copies and rows."""
        config = self._config
        if config.train.graphs or not config.model.checkpoint:
            model = dataclasses.replace(config.model, checkpoint=True)
            train = dataclasses.replace(config.train, graphs=False)
            leaner = dataclasses.replace(config, model=model, train=train)
            lean = Budget(leaner, self.parameters, self._device, ranks=self._ranks)
            if lean.expected().peak <= available:
                keys = "train.graphs=false and " if config.train.graphs else ""
                return f"Set {keys}model.checkpoint=true, with which this crop would fit"
        words = []
        if crop := self.largest_crop(available):
            smaller = "would fit" if crop < config.data.crop else "should fit: try a smaller one"
            words.append(f"--crop {crop} ({smaller})")
        words += ["train.diffusion_samples", "train.diffusion_chunk"]
        if config.data.msa:
            words.append("model.msa_rows")
        return f"Lower {', '.join(words[:-1])} or {words[-1]}"
