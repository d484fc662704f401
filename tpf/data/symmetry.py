"""Automorphisms of molecular graphs: the atom orders that a symmetric molecule may be read in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MAX_MATCHES = 1000
"""Most atom orders kept for one molecule (AF3 SI 2.8 asks for a bound, model.md 1.4)."""
_MAX_STEPS = 200_000
"""Assignments tried before a search settles for the orders found so far."""

Neighbours = list[dict[int, int]]
"""For each atom its neighbours and the label of the bond to each."""


def automorphisms(
    colours: Sequence[object],
    bonds: NDArray[np.int32],
    labels: Sequence[int],
    present: NDArray[np.bool_],
    limit: int = MAX_MATCHES,
) -> NDArray[np.int32]:
    """Return the self-matches of a labelled graph, restricted to its present nodes.

    ``colours`` [n] are comparable node labels, ``bonds`` [m, 2] node pairs with ``labels`` [m].
    The result [p, k] holds positions among the k present nodes; row 0 is the identity, rows are
    unique and at most ``limit``. A self-match maps present nodes to present nodes.
    """
    neighbours: Neighbours = [{} for _ in colours]
    for (i, j), label in zip(bonds.tolist(), labels, strict=True):
        neighbours[i][j] = label
        neighbours[j][i] = label
    classes = _refine([(bool(p), c) for p, c in zip(present, colours, strict=True)], neighbours)
    kept = np.flatnonzero(present)
    order = _connected_order(kept.tolist(), neighbours, classes)
    order += _connected_order(np.flatnonzero(~present).tolist(), neighbours, classes)
    position = np.full(len(classes), -1, np.int32)
    position[kept] = np.arange(len(kept), dtype=np.int32)
    maps = _search(order, len(kept), classes, neighbours, limit)
    return position[np.array(maps, dtype=np.int64)[:, kept]]


def _refine(colours: Sequence[object], neighbours: Neighbours) -> list[int]:
    """Return node classes that are stable under one more look at the neighbours (1-WL)."""
    rank = {c: k for k, c in enumerate(sorted(set(colours), key=repr))}
    classes = [rank[c] for c in colours]
    while True:
        seen = [
            (classes[i], tuple(sorted((label, classes[j]) for j, label in near.items())))
            for i, near in enumerate(neighbours)
        ]
        ranks = {c: k for k, c in enumerate(sorted(set(seen)))}
        refined = [ranks[c] for c in seen]
        if len(ranks) == len(set(classes)):
            return refined
        classes = refined


def _connected_order(nodes: list[int], neighbours: Neighbours, classes: list[int]) -> list[int]:
    """Return the nodes so that each one follows a neighbour if any, rare classes first."""
    counts = np.bincount(classes)
    left = sorted(nodes, key=lambda i: (counts[classes[i]], i))
    members = set(nodes)
    order: list[int] = []
    done: set[int] = set()
    for start in left:
        queue = [start]
        while queue:
            node = queue.pop(0)
            if node in done:
                continue
            done.add(node)
            order.append(node)
            queue.extend(j for j in sorted(neighbours[node]) if j in members and j not in done)
    return order


def _search(
    order: list[int], n_present: int, classes: list[int], neighbours: Neighbours, limit: int
) -> list[list[int]]:
    """Return complete maps by depth-first assignment, one for each map of the present nodes."""
    mapping = [-1] * len(classes)
    used: set[int] = set()
    maps: list[list[int]] = []
    stack = [_candidates(order[0], classes, neighbours, mapping, used)] if order else []
    steps = 0
    while stack and len(maps) < limit and steps < _MAX_STEPS:
        steps += 1
        node = order[len(stack) - 1]
        if mapping[node] >= 0:
            used.discard(mapping[node])
            mapping[node] = -1
        if not stack[-1]:
            stack.pop()
            continue
        mapping[node] = stack[-1].pop()
        used.add(mapping[node])
        if len(stack) < len(order):
            stack.append(_candidates(order[len(stack)], classes, neighbours, mapping, used))
            continue
        maps.append(mapping.copy())
        for absent in order[n_present:]:  # any one completion will do
            used.discard(mapping[absent])
            mapping[absent] = -1
        del stack[n_present:]
    return maps or [list(range(len(classes)))]


def _candidates(
    node: int, classes: list[int], neighbours: Neighbours, mapping: list[int], used: set[int]
) -> list[int]:
    """Return the possible images of a node, the best (itself) last, as a stack."""
    mapped = [(mapping[j], label) for j, label in neighbours[node].items() if mapping[j] >= 0]
    pool = neighbours[mapped[0][0]] if mapped else range(len(classes))
    fits = [
        c
        for c in pool
        if classes[c] == classes[node]
        and c not in used
        and all(neighbours[c].get(image) == label for image, label in mapped)
    ]
    return sorted(fits, key=lambda c: (c == node, -c))
