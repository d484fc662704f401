"""The tiny preset learns crambin (46 residues) by heart: ten minutes on two CPU cores.

Two runs, the second from the weights of the first. At high noise levels alone the model soon gives
the one structure, in its one hand, whatever the noise. Trained on all levels from the start it
follows the noise instead, whose hand is a matter of chance: half of all samples are mirror images.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tpf.cli.display import Silent
from tpf.config import load
from tpf.train import Options, train

RECIPE = [
    f"data.path={Path(__file__).parent / 'structures' / '1cbn.cif.gz'}",
    "data.conformers=ideal",
    "model.dropout_pair=0",
    "model.dropout_msa=0",
    "loss.plddt=0",
    "loss.pde=0",
    "loss.pae=0",
    "loss.resolved=0",
    "loss.smooth_lddt=0",  # it is the same for both hands
    "train.cpu_threads=2",
    "train.lr=5e-3",
    "train.diffusion_samples=24",
    "train.diffusion_chunk=24",
    "train.max_recycles=0",
    "train.checkpoint_every=1000",
    "validate.recycles=0",
]
HIGH_NOISE = ["train.steps=150", "train.noise_mean=3", "train.noise_sd=1.2"]
ALL_LEVELS = [
    "train.steps=1000",
    "train.noise_mean=0.6",
    "train.noise_sd=2",
    "train.decay_after=600",
    "train.decay_every=32",
    "train.decay=0.75",
    "validate.samples=5",
]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tiny_learns_one_protein(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # a laptop has none
    begin = time.monotonic()
    first, second = tmp_path / "first", tmp_path / "second"
    train(load("tiny", RECIPE + HIGH_NOISE), Options(first, validate=False), Silent())
    train(load("tiny", RECIPE + ALL_LEVELS), Options(second, init=first), Silent())
    assert time.monotonic() - begin < 600
    found = json.loads((second / "validation" / "step-001000" / "metrics.json").read_text())
    samples = found["targets"][0]["seeds"][0]["samples"]
    assert len(samples) == 5
    for sample in samples:
        assert sample["lddt_intra_protein"] >= 0.8, samples
        assert sample["rmsd"] < 1.5, "a mirror image has 7 Angstrom"
