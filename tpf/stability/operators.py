"""The triangle operators of an arm: our own by ``model.impl``, or those of ``tpf bench``."""

from __future__ import annotations

import dataclasses

import torch

from tpf.bench import backends
from tpf.bench.cases import Attend
from tpf.bench.swap import CHOICES, Choice, Operators
from tpf.errors import HardwareError, UsageError
from tpf.kernels.describe import check_impl
from tpf.kernels.ops import IMPLS

REFERENCE = Choice("torch", "torch")


def check_name(impl: str) -> None:
    """Raise ``UsageError`` unless impl is one of ``--impl`` of training or of ``tpf bench``."""
    names = list(dict.fromkeys([*IMPLS, *backends.BACKENDS]))
    if impl not in names:
        raise UsageError(f"--impls {impl}: no such backend; choose from {', '.join(names)}")


def is_own(impl: str) -> bool:
    """Return whether training takes impl as ``model.impl``."""
    return impl in IMPLS


def choice(impl: str) -> Choice:
    """Return the operators of a backend that is not our own.

    Third parties have cuEquivariance's update beside their attention, or their own, as in ``tpf
    bench step`` and in the paper; what has no update there has the reference.
    """
    return CHOICES.get(impl, Choice(impl, REFERENCE.multiplication))


def why_unavailable(impl: str, device: torch.device) -> str | None:
    """Return why a backend cannot run on this device, as far as can be told without loading it."""
    try:
        if is_own(impl):
            check_impl(impl, device)
        else:
            choice(impl).check(device)
    except (HardwareError, backends.UnavailableError) as reason:
        return str(reason)
    return None


def with_attention(attend: Attend, device: torch.device) -> Operators:
    """Return the reference operators with another attention."""
    return dataclasses.replace(REFERENCE.open(device), attention=attend)
