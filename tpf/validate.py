"""Validation: sample structures of whole entries, score them, write the results.

``validate_model`` is what training calls, ``validate_checkpoint`` is ``tpf validate``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tpf import checkpoint
from tpf.config import Config, load
from tpf.data.batch import to_device, to_torch
from tpf.data.dataset import ValidationDataset
from tpf.data.records import Entries
from tpf.data.write import write_mmcif
from tpf.errors import DataError, UsageError
from tpf.metrics.confidence import expected_plddt
from tpf.metrics.evaluate import evaluate_samples
from tpf.metrics.schema import (
    SeedResult,
    Skipped,
    TargetResult,
    Validation,
    compare,
    read_json,
    to_dict,
    write_csv,
    write_json,
)
from tpf.model.model import Model
from tpf.permutation import align
from tpf.report.validate import write_validation_report

_TORCH_STREAM = 3


def validate_model(
    model: Model,
    targets: ValidationDataset,
    config: Config,
    folder: Path,
    *,
    origin: str,
    should_stop: Callable[[], bool] = lambda: False,
    progress: Callable[[str, int, int], None] = lambda target, done, total: None,
) -> Validation | None:
    """Sample and score every target with the model's present weights; write ``folder``.

    Returns None if ``should_stop`` became true; nothing but predicted structures is written then.
    The model's training mode is restored. A target that fails is skipped with its reason.
    """
    was_training = model.training
    model.eval()
    done: list[TargetResult] = []
    skipped = [Skipped(s.id, f"{s.stage}: {s.reason}") for s in targets.skipped]
    try:
        for index in range(len(targets)):
            name = targets.records[index].id
            progress(name, index, len(targets))
            try:
                done.append(_target(model, targets, index, config, folder / "predicted"))
            except DataError as error:
                skipped.append(Skipped(name, f"{error.stage}: {error.reason}"))
            except torch.OutOfMemoryError:
                tokens = targets.records[index].n_tokens
                skipped.append(Skipped(name, f"out of memory at {tokens} tokens"))
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
def _target(
    model: Model, targets: ValidationDataset, index: int, config: Config, folder: Path
) -> TargetResult:
    device = next(model.parameters()).device
    record = targets.records[index]
    seeds = []
    for seed in range(config.validate.seeds):
        stream = np.random.SeedSequence([seed, _TORCH_STREAM, *record.id.encode()])
        torch.manual_seed(int(stream.generate_state(1, np.uint64)[0] >> 1))
        batch = to_device(to_torch(targets.features(index, seed)), device)
        trunk = model.trunk(batch, config.validate.recycles + 1, config.train.precision)
        x = model.rollout(batch, trunk, config.validate.samples, config.validate.sampling_steps)
        if not x.isfinite().all():
            raise DataError(record.id, "sampling", "the sampled coordinates are not finite")
        aligned = align(batch, x)
        if not aligned.valid.all():
            raise DataError(record.id, "alignment", "; ".join(aligned.events))
        heads = model.confidence(batch, trunk, x)
        truth = (aligned.positions, aligned.resolved)
        samples = evaluate_samples(
            batch, x, truth, heads, model.distogram(trunk), extras=config.validate.extras
        )
        seeds.append(SeedResult.build(seed, samples))
        tokens = targets.tokens(index)
        for k in range(x.shape[1]):
            path = folder / f"{record.id}-seed{seed}-sample{k}.cif"
            path.parent.mkdir(parents=True, exist_ok=True)
            plddt = 100 * expected_plddt(heads["plddt"][0, k])
            write_mmcif(path, tokens.tables, _numpy(x[0, k]), _numpy(plddt))
    return TargetResult(record.id, record.n_tokens, seeds)


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
    run = folder.parent.parent
    config = load(str(run / "config.yaml"), overrides)
    saved = checkpoint.load(folder)
    if out is None:
        out = _new_folder(run / "validation" / folder.name)
    elif out.exists():
        raise UsageError(f"--out {out} exists; nothing is overwritten: choose another folder")
    entries = Entries(config.data)
    dataset = ValidationDataset(entries, config.data, max_tokens=config.validate.max_tokens)
    if targets is not None:
        dataset.select(_read_ids(targets))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Model(config.model).to(device)
    checkpoint.load_weights(model, saved.ema, str(folder))
    result = validate_model(
        model, dataset, config, out, origin=f"{run}, step {saved.step}", progress=progress
    )
    assert result is not None
    return result, out


def _new_folder(wanted: Path) -> Path:
    folder, copy = wanted, 2
    while folder.exists():
        folder, copy = wanted.with_name(f"{wanted.name}-{copy}"), copy + 1
    return folder


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
    weights = str(a.settings["selection_weights"])
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


def document(result: Validation) -> dict[str, Any]:
    """Return the document of metrics.json."""
    return to_dict(result)
