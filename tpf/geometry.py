"""Rigid geometry: superposition, random rotations, distances and token frames.

Nothing here is learned and superposition never carries gradients. Positions are in angstrom.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

DISTANCE_EPS = 1e-8
"""Added to squared distances (square angstrom) so that the root has a finite gradient at 0."""

_FRAME_ANGLE_DEGREES = 25.0
_PROTEIN_FRAME = ("N", "CA", "C")
_NUCLEIC_FRAME = ("C3'", "C1'", "C4'")


@torch.no_grad()
def kabsch(mobile: Tensor, target: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rigid motion of least weighted squared distance (AF3 Alg 28).

    mobile, target [..., n, 3] and weights [..., n] (broadcast over the leading axes) give
    rotation [..., 3, 3] and translation [..., 3] with ``mobile @ rotation.mT + translation``
    nearest to target. Rotations are proper. Computed in FP32, or FP64 if an input is FP64.
    Without weight, or where the input is not finite, the rotation is the identity; the
    translation is then the difference of the centroids, or 0 if that is not finite.
    """
    dtype = torch.promote_types(torch.promote_types(mobile.dtype, target.dtype), torch.float32)
    with torch.autocast(mobile.device.type, enabled=False):
        mobile, target, w = mobile.to(dtype), target.to(dtype), weights.to(dtype).unsqueeze(-1)
        total = w.sum(-2, keepdim=True)
        share = torch.where(total > 0, w / total.clamp_min(torch.finfo(dtype).tiny), 0.0)
        mobile_centroid = (share * mobile).sum(-2, keepdim=True)
        target_centroid = (share * target).sum(-2, keepdim=True)
        left, right = mobile - mobile_centroid, target - target_centroid
        covariance = (share * left).unsqueeze(-1) * right.unsqueeze(-2)
        rotation = _nearest_rotation(covariance.sum(-3))
        translation = (target_centroid - _rotate(mobile_centroid, rotation)).squeeze(-2)
    finite = translation.isfinite().all(-1, keepdim=True)
    return rotation, torch.where(finite, translation, 0.0)


