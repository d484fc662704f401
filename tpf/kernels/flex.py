"""Triangle attention through compiled ``flex_attention``, for NVIDIA GPUs other than Hopper."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

MIN_HEAD_DIM = 16


@functools.cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def flex_triangle_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Compute triangle attention of q, k, v [B, O, H, N, D] with stock PyTorch kernels.

    bias [B, H, N, N] is a captured buffer that may need a gradient; mask bool [B, O, N] or None.
    The gradient of bias is summed with atomics, so it is not bitwise repeatable.
    """
    b, o, h, n, d = q.shape
    width = max(MIN_HEAD_DIM, 1 << (d - 1).bit_length())
    flat = [F.pad(x, (0, width - d)).reshape(b * o, h, n, width) for x in (q, k, v)]
    bias = bias.contiguous()
    keep = None if mask is None else mask.reshape(b * o, n)

    def score_mod(
        score: Tensor, slice_: Tensor, head: Tensor, query: Tensor, key: Tensor
    ) -> Tensor:
        score = score + bias[slice_ // o, head, query, key]
        return score if keep is None else torch.where(keep[slice_, key], score, -float("inf"))

    out = _compiled()(*flat, score_mod=score_mod, scale=scale)
    result: Tensor = out[..., :d].reshape(b, o, h, n, d)
    return result
