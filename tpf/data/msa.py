"""The MSA features of a crop (AF3 SI 2.3): paired rows, rows of each chain, profile, deletions."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tpf.data.alignment import Alignment
from tpf.data.chem import GAP, RESIDUES
from tpf.data.tables import LIGAND, Tokens
from tpf.errors import DataError

N_RESTYPES = len(RESIDUES)


def one_hot(index: NDArray[np.integer], classes: int) -> NDArray[np.int32]:
    """Return ``index`` [...] as int32 one-hot [..., classes]."""
    out = np.zeros((*index.shape, classes), np.int32)
    np.put_along_axis(out, index[..., None].astype(np.int64), 1, axis=-1)
    return out


def msa_features(
    tokens: Tokens,
    index: NDArray[np.intp],
    alignments: Mapping[int, Alignment],
    max_rows: int,
    rng: np.random.Generator | None = None,
    sampled: int | None = None,
    *,
    vary_depth: bool = True,
) -> dict[str, NDArray[np.generic]]:
    """Return msa [M,N,32], masks, deletions and the profile of the tokens ``index`` [N].

    ``alignments`` by entity; a chain without one has its query row only, whose profile is its
    one-hot residue. Row 0 is the query; then come rows paired by species over the entities (at
    most half of ``max_rows``), then the rows of each chain side by side. With ``rng`` at most
    ``sampled`` of all rows are drawn, in order, and with ``vary_depth`` (training) each chain keeps
    a random number of its own before that. The profile is over those before these cuts.
    """
    tables = tokens.tables
    chain = tables.res_chain[tokens.residue[index]]
    query = tokens.restype[index]
    chosen = {
        int(c): alignments[int(tables.chain_entity[c])]
        for c in np.unique(chain)
        if int(tables.chain_entity[c]) in alignments and tables.chain_type[c] != LIGAND
    }
    entity = {c: int(tables.chain_entity[c]) for c in chosen}
    paired = pair_rows({entity[c]: a for c, a in chosen.items()}, (max_rows - 1) // 2)
    n_paired = 1 + len(next(iter(paired.values()), ()))
    most, depth_rng = max_rows - n_paired + 1, rng if vary_depth else None
    picks = {c: _draw_rows(len(a.rows), most, depth_rng) for c, a in chosen.items()}
    depth = n_paired + max([0, *(len(p) - 1 for p in picks.values())])

    rows = np.full((depth, len(index)), GAP, np.int32)
    deletions = np.zeros((depth, len(index)), np.float32)
    mask = np.zeros((depth, len(index)), np.float32)
    profile = one_hot(query, N_RESTYPES).astype(np.float32)
    deletion_mean = np.zeros(len(index), np.float32)
    for c, alignment in chosen.items():
        here = np.flatnonzero(chain == c)
        column = tables.res_id[tokens.residue[index[here]]] - 1
        _check_columns(tables.id, column, alignment)
        picked = picks[c][1:]
        blocks = [(alignment, picked, n_paired + np.arange(len(picked)))]
        if entity[c] in paired:
            row = paired[entity[c]]
            blocks.append((alignment.for_pairing, row[row >= 0], 1 + np.flatnonzero(row >= 0)))
        for source, taken, place in blocks:
            rows[np.ix_(place, here)] = source.rows[taken][:, column]
            deletions[np.ix_(place, here)] = source.deletions[taken][:, column]
            mask[np.ix_(place, here)] = 1.0
        profile[here] = alignment.profile[column]
        deletion_mean[here] = alignment.deletion_mean[column]
    rows[0], deletions[0], mask[0] = query, 0.0, 1.0
    if rng is not None and sampled is not None and depth > sampled:
        kept = np.sort(rng.choice(depth - 1, sampled - 1, replace=False)) + 1
        kept = np.concatenate([[0], kept])
        rows, deletions, mask = rows[kept], deletions[kept], mask[kept]
        n_paired = int((kept < n_paired).sum())
    return {
        "msa": one_hot(rows, N_RESTYPES),
        "has_deletion": (deletions != 0).astype(np.float32),
        "deletion_value": (2 / math.pi * np.arctan(deletions / 3)).astype(np.float32),
        "profile": profile,
        "deletion_mean": deletion_mean,
        "msa_mask": mask,
        "num_paired_seqs": np.full(1, n_paired, np.int32),
    }


def pair_rows(alignments: Mapping[int, Alignment], limit: int) -> dict[int, NDArray[np.intp]]:
    """Return for each entity its row [P] in each paired row, -1 where it has none; {} if unpaired.

    A species pairs the entities that have it: their rows most like the query first, as many as the
    entity with the fewest has. Species of the most entities come first, then those with the rows
    most like the queries; at most ``limit`` rows.
    """
    if len(alignments) < 2:
        return {}
    rows_of = {e: a.for_pairing.by_species for e, a in alignments.items()}
    shared: dict[str, list[int]] = {}
    for e, found in rows_of.items():
        for species in found:
            shared.setdefault(species, []).append(e)
    ranked = sorted(
        (-len(entities), -_likeness(alignments, rows_of, species, entities), species)
        for species, entities in shared.items()
        if len(entities) > 1
    )
    blocks: list[NDArray[np.intp]] = []
    order = list(alignments)
    for _, _, species in ranked:
        entities = shared[species]
        n = min(len(rows_of[e][species]) for e in entities)
        block = np.full((n, len(order)), -1, np.intp)
        for e in entities:
            block[:, order.index(e)] = rows_of[e][species][:n]
        blocks.append(block)
    if not blocks:
        return {}
    table = np.concatenate(blocks)[:limit]
    return {e: table[:, k] for k, e in enumerate(order)}


def _likeness(
    alignments: Mapping[int, Alignment],
    rows_of: Mapping[int, Mapping[str, NDArray[np.intp]]],
    species: str,
    entities: list[int],
) -> float:
    """Return the mean share of residues in which the best rows of a species equal the queries."""
    shares = []
    for e in entities:
        source = alignments[e].for_pairing
        best = source.rows[rows_of[e][species][0]]
        shares.append(float((best == source.rows[0]).mean()))
    return sum(shares) / len(shares)


def _draw_rows(n: int, max_rows: int, rng: np.random.Generator | None) -> NDArray[np.intp]:
    """Return the rows to keep in order; the query (row 0) is always one of them."""
    if rng is None:
        return np.arange(min(n, max_rows))
    depth = min(int(rng.integers(1, n + 1)), max_rows)
    others = rng.choice(n - 1, depth - 1, replace=False) + 1
    return np.concatenate([[0], np.sort(others)]).astype(np.intp)


def _check_columns(entry: str, column: NDArray[np.int32], alignment: Alignment) -> None:
    width = alignment.rows.shape[1]
    if len(column) and (column.min() < 0 or column.max() >= width):
        raise DataError(
            entry, "msa", f"residue {int(column.max()) + 1} lies outside an alignment of {width}"
        )
