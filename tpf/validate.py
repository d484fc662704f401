"""Validation: sample structures of whole entries, score them, write the results.

``validate_model`` is what training calls, ``validate_checkpoint`` is ``tpf validate``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tpf import checkpoint, dist
from tpf.config import Config, from_dict, to_dict
from tpf.data.batch import Batch, to_device, to_torch
from tpf.data.dataset import ValidationDataset
from tpf.data.records import Entries, Record, failure_of
from tpf.data.tables import Tables
from tpf.data.write import write_mmcif
from tpf.errors import DataError, UsageError
from tpf.kernels.describe import check_impl
from tpf.metrics.confidence import PLDDT_RANGE, expected
from tpf.metrics.evaluate import evaluate_samples
from tpf.metrics.schema import (
    SeedResult,
    Skipped,
    TargetResult,
    Validation,
    compare,
    read_json,
    write_csv,
    write_json,
)
from tpf.metrics.structure import Scored, from_features, unbatch
from tpf.model.model import Model
from tpf.permutation import align
from tpf.report.validate import write_validation_report

_TORCH_STREAM = 3


def validate_model(
    model: Model,
    entries: Entries,
    config: Config,
    folder: Path,
    *,
    origin: str,
    only: list[str] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    progress: Callable[[str, int, int], None] = lambda target, done, total: None,
) -> Validation | None:
    """Sample and score every entry, or those of the ids ``only``; write ``folder``.

    Uses the model's present weights and restores its training mode. A target that fails is
    skipped with its reason. Returns None if ``should_stop`` became true; nothing but predicted
    structures is written then.
    """
    targets = Targets(entries, config, only)
    was_training = model.training
    model.eval()
    done: list[TargetResult] = []
    skipped = list(targets.skipped)
    try:
        for count, index in enumerate(targets.chosen):
            record = targets.record(index)
            progress(record.id, count, len(targets.chosen))
            try:
                with torch.compiler.set_stance("force_eager"):  # every target has its own sizes
                    done.append(_validate_target(model, targets, index, folder / "predicted"))
            except torch.OutOfMemoryError:
                skipped.append(Skipped(record.id, f"out of memory at {record.n_tokens} tokens"))
            except Exception as error:  # the other targets still count
                bad = failure_of(record.id, error)
                skipped.append(Skipped(bad.id, f"{bad.stage}: {bad.reason}"))
            if should_stop():
                return None
    finally:
        model.train(was_training)
    result = Validation.build(
        origin, _settings(config), done, skipped, config.validate.selection_weights
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_json(result, folder / "metrics.json")
    write_csv(result, folder / "targets.csv")
    write_validation_report(result, folder / "report.html")
    return result


class Targets:
    """Whole entries to validate on: one data set for each evaluation seed."""

    def __init__(self, entries: Entries, config: Config, only: list[str] | None) -> None:
        """Choose the entries; raise ``UsageError`` if an id of ``only`` is not there."""
        self.config = config
        self._seeds = [
            ValidationDataset(
                entries, config.data, max_tokens=config.validate.max_tokens, seed=seed
            )
            for seed in range(config.validate.seeds)
        ]
        wanted = None if only is None else set(only)
        known = {record.id.lower() for record in entries.records}
        if wanted is not None and (absent := sorted(wanted - known)):
            raise UsageError(
                f"--targets: {len(absent)} ids are not among the usable entries of --data, "
                f"such as {absent[0]}"
            )
        first = self._seeds[0]
        self.chosen = [
            i for i, r in enumerate(first.records) if wanted is None or r.id.lower() in wanted
        ]
        limit = config.validate.max_targets
        if limit is not None and len(self.chosen) > limit:
            places = np.linspace(0, len(self.chosen) - 1, limit).round().astype(int)
            self.chosen = [self.chosen[place] for place in places]
        self.skipped = [
            Skipped(s.id, f"{s.stage}: {s.reason}")
            for s in first.skipped
            if wanted is None or s.id.lower() in wanted
        ]

    def record(self, index: int) -> Record:
        return self._seeds[0].records[index]

    def batch(self, index: int, seed: int) -> Batch:
        """Return the features of a target under a seed, as a batch of one."""
        return to_torch(self._seeds[seed][index])

    def tables(self, index: int) -> Tables:
        return self._seeds[0].tokens(index).tables


def _settings(config: Config) -> dict[str, Any]:
    """Return what two validations must share to be compared."""
    v = config.validate
    return {
        "samples": v.samples,
        "seeds": v.seeds,
        "sampling_steps": v.sampling_steps,
        "recycles": v.recycles,
        "max_tokens": v.max_tokens,
        "msa": config.data.msa is not None,
        "conformers": config.data.conformers,
        "selection_weights": v.selection_weights,
    }


@torch.no_grad()
def _validate_target(model: Model, targets: Targets, index: int, folder: Path) -> TargetResult:
    config, record = targets.config, targets.record(index)
    device = next(model.parameters()).device
    folder.mkdir(parents=True, exist_ok=True)
    results = []
    for seed in range(config.validate.seeds):
        stream = np.random.SeedSequence([seed, _TORCH_STREAM, *record.id.encode()])
        torch.manual_seed(int(stream.generate_state(1, np.uint64)[0] >> 1))
        batch = to_device(targets.batch(index, seed), device)
        trunk = model.trunk(batch, config.validate.recycles + 1, config.train.precision)
        sampling = config.validate.samples, config.validate.sampling_steps
        x = model.rollout(model.prepare(batch, trunk), *sampling)
        if not x.isfinite().all():
            raise DataError(record.id, "sampling", "the sampled coordinates are not finite")
        aligned = align(batch, x)
        if not aligned.valid.all():
            raise DataError(record.id, "alignment", "; ".join(aligned.events))
        heads = model.confidence(batch, trunk, x)
        truth = (aligned.positions, aligned.resolved)
        samples = evaluate_samples(batch, x, truth, heads, model.distogram(trunk))
        results.append(SeedResult.build(seed, samples))
        plddt = 100 * expected(heads["plddt"][0], PLDDT_RANGE)
        for k in range(x.shape[1]):
            path = folder / f"{record.id}-seed{seed}-sample{k}.cif"
            write_mmcif(path, targets.tables(index), _numpy(x[0, k]), _numpy(plddt[k]))
    chains, interfaces = Scored.everything(from_features(unbatch(batch))).counts()
    return TargetResult(record.id, record.n_tokens, results, chains, interfaces)


def _numpy(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.asarray(tensor.float().cpu().numpy(), np.float32)


def validate_checkpoint(
    path: Path,
    overrides: list[str],
    *,
    targets: Path | None,
    out: Path | None,
    progress: Callable[[str, int, int], None] = lambda target, done, total: None,
) -> tuple[Validation, Path]:
    """Validate the EMA weights of a checkpoint or run; return the result and where it lies.

    ``overrides`` are dotted values on top of the run's configuration; ``targets`` a file with one
    entry id a line. Raises ``UsageError`` for a wrong path, an existing ``out`` or an unknown id.
    """
    folder = checkpoint.resolve(path)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("tpf validate runs as one process; start it without torchrun")
    saved = checkpoint.load(folder)
    config = from_dict(to_dict(saved.config), ["validate.max_targets=null", *overrides])
    if out is None:
        out = checkpoint.unused(_home(folder) / "validation" / folder.name)
    elif out.exists():
        raise UsageError(f"--out {out} exists; nothing is overwritten: choose another folder")
    entries = Entries(config.data)
    only = None if targets is None else _read_ids(targets)
    device = dist.start(config.train.cpu_threads).device
    check_impl(config.model.impl, device)
    model = Model(config.model).to(device)
    checkpoint.load_weights(model, saved.ema, str(folder))
    result = validate_model(
        model,
        entries,
        config,
        out,
        origin=f"{folder}, step {saved.step}",
        only=only,
        progress=progress,
    )
    assert result is not None
    return result, out


def _home(folder: Path) -> Path:
    """Return the run of a checkpoint folder, or the folder that holds it if it has none."""
    run = folder.parent.parent
    return run if (run / "config.yaml").is_file() else folder.parent


def _read_ids(path: Path) -> list[str]:
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise UsageError(f"--targets {path}: {error.strerror}") from error
    ids = [line.split("#")[0].strip().lower() for line in lines]
    if not any(ids):
        raise UsageError(f"--targets {path}: names no entry; write one id a line")
    return [name for name in ids if name]


def compare_files(first: Path, second: Path, resamples: int) -> dict[str, Any]:
    """Return the paired bootstrap of two validations as a plain dictionary (metrics.md B5)."""
    a, b = read_json(first), read_json(second)
    weights = str(a.settings.get("selection_weights", "fine-tuning"))
    difference = compare(a, b, resamples, weights)
    return {
        "first": a.checkpoint,
        "second": b.checkpoint,
        "selection_weights": weights,
        "difference": difference.value,
        "interval": [difference.low, difference.high],
        "metrics": list(difference.metrics),
        "targets": len(a.targets),
        "resamples": difference.resamples,
    }
