"""Say which implementation the triangle operators will use, without running them."""

from __future__ import annotations

import torch

from tpf.kernels.ops import AUTO_TAKES_KERNELS


def describe_impl(impl: str, device: torch.device) -> str:
    """Return what ``--impl`` means for training on this device, for people."""
    if impl != "auto":
        return impl
    if device.type != "cuda":
        return "torch (the reference path; no NVIDIA GPU)"
    if not AUTO_TAKES_KERNELS:
        return "torch (the reference path; ask for --impl cuda or flex by name)"
    capability = torch.cuda.get_device_capability(device)
    if capability == (9, 0):
        return "cuda (Hopper kernels) for BF16, torch otherwise"
    if capability >= (8, 0):
        return f"flex for BF16 (compute capability {capability}), torch otherwise"
    return f"torch (compute capability {capability})"
