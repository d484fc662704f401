"""Check and describe ``--impl`` for a device, without running the operators."""

from __future__ import annotations

import torch

from tpf.errors import HardwareError, UsageError
from tpf.kernels.ops import IMPLS


def check_impl(impl: str, device: torch.device) -> None:
    """Raise ``UsageError`` for an unknown name, ``HardwareError`` for one the device cannot run."""
    if impl not in IMPLS:
        raise UsageError(
            f"--impl {impl}: no such backend; choose from {', '.join(IMPLS)} (those of others run "
            "in tpf stability and tpf bench)"
        )
    if impl in ("auto", "torch"):
        return
    if device.type != "cuda":
        raise HardwareError(f"--impl {impl} needs an NVIDIA GPU, none is visible; use --impl auto")
    capability = torch.cuda.get_device_capability(device)
    if impl == "cuda" and capability != (9, 0):
        raise HardwareError(
            f"--impl cuda needs a Hopper GPU (compute capability 9.0), this one has "
            f"{capability[0]}.{capability[1]}; use --impl auto"
        )


def describe_impl(impl: str, device: torch.device) -> str:
    """Return what ``--impl`` means for training on this device, for people."""
    if impl != "auto":
        return impl
    if device.type != "cuda":
        return "torch (the reference path; no NVIDIA GPU)"
    capability = torch.cuda.get_device_capability(device)
    if capability == (9, 0):
        return "cuda (Hopper kernels) for BF16, torch otherwise"
    if capability >= (8, 0):
        return f"flex for BF16 (compute capability {capability}), torch otherwise"
    return f"torch (compute capability {capability})"
