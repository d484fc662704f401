"""The DFG phenylalanine of a made-up kinase and of a real one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from metric_structures import build_structure

from tpf.data.chem import ONE_LETTER
from tpf.data.load import load_tables
from tpf.data.tables import PROTEIN
from tpf.data.tokens import tokenize
from tpf.metrics.kinase import kinase_metrics
from tpf.metrics.structure import Sample, Scored, Structure, from_tokens

LOOP = "HRDLKPENLLIDQQGYIQVTDFG"
PHE = LOOP.index("DFG") + 30
CODES = {letter: code for code, letter in ONE_LETTER.items() if len(code) == 3}


def kinase(sequence: str) -> Structure:
    names = [CODES[letter] for letter in sequence]
    residues = [k for k in range(len(names)) for _ in range(2)]
    return build_structure(
        [PROTEIN] * len(residues),
        residues=residues,
        names=["CA", "CB"] * len(names),
        res_names=names,
    )


def shift(structure: Structure, moved: float, resolved: bool = True) -> dict[str, float]:
    rng = np.random.default_rng(0)
    truth = np.repeat(np.cumsum(rng.normal(size=(structure.n_atoms // 2, 3)), axis=0), 2, axis=0)
    predicted = truth + 5.0
    mask = np.ones(structure.n_atoms)
    if structure.n_atoms > 2 * PHE + 3:
        predicted[2 * PHE + 3, 0] += moved  # CB of the residue after the aspartate
        mask[2 * PHE + 3] = resolved
    sample = Sample.make(predicted, truth, mask)
    return kinase_metrics(structure, sample, Scored.everything(structure))


def test_the_shift_of_a_made_up_kinase() -> None:
    structure = kinase("A" * 30 + LOOP + "A" * 10)
    assert shift(structure, 0.0) == {"dfg_shift": pytest.approx(0.0, abs=1e-9)}
    assert shift(structure, 10.0) == {"dfg_shift": pytest.approx(10.0)}
    assert shift(structure, 10.0, resolved=False) == {}
    assert shift(kinase("A" * 70), 10.0) == {}
    assert shift(kinase(LOOP), 0.0) == {}  # too short to be fitted


def test_a_real_kinase_turned_by_a_flip(shared_data: Path) -> None:
    path = shared_data / "kinase" / "8aem.cif.gz"
    if not path.is_file():
        pytest.skip(f"{path.name} is not in shared/data/kinase")
    tokens = tokenize(load_tables(path))
    structure = from_tokens(tokens)
    tables = tokens.tables
    truth = np.nan_to_num(tables.pos.astype(float))
    resolved = np.isfinite(tables.pos).all(axis=1)
    sequence = "".join(ONE_LETTER.get(n, "X") for n in tables.res_name[tables.res_chain == 0])
    residue = sequence.index("DWG") + 1  # CK2 has tryptophan in the place of phenylalanine
    predicted = truth.copy()
    own = (tables.atom_residue == residue) & ~np.isin(tables.atom_name, ("N", "CA", "C", "O"))
    predicted[own] += [6.0, 0.0, 8.0]
    sample = Sample.make(predicted, truth, resolved)
    found = kinase_metrics(structure, sample, Scored.everything(structure))
    assert found["dfg_shift"] == pytest.approx(10.0, abs=1e-6)
