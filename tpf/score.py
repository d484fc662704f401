"""``tpf score``: the metrics of a predicted structure file against an experimental one.

The reference gives the topology. Predicted positions are put on its atoms by name, the reference
is permuted to the prediction as in validation, and the same ``evaluate`` is applied.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tpf.data.batch import Batch, to_torch
from tpf.data.ccd import Dictionary
from tpf.data.conformers import Conformers, atom_orders
from tpf.data.features import (
    Layout,
    ground_truth,
    layout,
    layout_features,
    linked_atoms,
    token_features,
)
from tpf.data.load import load_tables
from tpf.data.molecules import find_molecules
from tpf.data.tables import Tables, Tokens
from tpf.data.tokens import tokenize
from tpf.errors import DataError, UsageError
from tpf.metrics.evaluate import evaluate
from tpf.metrics.matching import Match, match_tables
from tpf.metrics.structure import Sample, from_tokens, take
from tpf.permutation import align


def score_files(
    predicted: Path | str, reference: Path | str, *, ccd: str | None = None
) -> dict[str, Any]:
    """Return the metrics of two structure files, what was matched, and what was not.

    Raises ``UsageError`` naming a file that cannot be read and ``DataError`` if no atom of the
    reference is predicted.
    """
    pred = _read(Path(predicted), ccd)
    tokens = tokenize(_read(Path(reference), ccd))
    result = score_tables(pred, tokens, Dictionary(ccd))
    return {"predicted": str(predicted), "reference": str(reference), **result}


def _read(path: Path, ccd: str | None) -> Tables:
    if not path.is_file():
        what = "this is a folder" if path.is_dir() else "no such file"
        raise UsageError(f"{path}: {what}; give a structure as mmCIF or BinaryCIF")
    try:
        return load_tables(path, ccd=ccd, filters=False)
    except DataError as error:
        raise UsageError(f"{path}: {error.stage}: {error.reason}") from error


def score_tables(pred: Tables, tokens: Tokens, dictionary: Dictionary) -> dict[str, Any]:
    """Return ``{"metrics", "matched", "notes"}`` of a prediction and a tokenised reference.

    ``dictionary`` defines the components whose equivalent atoms may be exchanged.
    """
    match = match_tables(pred, tokens.tables)
    crop = _matched_tokens(tokens, match)
    if not len(crop):
        raise DataError(
            pred.id, "match", f"no atom of {tokens.tables.id} is predicted; compare like with like"
        )
    lay = layout(tokens, crop)
    source = match.source[lay.atom]
    orders = _atom_orders(tokens.tables, lay, dictionary)
    x = _positions(pred, source, lay)
    batch = _alignment_batch(tokens, lay, orders)
    aligned = align(batch, torch.from_numpy(x.astype(np.float32))[None, None])
    structure = replace(
        from_tokens(tokens, crop),
        automorphisms={uid: order.astype(np.int64) for uid, order in orders.items()},
    )
    placed = source >= 0
    sample = Sample.make(
        x[placed], aligned.positions[0, 0].numpy()[placed], aligned.resolved[0, 0].numpy()[placed]
    )
    if not sample.resolved.any():
        raise DataError(pred.id, "match", f"no resolved atom of {tokens.tables.id} is predicted")
    return {
        "metrics": evaluate(take(structure, placed), sample, extras=True),
        "matched": _counts(pred, tokens.tables, match),
        "notes": [*match.notes, *aligned.events],
    }


def _matched_tokens(tokens: Tokens, match: Match) -> NDArray[np.intp]:
    """Tokens of the residues that have a predicted atom (a residue is taken whole)."""
    present = np.zeros(len(tokens.tables.res_name), dtype=bool)
    present[tokens.tables.atom_residue[match.source >= 0]] = True
    return np.flatnonzero(present[tokens.residue])


def _positions(pred: Tables, source: NDArray[np.int64], lay: Layout) -> NDArray[np.float64]:
    """Predicted positions [A, 3]; an atom without one gets the centre of its residue."""
    x = pred.pos[np.maximum(source, 0)].astype(np.float64)
    known = source >= 0
    n_residues = int(lay.residue.max()) + 1
    count = np.bincount(lay.residue[known], minlength=n_residues)
    centre = np.stack(
        [np.bincount(lay.residue[known], x[known, c], n_residues) / count for c in range(3)], -1
    )
    x[~known] = centre[lay.residue[~known]]
    return x


def _atom_orders(
    tables: Tables, lay: Layout, dictionary: Dictionary
) -> dict[int, NDArray[np.int32]]:
    """Equivalent atom orders of every residue of the layout, by its number in the layout."""
    conformers = Conformers(dictionary)
    linked = linked_atoms(tables)
    edges = np.searchsorted(lay.residue, np.arange(int(lay.residue.max()) + 2))
    orders = {}
    for uid, (start, stop) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
        atoms = lay.atom[start:stop]
        component = conformers.component(tables, int(tables.atom_residue[atoms[0]]), atoms)
        names = tuple(tables.atom_name[atoms].tolist())
        orders[uid] = atom_orders(component, names, tuple(linked[atoms].tolist()))
    return orders


def _alignment_batch(tokens: Tokens, lay: Layout, orders: dict[int, NDArray[np.int32]]) -> Batch:
    """The features that permutation alignment reads, as a batch of one."""
    molecules = find_molecules(tokens)
    return to_torch(
        {
            "id": tokens.tables.id,
            **token_features(tokens, molecules, lay.token),
            **layout_features(tokens, lay),
            "token_mask": np.ones(len(lay.token), np.float32),
            "atom_mask": np.ones(len(lay.atom), np.float32),
            "ref_space_uid_to_perm": orders,
            "ground_truth": ground_truth(tokens, molecules, lay.token),
        }
    )


def _counts(pred: Tables, reference: Tables, match: Match) -> dict[str, Any]:
    resolved = np.isfinite(reference.pos).all(axis=1) & (reference.occupancy > 0)
    found = match.source >= 0
    return {
        "chains": len(match.chains),
        "predicted_chains": len(pred.chain_id),
        "reference_chains": len(reference.chain_id),
        "residues": len(np.unique(reference.atom_residue[found])),
        "atoms": int(found.sum()),
        "resolved_atoms": int((found & resolved).sum()),
        "reference_resolved_atoms": int(resolved.sum()),
    }
