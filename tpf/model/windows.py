"""Atom windows, and the maps between tokens, atoms and windows.

Every map is deterministic in both passes on any device: rows are taken by embedding lookup and
summed over the contiguous atoms of a token, never added by atomics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """Take rows ``index`` [B, K] of x [B, *P, R, C], the same for all of *P: [B, *P, K, C]."""
    *lead, n_rows, channels = x.shape
    table = x.reshape(-1, channels)
    first = torch.arange(0, len(table), n_rows, device=x.device)
    rows = first.view(len(index), -1, 1) + index[:, None]
    return F.embedding(rows, table).view(*lead, index.shape[1], channels)


def key_windows(length: Tensor, n_windows: int, n_query: int, n_key: int) -> tuple[Tensor, Tensor]:
    """Return the key atoms [B, W, n_key] of each query window, and which slots hold one.

    Keys are centred on the queries; windows that overrun the ``length`` [B] atoms are shifted
    inside, first at the start, then at the end (AF3 Alg 7 truncates them instead).
    """
    window = torch.arange(n_windows, device=length.device)
    start = window * n_query + (n_query - n_key) // 2
    last = (length[:, None] - n_key).clamp_min(0)
    start = torch.minimum(start.clamp_min(0), last)
    keys = start[..., None] + torch.arange(n_key, device=length.device)
    valid = keys < length[:, None, None]
    return keys.where(valid, 0), valid


@dataclass(frozen=True, eq=False, kw_only=True)
class AtomLayout:
    """Where the atoms of a batch lie; the atom axis L is padded to whole query windows.

    Atoms are in token order, padding last.
    """

    n_atoms: int
    """Atoms before padding to whole windows."""
    n_query: int
    mask: Tensor
    """[B, L] bool, real atoms."""
    token: Tensor
    """[B, L] token of each atom, 0 where padded."""
    count: Tensor
    """[B, N + 1] atoms of each token, then the padding atoms."""
    keys: Tensor
    """[B, W, n_key] key atoms of each window."""
    key_mask: Tensor
    """[B, W, n_key] bool, slots that hold an atom."""

    @classmethod
    def build(cls, f: dict[str, Any], n_query: int, n_key: int) -> AtomLayout:
        """Lay out the atoms of features ``atom_mask``, ``atom_to_token_index``, ``token_mask``."""
        n_batch, n_atoms = f["atom_mask"].shape
        n_tokens = f["token_mask"].shape[1]
        n_windows = -(-n_atoms // n_query)
        pad = (0, n_windows * n_query - n_atoms)
        mask = F.pad(f["atom_mask"] > 0, pad)
        token = F.pad(f["atom_to_token_index"].long(), pad)
        count = torch.zeros(n_batch, n_tokens + 1, dtype=torch.long, device=mask.device)
        count.scatter_add_(1, token.where(mask, n_tokens), torch.ones_like(token))
        keys, key_mask = key_windows(mask.sum(1), n_windows, n_query, n_key)
        return cls(
            n_atoms=n_atoms,
            n_query=n_query,
            mask=mask,
            token=token.where(mask, 0),
            count=count,
            keys=keys,
            key_mask=key_mask,
        )

    def pad(self, x: Tensor) -> Tensor:
        """Pad x [..., A, C] with zeros to [..., L, C]."""
        return F.pad(x, (0, 0, 0, self.mask.shape[1] - self.n_atoms))

    def queries(self, x: Tensor) -> Tensor:
        """View x [..., L, C] as windows [..., W, n_query, C]."""
        return torch.unflatten(x, -2, (-1, self.n_query))

    def gather_keys(self, x: Tensor) -> Tensor:
        """Take the key atoms of each window: x [B, *P, L, C] -> [B, *P, W, n_key, C]."""
        return torch.unflatten(gather_rows(x, self.keys.flatten(1)), -2, self.keys.shape[1:])

    def gather_pairs(self, z: Tensor) -> Tensor:
        """Take token pairs for each query and key: z [B, N, N, C] -> [B, W, n_query, n_key, C]."""
        token_q = self.queries(self.token[..., None])
        token_k = self.gather_key_ids(self.token)[:, :, None]
        pairs = token_q * z.shape[1] + token_k
        return torch.unflatten(gather_rows(z.flatten(1, 2), pairs.flatten(1)), 1, pairs.shape[1:])

    def gather_key_ids(self, x: Tensor) -> Tensor:
        """Take the key atoms of each window from integers [B, L]: [B, W, n_key]."""
        return x.gather(1, self.keys.flatten(1)).view(self.keys.shape)

    def to_atoms(self, x: Tensor) -> Tensor:
        """Broadcast tokens to their atoms: x [B, *P, N, C] -> [B, *P, L, C]."""
        return gather_rows(x, self.token)

    def mean_of_atoms(self, x: Tensor) -> Tensor:
        """Average over the atoms of each token: x [B, S, L, C] -> [B, S, N, C]."""
        n_batch, n_samples, _, channels = x.shape
        count = self.count[:, None].expand(-1, n_samples, -1)
        total = torch.segment_reduce(
            x.reshape(-1, channels), "sum", lengths=count.flatten(), unsafe=True
        )
        total = total.view(n_batch, n_samples, -1, channels)[:, :, :-1]
        return total / count[:, :, :-1, None].clamp_min(1)
