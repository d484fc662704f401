"""Permutation alignment: the ground truth in the order of a prediction (AF3 SI 4.2).

Copies of a molecule, and symmetry-equivalent atoms inside a residue or ligand, are assigned to
the predicted ones, separately for every sample. "Molecule" means covalently joined chains.
Everything is FP32 and without gradient. Identities are compared on the CPU, once for all
samples; the geometry runs on the device of the prediction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tpf.errors import DataError
from tpf.geometry import apply_rigid, kabsch

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

_MIN_ANCHOR_CENTRES = 4
"""Resolved token centres that the best copy of an anchor must have."""
_FAILURES = (DataError, RuntimeError, ValueError, IndexError, KeyError)


class Aligned(NamedTuple):
    """The ground truth in the order of the predicted atoms, for every sample."""

    positions: Tensor
    """[B, S, A, 3] FP32, angstrom; 0 where unresolved."""
    resolved: Tensor
    """[B, S, A] FP32, 1 where resolved."""
    events: list[str]
    """One line for each naive matching and for each entry that could not be matched."""
    valid: Tensor
    """[B] bool; False for an entry whose losses must all be 0."""


@torch.no_grad()
def align(f: Mapping[str, Any], x_pred: Tensor) -> Aligned:
    """Order the ground truth of features f like the predictions x_pred [B, S, A, 3].

    An entry that cannot be aligned is matched by ``token_index``; if that fails as well it is
    marked as not valid, with nothing resolved. Both leave an event that names the entry.
    """
    batch, samples, n_atoms = x_pred.shape[:3]
    positions = torch.zeros(batch, samples, n_atoms, 3, device=x_pred.device)
    resolved = torch.zeros(batch, samples, n_atoms, device=x_pred.device)
    valid = torch.ones(batch, dtype=torch.bool, device=x_pred.device)
    events: list[str] = []
    with torch.autocast(x_pred.device.type, enabled=False):
        for b in range(batch):
            index = _match_or_report(f, b, x_pred[b].float(), events)
            if index is None:
                valid[b] = False
            else:
                truth = f["ground_truth"]
                positions[b], resolved[b] = _take(
                    truth["atom_positions"][b], truth["atom_resolved_mask"][b], index
                )
    return Aligned(positions, resolved, events, valid)


def _match_or_report(f: Mapping[str, Any], b: int, x: Tensor, events: list[str]) -> Tensor | None:
    """Return ground truth atoms [S, A] of the predicted ones (-1: none); None if all fails."""
    name = str(f["id"][b]) if "id" in f else f"batch entry {b}"
    for kind, match in (("naive matching", _match), ("losses set to 0", _match_by_token_index)):
        try:
            return match(f, b, x)
        except torch.OutOfMemoryError:
            raise
        except _FAILURES as error:
            reason = error.reason if isinstance(error, DataError) else f"{error!r}"
            events.append(f"{kind}: {name}: {reason}")
    return None


def _match(f: Mapping[str, Any], b: int, x: Tensor) -> Tensor:
    """Assign molecule copies, then atoms inside residues and ligands."""
    if not x.isfinite().all():
        raise _failure("the prediction is not finite")
    truth = f["ground_truth"]
    resolved = truth["atom_resolved_mask"][b].float()
    x_gt = truth["atom_positions"][b].float() * resolved.unsqueeze(-1)
    molecules = _molecules(_tokens(f, b), _tokens(truth, b), _numpy(resolved) > 0)
    if all(len(m.pred_atoms) == 1 and m.n_truth == 1 for m in molecules):
        choices = [np.zeros((x.shape[0], 1), np.int64) for _ in molecules]
    else:
        choices = _assign_copies(molecules, x, x_gt)
    index = np.full(x.shape[:2], -1, np.int64)
    for molecule, choice in zip(molecules, choices, strict=True):
        for p, atoms in enumerate(molecule.pred_atoms):
            index[:, atoms] = molecule.truth_atoms[p][choice[:, p]]
    matched = torch.from_numpy(index).to(x.device)
    permutations = f.get("ref_space_uid_to_perm")
    if not permutations:
        return matched
    uid = np.where(_numpy(f["atom_mask"][b]) > 0, _numpy(f["ref_space_uid"][b]), -1)
    groups = _permutation_groups(uid.astype(np.int64), permutations[b])
    return _permute_atoms(matched, groups, x, x_gt, resolved)


def _match_by_token_index(f: Mapping[str, Any], b: int, x: Tensor) -> Tensor:
    """Match tokens by their number in the uncropped assembly."""
    pred, truth = _tokens(f, b), _tokens(f["ground_truth"], b)
    place = {int(number): row for row, number in reversed(list(enumerate(truth.number)))}
    rows = np.array([place.get(int(number), -1) for number in pred.number], np.int64)
    if not (rows >= 0).any():
        raise _failure("no predicted token has a ground truth token of equal token_index")
    index = np.full(x.shape[:2], -1, np.int64)
    index[:, _atoms_of(pred, np.arange(len(rows)))] = _truth_atoms(pred, truth, rows)
    return torch.from_numpy(index).to(x.device)


def _failure(reason: str) -> DataError:
    return DataError("ground truth", "permutation alignment", reason)


def _take(x_gt: Tensor, resolved: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return positions [S, A, 3] and resolved flags [S, A] of the atoms of index, FP32."""
    place = index.clamp_min(0)
    flags = resolved.float()[place] * (index >= 0)
    return torch.where(flags.unsqueeze(-1) > 0, x_gt.float()[place], 0.0), flags


