"""Whether two definitions mean the same molecule, by their atoms and bonds.

Component codes do not tell: every program writes LIG, UNL or DRG for the molecule at hand. The
drawn (Kekule) form of a ring and the resonance form of an end make no difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tpf.data.ccd import Component
from tpf.data.complete import MAX_BOND_LENGTH

RESONANT = (7, 8, 16, 34)
"""Terminal N, O, S, Se: bond orders to them depend on the drawn resonance form."""
_ROUNDS = 8
"""Looks at the neighbours that a digest makes; enough for the longest chain of equal atoms."""


def bond_labels(component: Component) -> NDArray[np.int32]:
    """Return [m] the order of each bond, 4 if aromatic, 0 if unknown or to a resonant end."""
    degree = np.bincount(component.bonds.ravel(), minlength=len(component))
    resonant = np.isin(component.elements, RESONANT) & (degree == 1)
    ends = resonant[component.bonds].any(axis=1)
    labels = np.where(component.bond_aromatic, 4, component.bond_orders)
    return np.where(ends, 0, labels).astype(np.int32)


def agrees(part: Component, whole: Component) -> bool:
    """Return whether a definition shows all or some of the atoms of another, equally bonded.

    A part without bonds says nothing of them; one with ``model`` coordinates may lack bonds that
    are stretched there.
    """
    place = np.array([whole.index.get(name, -1) for name in part.atom_names.tolist()], dtype=int)
    if not len(place) or (place < 0).any():
        return False
    if ((part.elements != whole.elements[place]) & (part.elements != 0)).any():
        return False
    if not len(part.bonds):
        return True
    everything = np.arange(len(whole))
    shown, known = _labelled(part, place), _labelled(whole, everything)
    if not _included(shown, known):
        # a ring drawn the other way round, or without aromatic flags
        drawn = _labelled(part, place, alternating_bonds(part))
        if not _included(drawn, _labelled(whole, everything, alternating_bonds(whole))):
            return False
    row = {int(k): i for i, k in enumerate(place)}
    absent = [pair for pair in known if pair not in shown and row.keys() >= set(pair)]
    ends = np.array([[row[i], row[j]] for i, j in absent], dtype=int).reshape(-1, 2)
    length = np.linalg.norm(part.model[ends[:, 0]] - part.model[ends[:, 1]], axis=1)
    return bool((length > MAX_BOND_LENGTH).all())


def same_molecule(a: Component, b: Component) -> bool:
    """Return whether two definitions have the same atoms, by name, and the same bonds."""
    return len(a) == len(b) and agrees(a, b) and agrees(b, a) and len(a.bonds) == len(b.bonds)


_Label = tuple[int, bool]
"""Order as drawn, 0 if it says nothing; whether the bond is aromatic."""


def _labelled(
    component: Component, place: NDArray[np.intp], aromatic: NDArray[np.bool_] | bool = False
) -> dict[tuple[int, int], _Label]:
    """Return the bonds between atoms renumbered by ``place``; ``aromatic`` adds to the flags."""
    orders = np.where(bond_labels(component) != 0, component.bond_orders, 0).tolist()
    flags = (component.bond_aromatic | aromatic).tolist()
    pairs = np.sort(place[component.bonds], axis=1).tolist()
    rows = zip(pairs, orders, flags, strict=True)
    return {(i, j): (order, flag) for (i, j), order, flag in rows}


def _included(shown: dict[tuple[int, int], _Label], known: dict[tuple[int, int], _Label]) -> bool:
    """Return whether every bond is known, with the same order if both say one."""
    if not shown.keys() <= known.keys():
        return False
    pairs = ((label, known[pair]) for pair, label in shown.items())
    return all(a[0] == b[0] or 0 in (a[0], b[0]) or (a[1] and b[1]) for a, b in pairs)


def graph_digest(elements: NDArray[np.int32], bonds: NDArray[np.int32]) -> str:
    """Return a text that is equal for molecules of equal atoms and bonds, in whatever order.

    ``elements`` [n] and ``bonds`` [m, 2]; bond orders and stereo do not count. Different molecules
    have different texts but for rare regular graphs.
    """
    near: list[list[int]] = [[] for _ in range(len(elements))]
    for i, j in bonds.tolist():
        near[i].append(j)
        near[j].append(i)
    colours = [str(z) for z in elements.tolist()]
    for _ in range(_ROUNDS):
        colours = [
            _short(colour + "".join(sorted(colours[j] for j in own)))
            for colour, own in zip(colours, near, strict=True)
        ]
    return _short("".join(sorted(colours)))


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def alternating_bonds(component: Component) -> NDArray[np.bool_]:
    """Return [m] whether a bond lies in a six-ring of alternating single and double bonds.

    In fused rings a bond of one such ring may count as single or double in the next.
    """
    number = {(i, j): k for k, (i, j) in enumerate(component.bonds.tolist())}
    number |= {(j, i): k for (i, j), k in number.items()}
    near: list[list[int]] = [[] for _ in range(len(component))]
    for i, j in number:
        near[i].append(j)
    rings = [
        np.array([number[a, b] for a, b in zip(path, [*path[1:], path[0]], strict=True)])
        for start in range(len(component))
        for path in _six_rings(near, start)
    ]
    single, double = component.bond_orders == 1, component.bond_orders == 2
    found: NDArray[np.bool_] = component.bond_orders == 4
    while True:
        may_single, may_double = single | found, double | found
        before = int(found.sum())
        for ring in rings:
            for phase in (0, 1):
                if may_double[ring[phase::2]].all() and may_single[ring[1 - phase :: 2]].all():
                    found[ring] = True
        if int(found.sum()) == before:
            return found


def _six_rings(near: list[list[int]], start: int) -> Iterator[list[int]]:
    """Yield the rings of six atoms of which ``start`` is the first, in one direction each."""
    paths = [[start]]
    for _ in range(5):
        paths = [
            [*path, atom]
            for path in paths
            for atom in near[path[-1]]
            if atom > start and atom not in path
        ]
    yield from (path for path in paths if start in near[path[-1]] and path[1] < path[-1])
