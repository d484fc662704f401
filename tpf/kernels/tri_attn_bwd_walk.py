"""How the thread blocks of the attention backward's dQ kernel divide its work."""

from __future__ import annotations

import itertools
from typing import NamedTuple


class Walk(NamedTuple):
    """How the dQ kernel divides its items, (64 queries, group of slices), among blocks.

    A strip is all groups of the same queries; items are numbered strip by strip. Block x takes as
    many as lie between x * items // blocks and the same for x + 1.
    """

    strips: int
    groups: int
    blocks: int

    @property
    def items(self) -> int:
        """Items of all strips."""
        return self.strips * self.groups

    @property
    def slots(self) -> int:
        """Partials of dbias, one for each strip of a block: strip s of block x in slot x + s."""
        return self.blocks + self.strips - 1

    def order(self) -> list[int]:
        """Return the items of block 0, block 1 and so on: 2 * item + (1 at a new strip).

        The blocks of a strip deal its groups evenly, and each block walks all its strips at once
        in ascending order of the groups. So all blocks work on about the same slices at any time
        and find their keys and values in L2.
        """
        starts = [block * self.items // self.blocks for block in range(self.blocks + 1)]
        shares: list[list[tuple[int, int]]] = [[] for _ in range(self.strips)]
        for block, (first, end) in enumerate(itertools.pairwise(starts)):
            for strip in range(first // self.groups, -(-end // self.groups)):
                low, high = strip * self.groups, (strip + 1) * self.groups
                shares[strip].append((block, min(end, high) - max(first, low)))
        walks: list[list[tuple[int, int]]] = [[] for _ in range(self.blocks)]
        for strip, parts in enumerate(shares):
            turns = sorted(((2 * i + 1) / n, block) for block, n in parts for i in range(n))
            for group, (_, block) in enumerate(turns):
                walks[block].append((group, strip))
        order = []
        for walk_of_block in walks:
            known: set[int] = set()
            for group, strip in sorted(walk_of_block):
                order.append(2 * (strip * self.groups + group) + (strip not in known))
                known.add(strip)
        return order