# Identities ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tokens:
    """Real tokens of the prediction or of the ground truth; arrays are [n tokens]."""

    kind: Ints
    copy: Ints
    place: Ints
    """Number of the token inside its molecule."""
    number: Ints
    """Number of the token in the uncropped assembly."""
    n_atoms: Ints
    start: Ints
    center: Ints
    polymer: Flags


@dataclass(frozen=True)
class _Molecule:
    """All copies of one kind of molecule; list items belong to the P predicted copies.

    G is the number of ground truth copies; -1 marks what a ground truth copy lacks.
    """

    polymer: bool
    n_truth: int
    pred_atoms: list[Ints]
    """Predicted atoms [n]."""
    truth_atoms: list[Ints]
    """Their counterparts in every ground truth copy [G, n]."""
    pred_centers: list[Ints]
    """Centre atoms of the predicted tokens [k]."""
    truth_centers: list[Ints]
    """Their counterparts [G, k]; -1 also where unresolved."""
    order: list[int]
    """Predicted copies, most resolved atoms first."""

    @property
    def resolved_centers(self) -> Ints:
        """Number of resolved centres of every pair of copies, [P, G]."""
        return np.stack([(centers >= 0).sum(1) for centers in self.truth_centers])


def _numpy(value: Tensor) -> NDArray[Any]:
    return np.asarray(value.detach().cpu())


def _tokens(f: Mapping[str, Any], b: int) -> _Tokens:
    real = _numpy(f["num_atoms_per_token"][b]) > 0

    def ids(name: str) -> Ints:
        return _numpy(f[name][b])[real].astype(np.int64)

    return _Tokens(
        kind=ids("mol_entity_id"),
        copy=ids("mol_sym_id"),
        place=ids("mol_sym_token_index"),
        number=ids("token_index"),
        n_atoms=ids("num_atoms_per_token"),
        start=ids("start_atom_index"),
        center=ids("center_atom_index"),
        polymer=(ids("is_protein") > 0) | (ids("is_rna") > 0) | (ids("is_dna") > 0),
    )


def _molecules(pred: _Tokens, truth: _Tokens, resolved: Flags) -> list[_Molecule]:
    """Pair the predicted and the ground truth copies of every predicted kind of molecule."""
    return [_molecule(pred, truth, resolved, int(kind)) for kind in np.unique(pred.kind)]


