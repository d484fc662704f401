"""A builder of small structures given atom by atom."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tpf.data.tables import LIGAND
from tpf.metrics.structure import Structure


def build_structure(
    kinds: Sequence[int],
    chains: Sequence[int] | None = None,
    *,
    residues: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    res_names: Sequence[str] | None = None,
    entities: Sequence[int] | None = None,
    element: int = 6,
) -> Structure:
    """One token and, unless given, one residue per atom."""
    kind = np.asarray(kinds, dtype=np.int64)
    chain = np.zeros(len(kind), np.int64) if chains is None else np.asarray(chains, np.int64)
    residue = np.arange(len(kind)) if residues is None else np.asarray(residues, np.int64)
    n_chains, n_res = int(chain.max()) + 1, int(residue.max()) + 1
    first = [int(np.flatnonzero(chain == c)[0]) for c in range(n_chains)]
    return Structure(
        kind=kind,
        chain=chain,
        residue=residue,
        token=np.arange(len(kind)),
        atom_name=np.asarray(names if names is not None else ["CA"] * len(kind)),
        element=np.full(len(kind), element),
        res_name=np.asarray(res_names if res_names is not None else ["ALA"] * n_res),
        asym_id=np.arange(1, n_chains + 1),
        entity_id=np.asarray(entities) if entities is not None else np.arange(1, n_chains + 1),
        chain_type=kind[first],
        chain_polymer=np.array([(kind[chain == c] != LIGAND).all() for c in range(n_chains)]),
    )
