"""Memory of a training step, counted tensor by tensor before it runs.

A step peaks in its backward pass. What every part of the forward keeps for its backward is counted
below, per pair, token, atom or MSA row, and the peak is the largest of: the diffusion module's
backward with everything kept, the confidence head's with the trunk kept, the trunk's alone, and the
optimiser. With ``model.checkpoint`` blocks keep their inputs and one block at a time is whole.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tpf.config import Config, ModelConfig

ATOMS_PER_TOKEN = 8
"""Heavy atoms per token of protein crops; nucleotides have 21, atomised tokens 1."""
STATE_BYTES = 24
"""Per parameter: weight, EMA, gradient, clipped sum, and Adam's two moments in FP32."""
OPTIMISER_BYTES = 8
"""Per parameter: what Adam makes in passing."""
NEIGHBOURS, HALF_FULL = 600, 400
"""Atoms within 15 A of an atom of a large protein, and the atoms of one with half as many."""
FUSED_SCRATCH = 192 << 20
"""Bytes of the fused layers beside tensors of the pairs' size: chunks, cuBLAS."""
USABLE = 0.92
"""Share of a GPU's memory that tensors can fill; the rest is the context and fragments."""
GIB = 2**30
CROP_STEP = 32
N_RELPOS, N_DISTANCES, BINS = 139, 39, 64
FULL = 4
"""Bytes of an FP32 number."""


@dataclass(frozen=True)
class Sizes:
    """What the memory of a sample's step depends on."""

    tokens: int
    atoms: int
    msa_rows: int = 1
    templates: int = 0
    neighbours: float | None = None
    """Resolved atoms within 15 A of an atom, on average; None takes those of a protein."""

    @classmethod
    def expected(cls, config: Config, tokens: int) -> Sizes:
        """Return what a full crop of a protein has."""
        data = config.data
        rows = min(config.model.msa_rows, data.max_msa_rows) if data.msa else 1
        return cls(tokens, tokens * ATOMS_PER_TOKEN, rows, data.max_templates)

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> Sizes:
        """Return the sizes of a batch of one sample."""
        rows, tokens = batch["msa_mask"].shape[1:]
        templates = batch["template_restype"].shape[1]
        return cls(int(tokens), int(batch["atom_mask"].shape[1]), int(rows), int(templates))


@dataclass(frozen=True)
class Estimate:
    """Bytes of a step: what is there all the time, and what each part adds at its worst."""

    state: int
    trunk: int
    confidence: int
    diffusion: int
    optimiser: int

    @property
    def peak(self) -> int:
        """Largest number of bytes at once."""
        return self.state + max(self.trunk, self.confidence, self.diffusion, self.optimiser)

    @property
    def gib(self) -> float:
        """The peak in GiB."""
        return self.peak / GIB


@dataclass(frozen=True)
class _Part:
    """Bytes of a block: its input, what it keeps for its backward, what the backward adds."""

    input: float
    kept: float
    work: float

    def stack(self, blocks: int, remat: bool) -> tuple[float, float]:
        """Return what ``blocks`` of it keep, and what the backward of one adds to that."""
        if not blocks:
            return 0.0, 0.0
        if remat:
            return blocks * self.input, self.kept + self.work
        return blocks * self.kept, self.work


def estimate(config: Config, parameters: int, sizes: Sizes, device: str, fused: bool) -> Estimate:
    """Return the memory of a step on a ``device`` type; ``fused``: the trunk's layers are ours."""
    m = config.model
    scores = device != "cuda"  # attention with a bias keeps its weights
    trunk, trunk_work = _trunk(config, sizes, fused, scores)
    prepared, prepare_work = _prepared(m, sizes)
    confidence, confidence_work = _confidence(config, sizes, scores)
    diffusion, diffusion_work = _diffusion(config, sizes, scores)
    distogram = 3 * sizes.tokens**2 * BINS * FULL
    before = trunk + prepared + distogram + confidence
    scratch = FUSED_SCRATCH if fused else 0
    return Estimate(
        state=parameters * STATE_BYTES,
        trunk=int(trunk + scratch + max(trunk_work, prepared + prepare_work)),
        confidence=int(before + confidence_work),
        diffusion=int(before + diffusion + diffusion_work),
        optimiser=parameters * OPTIMISER_BYTES,
    )


def _trunk(config: Config, sizes: Sizes, fused: bool, scores: bool) -> tuple[float, float]:
    """Return what the trunk keeps and what the backward of one of its blocks adds."""
    m, pairs = config.model, sizes.tokens**2
    width = 2 if config.train.precision == "bf16-mixed" else FULL
    # Relative positions, first and last pair representation, the latter in full precision too.
    kept = _features(sizes) + _atom_features(m, sizes, 1)
    kept += pairs * (N_RELPOS * width + m.c_z * (3 * width + FULL))
    most = 0.0
    parts = [
        (_pairformer(m, sizes, width, fused, scores), m.pairformer_blocks),
        (_msa(m, sizes, width, fused), m.msa_blocks),
        *_template(m, sizes, width, fused),
    ]
    for part, blocks in parts:
        stored, work = part.stack(blocks, m.checkpoint)
        kept, most = kept + stored, max(most, work)
    return kept, most


