"""Random but consistent feature dictionaries with proteins, nucleotides and ligands.

``random_features`` imitates a collated batch: chains of residues whose atoms are contiguous,
one-hot types, ids that agree with each other, padding of zeros at the end of every axis.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpf.data.chem import ATOMS, RESIDUES, center_atom, representative_atom

PROTEIN, RNA, DNA, LIGAND = range(4)
GAP = 31


def random_features(
    *,
    n_batch: int = 1,
    n_tokens: int = 24,
    n_rows: int = 5,
    n_templates: int = 2,
    pad_tokens: int = 0,
    pad_atoms: int = 0,
    pad_rows: int = 0,
    generator: torch.Generator | None = None,
) -> dict[str, Any]:
    """Build features [B, ...] (spec model.md 1.3); padding comes on top of the real sizes."""
    g = generator or torch.Generator().manual_seed(0)
    samples = [_sample(n_tokens, n_rows, n_templates, g) for _ in range(n_batch)]
    n_atoms = max(len(sample["atom_mask"]) for sample in samples) + pad_atoms
    sizes = {"N": n_tokens + pad_tokens, "A": n_atoms, "M": n_rows + pad_rows}
    return {
        name: torch.stack([_pad(sample[name], axes, sizes) for sample in samples])
        for name, axes in AXES.items()
    }


AXES = {
    **dict.fromkeys(
        ("residue_index", "token_index", "asym_id", "entity_id", "sym_id", "mol_type"), "N"
    ),
    **dict.fromkeys(("is_protein", "is_rna", "is_dna", "is_ligand", "is_atomized"), "N"),
    **dict.fromkeys(("token_mask", "num_atoms_per_token", "start_atom_index"), "N"),
    **dict.fromkeys(("center_atom_index", "rep_atom_index", "deletion_mean", "cyclic_mask"), "N"),
    **dict.fromkeys(("restype", "profile"), "N."),
    "token_bonds": "NN",
    **dict.fromkeys(("atom_to_token_index", "atom_mask", "ref_mask"), "A"),
    **dict.fromkeys(("ref_charge", "ref_space_uid"), "A"),
    **dict.fromkeys(("ref_pos", "ref_element"), "A."),
    "ref_atom_name_chars": "A..",
    "msa": "MN.",
    **dict.fromkeys(("has_deletion", "deletion_value", "msa_mask"), "MN"),
    "num_paired_seqs": ".",
    "template_restype": ".N.",
    **dict.fromkeys(("template_pseudo_beta_mask", "template_backbone_frame_mask"), ".N"),
    **dict.fromkeys(("template_distogram", "template_unit_vector"), ".NN."),
}
"""Axes of each feature without the batch axis; only the named ones are padded."""


def _pad(x: Tensor, axes: str, sizes: dict[str, int]) -> Tensor:
    for axis, name in enumerate(axes):
        if name in sizes:
            short = sizes[name] - x.shape[axis]
            x = F.pad(x, (0, 0) * (x.dim() - 1 - axis) + (0, short))
    return x


def _sample(n_tokens: int, n_rows: int, n_templates: int, g: torch.Generator) -> dict[str, Tensor]:
    f = _tokens(n_tokens, g)
    f |= _atoms(f, g)
    f |= _alignment(f, n_rows, g)
    f |= _templates(f["asym_id"], f["token_mask"], n_templates, g)
    return f


def _tokens(n: int, g: torch.Generator) -> dict[str, Tensor]:
    """Two copies of a protein, RNA, DNA, and a ligand of single atoms (in that order)."""
    protein = max(1, n // 4)
    nucleic = max(1, n // 8)
    lengths = torch.tensor([protein, protein, nucleic, nucleic, n - 2 * (protein + nucleic)])
    kinds = torch.tensor([PROTEIN, PROTEIN, RNA, DNA, LIGAND])
    chain = torch.repeat_interleave(torch.arange(5), lengths)
    mol_type = kinds[chain]
    first = lengths.cumsum(0) - lengths
    number = torch.arange(n) - first[chain] + 1
    ligand = mol_type == LIGAND
    low = torch.tensor([0, 21, 26, 20])[mol_type]
    high = torch.tensor([20, 25, 30, 21])[mol_type]
    code = low + (torch.rand(n, generator=g) * (high - low)).long()
    bonds = torch.zeros(n, n, dtype=torch.int32)
    atoms = torch.nonzero(ligand)[:, 0]
    bonds[atoms[:-1], atoms[1:]] = bonds[atoms[1:], atoms[:-1]] = 1
    return {
        "residue_index": torch.where(ligand, 1, number).int(),
        "token_index": torch.arange(3, n + 3).int(),
        "asym_id": (chain + 1).int(),
        "entity_id": torch.tensor([1, 1, 2, 3, 4])[chain].int(),
        "sym_id": torch.tensor([1, 2, 1, 1, 1])[chain].int(),
        "mol_type": mol_type.int(),
        "restype": F.one_hot(code, 32).int(),
        "is_protein": (mol_type == PROTEIN).int(),
        "is_rna": (mol_type == RNA).int(),
        "is_dna": (mol_type == DNA).int(),
        "is_ligand": ligand.int(),
        "is_atomized": ligand.int(),
        "token_mask": torch.ones(n),
        "token_bonds": bonds,
        "cyclic_mask": torch.zeros(n, dtype=torch.bool),
    }


def _atom_names(residue: str, kind: int) -> tuple[str, ...]:
    return ("C1",) if kind == LIGAND else ATOMS[residue]


def _atoms(f: dict[str, Tensor], g: torch.Generator) -> dict[str, Tensor]:
    names = [RESIDUES[code] for code in f["restype"].argmax(-1).tolist()]
    kinds = f["mol_type"].tolist()
    rows = [
        (len(ATOMS[r]), ATOMS[r].index(center_atom(r)), ATOMS[r].index(representative_atom(r)))
        if kind != LIGAND
        else (1, 0, 0)
        for r, kind in zip(names, kinds, strict=True)
    ]
    counts, center, representative = torch.tensor(rows).unbind(1)
    start = counts.cumsum(0) - counts
    token = torch.repeat_interleave(torch.arange(len(counts)), counts)
    n = len(token)
    # A residue is a reference space of its own, and so is the whole ligand.
    space = torch.where(f["is_ligand"] > 0, len(counts), torch.arange(len(counts)))[token]
    atoms = [a for r, kind in zip(names, kinds, strict=True) for a in _atom_names(r, kind)]
    chars = torch.tensor([[ord(character) - 32 for character in a.ljust(4)] for a in atoms])
    element = torch.randint(0, 16, (n,), generator=g)
    return {
        "num_atoms_per_token": counts.int(),
        "start_atom_index": start.int(),
        "center_atom_index": (start + center).int(),
        "rep_atom_index": (start + representative).int(),
        "atom_to_token_index": token.int(),
        "atom_mask": torch.ones(n),
        "ref_pos": 2 * torch.randn(n, 3, generator=g),
        "ref_mask": torch.ones(n, dtype=torch.int32),
        "ref_element": F.one_hot(element, 119).int(),
        "ref_charge": torch.randint(-1, 2, (n,), generator=g).float(),
        "ref_atom_name_chars": F.one_hot(chars, 64).int(),
        "ref_space_uid": space.int(),
    }


def _alignment(f: dict[str, Tensor], n_rows: int, g: torch.Generator) -> dict[str, Tensor]:
    n = len(f["token_mask"])
    msa = F.one_hot(torch.randint(0, 32, (n_rows, n), generator=g), 32)
    msa[0] = f["restype"]
    deletions = torch.randint(0, 3, (n_rows, n), generator=g).float()
    return {
        "msa": msa.int(),
        "has_deletion": (deletions > 0).float(),
        "deletion_value": torch.atan(deletions / 3) * 2 / torch.pi,
        "msa_mask": torch.ones(n_rows, n),
        "profile": msa.float().mean(0),
        "deletion_mean": deletions.mean(0),
        "num_paired_seqs": torch.tensor([1], dtype=torch.int32),
    }


def _templates(
    asym_id: Tensor, token_mask: Tensor, n_templates: int, g: torch.Generator
) -> dict[str, Tensor]:
    n = len(token_mask)
    same_chain = (asym_id[:, None] == asym_id)[None, :, :, None]
    code = torch.randint(0, 21, (n_templates, n), generator=g)
    present = torch.rand(n_templates, n, generator=g) < 0.7
    bins = torch.randint(0, 39, (n_templates, n, n), generator=g)
    vector = F.normalize(torch.randn(n_templates, n, n, 3, generator=g), dim=-1)
    return {
        "template_restype": F.one_hot(code.where(present, GAP), 32).int(),
        "template_pseudo_beta_mask": present.float(),
        "template_backbone_frame_mask": present.float(),
        "template_distogram": F.one_hot(bins, 39).float() * same_chain,
        "template_unit_vector": vector * same_chain,
    }


def unzero(module: torch.nn.Module, scale: float = 0.3) -> None:
    """Give every parameter that starts at a constant a random value, so that all of them act."""
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        if parameter.numel() == 1 or parameter.detach().std() == 0:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            fan = parameter.shape[1] if parameter.dim() == 2 else 1
            parameter.data += (scale * noise / fan**0.5).to(parameter)
