"""Coordinates and bonds of entries of the archive against biotite, an independent reader."""

from __future__ import annotations

import gzip
import io
from typing import Any

import numpy as np
import pytest
from test_real_files import SHARED, load

from tpf.data.tables import LIGAND, Tables

pdbx = pytest.importorskip("biotite.structure.io.pdbx", reason="biotite is not installed")
struc = pytest.importorskip("biotite.structure", reason="biotite is not installed")
pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="shared/data is not beside the repo")


def read(folder: str, name: str) -> Any:  # noqa: ANN401 (biotite has no types)
    text = gzip.decompress((SHARED / folder / f"{name}.cif.gz").read_bytes()).decode()
    return pdbx.CIFFile.read(io.StringIO(text))


@pytest.mark.parametrize(
    "name",
    ["1ubq", "1bna", "1cbs", "3o5r", "4i39", "6yqw", "7f5d"],  # the last four with altlocs
)
def test_coordinates_against_biotite(name: str) -> None:
    array = pdbx.get_structure(
        read("general", name), model=1, altloc="occupancy", use_author_fields=False
    )
    theirs = {
        (a.chain_id, int(a.res_id), a.atom_name): a.coord
        for a in array
        if a.element not in ("H", "D") and a.res_name != "HOH" and a.res_id > 0
    }
    tables = load("general", name).tables
    chain = tables.chain_id[tables.res_chain]
    seen = 0
    for i in np.flatnonzero(tables.occupancy > 0):
        r = tables.atom_residue[i]
        if tables.chain_type[tables.res_chain[r]] == LIGAND or tables.res_name[r] == "ARG":
            continue  # biotite gives ligands no label number; arginines may have been renamed
        key = (str(chain[r]), int(tables.res_id[r]), str(tables.atom_name[i]))
        np.testing.assert_allclose(tables.pos[i], theirs[key], atol=2e-3)
        seen += 1
    assert seen > 400


PLAIN = (
    "102m 1a7g 1a8o 1aki 1bna 1bo0 1cbs 1cyo 1fas 1fki 1j59 1k1a 1l2y 1lvz 1o1z 1orc 1ubq 2gdo 4y60"
).split()
LINKED = {  # bonds between residues other than along a main chain of standard residues
    "1en2": 3, "1ema": 2, "1xda": 1, "2dty": 12, "4f8o": 2, "4i39": 1, "5lwx": 3, "6z4n": 2,
    "7n0a": 6, "7qhl": 1, "7x9k": 1,
}  # fmt: skip


@pytest.mark.parametrize("name", [*PLAIN, *LINKED])
def test_bonds(name: str) -> None:
    folder = "kinase" if (SHARED / "kinase" / f"{name}.cif.gz").is_file() else "general"
    tables = load(folder, name).tables
    bonds = struc.connect_via_residue_names(_array(tables)).as_array()
    expected = {(min(i, j), max(i, j)) for i, j, _ in bonds.tolist()}
    expected = {pair for pair in expected if not _length(tables, pair) > 2.4}
    found = {tuple(pair) for pair in tables.bonds.tolist()}
    assert expected <= found
    extra = found - expected
    assert len(extra) == LINKED.get(name, 0)
    assert {_names(tables, pair) for pair in extra} <= _recorded(folder, name)


def _array(tables: Tables) -> Any:  # noqa: ANN401 (biotite has no types)
    array = struc.AtomArray(len(tables.atom_name))
    array.coord = np.nan_to_num(tables.pos)
    array.atom_name = tables.atom_name
    array.res_name = tables.res_name[tables.atom_residue]
    array.res_id = tables.atom_residue + 1
    array.chain_id = tables.chain_id[tables.res_chain[tables.atom_residue]]
    array.element = np.full(len(tables.atom_name), "C")
    array.hetero = ~tables.res_standard[tables.atom_residue]
    return array


def _length(tables: Tables, pair: tuple[int, int]) -> float:
    return float(np.linalg.norm(tables.pos[pair[0]] - tables.pos[pair[1]]))


def _names(tables: Tables, pair: tuple[int, ...]) -> frozenset[tuple[str, str]]:
    return frozenset(
        (str(tables.res_name[tables.atom_residue[i]]), str(tables.atom_name[i])) for i in pair
    )


def _recorded(folder: str, name: str) -> set[frozenset[tuple[str, str]]]:
    """Return the ends (component, atom) of the covalent links that the file records."""
    block = read(folder, name).block
    if "struct_conn" not in block:
        return set()
    table = block["struct_conn"]
    sides = [
        list(
            zip(
                table[f"ptnr{k}_label_comp_id"].as_array(str).tolist(),
                table[f"ptnr{k}_label_atom_id"].as_array(str).tolist(),
                strict=True,
            )
        )
        for k in (1, 2)
    ]
    return {frozenset(ends) for ends in zip(*sides, strict=True)}