def _molecule(pred: _Tokens, truth: _Tokens, resolved: Flags, kind: int) -> _Molecule:
    pred_ids = np.unique(pred.copy[pred.kind == kind])
    truth_ids = np.unique(truth.copy[truth.kind == kind])
    if len(truth_ids) < len(pred_ids):
        raise _failure(
            f"molecule kind {kind} has {len(pred_ids)} predicted and only "
            f"{len(truth_ids)} ground truth copies"
        )
    mine = truth.kind == kind
    width = int(max(truth.place[mine].max(), pred.place[pred.kind == kind].max())) + 1
    table = np.full((len(truth_ids), width), -1, np.int64)
    table[np.searchsorted(truth_ids, truth.copy[mine]), truth.place[mine]] = np.flatnonzero(mine)

    tokens = [np.flatnonzero((pred.kind == kind) & (pred.copy == copy)) for copy in pred_ids]
    truth_atoms, truth_centers, counts = [], [], []
    for rows, copy in zip(tokens, pred_ids, strict=True):
        matched = table[:, pred.place[rows]]
        atoms = np.stack([_truth_atoms(pred, truth, row, rows) for row in matched])
        centers = np.where(matched >= 0, truth.center[matched], -1)
        truth_atoms.append(atoms)
        truth_centers.append(np.where((centers >= 0) & resolved[centers], centers, -1))
        n_resolved = ((atoms >= 0) & resolved[atoms]).sum(1)
        own = truth_ids == copy
        counts.append(int(n_resolved[own].max() if own.any() else n_resolved.max()))
    return _Molecule(
        polymer=bool(pred.polymer[pred.kind == kind].any()),
        n_truth=len(truth_ids),
        pred_atoms=[_atoms_of(pred, rows) for rows in tokens],
        truth_atoms=truth_atoms,
        pred_centers=[pred.center[rows] for rows in tokens],
        truth_centers=truth_centers,
        order=sorted(range(len(tokens)), key=lambda p: -counts[p]),
    )


def _atoms_of(tokens: _Tokens, rows: Ints) -> Ints:
    """Return the atoms of the tokens of rows, in order."""
    n_atoms = tokens.n_atoms[rows]
    first = np.cumsum(n_atoms) - n_atoms
    within = np.arange(int(n_atoms.sum())) - np.repeat(first, n_atoms)
    return np.repeat(tokens.start[rows], n_atoms) + within


def _truth_atoms(pred: _Tokens, truth: _Tokens, matched: Ints, rows: Ints | None = None) -> Ints:
    """Return the ground truth atoms of predicted tokens (default: all); -1 where matched is -1.

    Raises ``DataError`` if a matched pair of tokens differs in its number of atoms.
    """
    n_atoms = pred.n_atoms if rows is None else pred.n_atoms[rows]
    found = matched >= 0
    if (truth.n_atoms[matched[found]] != n_atoms[found]).any():
        raise _failure("matched tokens differ in their number of atoms")
    atoms = np.full(int(n_atoms.sum()), -1, np.int64)
    atoms[np.repeat(found, n_atoms)] = _atoms_of(truth, matched[found])
    return atoms


# Copies of molecules ------------------------------------------------------------------------


def _assign_copies(molecules: Sequence[_Molecule], x: Tensor, x_gt: Tensor) -> list[Ints]:
    """Return for every molecule the ground truth copy of each predicted copy, [S, P]."""
    rotation, translation = _transforms(_anchor(molecules), x, x_gt)
    choices, squares = [], []
    for molecule in molecules:
        distance = _centroid_distances(molecule, x, x_gt, rotation, translation)
        choice, square = _greedy(distance, molecule.order)
        choices.append(choice)
        squares.append(square)
    best = torch.cat(squares, dim=-1).mean(-1).argmin(-1)
    samples = torch.arange(x.shape[0], device=x.device)
    return [_numpy(choice[samples, best]) for choice in choices]


def _anchor(molecules: Sequence[_Molecule]) -> _Molecule:
    """Return the polymer (else ligand) of fewest copies that is resolved well enough."""
    fit = [m for m in molecules if m.resolved_centers.max() >= _MIN_ANCHOR_CENTRES]
    if not fit:
        raise _failure("copies cannot be told apart: no molecule has 4 resolved token centres")
    pool = [m for m in fit if m.polymer] or fit
    return min(pool, key=lambda m: (m.n_truth, -int(m.resolved_centers.max())))


def _transforms(anchor: _Molecule, x: Tensor, x_gt: Tensor) -> tuple[Tensor, Tensor]:
    """Superpose the best ground truth anchor on its predicted copies: [S, T, 3, 3], [S, T, 3]."""
    counts = anchor.resolved_centers
    best = int(counts.max(0).argmax())
    motions = []
    for p, centers in enumerate(anchor.pred_centers):
        if counts[p, best] < _MIN_ANCHOR_CENTRES:
            continue
        known = anchor.truth_centers[p][best] >= 0
        target = x[:, _index(centers[known], x)]
        mobile = x_gt[_index(anchor.truth_centers[p][best][known], x)].expand_as(target)
        motions.append(kabsch(mobile, target, torch.ones_like(target[..., 0])))
    rotations, translations = zip(*motions, strict=True)
    return torch.stack(rotations, dim=1), torch.stack(translations, dim=1)


