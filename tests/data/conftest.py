"""Entries that several tests look at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from assemblies import make_tables, make_tokens
from joined import KINASE, make, put
from poses import analog, sdf
from sample_features import PEPTIDE, features_of

from tpf.data.tables import DNA, LIGAND, PROTEIN, RNA, Tokens


@pytest.fixture(scope="module")
def mixed() -> Tokens:
    """Protein with a modified residue, DNA, RNA, a ligand on an atomized cysteine, an ion."""
    peptide = [*PEPTIDE, "PTR", "ALA"]
    tables = make_tables(
        [
            (PROTEIN, peptide),
            (DNA, ["DA", "DC"]),
            (RNA, ["G", "U"]),
            (LIGAND, ["ATP"]),
            (LIGAND, ["MG"]),
        ],
        links=[((0, 2, "SG"), (3, 0, "C8"))],
    )
    return make_tokens(tables, atomized=[2])


@pytest.fixture(scope="module")
def mixed_features(mixed: Tokens) -> dict[str, Any]:
    return features_of(mixed)


@pytest.fixture(scope="session")
def kinase(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SRC whose inhibitor is replaced by an analog without a methyl group, under the name LIG."""
    folder = tmp_path_factory.mktemp("kinase")
    pose = put(folder, "analog.sdf", sdf(*analog(KINASE, "MPZ")))
    result = make(folder, KINASE, pose, out="src-analog.cif.gz")
    assert result.ligands == ("LIG",) and result.replaced == ("MPZ of chain A",)
    return result.out
