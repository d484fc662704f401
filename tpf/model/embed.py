"""Relative positions and the input embedder (AF3 Alg 1 steps 1-5, 2, 3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from tpf.config import ModelConfig
from tpf.model.atoms import AtomEncoder
from tpf.model.primitives import Linear, no_autocast
from tpf.model.windows import AtomLayout

R_MAX, S_MAX = 32, 2
"""Largest residue and token offset, and chain offset, with a bin of its own."""
N_RELPOS = 2 * (2 * R_MAX + 2) + 1 + (2 * S_MAX + 2)


def relative_position(f: dict[str, Any], dtype: torch.dtype) -> Tensor:
    """Encode relative positions (AF3 Alg 3): [B, N, N, 139].

    Columns: residue offset 66, token offset 66, same entity, chain offset 6; the last bin of each
    offset stands for pairs where it does not apply. Chain offsets apply within an entity, as in
    DeepMind's code (the supplement prints the same-chain test).
    """
    same_chain = _equal(f["asym_id"])
    same_entity = _equal(f["entity_id"])
    same_residue = same_chain & _equal(f["residue_index"])
    residue = _difference(f["residue_index"])
    if "cyclic_mask" in f:
        residue = _wrap(residue, f, same_chain)
    columns = [
        _bins(residue, same_chain, R_MAX),
        _bins(_difference(f["token_index"]), same_residue, R_MAX),
        same_entity[..., None],
        _bins(_difference(f["sym_id"]), same_entity, S_MAX),
    ]
    return torch.cat(columns, -1).to(dtype)


def _equal(x: Tensor) -> Tensor:
    return x[:, :, None] == x[:, None]


def _difference(x: Tensor) -> Tensor:
    return x[:, :, None] - x[:, None]


def _bins(offset: Tensor, applies: Tensor, limit: int) -> Tensor:
    """One-hot (bool) of offsets clipped to +-limit, with one more bin for pairs without one."""
    index = (offset + limit).clamp(0, 2 * limit).where(applies, 2 * limit + 1)
    return index[..., None] == torch.arange(2 * limit + 2, device=offset.device)


def _wrap(offset: Tensor, f: dict[str, Any], same_chain: Tensor) -> Tensor:
    """Take residue offsets the short way round in cyclic chains.

    The period is the largest residue number of the chain among the tokens.
    """
    numbers: Tensor = f["residue_index"][:, None].expand_as(offset)
    period = numbers.where(same_chain, 0).amax(-1).clamp_min(1)[..., None]
    wrapped = (offset + period // 2) % period - period // 2
    cyclic: Tensor = f["cyclic_mask"]
    return wrapped.where(cyclic.bool()[..., None], offset)


class InputEmbedding(NamedTuple):
    """The first representations, which every recycling iteration starts from."""

    s_input: Tensor
    """[B, N, c_s_input], in full precision"""
    s: Tensor
    """[B, N, c_s]"""
    z: Tensor
    """[B, N, N, c_z]"""


class InputEmbedder(nn.Module):
    """Input features to the first representations (AF3 Alg 1 steps 1-5, Alg 2)."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.n_query, self.n_key = cfg.n_query, cfg.n_key
        self.atom_attn_enc = AtomEncoder(cfg, cfg.c_token, noisy=False)
        self.linear_s = Linear(cfg.c_s_input, cfg.c_s)
        self.linear_z_i = Linear(cfg.c_s_input, cfg.c_z)
        self.linear_z_j = Linear(cfg.c_s_input, cfg.c_z)
        self.linear_relpos = Linear(N_RELPOS, cfg.c_z)
        self.linear_token_bonds = Linear(1, cfg.c_z)

    if TYPE_CHECKING:
        __call__: Callable[..., InputEmbedding]

    def forward(self, f: dict[str, Any]) -> InputEmbedding:
        with no_autocast(f["token_mask"].device):
            layout = AtomLayout.build(f, self.n_query, self.n_key)
            a, _ = self.atom_attn_enc(self.atom_attn_enc.features(f, layout), layout)
        a = a[:, 0]
        parts = [f["restype"], f["profile"], f["deletion_mean"][..., None]]
        s_input = torch.cat([a, *(x.to(a.dtype) for x in parts)], -1)
        z = (
            self.linear_z_i(s_input)[:, :, None]
            + self.linear_z_j(s_input)[:, None]
            + self.linear_relpos(relative_position(f, a.dtype))
            + self.linear_token_bonds(f["token_bonds"].to(a.dtype)[..., None])
        )
        return InputEmbedding(s_input, self.linear_s(s_input), z)
