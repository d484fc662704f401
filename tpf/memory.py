"""Memory of a training step, counted tensor by tensor before it runs.

A step peaks in its backward pass. What every part of the forward keeps for its backward is counted
below, per pair, token, atom or MSA row, and the peak is the largest of: the diffusion module's
backward with everything kept, the confidence head's with the trunk kept, the trunk's alone. With
``model.checkpoint`` blocks keep their inputs and one block at a time is whole. CUDA graphs set that
block's memory apart, with what they read and write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tpf.config import Config, ModelConfig

ATOMS_PER_TOKEN = 8
"""Heavy atoms per token of protein crops; nucleotides have 21, atomised tokens 1."""
STATE_BYTES, SHARED_BYTES = 12, 12
"""Per parameter in FP32: weight, gradient, clipped sum; EMA and Adam's two moments, which ranks
share."""
ATOM_SHAPES = 8
"""Numbers of atoms (in windows) of which graphs are kept, when every crop has another."""
STATIC, COPIES = 5, 2
"""Inputs of a block that its graphs hold (argument, results of a call with gradient and of one
without, gradients of both), and that a replay adds."""
NEIGHBOURS, HALF_FULL = 600, 400
"""Atoms within 15 A of an atom of a large protein, and the atoms of one with half as many."""
FUSED_SCRATCH = 192 << 20
"""Bytes of the fused layers beside tensors of the pairs' size: chunks, cuBLAS."""
GIB = 2**30
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
    graphs: int
    trunk: int
    confidence: int
    diffusion: int

    @property
    def peak(self) -> int:
        """Largest number of bytes at once."""
        return self.state + self.graphs + max(self.trunk, self.confidence, self.diffusion)

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

    def stack(self, blocks: int, remat: bool, graphs: bool = False) -> tuple[float, float]:
        """Return what ``blocks`` of it keep, and what the backward of one adds to that."""
        if not blocks:
            return 0.0, 0.0
        if graphs:
            return blocks * self.input, COPIES * self.input
        if remat:
            return blocks * self.input, self.kept + self.work
        return blocks * self.kept, self.work


def estimate(
    config: Config, parameters: int, sizes: Sizes, device: str, fused: bool, *, ranks: int = 1,
    copied: int = 0,
) -> Estimate:  # fmt: skip
    """Return the memory of a step on a ``device`` type.

    ``fused``: the trunk's layers are ours. ``ranks`` share the optimiser's state. ``copied``:
    parameters that CUDA graphs hold once more.
    """
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
        state=parameters * STATE_BYTES + parameters * SHARED_BYTES // ranks,
        graphs=int(_graphs(config, sizes, fused) + FULL * copied) if config.train.graphs else 0,
        trunk=int(trunk + scratch + max(trunk_work, prepared + prepare_work)),
        confidence=int(before + confidence_work),
        diffusion=int(before + diffusion + diffusion_work),
    )


def _graphs(config: Config, sizes: Sizes, fused: bool) -> float:
    """Return what CUDA graphs of one crop hold: a pool for the largest block, and operands."""
    atoms = _atom_block(config.model, sizes, config.train.diffusion_samples, False)
    blocks = [*_token_blocks(config, sizes, fused), atoms]
    pool = max(block.kept + block.work for block in blocks)
    return pool + (FUSED_SCRATCH if fused else 0) + _graph_operands(config, sizes, fused)


def _token_blocks(config: Config, sizes: Sizes, fused: bool) -> list[_Part]:
    """Return a block of every kind that does not depend on the atoms."""
    m = config.model
    width = 2 if config.train.precision == "bf16-mixed" else FULL
    trunk = [_pairformer(m, sizes, width, fused, False), _msa(m, sizes, width, fused)]
    trunk += [block for block, _ in _template(m, sizes, width, fused)[1:]]
    heads = [_pairformer(m, sizes, FULL, False, False)] if _has_confidence(config) else []
    return [*trunk, *heads, _token_block(m, sizes, config.train.diffusion_samples, False)]


def _graph_operands(
    config: Config, sizes: Sizes, fused: bool, atom_shapes: int = ATOM_SHAPES
) -> float:
    """Return the static operands, results and gradients of graphs, without parameters."""
    m = config.model
    atoms = _atom_block(m, sizes, config.train.diffusion_samples, False)
    conditions = FULL * sizes.atoms * (10 * m.c_atom + m.n_key * m.atom_heads)
    # Atom blocks with all copies and of the trunk, and a whole denoiser with its conditions.
    features = m.n_key * (m.c_atom_pair + 2 * m.atom_blocks * m.atom_heads)
    features += 20 * m.atom_blocks * m.c_atom
    biases = sizes.tokens**2 * m.diffusion_blocks * m.diffusion_heads
    denoiser = FULL * (sizes.atoms * features + biases)
    of_atoms = STATIC * atoms.input + 4 * conditions + denoiser
    of_tokens = STATIC * sum(block.input for block in _token_blocks(config, sizes, fused))
    return of_tokens + atom_shapes * of_atoms


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
        stored, work = part.stack(blocks, m.checkpoint, config.train.graphs)
        kept, most = kept + stored, max(most, work)
    return kept, most


def _has_confidence(config: Config) -> bool:
    loss = config.loss
    return any((loss.plddt, loss.pde, loss.pae, loss.resolved))


def _confidence(config: Config, sizes: Sizes, scores: bool) -> tuple[float, float]:
    """Return what the confidence heads keep, in FP32, and what their backward adds."""
    m, pairs = config.model, sizes.tokens**2
    if not _has_confidence(config):
        return 0.0, 0.0
    block = _pairformer(m, sizes, FULL, False, scores)
    kept, work = block.stack(m.confidence_blocks, m.checkpoint, config.train.graphs)
    kept += pairs * (2 * m.c_z + 2 * BINS + N_DISTANCES) * FULL
    return kept, max(work, 4 * pairs * BINS * FULL)


def _diffusion(config: Config, sizes: Sizes, scores: bool) -> tuple[float, float]:
    """Return what the denoiser keeps for all copies, and what its backward or the loss adds."""
    m, copies = config.model, config.train.diffusion_samples
    tokens = _token_block(m, sizes, copies, scores)
    atoms = _atom_block(m, sizes, copies, scores)
    kept_tokens, work_tokens = tokens.stack(m.diffusion_blocks, m.checkpoint, config.train.graphs)
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
