"""Validation: sample structures of whole entries, score them, write the results.

``validate_model`` is what training calls, ``validate_checkpoint`` is ``tpf validate``. Targets are
independent: ranks share them, each finished one is stored at once (``tpf.metrics.parts``), and a
validation that was killed goes on with the next.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tpf import dist
from tpf.config import Config, to_dict
from tpf.data.batch import Batch, to_device
from tpf.data.records import Entries, failure_of
from tpf.data.tables import Tables
from tpf.dist import World
from tpf.errors import DataError, Interrupted, TpfError, UsageError
from tpf.infer import Drawn, array, digest, draw, load_model, write_prediction
from tpf.metrics.calibration import Table, add, calibration
from tpf.metrics.evaluate import evaluate_samples, make_samples
from tpf.metrics.ligand import ligand_class, ligand_poses
from tpf.metrics.parts import Part, Parts
from tpf.metrics.picture import Trace, traces
from tpf.metrics.schema import (
    LigandResult,
    SeedResult,
    Skipped,
    TargetResult,
    Validation,
    compare,
    read_json,
    write_csv,
    write_json,
)
from tpf.metrics.structure import Sample, Scored, Structure, from_features, unbatch
from tpf.model.model import Model
from tpf.permutation import align
from tpf.report.validate import write_validation_report
from tpf.signals import Stop
from tpf.targets import Targets, read_groups, read_ids

Progress = Callable[[str, int, int], None]


def _silent(target: str, done: int, total: int) -> None:
    """Say nothing."""


def validate_model(
    model: Model,
    entries: Entries,
    config: Config,
    folder: Path,
    *,
    origin: str,
    only: list[str] | None = None,
    groups: Mapping[str, str] | None = None,
    world: World | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    progress: Progress = _silent,
) -> Validation | None:
    """Sample and score every entry, or those of the ids ``only``; write ``folder``.

    Uses the model's present weights and restores its training mode. A target that fails is
    skipped with its reason; targets that an earlier call with these weights and settings finished
    are not sampled again. With ``world`` every rank calls this and takes its share. Returns None
    if ``should_stop`` became true.
    """
    world = world or World(0, 1, next(model.parameters()).device)
    targets = Targets(entries, config, only)
    parts = Parts(folder, _key(digest(model), config, only))
    world.barrier()  # all have looked for the folder before one makes it
    with world.together():
        if world.is_main:
            parts.open()
    was_training = model.training
    model.eval()
    try:
        with world.together():
            finished = _take_share(model, targets, parts, folder, world, should_stop, progress)
    finally:
        model.train(was_training)
    if world.any(not finished):
        return None
    done = parts.all(targets.ids())
    result = _gather(done, targets, origin, config, groups or {})
    world.barrier()  # all have read the parts
    if world.is_main:
        write_csv(result, folder / "targets.csv")
        pictures = {part.id: part.picture for part in done if part.picture}
        confidence = add(part.calibration for part in done if part.calibration)
        write_validation_report(result, folder / "report.html", pictures, confidence)
        write_json(result, folder / "metrics.json")  # last: it says that all is there
        parts.remove()
    return result


def _take_share(
    model: Model,
    targets: Targets,
    parts: Parts,
    folder: Path,
    world: World,
    should_stop: Callable[[], bool],
    progress: Progress,
) -> bool:
    """Finish this rank's targets; return False if it was stopped before the last."""
    share = targets.share(world.rank, world.size)
    for count, index in enumerate(share):
        record = targets.record(index)
        known = parts.read(record.id)
        if known is None or known.result is None:  # a failure may have been the machine's
            progress(record.id, count, len(share))
            parts.write(_part(model, targets, index, folder / "predicted"))
        if should_stop() and count + 1 < len(share):
            return False
    return True


def _part(model: Model, targets: Targets, index: int, folder: Path) -> Part:
    record = targets.record(index)
    try:
        return _validate_target(model, targets, index, folder)
    except torch.OutOfMemoryError:
        return Part(record.id, reason=f"out of memory at {record.n_tokens} tokens")
    except Exception as error:  # the other targets still count
        bad = failure_of(record.id, error)
        return Part(record.id, reason=f"{bad.stage}: {bad.reason}")


def _gather(
    done: list[Part], targets: Targets, origin: str, config: Config, groups: Mapping[str, str]
) -> Validation:
    """Return the validation of all targets; raise ``TpfError`` if a rank left one unfinished."""
    absent = set(targets.ids()) - {part.id for part in done}
    if absent:
        raise TpfError(
            f"{len(absent)} targets have no result, such as {min(absent)}; all ranks must write to "
            "the same --out, on a file system that they share"
        )
    scored = [
        dataclasses.replace(part.result, group=groups.get(part.id.lower(), ""))
        for part in done
        if part.result is not None
    ]
    failed = [Skipped(part.id, part.reason) for part in done if part.result is None]
    return Validation.build(
        origin,
        _settings(config),
        scored,
        [*targets.skipped, *failed],
        config.validate.selection_weights,
    )


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
        "max_msa_rows": config.data.max_msa_rows,
        "conformers": config.data.conformers,
        "precision": config.train.precision,
        "selection_weights": v.selection_weights,
    }


def _key(weights: str, config: Config, only: list[str] | None) -> str:
    """Return a digest of everything that the result of a target depends on."""
    data = to_dict(config)["data"] | {"workers": 0}
    facts = [weights, data, to_dict(config)["model"], _settings(config), config.validate.extras]
    facts += [config.validate.max_targets, only]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@torch.no_grad()
