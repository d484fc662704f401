"""Protein kinases by their sequence: the motifs of the catalytic loop (Hanks & Hunter 1995)."""

from __future__ import annotations

import re

from tpf.data.chem import one_letters
from tpf.data.tables import PROTEIN, Tables

_CATALYTIC = re.compile("[HYF].[DN][LIVMFYT][KRATSCN]..N[LIVMFYCTS].{5,45}?D[FLYW][GS]")
"""HRD with the asparagine that binds magnesium, then DFG; with their known variants."""


def is_kinase(sequence: str) -> bool:
    """Tell whether a protein sequence has the catalytic loop of a protein kinase.

    Finds also pseudokinases that keep both motifs; kinases that lost one are missed.
    """
    return _CATALYTIC.search(sequence) is not None


def dfg_motif(sequence: str) -> int | None:
    """Return the 0-based place of the first residue of the DFG motif, None without a kinase."""
    found = _CATALYTIC.search(sequence)
    return None if found is None else found.end() - 3


def has_kinase(tables: Tables) -> bool:
    """Tell whether an entry has a protein kinase among its chains."""
    for chain in (tables.chain_type == PROTEIN).nonzero()[0]:
        if is_kinase(one_letters(tables.res_name[tables.res_chain == chain].tolist())):
            return True
    return False
