"""The atom-level view of a target that every metric works on.

``Structure`` holds what does not change between samples (chains, residues, atom names);
``Sample`` one prediction with the ground truth in its order; ``Scored`` which chains and chain
pairs of the target count. Index letters: A atoms, R residues, N tokens, C chains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tpf.data.chem import RESIDUES
from tpf.data.tables import DNA, LIGAND, PROTEIN, RNA, Tokens
from tpf.errors import UsageError

MODIFIED = 4
"""Atom class of atomised residues that are not ligands; PROTEIN .. LIGAND are 0 .. 3."""
CLASSES = ("protein", "rna", "dna", "ligand", "modified_residues")
"""Names of the atom classes by code."""
ANTIBODY_ROLES = ("ab_h", "ab_l", "ag")
"""Optional annotation of chains: heavy chain, light chain, antigen (codes 0, 1, 2; -1 none)."""

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Structure:
    """Topology of one target: real atoms only, in token order."""

    kind: Ints
    """[A] PROTEIN, RNA, DNA (standard residues only), LIGAND or MODIFIED."""
    chain: Ints
    """[A] index into the chain arrays."""
    residue: Ints
    """[A] index into the residue arrays, non-decreasing along a chain."""
    token: Ints
    """[A] index of the token, non-decreasing, every token at least once."""
    atom_name: NDArray[np.str_]
    """[A]"""
    element: Ints
    """[A] atomic number, 0 if unknown."""
    res_name: NDArray[np.str_]
    """[R] component code; "UNK" where the source does not tell."""
    asym_id: Ints
    """[C] chain number."""
    entity_id: Ints
    """[C] equal for copies of one molecule."""
    chain_type: Ints
    """[C] PROTEIN, RNA, DNA or LIGAND; of a mixed chain that of its first token."""
    chain_polymer: Bools
    """[C] made of polymer tokens only."""
    role: Ints | None = None
    """[C] index into ``ANTIBODY_ROLES`` or -1; None without annotation."""
    automorphisms: Mapping[int, NDArray[np.int64]] = field(default_factory=dict)
    """Residue index -> [n_perm, n_atoms] equivalent orders of its atoms."""

    @property
    def n_atoms(self) -> int:
        return len(self.kind)

    @property
    def n_chains(self) -> int:
        return len(self.asym_id)

    @property
    def n_tokens(self) -> int:
        return int(self.token[-1]) + 1 if len(self.token) else 0

    @property
    def token_start(self) -> Ints:
        """First atom of each token [N]."""
        return np.searchsorted(self.token, np.arange(self.n_tokens)).astype(np.int64)

    @property
    def res_chain(self) -> Ints:
        """Chain of each residue [R]."""
        chain = np.zeros(len(self.res_name), dtype=np.int64)
        chain[self.residue] = self.chain
        return chain


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One prediction of a ``Structure`` and the ground truth permuted to its order."""

    predicted: Floats
    """[A, 3] Angstrom."""
    truth: Floats
    """[A, 3] Angstrom; any finite or NaN value where unresolved."""
    resolved: Bools
    """[A] atom is resolved in the experiment."""

    @classmethod
    def make(cls, predicted: ArrayLike, truth: ArrayLike, resolved: ArrayLike) -> Sample:
        """Convert to FP64; raise ``UsageError`` for differing shapes or non-finite values."""
        x = np.asarray(predicted, dtype=np.float64)
        y = np.asarray(truth, dtype=np.float64)
        mask = np.asarray(resolved) > 0.5
        if x.shape != y.shape or x.shape != (len(mask), 3):
            raise UsageError(
                f"positions {x.shape}, ground truth {y.shape} and mask {mask.shape} differ; "
                "give [A, 3], [A, 3] and [A] of the same atoms"
            )
        if not np.isfinite(y[mask]).all():
            raise UsageError("a resolved ground-truth atom has no finite position; mask it")
        if not np.isfinite(x).all():
            count = int((~np.isfinite(x)).any(axis=1).sum())
            raise UsageError(f"{count} predicted atoms have no finite position; drop them first")
        return cls(predicted=x, truth=y, resolved=mask)


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Chains (F_intra) and chain pairs (F_inter) of a target that count (metrics.md part A)."""

    intra: Bools
    """[C]"""
    inter: Bools
    """[C, C] symmetric; the diagonal matters only for pairs of classes within one chain."""

    @classmethod
    def everything(cls, structure: Structure) -> Scored:
        """Score all chains and all pairs."""
        n = structure.n_chains
        return cls(intra=np.ones(n, dtype=bool), inter=np.ones((n, n), dtype=bool))

    @classmethod
    def listed(
        cls, structure: Structure, chains: set[int], interfaces: set[tuple[int, int]]
    ) -> Scored:
        """Score the given asym ids and pairs of asym ids only."""
        index = {int(asym): c for c, asym in enumerate(structure.asym_id)}
        intra = np.zeros(structure.n_chains, dtype=bool)
        inter = np.zeros((structure.n_chains, structure.n_chains), dtype=bool)
        for asym in chains & index.keys():
            intra[index[asym]] = True
        for a, b in interfaces:
            if a in index and b in index:
                inter[index[a], index[b]] = inter[index[b], index[a]] = True
        return cls(intra=intra, inter=inter)

    def counts(self) -> tuple[int, int]:
        """Return the number of scored chains and of scored pairs of different chains."""
        return int(self.intra.sum()), int(np.triu(self.inter, 1).sum())


def atom_kind(mol_type: NDArray[Any], atomized: NDArray[Any]) -> Ints:
    """Return the atom class of molecule types and atomised flags (same shape)."""
    kind = np.asarray(mol_type, dtype=np.int64).copy()
    kind[(np.asarray(atomized) > 0) & (kind != LIGAND)] = MODIFIED
    return kind


def from_features(features: Mapping[str, Any], automorphisms: bool = True) -> Structure:
    """Build from one entry's feature dict without batch axis (model.md 1.3), torch or numpy.

    Padding (token_mask or atom_mask 0) is dropped; it must lie at the end of both axes.
    """
    n = int(_array(features["token_mask"]).sum())
    a = int(_array(features["atom_mask"]).sum())
    token = _array(features["atom_to_token_index"])[:a].astype(np.int64)
    mol_type = np.full(n, LIGAND, dtype=np.int64)
    for code, name in ((PROTEIN, "is_protein"), (RNA, "is_rna"), (DNA, "is_dna")):
        mol_type[_array(features[name])[:n] > 0] = code
    atomized = _array(features["is_atomized"])[:n] > 0
    uid, residue = np.unique(_array(features["ref_space_uid"])[:a], return_inverse=True)
    first_atom = np.searchsorted(residue, np.arange(len(uid)))
    restype = _array(features["restype"])[:n].argmax(-1)
    names = np.asarray(RESIDUES)[restype[token[first_atom]]]
    names[atomized[token[first_atom]]] = "UNK"
    permutations = features.get("ref_space_uid_to_perm", {}) if automorphisms else {}
    element = _array(features["ref_element"])[:a]
    return _assemble(
        token=token,
        token_kind=atom_kind(mol_type, atomized),
        token_type=mol_type,
        token_asym=_array(features["asym_id"])[:n].astype(np.int64),
        token_entity=_array(features["entity_id"])[:n].astype(np.int64),
        residues=(residue.astype(np.int64), names),
        atoms=(
            decode_names(_array(features["ref_atom_name_chars"])[:a]),
            np.where(element.any(-1), element.argmax(-1) + 1, 0).astype(np.int64) % 119,
        ),
        automorphisms={
            int(np.searchsorted(uid, key)): _array(value).astype(np.int64)
            for key, value in permutations.items()
            if int(key) in uid
        },
    )


def from_tokens(tokens: Tokens, index: NDArray[np.integer] | None = None) -> Structure:
    """Build from all tokens of an assembly or those of ``index`` (ascending), with all atoms.

    Asym ids are 1-based chain numbers of the assembly.
    """
    tables = tokens.tables
    chosen = np.arange(len(tokens)) if index is None else np.asarray(index)
    token = np.repeat(np.arange(len(chosen)), tokens.num_atoms[chosen]).astype(np.int64)
    start = np.searchsorted(token, np.arange(len(chosen)))
    atom = tokens.start_atom[chosen][token] + np.arange(len(token)) - start[token]
    chain = tables.res_chain[tokens.residue[chosen]].astype(np.int64)
    own, residue = np.unique(tables.atom_residue[atom], return_inverse=True)
    return _assemble(
        token=token,
        token_kind=atom_kind(tokens.mol_type[chosen], tokens.atomized[chosen]),
        token_type=tokens.mol_type[chosen].astype(np.int64),
        token_asym=chain + 1,
        token_entity=tables.chain_entity[chain].astype(np.int64),
        residues=(residue.astype(np.int64), tables.res_name[own]),
        atoms=(tables.atom_name[atom], tables.element[atom].astype(np.int64)),
        automorphisms={},
    )


def take(structure: Structure, keep: Bools) -> Structure:
    """Return the structure of the atoms in ``keep`` [A]; tokens without atoms disappear.

    Residues that lose an atom lose their equivalent orders.
    """
    _, token = np.unique(structure.token[keep], return_inverse=True)
    broken = set(structure.residue[~keep].tolist())
    return replace(
        structure,
        kind=structure.kind[keep],
        chain=structure.chain[keep],
        residue=structure.residue[keep],
        token=token.astype(np.int64),
        atom_name=structure.atom_name[keep],
        element=structure.element[keep],
        automorphisms={r: v for r, v in structure.automorphisms.items() if r not in broken},
    )


def _assemble(
    *,
    token: Ints,
    token_kind: Ints,
    token_type: Ints,
    token_asym: Ints,
    token_entity: Ints,
    residues: tuple[Ints, NDArray[np.str_]],
    atoms: tuple[NDArray[np.str_], Ints],
    automorphisms: Mapping[int, Ints],
) -> Structure:
    asym, first, chain = np.unique(token_asym, return_index=True, return_inverse=True)
    polymer = np.ones(len(asym), dtype=bool)
    np.logical_and.at(polymer, chain, token_kind != LIGAND)
    return Structure(
        kind=token_kind[token],
        chain=chain.astype(np.int64)[token],
        residue=residues[0],
        token=token,
        atom_name=atoms[0],
        element=atoms[1],
        res_name=residues[1],
        asym_id=asym,
        entity_id=token_entity[first],
        chain_type=token_type[first],
        chain_polymer=polymer,
        automorphisms=automorphisms,
    )


def decode_names(chars: NDArray[Any]) -> NDArray[np.str_]:
    """Return atom names [A] of one-hot characters [A, 4, 64] (code = ord - 32)."""
    codes = (chars.argmax(-1) + 32).astype(np.uint8)
    text = np.ascontiguousarray(codes).view("S4").ravel()
    return np.char.strip(text.astype(np.str_))


def unbatch(batch: Mapping[str, Any], entry: int = 0) -> dict[str, Any]:
    """Return one entry's features of a collated batch, without ``ground_truth``."""
    return {key: value[entry] for key, value in batch.items() if not isinstance(value, dict)}


def _array(value: Any) -> NDArray[Any]:
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    return np.asarray(value)