def _nearest_rotation(covariance: Tensor) -> Tensor:
    """Return the proper rotation R of largest trace(R @ covariance), [..., 3, 3]."""
    identity = torch.eye(3, dtype=covariance.dtype, device=covariance.device)
    finite = covariance.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    covariance = torch.where(finite, covariance, 0.0)
    try:
        u, _, vh = torch.linalg.svd(covariance)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return identity.expand_as(covariance).clone()
    sign = torch.ones_like(covariance[..., 0])
    sign[..., 2] = torch.where(torch.linalg.det(u) * torch.linalg.det(vh) < 0, -1.0, 1.0)
    rotation = _rotate(vh.mT * sign.unsqueeze(-2), u)
    usable = covariance.abs().amax((-1, -2), keepdim=True) > 0
    return torch.where(usable, rotation, identity)


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Return x @ rotation.mT as a sum of products, which TF32 settings cannot round."""
    return (x.unsqueeze(-2) * rotation.unsqueeze(-3)).sum(-1)


def apply_rigid(x: Tensor, rotation: Tensor, translation: Tensor) -> Tensor:
    """Move x [..., n, 3] by rotation [..., 3, 3], then translation [..., 3]."""
    with torch.autocast(x.device.type, enabled=False):
        return _rotate(x.to(rotation.dtype), rotation) + translation.unsqueeze(-2)


def random_rotations(
    n: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Tensor:
    """Draw n rotations uniformly (normalised normal quaternions), [n, 3, 3]."""
    q = torch.nn.functional.normalize(torch.randn(n, 4, device=device, dtype=dtype), dim=-1)
    w, x, y, z = q.unbind(-1)
    rows = (
        (1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)),
        (2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)),
        (2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)),
    )
    return torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2)


def length(vector: Tensor, eps: float = DISTANCE_EPS) -> Tensor:
    """Return the root of (squared length + eps) over the last axis."""
    return vector.square().sum(-1).add(eps).sqrt()


def pair_distances(x: Tensor, y: Tensor | None = None, eps: float = DISTANCE_EPS) -> Tensor:
    """Return the distances [..., n, m] of x [..., n, 3] to y [..., m, 3] (default: x itself)."""
    other = x if y is None else y
    return length(x.unsqueeze(-2) - other.unsqueeze(-3), eps)


def gather_atoms(values: Tensor, index: Tensor) -> Tensor:
    """Take values [B, ..., A, *C] at atoms index [B, K], one list per batch entry: [B, ..., K, *C].

    The atom axis is the second to last one for positions (``C = 3``); use ``gather_flags`` for
    values without channel. Negative indices give the first atom: mask them.
    """
    shape = (index.shape[0],) + (1,) * (values.ndim - 3) + (index.shape[1], 1)
    expanded = index.clamp_min(0).long().view(shape)
    return values.gather(-2, expanded.expand(*values.shape[:-2], -1, values.shape[-1]))


def gather_flags(values: Tensor, index: Tensor) -> Tensor:
    """Take values [B, ..., A] at atoms index [B, K]; False or 0 where the index is negative."""
    shape = (index.shape[0],) + (1,) * (values.ndim - 2) + (index.shape[1],)
    expanded = index.long().view(shape).expand(*values.shape[:-1], -1)
    taken = values.gather(-1, expanded.clamp_min(0))
    return torch.where(expanded >= 0, taken, torch.zeros_like(taken))


class Frames(NamedTuple):
    """Local frames of tokens: origin [..., N, 3], axes [..., N, 3, 3] (rows), valid [..., N]."""

    origin: Tensor
    axes: Tensor
    valid: Tensor


def frames_from_points(a: Tensor, b: Tensor, c: Tensor, valid: Tensor) -> Frames:
    """Build frames with origin b from three points [..., N, 3] each (AF3 Alg 29, lines 1-6)."""
    w1 = torch.nn.functional.normalize(a - b, dim=-1, eps=1e-6)
    w2 = torch.nn.functional.normalize(c - b, dim=-1, eps=1e-6)
    e1 = torch.nn.functional.normalize(w1 + w2, dim=-1, eps=1e-6)
    e2 = torch.nn.functional.normalize(w2 - w1, dim=-1, eps=1e-6)
    e3 = torch.linalg.cross(e1, e2, dim=-1)
    return Frames(b, torch.stack([e1, e2, e3], dim=-2), valid)


def express_in_frames(points: Tensor, frames: Frames) -> Tensor:
    """Return coordinates [..., N, M, 3] of points [..., M, 3] in N frames (AF3 Alg 29)."""
    offset = points.unsqueeze(-3) - frames.origin.unsqueeze(-2)
    return _rotate(offset, frames.axes)


def token_frames(f: Mapping[str, Any], positions: Tensor, present: Tensor) -> Frames:
    """Build the frame of every token from one structure (SI 4.3.2).

    positions [B, S, A, 3], present [B, S, A] (which atoms exist). Protein residues use N, CA, C,
    nucleotides C3', C1', C4' (the middle atom is the origin). An atomised token uses its two
    nearest present atoms of the same chain, and is valid only if their angle at the token's
    atom is between 25 and 155 degrees. A frame is valid only if its three atoms are present.
    """
    present = present > 0
    standard = (f["token_mask"] > 0) & (f["is_atomized"] == 0)
    nucleic = (f["is_rna"] > 0) | (f["is_dna"] > 0)
    codes = _atom_name_codes(f["ref_atom_name_chars"])
    batch, samples, n_tokens = positions.shape[0], positions.shape[1], standard.shape[1]
    index = torch.full((batch, samples, n_tokens, 3), -1, device=positions.device)
    for names, rows in ((_PROTEIN_FRAME, f["is_protein"] > 0), (_NUCLEIC_FRAME, nucleic)):
        named = torch.stack([_named_atom(f, codes, name) for name in names], dim=-1)
        chosen = (rows & standard)[:, None, :, None]
        index = torch.where(chosen, named.unsqueeze(1), index)
    atomised = (f["token_mask"] > 0) & (f["is_atomized"] > 0)
    for b in range(batch):
        rows = atomised[b].nonzero().squeeze(-1)
        if rows.numel():
            index[b, :, rows] = _nearest_atoms(f, b, rows, positions[b], present[b])
    flat = index.clamp_min(0).flatten(-2)
    points = positions.gather(2, flat.unsqueeze(-1).expand(-1, -1, -1, 3))
    a, origin, c = points.view(batch, samples, n_tokens, 3, 3).unbind(-2)
    complete = (present.gather(2, flat).view_as(index) & (index >= 0)).all(-1)
    bent = _is_bent(a, origin, c) | ~atomised.unsqueeze(1)
    return frames_from_points(a, origin, c, complete & bent)


def _atom_name_codes(chars: Tensor) -> Tensor:
    """Pack one-hot atom names [B, A, 4, 64] into one integer per atom."""
    place = 64 ** torch.arange(3, -1, -1, device=chars.device)
    return (chars.argmax(-1) * place).sum(-1)


def _named_atom(f: Mapping[str, Any], codes: Tensor, name: str) -> Tensor:
    """Return the atom index [B, N] with this name in every token, -1 where there is none."""
    code = 0
    for character in name.ljust(4):
        code = 64 * code + ord(character) - 32
    batch, atom = ((codes == code) & (f["atom_mask"] > 0)).nonzero(as_tuple=True)
    index = torch.full(f["token_mask"].shape, -1, device=codes.device)
    index[batch, f["atom_to_token_index"][batch, atom].long()] = atom
    return index


def _nearest_atoms(
    f: Mapping[str, Any], b: int, rows: Tensor, positions: Tensor, present: Tensor
) -> Tensor:
    """Return (nearest, own, second nearest) atoms [S, K, 3] of K atomised tokens; -1 if none."""
    chain = f["asym_id"][b].long()
    own = f["center_atom_index"][b].long()[rows]
    atom_chain = chain[f["atom_to_token_index"][b].long()]
    allowed = (chain[rows, None] == atom_chain) & (f["atom_mask"][b] > 0)
    allowed[torch.arange(len(rows), device=rows.device), own] = False
    distance = torch.cdist(
        positions[:, own], positions, compute_mode="donot_use_mm_for_euclid_dist"
    )
    distance = torch.where(allowed & present.unsqueeze(1), distance, torch.inf)
    if distance.shape[-1] < 2:
        return torch.full((*distance.shape[:2], 3), -1, device=rows.device)
    nearest = distance.topk(2, dim=-1, largest=False)
    index = torch.where(nearest.values.isfinite(), nearest.indices, -1)
    own = own.expand(distance.shape[0], -1)
    return torch.stack([index[..., 0], own, index[..., 1]], dim=-1)


def _is_bent(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return whether the angle a-b-c is strictly between 25 and 155 degrees."""
    cosine = torch.nn.functional.cosine_similarity(a - b, c - b, dim=-1, eps=1e-6)
    return cosine.abs() < math.cos(math.radians(_FRAME_ANGLE_DEGREES))
