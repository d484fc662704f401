"""The precision of every part of a training step (spec model.md section 7)."""

from __future__ import annotations

from tpf.config import TrainConfig


def policy(cfg: TrainConfig) -> dict[str, str]:
    """Return the number format of each part; parts are the names that people read."""
    trunk = "BF16" if cfg.precision == "bf16-mixed" else "FP32"
    return {
        "parameters, optimiser, EMA": "FP32",
        "gradient norm, clipping, all-reduce": "FP32",
        "trunk: linear layers, triangle operators": trunk,
        "trunk: residual streams m, z, s": trunk,
        "LayerNorm statistics; single attention: logits, softmax, values": "FP32",
        "input atom encoder, diffusion module, rollout": "FP32",
        "confidence heads, alignment, losses": "FP32",
        "FP32 products on a GPU": "TF32" if cfg.tf32 else "FP32",
    }
