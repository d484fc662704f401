"""Features of a crop: the table of AF3 SI 2.8 as numpy arrays (spec model.md 1.3).

Index letters: N tokens of the crop, A atoms of the crop, M MSA rows, T templates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpf.config import DataConfig, LossConfig
from tpf.data.alignment import Alignment
from tpf.data.ccd import Dictionary
from tpf.data.chem import GAP
from tpf.data.conformers import Conformers, atom_orders, random_rotation
from tpf.data.molecules import Molecules, find_molecules
from tpf.data.msa import N_RESTYPES, msa_features, one_hot
from tpf.data.tables import DNA, LIGAND, PROTEIN, RNA, Tables, Tokens

N_ELEMENTS = 119
"""Atomic numbers 1 to 118 and a wildcard."""
N_NAME_CHARS = 64
N_DISTOGRAM_BINS = 39
_POLYMER_LINKS = {("C", "N"), ("O3'", "P")}

Features = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which tokens and atoms of an entry a crop holds, and how its atoms lie in its tokens."""

    token: NDArray[np.intp]
    """[N] token of the entry."""
    atom: NDArray[np.intp]
    """[A] atom of the entry."""
    start: NDArray[np.int32]
    """[N] first atom of the crop in the token."""
    atom_to_token: NDArray[np.int32]
    """[A] token of the crop."""
    residue: NDArray[np.int32]
    """[A] 0-based number of the residue or ligand instance inside the crop."""


def layout(tokens: Tokens, index: NDArray[np.integer]) -> Layout:
    """Return the layout of the tokens ``index`` [N], in ascending order of tokens."""
    token = np.sort(index).astype(np.intp)
    count = tokens.num_atoms[token]
    start = np.cumsum(count) - count
    atom_to_token = np.repeat(np.arange(len(token), dtype=np.int32), count)
    within = np.arange(len(atom_to_token)) - start[atom_to_token]
    atom = tokens.start_atom[token][atom_to_token] + within
    owner = tokens.tables.atom_residue[atom]
    _, residue = np.unique(owner, return_inverse=True)
    return Layout(
        token=token,
        atom=atom.astype(np.intp),
        start=start.astype(np.int32),
        atom_to_token=atom_to_token,
        residue=residue.astype(np.int32),
    )


def featurize(
    tokens: Tokens,
    crop: NDArray[np.integer],
    dictionary: Dictionary,
    rng: np.random.Generator,
    *,
    config: DataConfig,
    loss: LossConfig | None = None,
    msa: dict[int, Alignment] | None = None,
    training: bool = True,
) -> Features:
    """Return every feature of model.md table 1.3 for the tokens ``crop`` [N] of an entry.

    ``msa`` holds alignments by entity number (none: the query row alone); ``training`` cuts them
    to a random depth. ``config`` gives the conformer source, MSA rows and number T of (empty)
    templates; with T = 0 the template features have no rows. Arrays that are zero throughout may
    be broadcast views. The result is a pure function of the arguments and the state of ``rng``.
    """
    lay = layout(tokens, crop)
    molecules = find_molecules(tokens)
    n = len(lay.token)
    features: Features = {"id": tokens.tables.id}
    resolution = tokens.tables.resolution
    features["resolution"] = np.float32(np.nan if resolution is None else resolution)
    features |= token_features(tokens, molecules, lay.token)
    features |= layout_features(tokens, lay)
    features["restype"] = one_hot(tokens.restype[lay.token], N_RESTYPES)
    features["token_mask"] = np.ones(n, np.float32)
    features["atom_mask"] = np.ones(len(lay.atom), np.float32)
    features["cyclic_mask"] = np.zeros(n, np.bool_)
    features["token_bonds"] = token_bonds(tokens, lay)
    features |= reference_features(tokens, lay, Conformers.of(dictionary, config), rng)
    features |= msa_features(
        tokens,
        lay.token,
        msa or {},
        config.max_msa_rows,
        rng,
        config.sampled_msa_rows,
        vary_depth=training,
    )
    features |= empty_templates(config.max_templates, n)
    features["ground_truth"] = ground_truth(tokens, molecules, lay.token)
    features["loss_weights"] = loss_weights(tokens.tables, loss or LossConfig())
    return features


