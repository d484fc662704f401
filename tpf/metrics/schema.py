"""The result of a validation: metrics.json and targets.csv (layout: spec of ``tpf validate``)."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from tpf.errors import UsageError
from tpf.files import write_whole
from tpf.metrics.selection import (
    ModelSelection,
    dataset_means,
    model_selection,
    select,
    selection_weights,
)
from tpf.metrics.stats import Difference, compare_tables, over_seeds, pearson, target_table

Column = Literal["reported", "top1", "best"]


@dataclass(frozen=True)
class SeedResult:
    """One target under one evaluation seed."""

    seed: int
    samples: list[dict[str, float]]
    top1: dict[str, float]
    best: dict[str, float]
    reported: dict[str, float]

    @classmethod
    def build(cls, seed: int, samples: Sequence[Mapping[str, float]]) -> SeedResult:
        """Select top-1 and best of the samples; values that are not finite are left out."""
        finite = [{k: float(v) for k, v in s.items() if math.isfinite(v)} for s in samples]
        chosen = select(finite)
        return cls(seed, finite, chosen.top1, chosen.best, chosen.reported)


@dataclass(frozen=True)
class LigandResult:
    """Pose of one ligand of a target, of the top-1 sample of each seed that has one."""

    chain: str
    component: str
    """Codes of its residues."""
    kind: str
    """Class (``tpf.metrics.ligand.ligand_class``)."""
    rmsd: list[float]
    """Pocket-aligned, Angstrom."""


@dataclass(frozen=True)
class TargetResult:
    """One target under all seeds."""

    id: str
    n_tokens: int
    seeds: list[SeedResult]
    chains: int = 0
    """Scored chains."""
    interfaces: int = 0
    """Scored pairs of chains."""
    ligands: list[LigandResult] = field(default_factory=list)
    """Filled by ``validate.extras``."""
    group: str = ""
    """From ``--groups``."""


@dataclass(frozen=True)
class Skipped:
    """A target that was not evaluated."""

    id: str
    reason: str


@dataclass(frozen=True)
class DatasetValue:
    """A metric over the data set: mean over seeds, sample SD over seeds, number of targets."""

    mean: float
    sd: float | None
    n: int


@dataclass(frozen=True)
class Validation:
    """A whole validation, as metrics.json holds it."""

    checkpoint: str
    settings: dict[str, Any]
    targets: list[TargetResult]
    dataset: dict[str, DatasetValue]
    model_selection: ModelSelection
    skipped: list[Skipped] = field(default_factory=list)

    @classmethod
    def build(
        cls,
        checkpoint: str,
        settings: Mapping[str, Any],
        targets: Sequence[TargetResult],
        skipped: Sequence[Skipped] = (),
        weights: str = "fine-tuning",
    ) -> Validation:
        """Aggregate targets; ``settings`` is everything that two runs must share to compare.

        A target that occurs twice (repeated to fill ranks) counts once.
        """
        unique = sorted({target.id: target for target in targets}.values(), key=lambda t: t.id)
        dataset = dataset_values(unique)
        chosen = model_selection({name: v.mean for name, v in dataset.items()}, weights)
        return cls(checkpoint, dict(settings), unique, dataset, chosen, list(skipped))


def dataset_values(
    targets: Sequence[TargetResult], column: Column = "reported"
) -> dict[str, DatasetValue]:
    """Return the data set value of each metric (metrics.md B2, B4)."""
    seeds = sorted({seed.seed for target in targets for seed in target.seeds})
    by_seed: dict[str, list[float]] = {}
    for number in seeds:
        found = [getattr(s, column) for t in targets for s in t.seeds if s.seed == number]
        for name, (mean, _) in dataset_means(found).items():
            by_seed.setdefault(name, []).append(mean)
    values = {}
    for name in sorted(by_seed):
        mean, sd = over_seeds(by_seed[name])
        n = sum(any(name in getattr(s, column) for s in t.seeds) for t in targets)
        values[name] = DatasetValue(mean, sd, n)
    return values


def to_dict(result: Validation) -> dict[str, Any]:
    """Return the document of metrics.json."""
    return asdict(result)


def from_dict(document: Mapping[str, Any]) -> Validation:
    """Rebuild a validation; raise ``UsageError`` naming what is missing."""
    try:
        return Validation(
            checkpoint=document["checkpoint"],
            settings=dict(document["settings"]),
            targets=[target_from_dict(t) for t in document["targets"]],
            dataset={k: DatasetValue(**v) for k, v in document["dataset"].items()},
            model_selection=ModelSelection(
                value=document["model_selection"]["value"],
                weights=document["model_selection"]["weights"],
                missing=tuple(document["model_selection"]["missing"]),
            ),
            skipped=[Skipped(**s) for s in document["skipped"]],
        )
    except (KeyError, TypeError) as error:
        raise UsageError(f"metrics.json does not have the expected fields ({error})") from error


def target_from_dict(document: Mapping[str, Any]) -> TargetResult:
    """Rebuild one target; raise ``KeyError`` or ``TypeError`` for what is missing or unknown."""
    parts = {
        "seeds": [SeedResult(**seed) for seed in document["seeds"]],
        "ligands": [LigandResult(**ligand) for ligand in document["ligands"]],
    }
    return TargetResult(**{**document, **parts})


def write_json(result: Validation, path: Path) -> None:
    """Write metrics.json."""
    content = json.dumps(to_dict(result), indent=1, allow_nan=False) + "\n"
    write_whole(path, content.encode())


def read_json(path: Path) -> Validation:
    """Read metrics.json, or that of a folder; raise ``UsageError`` for anything else."""
    path = path / "metrics.json" if path.is_dir() else path
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file; give the output of tpf validate") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: not readable as metrics.json ({error})") from error
    if not isinstance(document, dict):
        raise UsageError(f"{path}: no JSON object; give the output of tpf validate")
    try:
        return from_dict(document)
    except UsageError as error:
        raise UsageError(f"{path}: {error}; give the output of tpf validate") from error


def write_csv(result: Validation, path: Path) -> None:
    """Write targets.csv: a row for every target, seed and choice (sample number, top1, ...)."""
    names = sorted({name for row in _rows(result) for name in row[4]})
    buffer = io.StringIO()
    table = csv.writer(buffer, lineterminator="\n")
    table.writerow(["id", "n_tokens", "seed", "choice", *names])
    for *head, values in _rows(result):
        table.writerow([*head, *(f"{values[n]:.6g}" if n in values else "" for n in names)])
    write_whole(path, buffer.getvalue().encode())


def _rows(result: Validation) -> list[tuple[str, int, int, str, dict[str, float]]]:
    rows = []
    for target in result.targets:
        for seed in target.seeds:
            choices = [(f"sample{k}", sample) for k, sample in enumerate(seed.samples)]
            choices += [("top1", seed.top1), ("best", seed.best), ("reported", seed.reported)]
            rows += [(target.id, target.n_tokens, seed.seed, c, v) for c, v in choices]
    return rows


def compare(
    a: Validation,
    b: Validation,
    resamples: int = 10_000,
    weights: str = "fine-tuning",
    column: Column = "reported",
) -> Difference:
    """Return the paired bootstrap of two validations (metrics.md B5).

    Raises ``UsageError`` if targets, seeds or settings differ.
    """
    _refuse_different(a, b)
    names = list(selection_weights(weights))
    tables = [
        target_table([[getattr(s, column) for s in t.seeds] for t in _by_id(v)], names)
        for v in (a, b)
    ]
    return compare_tables(tables[0], tables[1], names, weights, resamples)


def _by_id(result: Validation) -> list[TargetResult]:
    return sorted(result.targets, key=lambda target: target.id)


def _refuse_different(a: Validation, b: Validation) -> None:
    for key in sorted(a.settings.keys() | b.settings.keys()):
        left, right = a.settings.get(key), b.settings.get(key)
        if left != right:
            raise UsageError(
                f"setting {key} differs ({left} and {right}); validate both checkpoints alike"
            )
    ids = [[t.id for t in _by_id(v)] for v in (a, b)]
    if ids[0] != ids[1]:
        odd = sorted(set(ids[0]) ^ set(ids[1]))
        raise UsageError(
            f"target lists differ ({len(odd)} targets in one only, such as {odd[0]}); "
            "validate both checkpoints on the same targets"
        )
    for left_t, right_t in zip(_by_id(a), _by_id(b), strict=True):
        seeds = [sorted(s.seed for s in t.seeds) for t in (left_t, right_t)]
        if seeds[0] != seeds[1]:
            raise UsageError(
                f"seeds of target {left_t.id} differ ({seeds[0]} and {seeds[1]}); "
                "validate both checkpoints with the same seeds"
            )


def correlations(result: Validation) -> dict[str, float]:
    """Return the Pearson correlation of lddt_intra_X and plddt_X over targets and samples."""
    samples = [s for t in result.targets for seed in t.seeds for s in seed.samples]
    found = {}
    for name in sorted({key for s in samples for key in s if key.startswith("plddt_")}):
        kind = name.removeprefix("plddt_")
        both = [s for s in samples if name in s and f"lddt_intra_{kind}" in s]
        value = pearson([s[f"lddt_intra_{kind}"] for s in both], [s[name] for s in both])
        if value is not None:
            found[kind] = value
    return found
