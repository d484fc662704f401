"""A made-up protein of any size, as one training sample."""

from __future__ import annotations

from typing import Any

import numpy as np

from tpf.config import Config
from tpf.data import chem
from tpf.data.batch import to_torch
from tpf.data.ccd import Dictionary
from tpf.data.features import featurize
from tpf.data.tables import PROTEIN, Tables
from tpf.data.tokens import tokenize

STEP = 3.8
"""Angstrom between neighbouring CA atoms."""
RESOLUTION = 2.0
"""Angstrom; lets the confidence losses take part."""
AMINO_ACIDS = tuple(name for name in chem.RESIDUES[:20])


def make_protein(residues: int, seed: int = 0) -> Tables:
    """Return two chains of equal random sequence (one, if ``residues`` is odd) as random walks.

    Every residue is one token. Atoms lie around their CA; there are peptide bonds only.
    """
    rng = np.random.default_rng([seed, residues])
    copies = 2 if residues % 2 == 0 else 1
    length = residues // copies
    sequence = [AMINO_ACIDS[k] for k in rng.integers(len(AMINO_ACIDS), size=length)] * copies
    names = [chem.ATOMS[name] for name in sequence]
    counts = np.array([len(atoms) for atoms in names])
    first = np.cumsum(counts) - counts
    walk = np.cumsum(rng.normal(size=(residues, 3)) * STEP / 3**0.5, axis=0)
    atom_residue = np.repeat(np.arange(residues), counts)
    pos = walk[atom_residue] + rng.normal(size=(int(counts.sum()), 3))
    inner = [r for r in range(residues) if (r + 1) % length]
    bonds = [(first[r] + names[r].index("C"), first[r + 1]) for r in inner]
    flat = [atom for atoms in names for atom in atoms]
    n_atoms = len(flat)
    return Tables(
        id=f"synthetic-{residues}",
        method="X-RAY DIFFRACTION",
        resolution=RESOLUTION,
        release_date=None,
        atom_name=np.array(flat),
        element=np.array([chem.atomic_number(atom[0]) for atom in flat], np.int32),
        charge=np.zeros(n_atoms, np.float32),
        ideal=np.full((n_atoms, 3), np.nan, np.float32),
        pos=pos.astype(np.float32),
        occupancy=np.ones(n_atoms, np.float32),
        b_factor=np.zeros(n_atoms, np.float32),
        atom_residue=atom_residue.astype(np.int32),
        res_name=np.array(sequence),
        res_id=np.tile(np.arange(1, length + 1, dtype=np.int32), copies),
        auth_seq=np.tile(np.arange(1, length + 1).astype(str), copies),
        res_chain=np.repeat(np.arange(copies, dtype=np.int32), length),
        res_standard=np.ones(residues, np.bool_),
        chain_id=np.array(["A", "B"][:copies]),
        auth_chain=np.array(["A", "B"][:copies]),
        chain_type=np.full(copies, PROTEIN, np.int32),
        chain_entity=np.ones(copies, np.int32),
        chain_sym=np.arange(1, copies + 1, dtype=np.int32),
        bonds=np.array(bonds, np.int32).reshape(-1, 2),
        bond_order=np.ones(len(bonds), np.int32),
    )


def make_sample(residues: int, config: Config, seed: int = 0) -> dict[str, Any]:
    """Return the protein as a batch of one with its ground truth, as the loader would."""
    tokens = tokenize(make_protein(residues, seed))
    features = featurize(
        tokens,
        np.arange(len(tokens)),
        Dictionary(config.data.ccd),
        np.random.default_rng(seed),
        config=config.data,
        loss=config.loss,
    )
    return to_torch(features | {"position": 0, "skipped": []})