def token_features(
    tokens: Tokens, molecules: Molecules, token: NDArray[np.intp]
) -> dict[str, NDArray[np.int32]]:
    """Return the ids and molecule flags of tokens, each [N] int32."""
    tables = tokens.tables
    residue = tokens.residue[token]
    chain = tables.res_chain[residue]
    mol_type = tokens.mol_type[token]
    arrays = {
        "residue_index": tables.res_id[residue],
        "token_index": token,
        "asym_id": chain + 1,
        "entity_id": tables.chain_entity[chain],
        "sym_id": tables.chain_sym[chain],
        "mol_type": mol_type,
        "is_protein": mol_type == PROTEIN,
        "is_rna": mol_type == RNA,
        "is_dna": mol_type == DNA,
        "is_ligand": mol_type == LIGAND,
        "is_atomized": tokens.atomized[token],
        "num_atoms_per_token": tokens.num_atoms[token],
        "mol_entity_id": molecules.entity[token],
        "mol_sym_id": molecules.sym[token],
        "mol_sym_component_id": molecules.component[token],
        "mol_sym_token_index": molecules.token[token],
    }
    return {name: value.astype(np.int32) for name, value in arrays.items()}


def layout_features(tokens: Tokens, lay: Layout) -> dict[str, NDArray[np.int32]]:
    """Return how the atoms lie in the tokens, and the token's centre and representative atoms."""
    shift = lay.start - tokens.start_atom[lay.token]
    return {
        "start_atom_index": lay.start,
        "atom_to_token_index": lay.atom_to_token,
        "center_atom_index": (tokens.center_atom[lay.token] + shift).astype(np.int32),
        "rep_atom_index": (tokens.rep_atom[lay.token] + shift).astype(np.int32),
        "ref_space_uid": lay.residue,
    }


def token_bonds(tokens: Tokens, lay: Layout) -> NDArray[np.int32]:
    """Return [N, N] int32, 1 where a bond joins two atomized tokens (both directions).

    The bonds that link consecutive residues of a polymer are left out.
    """
    tables = tokens.tables
    where = np.full(len(tables.atom_name), -1, np.int64)
    atomized = tokens.atomized[lay.token]
    where[lay.atom] = np.where(atomized[lay.atom_to_token], lay.atom_to_token, -1)
    ends = where[tables.bonds]
    kept = (ends >= 0).all(axis=1) & (ends[:, 0] != ends[:, 1])
    bonds = np.zeros((len(lay.token), len(lay.token)), np.int32)
    for (i, j), (a, b) in zip(ends[kept].tolist(), tables.bonds[kept].tolist(), strict=True):
        if not _is_polymer_link(tables, a, b):
            bonds[i, j] = bonds[j, i] = 1
    return bonds


def _is_polymer_link(tables: Tables, a: int, b: int) -> bool:
    """Tell whether a bond is a peptide or phosphodiester bond between neighbours in a chain."""
    if tables.atom_residue[a] > tables.atom_residue[b]:
        a, b = b, a
    first, second = tables.atom_residue[a], tables.atom_residue[b]
    chain = tables.res_chain[first]
    return (
        first != second
        and chain == tables.res_chain[second]
        and bool(tables.chain_type[chain] != LIGAND)
        and bool(tables.res_id[second] - tables.res_id[first] == 1)
        and (str(tables.atom_name[a]), str(tables.atom_name[b])) in _POLYMER_LINKS
    )


def reference_features(
    tokens: Tokens, lay: Layout, conformers: Conformers, rng: np.random.Generator
) -> Features:
    """Return the reference conformers, each residue in its own random pose, and their atoms.

    ``ref_space_uid_to_perm`` maps a residue number to its symmetry-equivalent atom orders
    [n_perm, n_atoms] as positions inside the residue's atoms of the crop; row 0 is the identity.
    """
    tables = tokens.tables
    positions = np.zeros((len(lay.atom), 3), np.float32)
    mask = np.zeros(len(lay.atom), np.int32)
    permutations: dict[int, NDArray[np.int32]] = {}
    linked = linked_atoms(tables)
    edges = np.searchsorted(lay.residue, np.arange(lay.residue[-1] + 2))
    for uid, (start, stop) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
        atoms = lay.atom[start:stop]
        residue = int(tables.atom_residue[atoms[0]])
        component = conformers.component(tables, residue, atoms)
        names = tuple(tables.atom_name[atoms].tolist())
        pos, known = conformers.draw(component, names, rng)
        positions[start:stop] = _random_pose(pos, known, rng)
        mask[start:stop] = known
        permutations[uid] = atom_orders(component, names, tuple(linked[atoms].tolist()))
    element = tables.element[lay.atom]
    wildcard = (element < 1) | (element >= N_ELEMENTS)
    return {
        "ref_pos": positions,
        "ref_mask": mask,
        "ref_element": one_hot(np.where(wildcard, N_ELEMENTS - 1, element - 1), N_ELEMENTS),
        "ref_charge": tables.charge[lay.atom].astype(np.float32),
        "ref_atom_name_chars": one_hot(_name_codes(tables.atom_name[lay.atom]), N_NAME_CHARS),
        "ref_space_uid_to_perm": permutations,
    }