def _confidence(config: Config, sizes: Sizes, scores: bool) -> tuple[float, float]:
    """Return what the confidence heads keep, in FP32, and what their backward adds."""
    m, loss, pairs = config.model, config.loss, sizes.tokens**2
    if not any((loss.plddt, loss.pde, loss.pae, loss.resolved)):
        return 0.0, 0.0
    block = _pairformer(m, sizes, FULL, False, scores)
    kept, work = block.stack(m.confidence_blocks, m.checkpoint)
    kept += pairs * (2 * m.c_z + 2 * BINS + N_DISTANCES) * FULL
    return kept, max(work, 4 * pairs * BINS * FULL)


def _diffusion(config: Config, sizes: Sizes, scores: bool) -> tuple[float, float]:
    """Return what the denoiser keeps for all copies, and what its backward or the loss adds."""
    m, copies = config.model, config.train.diffusion_samples
    tokens = _token_block(m, sizes, copies, scores)
    atoms = _atom_block(m, sizes, copies, scores)
    kept_tokens, work_tokens = tokens.stack(m.diffusion_blocks, m.checkpoint)
    kept_atoms, work_atoms = atoms.stack(2 * m.atom_blocks, m.checkpoint)
    between = FULL * copies * sizes.atoms * (m.c_token_diffusion + 3 * m.c_atom)
    work = max(work_tokens, work_atoms, _smooth_lddt(config, sizes))
    return kept_tokens + kept_atoms + between, work


def _norm(channels: int, width: int) -> int:
    """Bytes of a layer norm's result, and of its input in FP32 if that is a copy."""
    return channels * (width + (FULL if width < FULL else 0))


def _pair_block(
    channels: int, hidden: int, heads: int, dim: int, expansion: int, width: int, fused: bool
) -> _Part:
    """Count a pair block, bytes per pair: two multiplications, two attentions, a transition."""
    wide = heads * dim
    stream = channels * width
    if fused:
        multiplication = stream + 6 * hidden + 24
        attention = stream + 12 * wide + 8 * heads
        kept = 2 * multiplication + 2 * attention + 2 * stream
        return _Part(stream, kept, 2 * (6 * wide + 3 * channels))
    norm = _norm(channels, width)
    attention = stream + norm + heads * (width + FULL) + 6 * wide * width
    copies = wide * width * (1 if width == FULL else 3)  # of one node's order; rounding residuals
    transition = stream + norm + 4 * expansion * channels * width
    kept = 2 * stream + 2 * attention + copies + transition
    # First the transition's gradients; at the end the multiplication, again and all in FP32, when
    # what the other layers kept is gone.
    multiplication = FULL * (8 * channels + 14 * hidden) + 4 * stream
    return _Part(stream, kept, max((2 * expansion + 2) * stream, multiplication - kept))


def _pairformer(m: ModelConfig, sizes: Sizes, width: int, fused: bool, scores: bool) -> _Part:
    pair = _pair_block(m.c_z, m.c_hidden_mul, m.tri_heads, m.tri_dim, 4, width, fused)
    n, pairs = sizes.tokens, sizes.tokens**2
    bias = m.single_heads * (width + (FULL if width < FULL else 0))
    bias += 2 * m.single_heads * FULL if scores else 0
    single = n * m.c_s * (2 * _norm(1, width) + 25 * width)
    norm = m.c_z * width if fused else _norm(m.c_z, width)
    work = pair.work - (norm + bias if fused else 0)  # which are gone before the pairs' backward
    return _Part(
        pairs * pair.input + n * m.c_s * width,
        pairs * (pair.kept + norm + bias) + single,
        pairs * work,
    )


def _msa(m: ModelConfig, sizes: Sizes, width: int, fused: bool) -> _Part:
    pair = _pair_block(m.c_z, m.c_hidden_mul, m.tri_heads, m.tri_dim, 4, width, fused)
    rows, pairs = sizes.msa_rows * sizes.tokens, sizes.tokens**2
    wide = m.msa_heads * m.msa_head_dim
    row = m.c_m * (width * 18 + 3 * _norm(1, width)) + (4 * wide + 4 * m.c_opm) * width
    averaging = _norm(m.c_z, width) + m.msa_heads * (2 * width + FULL)
    outer = m.c_opm**2 * width
    return _Part(
        pairs * m.c_z * width + rows * m.c_m * width,
        pairs * (pair.kept + averaging + outer) + rows * row,
        max(pairs * pair.work, 2 * pairs * outer),
    )


def _template(m: ModelConfig, sizes: Sizes, width: int, fused: bool) -> list[tuple[_Part, int]]:
    """Count the template module: its features and embedding once, its blocks."""
    pairs = sizes.templates * sizes.tokens**2
    if not m.templates or not pairs:
        return []
    pair = _pair_block(m.c_t, m.c_t, m.template_heads, m.template_dim, 2, width, fused)
    embedded = pairs * (44 + m.c_t) * width
    block = _Part(pairs * pair.input, pairs * pair.kept, pairs * pair.work)
    return [(_Part(embedded, embedded, 5 * pairs * m.c_t * width), 1), (block, m.template_blocks)]


