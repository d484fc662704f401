"""The flat picture of a prediction on its reference: C-alpha traces and ligand atoms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tpf.data.tables import LIGAND
from tpf.metrics.structure import Bools, Floats, Sample, Structure
from tpf.metrics.superpose import superpose

CENTRES = ("CA", "C1'")
"""Atoms that draw a polymer."""

Point = list[float] | None
"""Position in the picture, Angstrom; None where the reference is unresolved."""


@dataclass(frozen=True)
class Trace:
    """One chain: the residues of a polymer in order, or the atoms of a ligand."""

    chain: str
    ligand: bool
    predicted: list[Point]
    plddt: list[int]
    """Of each point, 0 to 100."""
    truth: list[Point]
    """Empty without a reference."""


def traces(
    structure: Structure, names: Sequence[str], x: Floats, plddt: Floats, sample: Sample | None
) -> list[Trace]:
    """Return the chains seen from the direction in which the complex is thinnest.

    ``names`` are chain ids by asym id - 1, ``x`` [A, 3] the prediction and ``plddt`` [A] its
    confidence. With ``sample`` the prediction is laid on the truth by all resolved atoms.
    """
    resolved = np.zeros(len(x), dtype=bool)
    truth = x
    if sample is not None:
        resolved, truth = sample.resolved, sample.truth
        x = superpose(sample.predicted, truth, resolved) if resolved.any() else x
    shown = _shown(structure)
    frame = truth[shown & resolved] if (shown & resolved).sum() > 2 else x[shown]
    if not len(frame):
        return []
    centre, axes = _view(frame)
    flat, flat_truth = ((p - centre) @ axes for p in (x, np.where(resolved[:, None], truth, 0.0)))
    found = []
    for c in range(structure.n_chains):
        here = np.flatnonzero(shown & (structure.chain == c))
        if len(here):
            truth_points: list[Point] = [
                _point(flat_truth[i]) if resolved[i] else None for i in here.tolist()
            ]
            found.append(
                Trace(
                    chain=str(names[int(structure.asym_id[c]) - 1]),
                    ligand=bool((structure.kind[here] == LIGAND).all()),
                    predicted=[_point(flat[i]) for i in here.tolist()],
                    plddt=[round(float(plddt[i])) for i in here.tolist()],
                    truth=[] if sample is None else truth_points,
                )
            )
    return found


def _shown(structure: Structure) -> Bools:
    ligand = structure.kind == LIGAND
    return np.asarray(ligand | np.isin(structure.atom_name, CENTRES))


def _view(points: Floats) -> tuple[Floats, Floats]:
    """Return the centre and the two axes [3, 2] of largest extent, their signs fixed."""
    centre = points.mean(axis=0)
    _, vectors = np.linalg.eigh(np.cov((points - centre).T) if len(points) > 1 else np.eye(3))
    axes = vectors[:, [2, 1]]
    largest = np.abs(axes).argmax(axis=0)
    return centre, axes * np.sign(axes[largest, [0, 1]])


def _point(place: Floats) -> list[float]:
    return [round(float(value), 1) for value in place]
