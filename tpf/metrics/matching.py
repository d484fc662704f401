"""Find the atoms of a reference structure in a prediction, by sequence, residue and atom name.

Which copy of a molecule is which does not matter here: copies are paired in file order, and the
permutation alignment sorts them out afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

import numpy as np

from tpf.data.tables import LIGAND, Tables
from tpf.metrics.structure import Ints

MIN_SHARE = 0.5
"""Share of a predicted polymer's residues that must be found in the reference chain."""
MIN_BLOCK = 3
"""Residues in a row that an alignment must have in common, so that chance does not count."""

Pairs = list[tuple[int, int]]
"""(predicted, reference) residue numbers inside two chains."""


@dataclass(frozen=True)
class Match:
    """The predicted atom of each reference atom."""

    source: Ints
    """[A reference] atom of the prediction with a position, -1 without one."""
    chains: tuple[tuple[str, str], ...]
    """(predicted, reference) chain ids paired before permutation alignment."""
    notes: tuple[str, ...]
    """What has no counterpart, one sentence each."""


@dataclass(frozen=True)
class _Chain:
    """Residues of one chain."""

    id: str
    kind: int
    entity: int
    first: int
    names: tuple[str, ...]
    numbers: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.id} ({'-'.join(self.names)})" if self.kind == LIGAND else self.id


def match_tables(predicted: Tables, reference: Tables) -> Match:
    """Pair chains, residues of equal name, and atoms of equal name."""
    pred, ref = _chains(predicted), _chains(reference)
    entities: dict[int, list[_Chain]] = {}
    for chain in ref:
        entities.setdefault(chain.entity, []).append(chain)
    source = np.full(len(reference.atom_name), -1, dtype=np.int64)
    atoms = (_atoms(predicted, only_placed=True), _atoms(reference, only_placed=False))
    pairs: list[tuple[str, str]] = []
    known: dict[tuple[object, ...], Pairs] = {}
    left = pred
    for exact in (True, False):
        waiting, left = left, []
        for chain in waiting:
            free = [c for group in entities.values() for c in group[:1]]
            if exact:
                free = [c for c in free if c.names == chain.names]
            partner, residues = _best_partner(chain, free, known)
            if partner is None:
                left.append(chain)
                continue
            entities[partner.entity].remove(partner)
            pairs.append((chain.id, partner.id))
            for p, r in residues:
                own, other = atoms[0][chain.first + p], atoms[1][partner.first + r]
                for name in own.keys() & other.keys():
                    source[other[name]] = own[name]
    extra = [str(c) for c in left]
    missing = [str(c) for group in entities.values() for c in group]
    return Match(source, tuple(pairs), _notes(extra, missing, source, reference))


def _chains(tables: Tables) -> list[_Chain]:
    edges = np.searchsorted(tables.res_chain, np.arange(len(tables.chain_id) + 1))
    return [
        _Chain(
            id=str(tables.chain_id[c]),
            kind=int(tables.chain_type[c]),
            entity=int(tables.chain_entity[c]),
            first=int(start),
            names=tuple(tables.res_name[start:stop].tolist()),
            numbers=tuple(tables.res_id[start:stop].tolist()),
        )
        for c, (start, stop) in enumerate(zip(edges[:-1], edges[1:], strict=True))
    ]


def _atoms(tables: Tables, only_placed: bool) -> list[dict[str, int]]:
    """Atom index by name, for each residue; ``only_placed`` leaves atoms without position out."""
    found: list[dict[str, int]] = [{} for _ in tables.res_name]
    placed = np.flatnonzero(np.isfinite(tables.pos).all(axis=1))
    chosen = placed if only_placed else np.arange(len(tables.atom_name))
    for atom in chosen.tolist():
        found[int(tables.atom_residue[atom])][str(tables.atom_name[atom])] = atom
    return found


def _best_partner(
    chain: _Chain, candidates: Sequence[_Chain], known: dict[tuple[object, ...], Pairs]
) -> tuple[_Chain | None, Pairs]:
    """Return the reference chain with the most residues in common, and these residues."""
    best: tuple[_Chain | None, Pairs] = (None, [])
    for candidate in candidates:
        if candidate.kind != chain.kind:
            continue
        key = (chain.names, chain.numbers, candidate.names, candidate.numbers)
        if key not in known:
            known[key] = _residue_pairs(chain, candidate)
        enough = MIN_SHARE * (1 if chain.kind == LIGAND else len(chain.names))
        if len(known[key]) >= enough and len(known[key]) > len(best[1]):
            best = (candidate, known[key])
    return best


def _residue_pairs(pred: _Chain, ref: _Chain) -> Pairs:
    """Pair residues of equal name: whole sequences, else by number or by alignment."""
    if pred.names == ref.names:
        return [(k, k) for k in range(len(pred.names))]
    place = {number: k for k, number in enumerate(ref.numbers)}
    numbered = [
        (k, place[number])
        for k, number in enumerate(pred.numbers)
        if number in place and ref.names[place[number]] == pred.names[k]
    ]
    matcher = SequenceMatcher(None, pred.names, ref.names, autojunk=False)
    aligned = [
        (block.a + k, block.b + k)
        for block in matcher.get_matching_blocks()
        if block.size >= MIN_BLOCK
        for k in range(block.size)
    ]
    return numbered if len(numbered) >= len(aligned) else aligned


def _notes(
    extra: list[str], missing: list[str], source: Ints, reference: Tables
) -> tuple[str, ...]:
    notes = []
    if extra:
        notes.append(f"predicted chains without counterpart, not scored: {', '.join(extra)}")
    if missing:
        notes.append(f"reference chains without prediction, not scored: {', '.join(missing)}")
    resolved = np.isfinite(reference.pos).all(axis=1) & (reference.occupancy > 0)
    lost = int((resolved & (source < 0)).sum())
    if lost:
        notes.append(f"{lost} of {int(resolved.sum())} resolved reference atoms have no prediction")
    return tuple(notes)
