"""Relative accessible surface of residues that the experiment does not show (metrics.md A6).

A model should leave disordered parts open to the solvent rather than pack them into fake
structure; ``rasa`` measures that, and ``disorder`` feeds the ranking of samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tpf.data.tables import PROTEIN
from tpf.metrics.sasa import protor_radii, sasa
from tpf.metrics.structure import Bools, Floats, Ints, Sample, Structure

WINDOW = 25
"""Residues of the smoothing box."""
DISORDER_THRESHOLD = 0.581
"""Smoothed relative area above which a residue counts as disordered."""
MAX_AREA = {
    "ALA": 106.0, "ARG": 248.0, "ASN": 157.0, "ASP": 163.0, "CYS": 135.0, "GLN": 198.0,
    "GLU": 194.0, "GLY": 84.0, "HIS": 184.0, "ILE": 169.0, "LEU": 164.0, "LYS": 205.0,
    "MET": 188.0, "PHE": 197.0, "PRO": 136.0, "SER": 130.0, "THR": 142.0, "TRP": 227.0,
    "TYR": 222.0, "VAL": 142.0,
}  # fmt: skip
"""Largest accessible area in square Angstrom (Sander and Rost 1994)."""
MAX_AREA_OTHER = 113.0


@dataclass(frozen=True)
class Exposure:
    """Smoothed relative accessible area of the residues of all protein chains."""

    residue: Ints
    """[P] residue index."""
    value: Floats
    """[P] 0..1"""

    def disorder(self) -> float:
        """Return the fraction of protein residues above the threshold, 0 without protein."""
        return disorder_fraction(self.value)


def relative_area(area: Floats, names: NDArray[np.str_]) -> Floats:
    """Return residue areas [R] divided by the maximum of the residue name, clipped to [0, 1]."""
    limit = np.array([MAX_AREA.get(str(name), MAX_AREA_OTHER) for name in names])
    return np.asarray(np.clip(area / limit, 0.0, 1.0))


def smooth(values: Floats, window: int = WINDOW) -> Floats:
    """Return the box average of values [R] along a chain; the ends are reflected, edge not twice.

    Raises ``ValueError`` for an even window.
    """
    if window % 2 == 0:
        raise ValueError(f"smoothing window {window} is even; give an odd number of residues")
    if not len(values):
        return values
    padded = np.pad(values, window // 2, mode="reflect")
    return np.convolve(padded, np.full(window, 1.0 / window), mode="valid")


def disorder_fraction(smoothed: Floats) -> float:
    """Return the share of smoothed values above 0.581, 0 for none."""
    return float((smoothed > DISORDER_THRESHOLD).mean()) if len(smoothed) else 0.0


def unresolved_mean(smoothed: Floats, unresolved: Bools) -> float | None:
    """Return the mean over residues without any resolved atom, None if there is none."""
    return float(smoothed[unresolved].mean()) if unresolved.any() else None


def exposure(structure: Structure, predicted: Floats) -> Exposure:
    """Return the smoothed relative area of every protein residue, each chain taken alone."""
    residues: list[Ints] = []
    values: list[Floats] = []
    for c in np.flatnonzero(structure.chain_type == PROTEIN):
        atoms = np.flatnonzero(structure.chain == c)
        names = structure.res_name[structure.residue[atoms]]
        radii = protor_radii(names, structure.atom_name[atoms], structure.element[atoms])
        area = sasa(predicted[atoms], radii)
        index, local = np.unique(structure.residue[atoms], return_inverse=True)
        total = np.bincount(local, area, minlength=len(index)).astype(np.float64)
        residues.append(index)
        values.append(smooth(relative_area(total, structure.res_name[index])))
    if not residues:
        return Exposure(np.zeros(0, dtype=np.int64), np.zeros(0))
    return Exposure(np.concatenate(residues), np.concatenate(values))


def rasa(structure: Structure, sample: Sample, exposed: Exposure) -> float | None:
    """Return the mean exposure of wholly unresolved protein residues, None if there is none."""
    seen = np.zeros(len(structure.res_name), dtype=bool)
    seen[structure.residue[sample.resolved]] = True
    return unresolved_mean(exposed.value, ~seen[exposed.residue])
