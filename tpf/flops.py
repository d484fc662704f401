"""Floating-point operations of a training step by formula, and what the GPU could do.

Counted are the products of matrices: a multiplication and an addition are two operations. The
backward of a product is two products. What is computed twice to save memory counts once, so that
the share of the peak (MFU) does not reward recomputing. Letters as in ``tpf.model``.
"""

from __future__ import annotations

import torch

from tpf.config import Config, ModelConfig
from tpf.memory import BINS, N_DISTANCES, N_RELPOS, Sizes

PEAK_TFLOPS = {
    "B200": 2250.0,
    "GH200": 989.4,
    "H200": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "A100": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "RTX 4090": 165.2,
}
"""Dense BF16 products with FP32 sums by a part of the device's name, the first that fits."""
REFERENCE_ATOM = 3 + 1 + 1 + 119 + 4 * 64
N_TEMPLATE = N_DISTANCES + 5
ATOM_BINS = 23 * (50 + 2)


def peak_flops(device: torch.device) -> float | None:
    """Return the peak of BF16 products of a device, operations a second; None if unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((1e12 * peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


def sample_flops(config: Config, sizes: Sizes, cycles: int) -> float:
    """Return the operations of one sample's forward and backward with ``cycles`` trunk cycles."""
    m, t, pairs = config.model, config.train, sizes.tokens**2
    leaf, embed = _embedder(m, sizes)
    trunk = _cycle(m, sizes)
    atom_leaf, prepare = _prepare(m, sizes)
    heads = pairs * m.c_z * BINS
    if any((config.loss.plddt, config.loss.pde, config.loss.pae, config.loss.resolved)):
        heads += _confidence(m, sizes)
    learned = embed + trunk + prepare + heads + _denoise(m, sizes, t.diffusion_samples)
    forward_only = (cycles - 1) * trunk + t.rollout_steps * _denoise(m, sizes, 1)
    return 2.0 * (3 * learned + 2 * (leaf + atom_leaf) + forward_only)


def _pair_block(n: int, c: int, hidden: int, wide: int, heads: int, expansion: int) -> int:
    multiplication = n * n * (4 * c * hidden + c * c + hidden * c) + n**3 * hidden
    attention = n * n * (heads * c + 5 * wide * c) + 2 * n**3 * wide
    return 2 * multiplication + 2 * attention + 3 * expansion * n * n * c * c


def _trunk_pairs(m: ModelConfig, n: int) -> int:
    wide = m.tri_heads * m.tri_dim
    return _pair_block(n, m.c_z, m.c_hidden_mul, wide, m.tri_heads, 4)


def _pairformer(m: ModelConfig, n: int) -> int:
    bias = n * n * m.c_z * m.single_heads
    single = n * 5 * m.c_s**2 + 2 * n * n * m.c_s + 12 * n * m.c_s**2
    return _trunk_pairs(m, n) + bias + single


def _msa(m: ModelConfig, sizes: Sizes) -> int:
    n, rows = sizes.tokens, sizes.tokens * sizes.msa_rows
    wide = m.msa_heads * m.msa_head_dim
    outer = 2 * rows * m.c_m * m.c_opm + n * rows * m.c_opm**2 + n * n * m.c_opm**2 * m.c_z
    averaging = n * n * m.c_z * m.msa_heads + n * rows * wide + 3 * rows * m.c_m * wide
    blocks = m.msa_blocks * (outer + _trunk_pairs(m, n))
    return blocks + (m.msa_blocks - 1) * (averaging + 12 * rows * m.c_m**2)


def _template(m: ModelConfig, sizes: Sizes) -> int:
    n, t = sizes.tokens, sizes.templates
    if not m.templates or not t:
        return 0
    wide = m.template_heads * m.template_dim
    block = _pair_block(n, m.c_t, m.c_t, wide, m.template_heads, 2)
    return n * n * m.c_t * (N_TEMPLATE * t + 2 * m.c_z) + t * m.template_blocks * block


def _cycle(m: ModelConfig, sizes: Sizes) -> int:
    """Products of one recycling iteration."""
    n, rows = sizes.tokens, sizes.tokens * sizes.msa_rows
    first = n * n * m.c_z**2 + n * m.c_s**2 + rows * 34 * m.c_m + n * m.c_s_input * m.c_m
    blocks = m.pairformer_blocks * _pairformer(m, n)
    return first + _msa(m, sizes) + _template(m, sizes) + blocks


def _atom_features(m: ModelConfig, sizes: Sizes, uses: int) -> tuple[int, int]:
    """Return an atom encoder's products of features, and those of what ``uses`` stacks take."""
    slots, atoms, c, p = sizes.atoms * m.n_key, sizes.atoms, m.c_atom, m.c_atom_pair
    leaf = atoms * REFERENCE_ATOM * c + slots * 5 * p
    modulation = atoms * 8 * c * c
    bias = slots * p * m.atom_heads
    return leaf, 2 * atoms * c * p + slots * 3 * p * p + uses * m.atom_blocks * (modulation + bias)


def _atom_blocks(m: ModelConfig, sizes: Sizes) -> int:
    """Products of an atom transformer for one copy."""
    return m.atom_blocks * sizes.atoms * (11 * m.c_atom**2 + 2 * m.n_key * m.c_atom)


def _embedder(m: ModelConfig, sizes: Sizes) -> tuple[int, int]:
    """Return the input embedder's products of features, and the others."""
    n = sizes.tokens
    leaf, inner = _atom_features(m, sizes, 1)
    inner += _atom_blocks(m, sizes) + sizes.atoms * m.c_atom * m.c_token
    inner += n * m.c_s_input * (m.c_s + 2 * m.c_z)
    return leaf + n * n * (N_RELPOS + 1) * m.c_z, inner


def _prepare(m: ModelConfig, sizes: Sizes) -> tuple[int, int]:
    """Return the denoiser's products of features, and those that all copies share."""
    n, c = sizes.tokens, m.c_z
    pair = n * n * ((c + N_RELPOS) * c + 12 * c * c + c * m.diffusion_blocks * m.diffusion_heads)
    single = n * (m.c_s + m.c_s_input) * m.c_s
    leaf, atoms = _atom_features(m, sizes, 2)
    return leaf, pair + single + atoms + n * m.c_s * m.c_atom + n * n * c * m.c_atom_pair


def _denoise(m: ModelConfig, sizes: Sizes, copies: int) -> int:
    n, c, atom = sizes.tokens, m.c_token_diffusion, m.c_atom
    noise = m.fourier_dim * m.c_s + n * 12 * m.c_s**2
    block = 6 * m.c_s * c + 11 * c * c + 2 * n * c
    tokens = n * (m.diffusion_blocks * block + m.c_s * c + c * atom)
    atoms = 2 * _atom_blocks(m, sizes) + sizes.atoms * (atom * c + 2 * 3 * atom)
    return copies * (noise + tokens + atoms)


def _confidence(m: ModelConfig, sizes: Sizes) -> int:
    n = sizes.tokens
    embed = 2 * n * m.c_s_input * m.c_z + n * n * N_DISTANCES * m.c_z
    heads = 2 * n * n * m.c_z * BINS + n * m.c_s * ATOM_BINS
    return embed + m.confidence_blocks * _pairformer(m, n) + heads
