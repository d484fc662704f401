"""A rough estimate of the memory of one training step, shown before it runs."""

from __future__ import annotations

from tpf.config import Config

ATOMS_PER_TOKEN = 9
"""Typical heavy atoms per token of protein crops."""
STATE_BYTES = 24
"""Per parameter: weight, EMA, gradient, clipped sum, and Adam's two moments in FP32."""
PAIR_COPIES = 24
"""Pair-sized tensors alive inside one recomputed Pairformer block (norms, gates, projections)."""
ATOM_PAIR_COPIES = 12
"""Window-pair tensors alive per diffusion copy inside one recomputed atom block."""


def memory_gb(config: Config, parameters: int) -> float:
    """Return the estimated peak memory in GiB of a training step at the configured crop.

    Counts the optimiser state, the stored block inputs, one recomputed block, and the diffusion
    copies; it is a guide for choosing a crop, not a bound.
    """
    m, tokens = config.model, config.data.crop
    atoms = tokens * ATOMS_PER_TOKEN
    width = 2 if config.train.precision == "bf16-mixed" else 4
    pair = tokens * tokens * m.c_z * width
    blocks = m.pairformer_blocks + m.msa_blocks + m.confidence_blocks
    trunk = pair * (blocks + PAIR_COPIES if m.checkpoint else blocks * PAIR_COPIES)
    copies = config.train.diffusion_samples
    windows = -(-atoms // m.n_query) * m.n_query * m.n_key
    token_block = copies * tokens * (m.c_token_diffusion * 12 + m.diffusion_heads * tokens * 2) * 4
    atom_block = copies * (atoms * m.c_atom * 12 + windows * m.atom_heads * 2) * 4
    atom_pairs = windows * m.c_atom_pair * ATOM_PAIR_COPIES * 4
    stored = 1 if m.checkpoint else m.diffusion_blocks
    diffusion = token_block * stored + atom_block + atom_pairs
    lddt = config.train.diffusion_chunk * atoms * atoms * 4 * 8
    return float(parameters * STATE_BYTES + trunk + max(diffusion, lddt)) / 2**30
