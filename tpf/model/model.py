"""The whole network (AF3 Alg 1): trunk, rollout, denoiser and heads."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tpf.config import ModelConfig
from tpf.errors import UsageError
from tpf.model import graphs
from tpf.model.diffusion import DenoiserContext, DiffusionModule, Trunk
from tpf.model.embed import InputEmbedder, InputEmbedding
from tpf.model.heads import AuxHeads
from tpf.model.msa import MSABlock, MSAEmbedder, MSAModule
from tpf.model.pairformer import PairformerBlock, PairformerStack
from tpf.model.primitives import LayerNorm, Linear, no_autocast
from tpf.model.sample import noise_schedule, sample
from tpf.model.template import TemplateEmbedder
from tpf.model.transformer import ConditionedBlock

VERSION = (2, 0, 0)
"""Version of the parameter layout, that of OpenFold3."""

ALIASES = "sample_diffusion.diffusion_module."
"""Prefix under which OpenFold3's state dict lists ``diffusion_module.*`` once more."""

Features = dict[str, Any]
Precision = Literal["bf16-mixed", "fp32"]


class Model(nn.Module):
    """AlphaFold3-style network with OpenFold3's parameter names.

    Methods take features with a leading batch axis (spec model.md 1.3) and use torch's default
    generators. Parameters stay FP32; all but ``trunk`` computes in the dtype of the parameters.
    """

    version_tensor: Tensor

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.register_buffer("version_tensor", torch.tensor(VERSION, dtype=torch.float32))
        self.input_embedder = InputEmbedder(cfg)
        self.layer_norm_z = LayerNorm(cfg.c_z)
        self.linear_z = Linear(cfg.c_z, cfg.c_z, init="final")
        self.template_embedder = TemplateEmbedder(cfg)
        self.msa_module_embedder = MSAEmbedder(cfg)
        self.msa_module = MSAModule(cfg)
        self.layer_norm_s = LayerNorm(cfg.c_s)
        self.linear_s = Linear(cfg.c_s, cfg.c_s, init="final")
        self.pairformer_stack = PairformerStack(cfg, cfg.pairformer_blocks)
        self.diffusion_module = DiffusionModule(cfg)
        self.aux_heads = AuxHeads(cfg)
        self.register_load_state_dict_pre_hook(_drop_aliases)  # type: ignore[no-untyped-call]

    def compile_blocks(self) -> None:
        """Compile the repeated blocks in place with torch.compile; the rest stays eager."""
        for module in self.modules():
            if isinstance(module, (MSABlock, PairformerBlock, ConditionedBlock)):
                module.compile()

    def trunk(self, f: Features, n_cycles: int, precision: Precision = "fp32") -> Trunk:
        """Run embedder, templates, MSA module and Pairformer ``n_cycles`` times.

        ``bf16-mixed`` runs under BF16 autocast; ``fp32`` leaves the caller's autocast as it is.
        Gradients flow through the last cycle only. Raises UsageError for no cycle, and for FP16.
        """
        if n_cycles < 1:
            raise UsageError(f"trunk got {n_cycles} cycles; give at least 1")
        device = f["token_mask"].device
        mixed = precision == "bf16-mixed"
        with torch.autocast(device.type, dtype=torch.bfloat16) if mixed else nullcontext():
            first = self.input_embedder(f)
            full = first.s_input.dtype
            stream = _stream_dtype(device, full)
            first = first._replace(s=first.s.to(stream), z=first.z.to(stream))
            s, z = torch.zeros_like(first.s), torch.zeros_like(first.z)
            with torch.no_grad():
                for _ in range(n_cycles - 1):
                    s, z = self._cycle(f, first, s, z)
            # Some PyTorch versions keep the casts of weights made above, which carry no gradient.
            torch.clear_autocast_cache()
            s, z = self._cycle(f, first, s, z)
        return Trunk(first.s_input, s.to(full), z.to(full))

    def _cycle(
        self, f: Features, first: InputEmbedding, s: Tensor, z: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run one recycling iteration (AF3 Alg 1 steps 7-13) on s [B, N, c_s], z [B, N, N, c_z]."""
        mask = f["token_mask"] > 0
        z = first.z + self.linear_z(self.layer_norm_z(z))
        if self.cfg.templates and f["template_restype"].shape[1]:
            z = z + self.template_embedder(f, z, mask)
        m, msa_mask = self.msa_module_embedder(f, first.s_input)
        z = self.msa_module(m, z, msa_mask, mask)
        s = first.s + self.linear_s(self.layer_norm_s(s))
        s, z = self.pairformer_stack(s, z, mask)
        return s, z

    def prepare(self, f: Features, trunk: Trunk) -> DenoiserContext:
        """Compute what ``denoise`` and ``rollout`` share: all but noise levels and positions."""
        return self.diffusion_module.prepare(f, trunk)

    def denoise(self, context: DenoiserContext, x_noisy: Tensor, t: Tensor) -> Tensor:
        """Denoise x_noisy [B, S, A, 3] (Angstrom) at noise levels t [B, S]: [B, S, A, 3]."""
        return self.diffusion_module(context, x_noisy, t)

    @torch.no_grad()
    def rollout(self, context: DenoiserContext, n_samples: int, n_steps: int) -> Tensor:
        """Sample structures [B, S, A, 3] in Angstrom (AF3 Alg 18); padded atoms are zero."""
        layout = context.layout
        return sample(
            graphs.bind(self.diffusion_module, context),
            layout.mask[:, : layout.n_atoms],
            n_samples,
            noise_schedule(n_steps, self.cfg.sigma_data),
            context.s.dtype,
        )

    def distogram(self, trunk: Trunk) -> Tensor:
        """Return distance logits [B, N, N, 64]."""
        with no_autocast(trunk.z.device):
            return self.aux_heads.distogram(trunk.z)

    def confidence(self, f: Features, trunk: Trunk, x: Tensor) -> dict[str, Tensor]:
        """Return logits for structures x [B, S, A, 3]; gradients stop at trunk and x.

        plddt [B, S, A, 50], resolved [B, S, A, 2], pae and pde [B, S, N, N, 64].
        """
        return self.aux_heads.confidence(f, trunk, x)


def _drop_aliases(module: nn.Module, state: dict[str, Any], *_: Any) -> None:  # noqa: ANN401
    """Drop OpenFold3's second names of the diffusion module from a state dict to be loaded."""
    for name in [name for name in state if name.startswith(ALIASES)]:
        del state[name]


def _stream_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the residual streams: that of autocast, if it is on."""
    if not torch.is_autocast_enabled(device.type) or dtype == torch.float64:
        return dtype
    stream = torch.get_autocast_dtype(device.type)
    if stream == torch.float16:
        raise UsageError("the trunk runs under float16 autocast, which overflows; use bfloat16")
    return stream
