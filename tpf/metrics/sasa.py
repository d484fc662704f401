"""Solvent accessible surface area (Shrake and Rupley 1973) with ProtOr radii.

Written out here so that the number does not depend on which optional package is installed; the
tests compare it with Biopython and biotite.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tpf.metrics.pairs import close_pairs
from tpf.metrics.structure import Floats, Ints

PROBE = 1.4
"""Radius of the solvent probe, Angstrom."""
POINTS = 1000
"""Points on the sphere of each atom."""

_BY_ELEMENT = {6: 1.88, 7: 1.64, 8: 1.42, 16: 1.77, 34: 1.77}
_OTHER_ELEMENT = 1.80
_HYDROXYL = 1.46
_TRIGONAL = 1.61
_AROMATIC_CH = 1.76
_HYDROXYLS = {
    ("ASP", "OD2"), ("GLU", "OE2"), ("SER", "OG"), ("THR", "OG1"), ("TYR", "OH"),
}  # fmt: skip
_TRIGONALS = {
    ("ARG", "CZ"), ("ASN", "CG"), ("ASP", "CG"), ("GLN", "CD"), ("GLU", "CD"), ("HIS", "CG"),
    ("PHE", "CG"), ("TYR", "CG"), ("TYR", "CZ"), ("TRP", "CG"), ("TRP", "CD2"), ("TRP", "CE2"),
}  # fmt: skip
_AROMATICS = {
    "HIS": ("CD2", "CE1"),
    "PHE": ("CD1", "CD2", "CE1", "CE2", "CZ"),
    "TYR": ("CD1", "CD2", "CE1", "CE2"),
    "TRP": ("CD1", "CE3", "CZ2", "CZ3", "CH2"),
}


def protor_radius(residue: str, atom: str, element: int) -> float:
    """Return the ProtOr radius in Angstrom (Tsai et al. 1999); by element for unknown residues.

    The carboxylate oxygens of ASP and GLU differ as in the protonated component definition.
    """
    if atom == "C":
        return _TRIGONAL
    if atom == "OXT" or (residue, atom) in _HYDROXYLS:
        return _HYDROXYL
    if (residue, atom) in _TRIGONALS:
        return _TRIGONAL
    if atom in _AROMATICS.get(residue, ()):
        return _AROMATIC_CH
    return _BY_ELEMENT.get(element, _OTHER_ELEMENT)


def protor_radii(residues: NDArray[np.str_], atoms: NDArray[np.str_], elements: Ints) -> Floats:
    """Return the radii [A] of atoms given by residue name, atom name and atomic number [A]."""
    return np.array(
        [
            protor_radius(str(r), str(a), int(e))
            for r, a, e in zip(residues, atoms, elements, strict=True)
        ]
    )


def fibonacci_sphere(n: int) -> Floats:
    """Return ``n`` nearly uniform unit vectors [n, 3] along a golden-angle spiral."""
    k = np.arange(n)
    z = 1.0 - (2.0 * k + 1.0) / n
    angle = k * np.pi * (3.0 - np.sqrt(5.0))
    radius = np.sqrt(1.0 - z * z)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle), z], axis=-1)


def sasa(x: Floats, radii: Floats, probe: float = PROBE, n_points: int = POINTS) -> Floats:
    """Return the accessible area [A], square Angstrom, of atoms at [A, 3] with given radii [A]."""
    extended = radii + probe
    points = fibonacci_sphere(n_points)
    first, neighbour = _neighbours(x, extended)
    free = np.full(len(x), n_points)
    for i in range(len(x)):
        near = neighbour[first[i] : first[i + 1]]
        toward = x[near] - x[i]
        square = np.einsum("nc,nc->n", toward, toward)
        reach = (extended[i] ** 2 + square - extended[near] ** 2) / (2.0 * extended[i])
        free[i] -= np.count_nonzero((points @ toward.T > reach).any(axis=1))
    return np.asarray(4.0 * np.pi * extended**2 * free / n_points)


def _neighbours(x: Floats, extended: Floats) -> tuple[Ints, Ints]:
    """Return, as offsets [A + 1] and indices, the atoms whose spheres overlap that of each atom."""
    rows, columns = [], []
    for i, j, d in close_pairs(x, 2.0 * float(extended.max(initial=0.0))):
        overlap = d < extended[i] + extended[j]
        rows += [i[overlap], j[overlap]]
        columns += [j[overlap], i[overlap]]
    if not rows:
        return np.zeros(len(x) + 1, dtype=np.int64), np.zeros(0, dtype=np.int64)
    row, column = np.concatenate(rows), np.concatenate(columns)
    order = np.argsort(row, kind="stable")
    return np.searchsorted(row[order], np.arange(len(x) + 1)).astype(np.int64), column[order]
