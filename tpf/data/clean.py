"""Cleaning of a structure for training: the steps of AF3 SI 2.5.4 in their order.

Every step is a pure function that returns its input with something removed or renamed, and a note
that counts it. ``clean`` runs them; completion with unresolved atoms is in ``complete``.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from tpf.data import chem
from tpf.data.ccd import Dictionary
from tpf.data.complete import MAX_BOND_LENGTH, complete
from tpf.data.definitions import resolve_definitions
from tpf.data.structure import (
    Structure,
    close_pairs,
    counted,
    keep_atoms,
    keep_chains,
    keep_residues,
    take,
)
from tpf.data.tables import PROTEIN, Tables
from tpf.errors import DataError

MIN_RESOLVED = 4
"""Residues; polymer chains with fewer resolved ones are dropped."""
CLASH_DISTANCE = 1.7
CLASH_FRACTION = 0.3
MAX_CA_DISTANCE = 10.0


def clean(structure: Structure, dictionary: Dictionary, *, filters: bool = True) -> Tables:
    """Return the cleaned, completed tables of a structure.

    Without ``filters`` nothing is dropped for its quality (steps 4, 6, 7, 8 and 11): for
    predictions and their references. Raises ``DataError`` (stage clean) if nothing is left.
    """
    structure = rename_selenomethionine(structure)
    structure = order_arginine(structure)
    structure = drop_waters(structure)
    if filters:
        structure = drop_crystal_aids(structure)
    structure = drop_hydrogens(structure)
    if filters:
        structure = drop_short_polymers(structure)
        structure = drop_unknown_polymers(structure)
        structure = drop_clashing_chains(structure)
    structure, known = resolve_definitions(structure, dictionary)
    structure = drop_foreign_atoms(structure, known)
    structure = order_atoms(structure, known)
    if filters:
        structure = drop_broken_proteins(structure)
    structure = drop_links(structure)
    if not structure.resolved.any():
        why = " ".join(structure.notes) or "The file has no polymer and no ligand."
        raise DataError(structure.id, "clean", f"nothing is left after cleaning. {why}")
    return complete(structure, known)


def rename_selenomethionine(structure: Structure) -> Structure:
    """Step 1: MSE becomes MET, its selenium the sulphur SD."""
    mse = structure.res_name == "MSE"
    coded = [any(site.code == "MSE" for site in chain.sequence) for chain in structure.chains]
    if not mse.any() and not any(coded):
        return structure
    selenium = mse[structure.atom_residue] & (structure.atom_name == "SE")
    chains = tuple(
        dataclasses.replace(
            chain,
            sequence=tuple(
                dataclasses.replace(site, code="MET") if site.code == "MSE" else site
                for site in chain.sequence
            ),
        )
        for chain in structure.chains
    )
    renamed = dataclasses.replace(
        structure,
        atom_name=np.where(selenium, "SD", structure.atom_name),
        element=np.where(selenium, chem.ATOMIC_NUMBER["S"], structure.element).astype(np.int32),
        res_name=np.where(mse, "MET", structure.res_name),
        chains=chains,
    )
    return renamed.noted(f"{counted(int(mse.sum()), 'residue')} MSE became MET.")


def order_arginine(structure: Structure) -> Structure:
    """Step 2: the arginine nitrogen nearer to CD is NH1."""
    spans = structure.spans()
    names = structure.atom_name.copy()
    swapped = 0
    for r in np.flatnonzero(structure.res_name == "ARG"):
        own = np.arange(spans[r], spans[r + 1])
        at = {str(names[i]): int(i) for i in own}
        if not {"CD", "NH1", "NH2"} <= at.keys():
            continue
        cd, first, second = (structure.pos[at[name]] for name in ("CD", "NH1", "NH2"))
        if np.sum((second - cd) ** 2) < np.sum((first - cd) ** 2):
            names[at["NH1"]], names[at["NH2"]] = "NH2", "NH1"
            swapped += 1
    if not swapped:
        return structure
    renamed = dataclasses.replace(structure, atom_name=names)
    return renamed.noted(f"NH1 and NH2 of {counted(swapped, 'arginine')} were exchanged.")


def drop_waters(structure: Structure) -> Structure:
    """Step 3: waters go."""
    water = np.isin(structure.res_name, list(chem.WATERS))
    if not water.any():
        return structure
    kept = keep_residues(structure, ~water)
    return kept.noted(f"{counted(int(water.sum()), 'water')} dropped.")


def drop_crystal_aids(structure: Structure) -> Structure:
    """Step 4: crystallisation aids of X-ray entries go (AF3 SI Table 9)."""
    if "X-RAY" not in structure.method:
        return structure
    polymer = np.array([chain.polymer for chain in structure.chains], dtype=bool)
    aid = np.isin(structure.res_name, list(chem.CRYSTAL_AIDS)) & ~polymer[structure.res_chain]
    if not aid.any():
        return structure
    names = ", ".join(sorted(set(structure.res_name[aid].tolist())))
    kept = keep_residues(structure, ~aid)
    return kept.noted(f"{counted(int(aid.sum()), 'crystallisation aid')} dropped ({names}).")


def drop_hydrogens(structure: Structure) -> Structure:
    """Step 5: hydrogen and deuterium go."""
    hydrogen = structure.element == 1
    if not hydrogen.any():
        return structure
    kept = keep_atoms(structure, ~hydrogen)
    return kept.noted(f"{counted(int(hydrogen.sum()), 'hydrogen')} dropped.")


def _drop_chains(structure: Structure, drop: NDArray[np.bool_], why: str) -> Structure:
    if not drop.any():
        return structure
    names = ", ".join(chain.id for chain, gone in zip(structure.chains, drop, strict=True) if gone)
    kept = keep_chains(structure, ~drop)
    return kept.noted(f"{counted(int(drop.sum()), 'chain')} dropped, {why} ({names}).")


def drop_short_polymers(structure: Structure) -> Structure:
    """Step 6: polymers with at most 3 resolved residues go."""
    residues = np.unique(structure.atom_residue[structure.resolved])
    resolved = np.bincount(structure.res_chain[residues], minlength=len(structure.chains))
    polymer = np.array([chain.polymer for chain in structure.chains], dtype=bool)
    return _drop_chains(
        structure, polymer & (resolved < MIN_RESOLVED), "3 or fewer resolved residues"
    )


def drop_unknown_polymers(structure: Structure) -> Structure:
    """Step 7: polymers without a single known residue go."""
    unknown = chem.UNKNOWN_RESIDUE.values()
    drop = [
        chain.polymer and all(site.code in unknown for site in chain.sequence)
        for chain in structure.chains
    ]
    return _drop_chains(structure, np.array(drop, dtype=bool), "every residue unknown")


def drop_clashing_chains(structure: Structure) -> Structure:
    """Step 8: of two chains that overlap in more than 30 % of the atoms of either, one goes.

    The one with the larger share goes; a tie takes the smaller chain, then the later id.
    """
    n = len(structure.chains)
    if n < 2:
        return structure
    atoms = np.flatnonzero(structure.resolved)
    chain = structure.atom_chain[atoms]
    touched: dict[tuple[int, int], set[int]] = {}
    for left, right in close_pairs(structure.pos[atoms], CLASH_DISTANCE):
        other = chain[left] != chain[right]
        for i, j in zip(left[other].tolist(), right[other].tolist(), strict=True):
            touched.setdefault((int(chain[i]), int(chain[j])), set()).add(i)
    sizes = np.bincount(chain, minlength=n)
    drop = np.zeros(n, dtype=bool)
    for a, b in sorted({(min(pair), max(pair)) for pair in touched}):
        if drop[a] or drop[b]:
            continue
        share = {c: len(touched.get(pair, ())) / sizes[c] for c, pair in ((a, (a, b)), (b, (b, a)))}
        if max(share.values()) > CLASH_FRACTION:
            worst = max((a, b), key=lambda c: (share[c], -sizes[c], structure.chains[c].id))
            drop[worst] = True
    return _drop_chains(structure, drop, "clashing with another chain")


def drop_foreign_atoms(structure: Structure, known: Dictionary) -> Structure:
    """Step 9: atoms that the component definition does not have go."""
    spans = structure.spans()
    keep = np.zeros(len(structure.atom_name), dtype=bool)
    for r, code in enumerate(structure.res_name.tolist()):
        component = known.get(code)
        if component is not None:
            own = slice(spans[r], spans[r + 1])
            keep[own] = [name in component.index for name in structure.atom_name[own].tolist()]
    if keep.all():
        return structure
    codes = sorted(set(structure.res_name[structure.atom_residue[~keep]].tolist()))
    kept = keep_atoms(structure, keep)
    return kept.noted(
        f"{counted(int((~keep).sum()), 'atom')} dropped that the definition of "
        f"{', '.join(codes)} lacks."
    )


def order_atoms(structure: Structure, known: Dictionary) -> Structure:
    """Step 10: the atoms of each residue in the order of its definition."""
    spans = structure.spans()
    rank = np.zeros(len(structure.atom_name), dtype=np.int64)
    for r, code in enumerate(structure.res_name.tolist()):
        component = known.get(code)
        if component is not None:
            own = slice(spans[r], spans[r + 1])
            rank[own] = [component.index[name] for name in structure.atom_name[own].tolist()]
    order = np.lexsort((rank, structure.atom_residue))
    return structure if (order[1:] > order[:-1]).all() else take(structure, order)


def drop_broken_proteins(structure: Structure) -> Structure:
    """Step 11: protein chains with neighbouring residues whose CA are over 10 Angstrom apart go."""
    ca = np.flatnonzero((structure.atom_name == "CA") & structure.resolved)
    residue = structure.atom_residue[ca]
    chain = structure.res_chain[residue]
    protein = np.array([c.polymer and c.type == PROTEIN for c in structure.chains], dtype=bool)
    next_to = (chain[1:] == chain[:-1]) & protein[chain[1:]]
    next_to &= structure.res_id[residue[1:]] == structure.res_id[residue[:-1]] + 1
    distance = np.linalg.norm(structure.pos[ca[1:]] - structure.pos[ca[:-1]], axis=1)
    drop = np.zeros(len(structure.chains), dtype=bool)
    drop[chain[1:][next_to & (distance > MAX_CA_DISTANCE)]] = True
    return _drop_chains(structure, drop, "neighbouring CA atoms over 10 Angstrom apart")


def drop_links(structure: Structure) -> Structure:
    """Step 12: of the recorded bonds, inter-chain dative ones, long ones and those that join two
    polymers, or residues of one polymer that are not neighbours, go."""
    left, right = structure.links[:, 0], structure.links[:, 1]
    chain, polymer = structure.atom_chain, structure.polymer_atom
    place = structure.res_id[structure.atom_residue]
    same = chain[left] == chain[right]
    dative = structure.dative & ~same
    neighbours = same & (np.abs(place[left] - place[right]) <= 1)
    polymers = polymer[left] & polymer[right] & ~neighbours & ~dative
    length = np.linalg.norm(structure.pos[left] - structure.pos[right], axis=1)
    long = (length > MAX_BOND_LENGTH) & ~dative & ~polymers
    keep = ~(dative | polymers | long)
    structure = dataclasses.replace(
        structure, links=structure.links[keep], dative=structure.dative[keep]
    )
    for mask, what in (
        (dative, "dative bond"),
        (polymers, "polymer cross-link"),
        (long, f"link over {MAX_BOND_LENGTH} Angstrom"),
    ):
        if mask.any():
            structure = structure.noted(f"{counted(int(mask.sum()), what)} removed.")
    return structure