def _index(values: Ints, like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)


def _centroid_distances(
    molecule: _Molecule, x: Tensor, x_gt: Tensor, rotation: Tensor, translation: Tensor
) -> Tensor:
    """Return squared distances [S, T, P, G] of centroids over the resolved common centres.

    A pair of copies without such a centre gets the largest distance of the others + 1.
    """
    columns, known = [], []
    for pred, truth in zip(molecule.pred_centers, molecule.truth_centers, strict=True):
        truth_index = _index(truth, x)
        weight = (truth_index >= 0).to(x.dtype)
        share = weight / weight.sum(-1, keepdim=True).clamp_min(1)
        centroid = (share.unsqueeze(-1) * x[:, None, _index(pred, x)]).sum(-2)
        centroid_gt = (share.unsqueeze(-1) * x_gt[truth_index.clamp_min(0)]).sum(-2)
        moved = apply_rigid(centroid_gt, rotation, translation)
        columns.append((moved - centroid.unsqueeze(1)).square().sum(-1))
        known.append(weight.sum(-1) > 0)
    distance, usable = torch.stack(columns, dim=-2), torch.stack(known)
    largest = torch.where(usable, distance, 0.0).amax((-1, -2), keepdim=True)
    return torch.where(usable, distance, largest + 1.0)


def _greedy(distance: Tensor, order: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Give each predicted copy, in order, the nearest unused ground truth copy.

    distance [S, T, P, G] gives the choice and its squared distance, both [S, T, P].
    """
    free = distance.clone()
    choice = torch.zeros(distance.shape[:-1], dtype=torch.long, device=distance.device)
    square = torch.zeros(distance.shape[:-1], device=distance.device)
    for p in order:
        square[..., p], choice[..., p] = free[..., p, :].min(-1)
        taken = choice[..., p, None, None].expand(*free.shape[:-1], 1)
        free.scatter_(-1, taken, torch.inf)
    return choice, square


# Atoms inside residues and ligands ----------------------------------------------------------


def _permutation_groups(uid: Ints, permutations: Mapping[int, Any]) -> list[tuple[Ints, Ints]]:
    """Group the residues that have more than one atom order by the shape of their orders.

    uid [A] is -1 for padding. Returns predicted atoms [U, n] and their orders [U, K, n].
    """
    by_uid = np.argsort(uid, kind="stable")
    groups: dict[tuple[int, ...], list[tuple[Ints, Ints]]] = {}
    for key, value in permutations.items():
        local = np.asarray(torch.as_tensor(value).cpu(), dtype=np.int64)
        if len(local) < 2:
            continue
        span = slice(*np.searchsorted(uid, [key, key + 1], sorter=by_uid))
        atoms = by_uid[span].astype(np.int64)
        if local.shape[1] != len(atoms) or local.min() < 0 or local.max() >= len(atoms):
            raise _failure(
                f"atom orders of shape {local.shape} and largest position {local.max()} do not "
                f"fit the {len(atoms)} atoms of ref_space_uid {key}"
            )
        groups.setdefault(local.shape, []).append((atoms, atoms[local]))
    return [
        (np.stack([atoms for atoms, _ in members]), np.stack([orders for _, orders in members]))
        for members in groups.values()
    ]


def _permute_atoms(
    index: Tensor, groups: list[tuple[Ints, Ints]], x: Tensor, x_gt: Tensor, resolved: Tensor
) -> Tensor:
    """Choose in every residue the atom order of least RMSD after a global superposition."""
    positions, flags = _take(x_gt, resolved, index)
    moved = apply_rigid(x, *kabsch(x, positions, flags))
    permuted = index.clone()
    samples = torch.arange(x.shape[0], device=x.device)[:, None, None]
    for group in groups:
        atoms, orders = (_index(array, x) for array in group)
        error = (moved[:, atoms].unsqueeze(2) - positions[:, orders]).square().sum(-1)
        weight = flags[:, orders]
        mean = (weight * error).sum(-1) / weight.sum(-1).clamp_min(1)
        best = mean.argmin(-1)
        residues = torch.arange(len(atoms), device=x.device)
        permuted[samples, atoms] = index[samples, orders[residues, best]]
    return permuted
