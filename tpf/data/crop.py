"""Crops of an entry to a token budget (AF3 SI 2.7, spec model.md section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tpf.data.proximity import near_any
from tpf.data.tables import LIGAND, Tokens
from tpf.errors import DataError

Strategy = Literal["contiguous", "spatial", "interface"]
STRATEGIES: tuple[Strategy, ...] = ("contiguous", "spatial", "interface")
INTERFACE_CENTRES = 15.0
"""Angstrom between token centres of an interface."""
MAX_POLYMERS = 20
"""Polymer chains above which an entry is cut to those nearest to a reference token."""
LIGAND_CONTACT = 5.0
"""Angstrom between a kept chain and a ligand that is kept with it."""


@dataclass(frozen=True, kw_only=True)
class Crop:
    """A crop and how it came about."""

    index: NDArray[np.intp]
    """[n] tokens of the entry in ascending order."""
    strategy: Literal["whole", "contiguous", "spatial", "interface"]
    notes: tuple[str, ...] = ()
    """Fallbacks that were taken, one sentence each."""


def crop(
    tokens: Tokens,
    budget: int,
    rng: np.random.Generator,
    weights: Sequence[float] = (0.2, 0.4, 0.4),
    preferred: Sequence[int] | None = None,
) -> NDArray[np.intp]:
    """Return the tokens of a crop in ascending order, see ``draw_crop``."""
    return draw_crop(tokens, budget, rng, weights, preferred).index


def draw_crop(
    tokens: Tokens,
    budget: int,
    rng: np.random.Generator,
    weights: Sequence[float] = (0.2, 0.4, 0.4),
    preferred: Sequence[int] | None = None,
) -> Crop:
    """Draw a crop of at most ``budget`` tokens around the ``preferred`` chain or pair of chains.

    ``weights`` of contiguous, spatial and spatial interface. An entry within the budget is kept
    whole. Raises ``DataError`` at stage "crop" if no token has a resolved centre.
    """
    space = _Space.of(tokens)
    if not space.resolved.any():
        raise DataError(tokens.tables.id, "crop", "no token has a resolved centre atom")
    if len(tokens) <= budget:
        return Crop(index=np.arange(len(tokens)), strategy="whole")
    notes: list[str] = []
    chains = _preferred_chains(space, preferred, rng, notes)
    kept = _near_chains(space, chains, rng)
    strategy = STRATEGIES[rng.choice(len(STRATEGIES), p=np.asarray(weights) / np.sum(weights))]
    if strategy == "contiguous":
        index = contiguous(space.chain, kept, budget, rng)
        if space.resolved[index].any():
            return Crop(index=index, strategy=strategy, notes=tuple(notes))
        notes.append("the contiguous crop had no resolved centre; cropped in space")
        strategy = "spatial"
    candidates = np.zeros(0, np.intp)
    if strategy == "interface" or len(chains) > 1:
        candidates = _interface_centres(space, chains, kept)
        if strategy == "interface" and len(candidates) == 0:
            notes.append("no interface centre near the preferred chains; cropped in space")
            strategy = "spatial"
    if len(candidates) == 0:
        candidates = np.flatnonzero(space.resolved & np.isin(space.chain, chains))
    reference = int(rng.choice(candidates))
    return Crop(
        index=nearest(space.centre, kept, reference, budget), strategy=strategy, notes=tuple(notes)
    )


@dataclass(frozen=True)
class _Space:
    """Where the tokens of an entry are."""

    tokens: Tokens
    chain: NDArray[np.int32]
    """[N]"""
    centre: NDArray[np.float32]
    """[N, 3] Angstrom, NaN where unresolved."""
    resolved: NDArray[np.bool_]
    """[N] the centre atom has coordinates and an occupancy above 0."""

    @classmethod
    def of(cls, tokens: Tokens) -> _Space:
        tables = tokens.tables
        centre = tables.pos[tokens.center_atom]
        resolved = np.isfinite(centre).all(axis=1) & (tables.occupancy[tokens.center_atom] > 0)
        centre = np.where(resolved[:, None], centre, np.nan).astype(np.float32)
        return cls(tokens, tables.res_chain[tokens.residue], centre, resolved)


def _preferred_chains(
    space: _Space, preferred: Sequence[int] | None, rng: np.random.Generator, notes: list[str]
) -> list[int]:
    """Return the preferred chains that have a resolved centre, else one drawn at random."""
    usable = np.unique(space.chain[space.resolved])
    if preferred is not None:
        chains = [int(c) for c in preferred if c in usable]
        if chains:
            return chains
        notes.append("the preferred chains have no resolved centre; another chain was drawn")
    return [int(rng.choice(usable))]


def _interface_centres(
    space: _Space, chains: list[int], kept: NDArray[np.bool_]
) -> NDArray[np.intp]:
    """Return the resolved tokens of a chain near any other, or of a pair near each other."""
    found = []
    for chain in chains:
        own = np.flatnonzero(kept & space.resolved & (space.chain == chain))
        partner = space.chain != chain
        if len(chains) > 1:
            partner &= np.isin(space.chain, chains)
        other = np.flatnonzero(kept & space.resolved & partner)
        found.append(own[near_any(space.centre[own], space.centre[other], INTERFACE_CENTRES)])
    return np.concatenate(found)


def _near_chains(space: _Space, chains: list[int], rng: np.random.Generator) -> NDArray[np.bool_]:
    """Return [N] the tokens of the polymers nearest to a reference token, and their ligands.

    All tokens if the entry has no more than ``MAX_POLYMERS`` polymer chains.
    """
    tables = space.tokens.tables
    polymers = np.flatnonzero(tables.chain_type != LIGAND)
    everything = np.ones(len(space.chain), np.bool_)
    if len(polymers) <= MAX_POLYMERS:
        return everything
    candidates = np.zeros(0, np.intp)
    if len(chains) > 1:
        candidates = _interface_centres(space, chains, everything)
    if len(candidates) == 0:
        candidates = np.flatnonzero(space.resolved & np.isin(space.chain, chains))
    reference = space.centre[int(rng.choice(candidates))]
    squared = ((space.centre - reference) ** 2).sum(axis=1)
    nearest_centre = np.full(len(tables.chain_id), np.inf)
    np.fmin.at(nearest_centre, space.chain, squared)
    order = polymers[np.argsort(nearest_centre[polymers], kind="stable")]
    kept = np.union1d(order[:MAX_POLYMERS], chains)
    atom_chain = tables.res_chain[tables.atom_residue]
    core = np.isin(atom_chain, kept) & (tables.occupancy > 0)
    ligand = (tables.chain_type[atom_chain] == LIGAND) & (tables.occupancy > 0)
    near = near_any(tables.pos[ligand], tables.pos[core], LIGAND_CONTACT)
    return np.isin(space.chain, np.union1d(kept, atom_chain[ligand][near]))


def contiguous(
    chain: NDArray[np.int32], kept: NDArray[np.bool_], budget: int, rng: np.random.Generator
) -> NDArray[np.intp]:
    """Return runs of tokens of chains in random order (AF-Multimer Alg 1).

    ``chain`` [N] of each token; only ``kept`` [N] tokens are taken, sorted.
    """
    spans = [np.flatnonzero(kept & (chain == c)) for c in rng.permutation(np.unique(chain[kept]))]
    used, rest = 0, sum(len(span) for span in spans)
    taken = []
    for span in spans:
        rest -= len(span)
        most = min(budget - used, len(span))
        least = min(len(span), max(0, budget - used - rest))
        size = int(rng.integers(least, most + 1))
        start = int(rng.integers(0, len(span) - size + 1))
        taken.append(span[start : start + size])
        used += size
    return np.sort(np.concatenate(taken))


def nearest(
    centre: NDArray[np.float32], kept: NDArray[np.bool_], reference: int, budget: int
) -> NDArray[np.intp]:
    """Return the ``budget`` kept tokens nearest to token ``reference``, sorted (Alg 2).

    ``centre`` [N, 3] Angstrom, NaN where unresolved: such tokens are never taken.
    """
    squared = ((centre - centre[reference]) ** 2).sum(axis=1)
    squared[~kept | ~np.isfinite(squared)] = np.inf
    order = np.argsort(squared, kind="stable")[:budget]
    return np.sort(order[np.isfinite(squared[order])])
