"""Agreement with the featuriser of OpenFold3 0.5.0, where installed, on the same mmCIF entries.

Chains are compared by their name in the file and their copy, since the two number copies of an
assembly in another order. What differs on purpose stands in docs/weights.md.
"""

from __future__ import annotations

import gzip
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tpf.data.chem import ELEMENTS
from tpf.data.features import layout, layout_features, token_bonds, token_features
from tpf.data.load import load_tables
from tpf.data.molecules import find_molecules
from tpf.data.tokens import tokenize

_REASON = "openfold3 0.5.0 and what its preprocessing needs (boto3, pdbeccdutils) are not installed"
preprocessing = pytest.importorskip(
    "openfold3.core.data.pipelines.preprocessing.structure", reason=_REASON, exc_type=ImportError
)

ROOT = Path(__file__).resolve().parents[2]
BUILT_IN = sorted((ROOT / "data" / "examples").glob("*.cif.gz"))
TOKENS = {"1en2": (153, 152), "3ek3": (442, 456), "1ema": (257, 287), "1ncb": (3836, 3840)}
"""Tokens of ours and theirs where they differ (docs/weights.md says why)."""
EQUAL = ("is_protein", "is_rna", "is_dna", "is_ligand", "is_atomized", "num_atoms_per_token",
         "start_atom_index", "atom_to_token_index", "restype", "token_bonds", "A_name", "A_residue",
         "A_element", "A_known")  # fmt: skip

Arrays = dict[str, NDArray[Any]]


def our_features(path: Path) -> Arrays:
    tokens = tokenize(load_tables(path))
    t = tokens.tables
    lay = layout(tokens, np.arange(len(tokens)))
    f: Arrays = dict(token_features(tokens, find_molecules(tokens), lay.token))
    f |= layout_features(tokens, lay)
    residue = t.atom_residue[lay.atom]
    names = [str(c).partition("-") for c in t.chain_id]
    chains = np.array([f"{name}/{int(copy or 1):03d}" for name, _, copy in names])
    return f | {
        "token_bonds": token_bonds(tokens, lay),
        "restype": tokens.restype,
        "A_name": t.atom_name[lay.atom],
        "A_residue": t.res_name[residue],
        "A_element": np.array([ELEMENTS[e].upper() for e in t.element[lay.atom]]),
        "A_known": t.occupancy[lay.atom] > 0,
        "A_position": t.pos[lay.atom],
        "A_chain": chains[t.res_chain[residue]],
    }


def peer_features(path: Path, folder: Path) -> Arrays:
    parsing = importlib.import_module("openfold3.core.data.io.structure.cif")
    component = importlib.import_module("openfold3.core.data.primitives.structure.component")
    tokenization = importlib.import_module("openfold3.core.data.primitives.structure.tokenization")
    featurization = importlib.import_module("openfold3.core.data.pipelines.featurization.structure")
    plain = folder / path.name.removesuffix(".gz")
    plain.write_bytes(gzip.decompress(path.read_bytes()))
    expand = b"_pdbx_struct_assembly_gen" in plain.read_bytes()
    parsed = parsing.parse_mmcif(plain, expand_bioassembly=expand, renumber_chain_ids=True)
    (block,) = parsed.structure_file.values()
    atoms = preprocessing.cleanup_structure_of3(
        parsed.atom_array, block, component.BiotiteCCDWrapper()
    )
    tokenization.tokenize_atom_array(atoms)
    tokenization.add_token_positions(atoms)
    n = len(np.unique(atoms.token_id))
    made = featurization.featurize_structure_of3(atoms, n, is_gt=False, add_perm_features=False)
    f: Arrays = {name: x.numpy() for name, x in made.items()}
    labels = atoms.label_asym_id.astype(str)
    copies: dict[str, dict[str, int]] = {}
    for label, chain in zip(labels, atoms.chain_id.astype(str), strict=True):
        own = copies.setdefault(label, {})
        own.setdefault(chain, len(own) + 1)
    chains = zip(labels, atoms.chain_id.astype(str), strict=True)
    return f | {
        "restype": f["restype"].argmax(-1),
        "A_name": atoms.atom_name.astype(str),
        "A_residue": atoms.res_name.astype(str),
        "A_element": np.char.upper(atoms.element.astype(str)),
        "A_known": np.isfinite(atoms.coord[:, 0]) & (atoms.occupancy > 0),
        "A_position": atoms.coord,
        "A_chain": np.array([f"{label}/{copies[label][c]:03d}" for label, c in chains]),
    }


def by_chain(f: Arrays) -> Arrays:
    """Put atoms and tokens in the order of their chains' names."""
    atoms = np.argsort(f["A_chain"], kind="stable")
    tokens = np.argsort(f["A_chain"][f["start_atom_index"]], kind="stable")
    new_atom, new_token = np.argsort(atoms), np.argsort(tokens)
    result = {}
    for name, x in f.items():
        if name == "token_bonds":
            result[name] = x[tokens][:, tokens]
        elif name == "atom_to_token_index":
            result[name] = new_token[x[atoms]]
        elif name == "start_atom_index":
            result[name] = new_atom[x[tokens]]
        elif len(x) == len(atoms):
            result[name] = x[atoms]
        elif len(x) == len(tokens):
            result[name] = x[tokens]
    return result


def first_seen(*ids: NDArray[Any]) -> list[int]:
    """Number (tuples of) ids in the order in which they appear, so that only equality counts."""
    numbers: dict[Any, int] = {}
    rows = zip(*(x.tolist() for x in ids), strict=True)
    return [numbers.setdefault(row, len(numbers)) for row in rows]


def both(path: Path, folder: Path) -> tuple[Arrays, Arrays]:
    return by_chain(our_features(path)), by_chain(peer_features(path, folder))


@pytest.mark.parametrize("path", BUILT_IN, ids=lambda p: p.name[:4])
def test_built_in_entries_agree(path: Path, tmp_path: Path) -> None:
    ours, theirs = both(path, tmp_path)
    for name in EQUAL:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
    known = ours["A_known"]
    np.testing.assert_allclose(ours["A_position"][known], theirs["A_position"][known], atol=1e-3)
    for names in (["asym_id"], ["entity_id"], ["asym_id", "residue_index"]):
        numbers = [first_seen(*(f[name] for name in names)) for f in (ours, theirs)]
        assert numbers[0] == numbers[1], names
    for f in (ours, theirs):  # a chain is one copy of one entity
        assert first_seen(f["asym_id"]) == first_seen(f["entity_id"], f["sym_id"])
    polymer = ours["is_ligand"] == 0
    np.testing.assert_array_equal(
        ours["residue_index"][polymer], theirs["residue_index"][polymer], err_msg="residue_index"
    )


@pytest.mark.parametrize("name", TOKENS)
def test_known_differences(name: str, shared_data: Path, tmp_path: Path) -> None:
    ours, theirs = both(shared_data / "general" / f"{name}.cif.gz", tmp_path)
    assert (len(ours["restype"]), len(theirs["restype"])) == TOKENS[name]