def _features(sizes: Sizes) -> float:
    """Bytes of a sample's features on the device."""
    n = sizes.tokens
    pair = n * n * (4 + sizes.templates * (39 + 3) * 4)
    return pair + sizes.msa_rows * n * 35 * 4 + sizes.atoms * (119 + 256 + 12) * 4


def _atom_features(m: ModelConfig, sizes: Sizes, uses: int) -> float:
    """Bytes that an atom encoder's features keep for ``uses`` transformers over them."""
    slot = (1 + uses) * m.c_atom_pair + uses * m.atom_blocks * m.atom_heads
    if not m.checkpoint:
        slot += 4 * m.c_atom_pair + 8
    modulations = (uses * m.atom_blocks * 10 + 4) * m.c_atom
    return FULL * sizes.atoms * (m.n_key * slot + modulations)


def _prepared(m: ModelConfig, sizes: Sizes) -> tuple[float, float]:
    """Return what the conditioning of the denoiser keeps, and what its backward adds."""
    pairs = sizes.tokens**2
    inside = 2 * (m.c_z + N_RELPOS) + 20 * m.c_z  # two norms' sides, two transitions
    kept = 3 * m.c_z + m.diffusion_blocks * m.diffusion_heads
    if not m.checkpoint:
        kept, inside = kept + inside, 4 * m.c_z
    work = max(pairs * inside, 8 * sizes.atoms * m.n_key * m.c_atom_pair)
    return FULL * pairs * kept + _atom_features(m, sizes, 2), FULL * work


def _token_block(m: ModelConfig, sizes: Sizes, copies: int, scores: bool) -> _Part:
    rows = copies * sizes.tokens
    logits = rows * sizes.tokens * m.diffusion_heads
    c = m.c_token_diffusion
    kept = rows * (29 * c + 2 * m.c_s) + (logits if scores else 0)
    work = max(rows * 6 * c, logits * (3 if scores else 1) - rows * 8 * c)
    return _Part(FULL * rows * c, FULL * kept, FULL * work)


def _atom_block(m: ModelConfig, sizes: Sizes, copies: int, scores: bool) -> _Part:
    rows = copies * sizes.atoms
    logits = rows * m.n_key * m.atom_heads
    gathered = 2 * m.n_key // m.n_query
    kept = rows * (25 + gathered) * m.c_atom + (logits if scores else 0)
    attention = logits * (3 if scores else 1) + rows * (gathered - 11) * m.c_atom
    work = max(rows * 6 * m.c_atom, attention)
    return _Part(FULL * rows * m.c_atom, FULL * kept, FULL * work)


def _smooth_lddt(config: Config, sizes: Sizes) -> float:
    """Bytes of the smooth lDDT loss of one chunk of copies, with its backward."""
    if not config.loss.smooth_lddt:
        return 0.0
    copies = min(config.train.diffusion_chunk, config.train.diffusion_samples)
    neighbours = sizes.neighbours
    if neighbours is None:
        neighbours = NEIGHBOURS * sizes.atoms / (sizes.atoms + HALF_FULL)
    pairs = sizes.atoms * neighbours / 2
    return pairs * (15 * copies * FULL + 40) + sizes.atoms**2 * 10.0


class Budget:
    """The memory of one device against what a configuration needs there."""

    def __init__(self, config: Config, parameters: int, device: torch.device) -> None:
        if config.train.graphs:  # whose backward computes blocks again
            model = dataclasses.replace(config.model, checkpoint=True)
            config = dataclasses.replace(config, model=model)
        self.parameters = parameters
        self._config, self._device = config, device
        impl = config.model.impl in ("auto", "cuda") and not config.train.compile
        hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
        self._fused = impl and hopper and config.train.precision == "bf16-mixed"

    @classmethod
    def of_model(cls, config: Config, model: torch.nn.Module, device: torch.device) -> Budget:
        """Return the budget of a model that has been built."""
        return cls(config, sum(p.numel() for p in model.parameters()), device)

    def of(self, sizes: Sizes) -> Estimate:
        """Return the estimate for a sample."""
        return estimate(self._config, self.parameters, sizes, self._device.type, self._fused)

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
        if not config.model.checkpoint:
            model = dataclasses.replace(config.model, checkpoint=True)
            lean = Budget(dataclasses.replace(config, model=model), self.parameters, self._device)
            if lean.expected().peak <= available:
                return "Set model.checkpoint=true, with which this crop would fit"
        words = []
        if crop := self.largest_crop(available):
            smaller = "would fit" if crop < config.data.crop else "should fit: try a smaller one"
            words.append(f"--crop {crop} ({smaller})")
        words += ["train.diffusion_samples", "train.diffusion_chunk"]
        if config.data.msa:
            words.append("model.msa_rows")
        return f"Lower {', '.join(words[:-1])} or {words[-1]}"