def _validate_target(model: Model, targets: Targets, index: int, folder: Path) -> Part:
    config, record, tables = targets.config, targets.record(index), targets.tables(index)
    device = next(model.parameters()).device
    folder.mkdir(parents=True, exist_ok=True)
    results: list[SeedResult] = []
    tops: list[tuple[Structure, Sample]] = []
    picture: list[Trace] = []
    counted: list[Table] = []
    for seed in range(config.validate.seeds):
        batch = to_device(targets.batch(index, seed), device)
        drawn = draw(model, batch, config, seed)
        structure, samples, found = _score(batch, drawn, config, seed)
        results.append(found)
        x, plddt = array(drawn.x[0]), drawn.plddt()
        top = min(range(len(samples)), key=lambda k: found.samples[k].get("gpde", 0.0))
        tops.append((structure, samples[top]))
        if not picture:
            names = tables.chain_id.tolist()
            predicted = samples[top].predicted
            picture = traces(structure, names, predicted, plddt[top], samples[top])
        for k, sample in enumerate(samples):
            counted.append(calibration(structure, sample, plddt[k]))
            path = folder / f"{record.id}-seed{seed}-sample{k}.cif"
            write_prediction(path, tables, x[k], plddt[k])
    chains, interfaces = Scored.everything(structure).counts()
    ligands = _ligands(tables, tops) if config.validate.extras else []
    result = TargetResult(record.id, record.n_tokens, results, chains, interfaces, ligands)
    return Part(record.id, result, "", picture, add(counted))


def _score(
    batch: Batch, drawn: Drawn, config: Config, seed: int
) -> tuple[Structure, list[Sample], SeedResult]:
    """Score the samples of one seed against the experiment in the order of each."""
    aligned = align(batch, drawn.x)
    if not aligned.valid.all():
        raise DataError(str(batch["id"][0]), "alignment", "; ".join(aligned.events))
    truth = (aligned.positions, aligned.resolved)
    extras = config.validate.extras
    found = evaluate_samples(batch, drawn.x, truth, drawn.heads, drawn.distogram, extras=extras)
    structure = from_features(unbatch(batch))
    return structure, make_samples(structure, drawn.x, truth), SeedResult.build(seed, found)


def _ligands(tables: Tables, tops: list[tuple[Structure, Sample]]) -> list[LigandResult]:
    """Return the pose of each ligand in the top-1 sample of every seed that has it."""
    found: dict[int, list[float]] = {}
    for structure, sample in tops:
        for pose in ligand_poses(structure, sample, Scored.everything(structure)):
            found.setdefault(pose.asym_id - 1, []).append(pose.rmsd)
    return [
        LigandResult(
            chain=str(tables.chain_id[chain]),
            component="-".join(tables.res_name[tables.res_chain == chain].tolist()),
            kind=ligand_class(tables, chain),
            rmsd=values,
        )
        for chain, values in sorted(found.items())
    ]


@dataclass(frozen=True)
class Request:
    """What ``tpf validate`` was asked for."""

    path: Path
    """Checkpoint or run."""
    overrides: list[str]
    """Dotted values on top of the run's configuration."""
    targets: Path | None = None
    """File with one entry id a line."""
    groups: Path | None = None
    """File with an entry id and a group a line."""
    out: Path | None = None


def validate_checkpoint(
    request: Request,
    world: World,
    progress: Progress = _silent,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[Validation, Path]:
    """Validate the EMA weights of a checkpoint or run; return the result and where it lies.

    An unfinished validation of the same weights, targets and settings goes on. Raises
    ``UsageError`` for a wrong path, another ``out`` that exists, or an unknown id, and
    ``Interrupted`` if ``should_stop`` became true; the same request then goes on.
    """
    loaded = load_model(
        request.path, ["validate.max_targets=null", *request.overrides], world.device
    )
    config = loaded.config
    only = None if request.targets is None else read_ids(request.targets)
    groups = {} if request.groups is None else read_groups(request.groups)
    home = _home(loaded.path) / "validation" / loaded.path.name
    out = _free_folder(request.out, home, _key(loaded.digest, config, only))
    result = validate_model(
        loaded.model,
        Entries(config.data),
        config,
        out,
        origin=loaded.origin,
        only=only,
        groups=groups,
        world=world,
        should_stop=should_stop,
        progress=progress,
    )
    if result is None:
        raise Interrupted("interrupted between two targets; the same command goes on")
    return result, out


def validate_rank(request: Request, progress: Progress = _silent) -> Path:
    """Validate as one process of the job that the environment describes; return the folder."""
    world = dist.start()
    try:
        patient, silent = world.size > 1, not world.is_main
        with Stop(patient=patient, silent=silent, unit="target").listening() as stop:
            told = progress if world.is_main else _silent
            return validate_checkpoint(request, world, told, stop)[1]
    finally:
        dist.stop()


def _free_folder(wanted: Path | None, default: Path, key: str) -> Path:
    """Return the folder to write: ``wanted``, or one after ``default``; both may be unfinished."""
    if wanted is None:
        folder, copy = default, 2
        while folder.exists() and not Parts(folder, key).fits():
            folder, copy = default.with_name(f"{default.name}-{copy}"), copy + 1
        return folder
    parts = Parts(wanted, key)
    if wanted.exists() and not parts.fits():
        why = (
            "holds an unfinished validation of other weights, targets or settings"
            if parts.exist()
            else "exists; nothing is overwritten"
        )
        raise UsageError(f"--out {wanted} {why}: choose another folder")
    return wanted


def _home(folder: Path) -> Path:
    """Return the run of a checkpoint folder, or the folder that holds it if it has none."""
    run = folder.parent.parent
    return run if (run / "config.yaml").is_file() else folder.parent


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
