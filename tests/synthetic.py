"""Small made-up complexes as feature dictionaries with their ground truth, batch size 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

ATOMS = {
    "protein": ["N", "CA", "C", "O", "CB"],
    "phe": ["N", "CA", "C", "O", "CB", "CG", "CD1", "CD2", "CE1", "CE2", "CZ"],
    "rna": ["P", "C4'", "C3'", "C2'", "C1'", "N9", "C4"],
    "dna": ["P", "C4'", "C3'", "C1'", "N9", "C4"],
}
CENTRE = {"protein": "CA", "phe": "CA", "rna": "C1'", "dna": "C1'"}
REPRESENTATIVE = {"protein": "CB", "phe": "CB", "rna": "C4", "dna": "C4"}
PHE_FLIP = [[*range(11)], [0, 1, 2, 3, 4, 5, 7, 6, 9, 8, 10]]


@dataclass
class Chain:
    """One molecule copy: ``size`` residues of a polymer type, or atoms of a ligand."""

    kind: int
    copy: int
    type: str
    size: int
    crop: Sequence[int] | None = None
    """Tokens that the prediction has; None for all, an empty list for none."""
    positions: np.ndarray = field(default_factory=lambda: np.zeros((0, 3)))
    resolved: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @property
    def names(self) -> list[list[str]]:
        if self.type == "ligand":
            return [[f"C{i}"] for i in range(self.size)]
        return [ATOMS[self.type]] * self.size

    def place(self, rng: np.random.Generator, spread: float = 12.0) -> Chain:
        """Draw a random walk of tokens with atoms around them, all resolved."""
        step = 1.5 if self.type == "ligand" else 3.8
        walk = np.cumsum(rng.normal(size=(self.size, 3)) * step / 3**0.5, axis=0)
        centre = rng.normal(size=3) * spread
        blocks = [
            walk[k] + centre + rng.normal(size=(len(names), 3))
            for k, names in enumerate(self.names)
        ]
        self.positions = np.concatenate(blocks)
        self.resolved = np.ones(len(self.positions))
        return self


def _side(chains: Sequence[Chain], cropped: bool) -> tuple[dict[str, np.ndarray], np.ndarray]:
    tokens: list[dict[str, Any]] = []
    atoms: list[tuple[int, int, str]] = []
    coords, uid, number = [], -1, 0
    for asym, chain in enumerate(chains, start=1):
        kept = range(chain.size) if chain.crop is None or not cropped else chain.crop
        first, atomised, started = 0, chain.type == "ligand", False
        for place, names in enumerate(chain.names):
            last, number = first + len(names), number + 1
            if place in kept:
                uid += 0 if atomised and started else 1
                started = True
                kind = "protein" if chain.type == "phe" else chain.type
                tokens.append(
                    {
                        "token_index": number - 1,
                        "asym_id": asym,
                        "mol_entity_id": chain.kind,
                        "mol_sym_id": chain.copy,
                        "mol_sym_component_id": 1,
                        "mol_sym_token_index": place,
                        "residue_index": 1 if atomised else place + 1,
                        "num_atoms_per_token": len(names),
                        "start_atom_index": len(atoms),
                        "center_atom_index": len(atoms)
                        + (0 if atomised else names.index(CENTRE[chain.type])),
                        "rep_atom_index": len(atoms)
                        + (0 if atomised else names.index(REPRESENTATIVE[chain.type])),
                        "is_atomized": int(atomised),
                        **{f"is_{t}": int(t == kind) for t in ("protein", "rna", "dna", "ligand")},
                    }
                )
                atoms += [(len(tokens) - 1, uid, name) for name in names]
                coords.append(np.c_[chain.positions, chain.resolved][first:last])
            first = last
    out = {key: np.array([t[key] for t in tokens], np.int32) for key in tokens[0]}
    out["entity_id"], out["sym_id"] = out["mol_entity_id"], out["mol_sym_id"]
    out["atom_to_token_index"] = np.array([a[0] for a in atoms], np.int32)
    out["ref_space_uid"] = np.array([a[1] for a in atoms], np.int32)
    chars = np.zeros((len(atoms), 4, 64), np.int32)
    for row, (_, _, name) in enumerate(atoms):
        for column, character in enumerate(name.ljust(4)):
            chars[row, column, ord(character) - 32] = 1
    out["ref_atom_name_chars"] = chars
    return out, np.concatenate(coords)


def complex_features(
    chains: Sequence[Chain],
    truth: Sequence[Chain] | None = None,
    orders: dict[str, Any] | None = None,
) -> tuple[dict[str, Any], torch.Tensor]:
    """Return features and the predicted atoms' own positions [1, 1, A, 3].

    ``truth`` (default: the same chains, uncropped) gives the ground truth. ``orders`` maps a chain
    type to the equivalent atom orders of each of its residues, or of the whole ligand.
    """
    pred, coords = _side(chains, cropped=True)
    gt, gt_coords = _side(truth or chains, cropped=False)
    pred["token_mask"] = np.ones(len(pred["asym_id"]), np.float32)
    pred["atom_mask"] = np.ones(len(coords), np.float32)
    pred["token_bonds"] = np.zeros((len(pred["asym_id"]),) * 2, np.int32)
    f: dict[str, Any] = {k: torch.from_numpy(v)[None] for k, v in pred.items()}
    known = gt_coords[:, 3:]
    gt["atom_positions"] = (gt_coords[:, :3] * known).astype(np.float32)
    gt["atom_resolved_mask"] = known[:, 0].astype(np.float32)
    f["ground_truth"] = {k: torch.from_numpy(v)[None] for k, v in gt.items()}
    f["resolution"], f["id"] = torch.tensor([2.0]), ["1abc"]
    chain_of_atom = pred["asym_id"][pred["atom_to_token_index"]]
    types = {
        int(uid): chains[int(asym) - 1].type
        for uid, asym in zip(pred["ref_space_uid"], chain_of_atom, strict=True)
    }
    given = orders or {}
    f["ref_space_uid_to_perm"] = [
        {uid: np.array(given[t], np.int32) for uid, t in types.items() if t in given}
    ]
    return f, torch.from_numpy(coords[None, None, :, :3]).float()


ATOM_FEATURES = ("atom_to_token_index", "ref_space_uid", "ref_atom_name_chars", "atom_mask")


def pad(f: dict[str, Any], tokens: int, atoms: int) -> dict[str, Any]:
    """Add zero padding to the token and atom axes of the predicted side."""
    out = dict(f)
    for key, value in f.items():
        if not isinstance(value, torch.Tensor) or value.ndim < 2:
            continue
        amount = atoms if key in ATOM_FEATURES else tokens
        extra = [0] * (2 * value.ndim)
        extra[2 * (value.ndim - 2) + 1] = amount
        if key == "token_bonds":
            extra[1] = amount
        out[key] = torch.nn.functional.pad(value, extra)
    return out
