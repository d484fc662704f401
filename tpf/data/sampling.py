"""Sampling weights of chains and interfaces, and the order of training (model.md section 4)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tpf.data.tables import DNA, PROTEIN, RNA
from tpf.errors import UsageError
from tpf.files import read_list

BETA_CHAIN = 0.5
BETA_INTERFACE = 1.0


@dataclass(frozen=True)
class Unit:
    """What one training sample is drawn for: a chain or an interface of an entry."""

    entry: int
    """Position in the list of entries."""
    chains: tuple[int, ...]
    """One chain, or the two of an interface: positions in the chains of the assembly."""


def weight(mol_types: Sequence[int], cluster_size: int) -> float:
    """Return the sampling weight of a chain (one molecule type) or an interface (two)."""
    counts = Counter(mol_types)
    beta = BETA_CHAIN if len(mol_types) == 1 else BETA_INTERFACE
    polymers = counts[PROTEIN] + counts[RNA] + counts[DNA]
    return beta / cluster_size * (3.0 * polymers + 1.0 * (len(mol_types) - polymers))


def cluster_weights(
    types: Sequence[Sequence[int]], clusters: Sequence[Sequence[str]]
) -> NDArray[np.float64]:
    """Return the weight of each unit, given the types and the clusters of its chains.

    The cluster of an interface is the sorted pair of its chains' clusters; the size of a cluster
    is the number of units in it.
    """
    keys = [tuple(sorted(names)) for names in clusters]
    size = Counter(keys)
    pairs = zip(types, keys, strict=True)
    return np.array([weight(kinds, size[key]) for kinds, key in pairs], np.float64)


def read_clusters(path: Path) -> dict[str, str]:
    """Read lines ``ENTRY_CHAIN CLUSTER`` (white space between); raise ``UsageError`` for others."""
    clusters: dict[str, str] = {}
    for line in read_list("data.clusters", path):
        fields = line.split()
        if len(fields) != 2:
            raise UsageError(f"{path}: a line is {line!r}; write ENTRY_CHAIN CLUSTER")
        clusters[fields[0]] = fields[1]
    return clusters


def epoch_order(
    weights: NDArray[np.float64], length: int, seed: int, epoch: int
) -> NDArray[np.intp]:
    """Return the units [length] of an epoch, drawn with replacement; equal on every rank."""
    rng = np.random.default_rng(seed + epoch)
    return rng.choice(len(weights), size=length, p=weights / weights.sum()).astype(np.intp)


def rank_positions(start: int, stop: int, rank: int, world: int) -> range:
    """Return the positions of ``range(start, stop)`` that belong to one rank: every world-th."""
    return range(start + rank, stop, world)
