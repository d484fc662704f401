"""Third-party triangle attention behind our signature; only public functions are called.

Each loader imports its package and returns a function of (q, k, v, bias, mask). What a package's
interface forces (scaling q, additive masks, copies into another layout) happens inside it, so that
it counts. Packages that are missing raise ImportError.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tpf.bench.cases import Attend

DROPPED_SCORE = -1e9
"""Additive score of a dropped key, for interfaces that take additive masks."""


def _additive(q: Tensor, mask: Tensor | None, dropped: float = DROPPED_SCORE) -> Tensor:
    """Return the mask as scores to add [B, O, 1, 1, N] in the dtype of q."""
    b, o, _, n, _ = q.shape
    added = q.new_zeros((b, o, 1, 1, n))
    return added if mask is None else added.masked_fill_(~mask, dropped)


def _evoformer(kernel: Callable[..., Any], *, prescale: bool = False, pair: bool = False) -> Attend:
    """Adapt a kernel of q, k, v [B, O, N, H, D], an additive mask and the pair bias.

    prescale: the caller multiplies q by the scale; pair: both biases come as one list.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
        added = _additive(q, mask)
        if prescale:
            q = q * (1 / math.sqrt(q.shape[-1]))
        rows = [x.transpose(2, 3) for x in (q, k, v)]
        out: Tensor = kernel(*rows, [added, bias]) if pair else kernel(*rows, added, bias)
        return out.transpose(2, 3)

    return attend


def openfold3() -> Attend:
    """Load the Triton kernel of OpenFold3."""
    module = importlib.import_module("openfold3.core.kernels.triton.evoformer")
    return _evoformer(module.TritonEvoformer)


def megafold() -> Attend:
    """Load MegaFold's kernel in its shipped configuration."""
    module = importlib.import_module("megafold.model.FusedEvoAttention.evoattention")
    return _evoformer(module.TritonEvoformer)


def protenix() -> Attend:
    """Load Protenix's Triton attention, whose caller scales q."""
    module = importlib.import_module("protenix.model.tri_attention.op")
    return _evoformer(module.TriAttentionFunction.apply, prescale=True)


def deepspeed() -> Attend:
    """Load DeepSpeed's EvoformerAttention (CUTLASS, built at first use)."""
    module = importlib.import_module("deepspeed.ops.deepspeed4science")
    return _evoformer(module.DS4Sci_EvoformerAttention, pair=True)


def cuequivariance() -> Attend:
    """Load NVIDIA's cuEquivariance."""
    kernel = importlib.import_module("cuequivariance_torch").triangle_attention

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
        out: Tensor = kernel(q, k, v, bias, mask=mask, scale=1 / math.sqrt(q.shape[-1]))
        return out

    return attend


def trifast() -> Attend:
    """Load TriFast, which takes heads before slices and True for a dropped key."""
    kernel = importlib.import_module("trifast").triangle_attention

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
        b, o, _, n, _ = q.shape
        if mask is None:
            dropped = torch.zeros((b, o, n), dtype=torch.bool, device=q.device)
        else:
            dropped = ~mask[:, :, 0, 0]
        heads = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        out: Tensor = kernel(*heads, bias[:, 0].contiguous(), dropped)
        return out.transpose(1, 2)

    return attend


def turbopairformer() -> Attend:
    """Load the authors' release, which scales by 1/sqrt(D) itself."""
    kernel = importlib.import_module("turbopairformer").turbo_attention

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
        dense = [x.contiguous() for x in (q, k, v)]
        added = {} if mask is None else {"res_mask": _additive(q, mask, -math.inf)}
        out: Tensor = kernel(*dense, pair_bias=bias, **added)
        return out.transpose(2, 3)

    return attend
