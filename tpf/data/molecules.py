"""Molecules of an assembly: covalently joined chains, their copies and matching token numbers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tpf.data.tables import LIGAND, Tables, Tokens


@dataclass(frozen=True, kw_only=True)
class Molecules:
    """Ids for permutation alignment (AF3 SI 4.2); all arrays are [N] over all tokens.

    Two tokens of equal ``entity`` and equal ``token`` are the same place in two copies of one
    molecule: their atoms have equal names in equal order.
    """

    entity: NDArray[np.int32]
    """1-based number of the molecule's kind."""
    sym: NDArray[np.int32]
    """1-based copy of the molecule inside its kind."""
    component: NDArray[np.int32]
    """1-based number of the chain inside the molecule, in an order that copies share."""
    token: NDArray[np.int32]
    """0-based number of the token inside the molecule, in that order."""


def find_molecules(tokens: Tokens) -> Molecules:
    """Group covalently joined chains into molecules and number their copies."""
    tables = tokens.tables
    atom_chain = tables.res_chain[tables.atom_residue]
    joins = _chain_joins(tables, atom_chain)
    token_chain = tables.res_chain[tokens.residue]
    first_token = np.searchsorted(token_chain, np.arange(len(tables.chain_id) + 1))
    digests = _chain_digests(tokens, first_token)
    first_atom = np.searchsorted(atom_chain, np.arange(len(tables.chain_id) + 1))

    n = len(tokens)
    out = {name: np.zeros(n, np.int32) for name in ("entity", "sym", "component", "token")}
    kinds: dict[object, int] = {}
    copies: dict[int, int] = {}
    for chains in _components(len(tables.chain_id), atom_chain, joins):
        chains = _canonical_order(tables, atom_chain, chains, joins)
        kind = kinds.setdefault(
            _signature(chains, digests, atom_chain, first_atom, joins), len(kinds) + 1
        )
        copies[kind] = copies.get(kind, 0) + 1
        base = 0
        for number, chain in enumerate(chains, start=1):
            span = slice(first_token[chain], first_token[chain + 1])
            size = span.stop - span.start
            out["entity"][span] = kind
            out["sym"][span] = copies[kind]
            out["component"][span] = number
            out["token"][span] = np.arange(base, base + size, dtype=np.int32)
            base += size
    return Molecules(**out)


def _chain_joins(tables: Tables, atom_chain: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the bonds [n, 2] whose atoms lie in different chains."""
    ends = atom_chain[tables.bonds]
    joins: NDArray[np.int32] = tables.bonds[ends[:, 0] != ends[:, 1]]
    return joins


def _chain_digests(tokens: Tokens, first_token: NDArray[np.intp]) -> list[bytes]:
    """Return one digest per chain over entity, atom names and token layout."""
    tables = tokens.tables
    digests = []
    for chain, entity in enumerate(tables.chain_entity.tolist()):
        start, stop = first_token[chain], first_token[chain + 1]
        digest = hashlib.sha256(f"{entity};{stop - start}".encode())
        if stop > start:
            last = stop - 1
            atoms = slice(
                tokens.start_atom[start], tokens.start_atom[last] + tokens.num_atoms[last]
            )
            digest.update(np.ascontiguousarray(tables.atom_name[atoms]).tobytes())
            digest.update(tokens.num_atoms[start:stop].tobytes())
            digest.update(tokens.restype[start:stop].tobytes())
            digest.update(tables.res_name[tokens.residue[start:stop]].tobytes())
            numbers = tables.res_id[tokens.residue[start:stop]]
            shift = numbers[0] if tables.chain_type[chain] == LIGAND else 0
            digest.update((numbers - shift).tobytes())
        digests.append(digest.digest())
    return digests


def _components(
    n_chains: int, atom_chain: NDArray[np.int32], joins: NDArray[np.int32]
) -> list[list[int]]:
    """Return the sets of joined chains, each sorted, in order of their first chain."""
    root = list(range(n_chains))

    def find(i: int) -> int:
        while root[i] != i:
            root[i] = root[root[i]]
            i = root[i]
        return i

    for a, b in atom_chain[joins].tolist():
        a, b = sorted((find(a), find(b)))
        root[b] = a
    groups: dict[int, list[int]] = {}
    for chain in range(n_chains):
        groups.setdefault(find(chain), []).append(chain)
    return list(groups.values())


def _canonical_order(
    tables: Tables, atom_chain: NDArray[np.int32], chains: list[int], joins: NDArray[np.int32]
) -> list[int]:
    """Return the chains by entity, then by where they are joined, so that copies agree."""
    if len(chains) == 1:
        return chains

    def site(atom: int) -> tuple[int, int, str]:
        residue = tables.atom_residue[atom]
        entity = tables.chain_entity[tables.res_chain[residue]]
        return int(entity), int(tables.res_id[residue]), str(tables.atom_name[atom])

    sites: dict[int, list[object]] = {chain: [] for chain in chains}
    for i, j in joins.tolist():
        for own, partner in ((i, j), (j, i)):
            if int(atom_chain[own]) in sites:
                sites[int(atom_chain[own])].append((site(partner), site(own)))
    return sorted(
        chains,
        key=lambda c: (int(tables.chain_entity[c]), sorted(sites[c], key=repr).__repr__(), c),
    )


def _signature(
    chains: list[int],
    digests: list[bytes],
    atom_chain: NDArray[np.int32],
    first_atom: NDArray[np.intp],
    joins: NDArray[np.int32],
) -> object:
    """Return what two copies of one molecule share: chain digests and joining bonds."""
    if len(chains) == 1:
        return digests[chains[0]]
    number = {chain: k for k, chain in enumerate(chains)}
    bonds = []
    for pair in joins.tolist():
        if int(atom_chain[pair[0]]) in number:
            ends = [(number[int(atom_chain[a])], int(a - first_atom[atom_chain[a]])) for a in pair]
            bonds.append(tuple(sorted(ends)))
    return tuple(digests[c] for c in chains), tuple(sorted(bonds))
