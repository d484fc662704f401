"""The tiny preset learns crambin (46 residues) by heart: ten minutes on two CPU cores."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tpf.cli.display import Silent
from tpf.config import load
from tpf.train import Options, train

STEPS = 1600
RECIPE = [
    f"data.path={Path(__file__).parent / 'structures' / '1cbn.cif.gz'}",
    "data.conformers=ideal",
    "model.dropout_pair=0",
    "model.dropout_msa=0",
    "loss.plddt=0",
    "loss.pde=0",
    "loss.pae=0",
    "loss.resolved=0",
    f"train.steps={STEPS}",
    "train.cpu_threads=2",
    "train.lr=5e-3",
    "train.decay_after=1000",
    "train.decay_every=50",
    "train.decay=0.75",
    "train.diffusion_samples=24",
    "train.diffusion_chunk=24",
    "train.max_recycles=0",
    "train.checkpoint_every=1000",
    "validate.recycles=0",
]
"""A high rate for long, then a steep decay (an early decay ends far lower); no confidence heads."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tiny_learns_one_protein(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # a laptop has none
    start = time.monotonic()
    summary = train(load("tiny", RECIPE), Options(tmp_path / "run"), Silent())
    assert time.monotonic() - start < 600
    before, after = (
        summary["validation"][step]["lddt_intra_protein"]["mean"] for step in (0, STEPS)
    )
    assert before < 0.3 and after >= 0.8, (before, after)
