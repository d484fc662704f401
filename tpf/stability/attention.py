"""Another implementation of triangle attention in the layers of a model."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from tpf.bench import backends
from tpf.bench.cases import Attend
from tpf.errors import HardwareError, UsageError
from tpf.kernels.describe import check_impl
from tpf.kernels.ops import IMPLS
from tpf.model.model import Model
from tpf.model.pairformer import TriangleAttention
from tpf.model.primitives import head_bias, no_autocast


class Rerouted(TriangleAttention):
    """A triangle attention layer (AF3 Alg 14, 15) whose attention is computed by ``attend``.

    It has the parameters of ``layer``, under the same names. Only what its caller calls as a module
    is rerouted, so the model's ``impl`` must be one whose pair stack does not fuse its layers.
    """

    def __init__(self, layer: TriangleAttention, attend: Attend) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(layer.__dict__)
        self.attend = attend

    def forward(self, z: Tensor, mask: Tensor) -> Tensor:
        z = self.layer_norm(z)
        bias = head_bias(z, self.linear_z.weight)[:, None]
        keys = mask if self.starting else mask.mT
        q, k, v = (x.permute(self.to_slices) for x in self.mha.qkv(z, z))
        with no_autocast(z.device):
            o = self.attend(q, k, v, bias, keys[:, :, None, None])
        return self.mha.output(z, o.permute(self.from_slices))


def reroute(model: Model, attend: Attend) -> None:
    """Let every triangle attention layer of the model use ``attend``."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, TriangleAttention):
                setattr(module, name, Rerouted(child, attend))


def check_name(impl: str) -> None:
    """Raise ``UsageError`` unless impl is one of ``--impl`` of training or of ``tpf bench``."""
    names = list(dict.fromkeys([*IMPLS, *backends.BACKENDS]))
    if impl not in names:
        raise UsageError(f"--impls {impl}: no such backend; choose from {', '.join(names)}")


def is_own(impl: str) -> bool:
    """Return whether training takes impl as ``model.impl``; others are rerouted."""
    return impl in IMPLS


def why_unavailable(impl: str, device: torch.device) -> str | None:
    """Return why a backend cannot run on this device, as far as can be told without loading it."""
    try:
        if is_own(impl):
            check_impl(impl, device)
        else:
            unloaded = dataclasses.replace(
                backends.BACKENDS[impl], load=lambda: backends.plain_attention
            )
            backends.open_backend(unloaded, device)
    except (HardwareError, backends.UnavailableError) as reason:
        return str(reason)
    return None


def load(impl: str, device: torch.device) -> Attend:
    """Return the attention of a backend of ``tpf bench``; raise its ``UnavailableError``."""
    return backends.open_backend(backends.BACKENDS[impl], device)
