"""Damaged files: no crash, no hang, no empty sample; every one gives features or a reason."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from damage import PLAIN_DAMAGE, damaged
from poses import posed_ligand, sdf

from tpf.config import DataConfig
from tpf.data.ccd import Dictionary
from tpf.data.crop import crop
from tpf.data.features import featurize
from tpf.data.ligands import define_ligand
from tpf.data.load import load_tables
from tpf.data.tokens import tokenize
from tpf.errors import DataError, UsageError

EXAMPLES = Path(__file__).resolve().parents[2] / "data" / "examples"
LONGEST = 20.0
"""Seconds for one file, many times what the slowest takes."""
CONFIG = DataConfig(conformers="ideal", max_templates=0)


def outcome(path: Path, seed: int) -> str:
    """Return "sample" or the stage at which a file is refused."""
    begin = time.perf_counter()
    try:
        tokens = tokenize(load_tables(path))
        index = crop(tokens, 96, np.random.default_rng(seed))
        sample = featurize(tokens, index, Dictionary(), np.random.default_rng(seed), config=CONFIG)
    except DataError as error:
        assert error.entry and error.reason
        return error.stage
    finally:
        assert time.perf_counter() - begin < LONGEST
    assert 0 < len(sample["token_mask"]) <= 96
    assert sample["ground_truth"]["atom_resolved_mask"].any()
    for name in ("ref_pos", "ref_charge", "profile"):
        assert np.isfinite(sample[name]).all(), name
    assert np.isfinite(sample["ground_truth"]["atom_positions"]).all()
    return "sample"


def run(files: list[Path], variants: int, folder: Path) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    for k in range(variants):
        source = files[k % len(files)]
        path = folder / f"{k}-{source.name.replace('.gz', '')}"
        path.write_bytes(damaged(source.read_bytes(), np.random.default_rng(k)))
        try:
            outcomes[outcome(path, k)] += 1
        except Exception as error:
            raise AssertionError(f"variant {k} of {source.name}: {error!r}") from error
        path.unlink()
    return outcomes


def test_damaged_examples(tmp_path: Path) -> None:
    files = sorted(EXAMPLES.iterdir())
    small = [file for file in files if file.name[:4] in ("1ubq", "1a8o", "4zey", "5i55")]
    outcomes = run(small, 60, tmp_path)
    assert outcomes["sample"] > 5 and outcomes["parse"] > 5 and outcomes["read"] > 2


def test_damaged_poses_and_smiles_are_defined_or_refused(tmp_path: Path) -> None:
    pytest.importorskip("rdkit")
    part, pos = posed_ligand(EXAMPLES / "4cup.cif.gz", "ZYB")
    outcomes: Counter[str] = Counter()
    for k in range(120):
        rng = np.random.default_rng(k)
        if k % 2:
            letters = list("CC1CN(CCO1)Cc1ccc(cc1)C(=O)Nc1cccc(c1)-c1ccc[nH]1")
            for place in rng.integers(len(letters), size=1).tolist():
                letters[place] = str(rng.choice(list("CNOSCNOSF[]()=#@+-12%./*$")))
            source = "".join(letters)
        else:
            damage = PLAIN_DAMAGE[k // 2 % len(PLAIN_DAMAGE)]
            source = str(tmp_path / f"{k}.sdf")
            text = sdf(part, pos, v3000=bool(k // 2 % 2)).encode()
            Path(source).write_bytes(damage(text, rng))
        try:
            assert len(define_ligand(source).component)
            outcomes["defined"] += 1
        except (DataError, UsageError) as error:
            assert "\n" not in str(error).replace(source, "")
            outcomes["refused"] += 1
    assert outcomes["defined"] > 5 and outcomes["refused"] > 50


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_thousand_damaged_entries(shared_data: Path, tmp_path: Path) -> None:
    names = ("kinase_from_pdb/4g5j", "kinase/7qhl", "kinase/2gdo", "general/2q2k", "general/1en2",
             "general/4zey", "general/1bna")  # fmt: skip
    files = [shared_data / f"{name}.cif.gz" for name in names]
    files += [shared_data / "torture" / "bcif_3jqh.bcif.gz"]
    files += [file for file in sorted(EXAMPLES.iterdir()) if file.name[:4] in ("1a7g", "4cup")]
    outcomes = run(files, 2000, tmp_path)
    assert outcomes["sample"] > 200 and outcomes["parse"] > 200
