"""Prediction: complexes named by files, sampled, ranked by confidence, written as mmCIF.

``predict_files`` is ``tpf predict``. Each complex gets a folder with one mmCIF for every seed and
sample (pLDDT in the B column), its PAE, and ``confidence.json``, best sample first.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tpf import dist
from tpf.checkpoint import unused, write_text
from tpf.config import Config
from tpf.data.batch import to_device, to_torch
from tpf.data.features import featurize
from tpf.data.jobs import Job, read_job
from tpf.data.tables import TYPE_NAMES
from tpf.errors import DataError, TpfError, UsageError
from tpf.files import make_folder
from tpf.infer import Drawn, Loaded, array, draw, load_model, write_prediction
from tpf.metrics.clash import has_clash
from tpf.metrics.confidence import ERROR_RANGE, confidence_metrics, expected
from tpf.metrics.evaluate import sample_confidence
from tpf.metrics.picture import Trace, traces
from tpf.metrics.rasa import exposure
from tpf.metrics.structure import Scored, Structure, from_features, unbatch
from tpf.report.predict import write_prediction_report


@dataclass
class Prediction:
    """What was predicted of one complex."""

    name: str
    document: dict[str, Any] = field(default_factory=dict)
    """Content of confidence.json."""
    picture: list[Trace] = field(default_factory=list)
    """The best sample."""
    error: str = ""
    """Why there is none."""


def predict_files(
    path: Path,
    inputs: Sequence[Path],
    overrides: list[str],
    *,
    out: Path,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
    say: Callable[[str], None] = lambda sentence: None,
) -> list[Prediction]:
    """Predict every input with the EMA weights of a checkpoint or run; write ``out``.

    ``say`` gets what was inferred or dropped when an input was read. Raises ``UsageError`` for an
    input that cannot be read, before anything is sampled. A complex that fails while it is sampled
    leaves its reason; the others go on.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("tpf predict runs as one process; start it without torchrun")
    if out.exists():
        raise UsageError(f"--out {out} exists; nothing is overwritten: choose another folder")
    device = dist.start().device
    loaded = load_model(path, overrides, device)
    jobs = [_read(file, loaded.config) for file in inputs]
    make_folder(out)
    done = []
    for count, job in enumerate(jobs):
        progress(job.name, count, len(jobs))
        for note in job.notes:
            say(f"{job.name}: {note}")
        folder = unused(out / job.name)
        folder.mkdir(parents=True)
        try:
            done.append(_predict(loaded, job, folder))
        except torch.OutOfMemoryError:
            reason = f"out of memory at {len(job.tokens)} tokens; take fewer --samples or chains"
            done.append(Prediction(job.name, error=reason))
        except TpfError as error:
            done.append(Prediction(job.name, error=str(error)))
    write_prediction_report(
        out / "report.html",
        loaded.origin,
        [(p.name, p.document, p.picture, p.error) for p in done],
    )
    return done


def _read(path: Path, config: Config) -> Job:
    try:
        return read_job(path, config.data)
    except DataError as error:
        raise UsageError(f"{path}: {error.stage}: {error.reason}") from error


def _predict(loaded: Loaded, job: Job, folder: Path) -> Prediction:
    config, tables = loaded.config, job.tokens.tables
    samples: list[dict[str, Any]] = []
    pictures: list[list[Trace]] = []
    for seed in range(config.validate.seeds):
        batch = _features(job, config, seed, next(loaded.model.parameters()).device)
        drawn = draw(loaded.model, batch, config, seed)
        plddt, x = drawn.plddt(), array(drawn.x[0])
        structure = from_features(unbatch(batch), automorphisms=False)
        for k in range(len(x)):
            stem = f"seed{seed}-sample{k}"
            summary = _confidence(batch, drawn, k, structure)
            summary["chain_plddt"] = {
                str(tables.chain_id[c]): float(plddt[k, structure.chain == c].mean())
                for c in range(structure.n_chains)
            }
            write_prediction(
                folder / f"{stem}.cif", tables, x[k], plddt[k], components=job.components
            )
            _write_pae(folder / f"{stem}-pae.npz", drawn, k)
            samples.append({"file": f"{stem}.cif", "seed": seed, "sample": k, **summary})
            names = tables.chain_id.tolist()
            pictures.append(traces(structure, names, x[k].astype(np.float64), plddt[k], None))
    order = sorted(range(len(samples)), key=lambda i: -samples[i]["ranking_score"])
    document = {
        "id": job.name,
        "folder": folder.name,
        "checkpoint": loaded.origin,
        "n_tokens": len(job.tokens),
        "chains": _chains(job),
        "notes": list(job.notes),
        "samples": [samples[i] for i in order],
    }
    write_text(folder / "confidence.json", json.dumps(document, indent=1, allow_nan=False) + "\n")
    return Prediction(job.name, document, pictures[order[0]])


def _features(job: Job, config: Config, seed: int, device: torch.device) -> dict[str, Any]:
    """Return the features of a whole complex; every draw follows from the seed and its name."""
    features = featurize(
        job.tokens,
        np.arange(len(job.tokens)),
        job.dictionary,
        np.random.default_rng([seed, zlib.crc32(job.name.encode())]),
        config=config.data,
        msa=job.alignments,
        training=False,
    )
    return to_device(to_torch(features), device)


def _confidence(
    batch: dict[str, Any], drawn: Drawn, index: int, structure: Structure
) -> dict[str, Any]:
    """Return the confidence of one sample: what metrics.md A7 defines without a reference."""
    x = array(drawn.x[0, index]).astype(np.float64)
    confidence = sample_confidence(
        batch, drawn.x, drawn.heads, drawn.distogram, entry=0, index=index
    )
    disorder, clash = exposure(structure, x).disorder(), has_clash(structure, x)
    scored = Scored.everything(structure)
    found = confidence_metrics(structure, confidence, scored, (disorder, clash))
    rankings = {name: found.pop(f"sample_{name}") for name in ("ranking_score", "ranking_score_si")}
    return {**rankings, **found, "disorder": disorder, "has_clash": clash}


def _write_pae(path: Path, drawn: Drawn, index: int) -> None:
    pae: NDArray[np.float32] = array(expected(drawn.heads["pae"][0, index], ERROR_RANGE))
    np.savez_compressed(path, pae=pae.astype(np.float16))


def _chains(job: Job) -> list[dict[str, Any]]:
    tables = job.tokens.tables
    return [
        {
            "id": str(tables.chain_id[c]),
            "type": TYPE_NAMES[int(tables.chain_type[c])],
            "entity": int(tables.chain_entity[c]),
            "residues": int((tables.res_chain == c).sum()),
            "msa_rows": len(job.alignments[e].rows) if (e := int(tables.chain_entity[c])) in
            job.alignments else 1,
        }
        for c in range(len(tables.chain_id))
    ]  # fmt: skip
