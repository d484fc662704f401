"""Diffusion module: conditioning and denoiser (AF3 Alg 20-22)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tpf.config import ModelConfig
from tpf.model.atoms import AtomDecoder, AtomEncoder, AtomFeatures
from tpf.model.embed import N_RELPOS, relative_position
from tpf.model.primitives import Layer, LayerNorm, Linear, Transition, no_autocast, remat
from tpf.model.transformer import AtomConditioning, DiffusionTransformer
from tpf.model.windows import AtomLayout

FOURIER_SEED = 42


class Trunk(NamedTuple):
    """What the trunk hands on, in full precision."""

    s_input: Tensor
    """[B, N, c_s_input]"""
    s: Tensor
    """[B, N, c_s]"""
    z: Tensor
    """[B, N, N, c_z]"""


class FourierEmbedding(Layer):
    """Random Fourier features of the noise level (AF3 Alg 22): x [...] -> cos(2 pi (x w + b))."""

    w: Tensor
    b: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        generator = torch.Generator("cpu").manual_seed(FOURIER_SEED)
        device = torch.get_default_device()
        w = torch.randn(channels, generator=generator, device="cpu")
        b = torch.rand(channels, generator=generator, device="cpu")
        self.register_buffer("w", w.to(device))
        self.register_buffer("b", b.to(device))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cos(2 * math.pi * (x[..., None] * self.w + self.b))


class DiffusionConditioning(nn.Module):
    """Conditioning of the denoiser (AF3 Alg 21), split by what each part depends on."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.sigma_data, self.checkpoint = cfg.sigma_data, cfg.checkpoint
        self.layer_norm_z = LayerNorm(cfg.c_z + N_RELPOS, offset=False)
        self.linear_z = Linear(cfg.c_z + N_RELPOS, cfg.c_z)
        self.transition_z = nn.ModuleList(Transition(cfg.c_z, 2) for _ in range(2))
        self.layer_norm_s = LayerNorm(cfg.c_s + cfg.c_s_input, offset=False)
        self.linear_s = Linear(cfg.c_s + cfg.c_s_input, cfg.c_s)
        self.fourier_emb = FourierEmbedding(cfg.fourier_dim)
        self.layer_norm_n = LayerNorm(cfg.fourier_dim, offset=False)
        self.linear_n = Linear(cfg.fourier_dim, cfg.c_s)
        self.transition_s = nn.ModuleList(Transition(cfg.c_s, 2) for _ in range(2))

    def pair(self, f: dict[str, Any], z: Tensor, pair_mask: Tensor) -> Tensor:
        """Condition the pairs: z of the trunk [B, N, N, c_z] -> [B, N, N, c_z]."""
        return remat(self._pair, f, z, pair_mask, enabled=self.checkpoint)

    def _pair(self, f: dict[str, Any], z: Tensor, pair_mask: Tensor) -> Tensor:
        z = torch.cat([z, relative_position(f, z.dtype)], -1)
        z = self.linear_z(self.layer_norm_z(z))
        for transition in self.transition_z:
            z = z + transition(z, pair_mask)
        return z

    def single(self, trunk: Trunk) -> Tensor:
        """Condition the tokens, before the noise level is known: [B, N, c_s]."""
        return self.linear_s(self.layer_norm_s(torch.cat([trunk.s, trunk.s_input], -1)))

    def noise(self, s: Tensor, t: Tensor, mask: Tensor) -> Tensor:
        """Add noise levels t [B, S] to the result of ``single``: [B, S, N, c_s]."""
        return remat(self._noise, s, t, mask, enabled=self.checkpoint)

    def _noise(self, s: Tensor, t: Tensor, mask: Tensor) -> Tensor:
        n = self.fourier_emb(torch.log(t / self.sigma_data) / 4)
        s = s[:, None] + self.linear_n(self.layer_norm_n(n))[:, :, None]
        for transition in self.transition_s:
            s = s + transition(s, mask[:, None])
        return s


@dataclass(frozen=True, eq=False, kw_only=True)
class DenoiserContext:
    """What the denoiser takes from features and trunk; shared by all samples and noise levels."""

    layout: AtomLayout
    token_mask: Tensor
    """[B, N] bool"""
    s: Tensor
    """[B, N, c_s], conditioning without the noise level"""
    token_biases: list[Tensor]
    """Per block of the diffusion transformer, [B, H, N, N]."""
    atoms: AtomFeatures
    decoder: AtomConditioning


class DiffusionModule(Layer):
    """Denoiser with preconditioning (AF3 Alg 20); everything in full precision."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.sigma_data = cfg.sigma_data
        self.n_query, self.n_key = cfg.n_query, cfg.n_key
        c_token = cfg.c_token_diffusion
        self.diffusion_conditioning = DiffusionConditioning(cfg)
        self.atom_attn_enc = AtomEncoder(cfg, c_token, noisy=True)
        self.layer_norm_s = LayerNorm(cfg.c_s, offset=False)
        self.linear_s = Linear(cfg.c_s, c_token, init="final")
        self.diffusion_transformer = DiffusionTransformer(
            c_token,
            cfg.c_s,
            cfg.c_z,
            blocks=cfg.diffusion_blocks,
            heads=cfg.diffusion_heads,
            checkpoint=cfg.checkpoint,
        )
        self.layer_norm_a = LayerNorm(c_token, offset=False)
        self.atom_attn_dec = AtomDecoder(cfg)

    def prepare(self, f: dict[str, Any], trunk: Trunk) -> DenoiserContext:
        """Compute what depends neither on the noisy positions nor on the noise level."""
        with no_autocast(trunk.z.device):
            layout = AtomLayout.build(f, self.n_query, self.n_key)
            mask = f["token_mask"] > 0
            pair_mask = mask[:, :, None] & mask[:, None]
            z = self.diffusion_conditioning.pair(f, trunk.z, pair_mask)
            atoms = self.atom_attn_enc.features(f, layout, trunk.s, z)
            return DenoiserContext(
                layout=layout,
                token_mask=mask,
                s=self.diffusion_conditioning.single(trunk),
                token_biases=self.diffusion_transformer.pair_biases(z, mask[:, None, None]),
                atoms=atoms,
                decoder=self.atom_attn_dec.condition(atoms, layout),
            )

    def forward(self, context: DenoiserContext, x_noisy: Tensor, t: Tensor) -> Tensor:
        """Denoise x_noisy [B, S, A, 3] (Angstrom) at noise levels t [B, S]: [B, S, A, 3]."""
        with no_autocast(x_noisy.device):
            layout, mask = context.layout, context.token_mask
            x_noisy = layout.pad(x_noisy) * layout.mask[:, None, :, None]
            level = t[:, :, None, None]
            total = (level.square() + self.sigma_data**2).sqrt()
            s = self.diffusion_conditioning.noise(context.s, t, mask)
            a, q = self.atom_attn_enc(context.atoms, layout, x_noisy / total)
            a = a + self.linear_s(self.layer_norm_s(s))
            a = self.diffusion_transformer(a, s, context.token_biases, mask)
            update = self.atom_attn_dec(self.layer_norm_a(a), q, context.decoder, layout)
            x = (self.sigma_data / total).square() * x_noisy
            x = x + self.sigma_data * level / total * update
            return (x * layout.mask[:, None, :, None])[:, :, : layout.n_atoms]