def linked_atoms(tables: Tables) -> NDArray[np.bool_]:
    """Return [A] whether an atom has a bond to another residue."""
    owner = tables.atom_residue[tables.bonds]
    linked = np.zeros(len(tables.atom_name), np.bool_)
    linked[tables.bonds[owner[:, 0] != owner[:, 1]].ravel()] = True
    return linked


def _random_pose(
    pos: NDArray[np.float32], known: NDArray[np.bool_], rng: np.random.Generator
) -> NDArray[np.float32]:
    """Return the known atoms centred, rotated at random and moved by N(0, 1) Angstrom; others 0."""
    rotation, shift = random_rotation(rng), rng.standard_normal(3)
    if not known.any():
        return np.zeros_like(pos)
    centred = pos - pos[known].mean(0)
    return np.where(known[:, None], centred @ rotation.T + shift, 0.0).astype(np.float32)


def _name_codes(names: NDArray[np.str_]) -> NDArray[np.int64]:
    """Return [A, 4] ord - 32 of the names, left-justified to four characters."""
    text = "".join(f"{str(name).upper():<4.4}" for name in names)
    codes = np.array([ord(character) - 32 for character in text], np.int64).reshape(-1, 4)
    return np.clip(codes, 0, N_NAME_CHARS - 1)


def empty_templates(n_templates: int, n_tokens: int) -> dict[str, NDArray[np.generic]]:
    """Return the features of absent templates: gap residues and zero masks."""
    t, n = n_templates, n_tokens
    gap = one_hot(np.array(GAP), N_RESTYPES)
    zero = np.zeros((), np.float32)
    return {
        "template_restype": np.broadcast_to(gap, (t, n, N_RESTYPES)).copy(),
        "template_pseudo_beta_mask": np.broadcast_to(zero, (t, n)),
        "template_backbone_frame_mask": np.broadcast_to(zero, (t, n)),
        "template_distogram": np.broadcast_to(zero, (t, n, n, N_DISTOGRAM_BINS)),
        "template_unit_vector": np.broadcast_to(zero, (t, n, n, 3)),
    }


def ground_truth(
    tokens: Tokens, molecules: Molecules, crop: NDArray[np.intp]
) -> dict[str, NDArray[np.generic]]:
    """Return ids and coordinates of the cropped tokens in every symmetric copy of their molecule.

    A token of the crop corresponds to the tokens of equal ``mol_entity_id`` and
    ``mol_sym_token_index``; their atoms are in equal order.
    """
    place = molecules.entity.astype(np.int64) * (len(tokens) + 1) + molecules.token
    lay = layout(tokens, np.flatnonzero(np.isin(place, place[crop])))
    tables = tokens.tables
    pos = tables.pos[lay.atom]
    resolved: NDArray[np.bool_] = np.all(np.isfinite(pos), axis=1)
    occupancy = np.clip(np.ceil(tables.occupancy[lay.atom]), 0, 1)
    return {
        **token_features(tokens, molecules, lay.token),
        **layout_features(tokens, lay),
        "atom_positions": np.where(resolved[:, None], pos, 0).astype(np.float32),
        "atom_resolved_mask": np.where(resolved, occupancy, 0).astype(np.float32),
    }


def loss_weights(tables: Tables, loss: LossConfig) -> dict[str, NDArray[np.float32]]:
    """Return the weight [1] of each loss; confidence losses need a trusted resolution."""
    resolution = tables.resolution
    trusted = resolution is not None and (
        loss.confidence_min_resolution <= resolution <= loss.confidence_max_resolution
    )
    weights = {
        "bond": loss.bond,
        "smooth_lddt": loss.smooth_lddt,
        "mse": loss.mse,
        "distogram": loss.distogram,
        "experimentally_resolved": loss.resolved if trusted else 0.0,
        "plddt": loss.plddt if trusted else 0.0,
        "pae": loss.pae if trusted else 0.0,
        "pde": loss.pde if trusted else 0.0,
    }
    return {name: np.full(1, weight, np.float32) for name, weight in weights.items()}
