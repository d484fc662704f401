"""What the arms of a study show: curves, verdicts, and whether they may be compared."""

from __future__ import annotations

import csv
import io
import json
import math
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tpf.bench.record import conditions
from tpf.checkpoint import write_text
from tpf.report.train import Record, read_records
from tpf.stability.arm import Outcome, read_outcome
from tpf.stability.study import RESULT, Arm, Study, arms
from tpf.stability.verdict import (
    FIRST_LOSS_TOLERANCE,
    Losses,
    first_difference,
    first_loss_difference,
    judge,
)

NOT_TERMS = frozenset(
    {"step", "loss", "lr", "grad_norm", "step_ms", "data_ms", "tokens_per_s", "max_mem_gb",
     "skipped"}
)  # fmt: skip
"""Numbers of a step record that are no loss terms."""


DETERMINISTIC = frozenset({"torch", "cuda", "paper"})
"""Backends that add in a fixed order, whose second run must repeat the first bit by bit."""


@dataclass(frozen=True)
class Curve:
    """The records of one arm, one for each update."""

    arm: Arm
    records: list[Record]
    outcome: Outcome | None

    @property
    def losses(self) -> Losses:
        """The raw losses; an arm that stopped at NaN has no record of that update."""
        raw = [_number(record.get("loss")) for record in self.records]
        found = next((k for k, value in enumerate(raw, 1) if not math.isfinite(value)), None)
        if found is None and self.outcome is not None and self.outcome.state == "nan":
            found = len(raw) + 1
        return Losses(raw, found)

    @property
    def nonfinite_reason(self) -> str | None:
        """What training said of the first update that was not finite."""
        said = next((str(r["nonfinite"]) for r in self.records if "nonfinite" in r), None)
        if said is None and self.outcome is not None and self.outcome.state == "nan":
            return self.outcome.reason
        return said

    def column(self, name: str) -> list[Any]:
        """Return one field of every record, None where it is missing."""
        return [record.get(name) for record in self.records]


@dataclass(frozen=True)
class Results:
    """Everything that the files and tables of a study are made of."""

    curves: list[Curve]
    rows: list[dict[str, Any]]
    warmup: dict[str, Any]
    failures: list[str]
    """Reasons for which arms failed, or may not be compared."""
    notes: list[str]
    """What a reader should know of the comparison."""


def collect(study: Study) -> Results:
    """Read the logs of all arms and judge them."""
    curves = [read_curve(study.path, arm) for arm in arms(study.settings)]
    references = {
        curve.arm.crop: curve
        for curve in curves
        if curve.arm.name == study.settings.reference and not curve.arm.again
    }
    rows, failures, notes = [], [], []
    for curve in curves:
        twin = next((c for c in curves if c.arm == _first_of(curve.arm)), None)
        row, bad = _row(curve, references[curve.arm.crop], twin, study.settings.steps)
        rows.append(row)
        failures += bad
    if len({_machine(study.path / curve.arm.folder) for curve in curves} - {None}) > 1:
        notes.append("the arms ran on different GPUs, versions or commits (environment.json)")
    warm = read_records(study.path / "warmup" / "run" / "train.jsonl")
    losses = Losses([_number(record.get("loss")) for record in warm])
    facts = {"steps": len(warm), "end_mean": losses.end_mean, "max_loss": _peak(losses)[1]}
    return Results(curves, rows, facts, failures, notes)


def read_curve(study: Path, arm: Arm) -> Curve:
    """Read the log of an arm, as far as it has come."""
    folder = study / arm.folder
    return Curve(arm, read_records(folder / "run" / "train.jsonl"), read_outcome(folder))


def _first_of(arm: Arm) -> Arm | None:
    return Arm(arm.crop, arm.name, arm.fault) if arm.again else None


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _peak(losses: Losses) -> tuple[int | None, float | None]:
    return losses.peak or (None, None)


def _machine(folder: Path) -> tuple[Any, ...] | None:
    path = folder / "run" / "environment.json"
    if not path.is_file():
        return None
    known = json.loads(path.read_text())
    return known["gpu"], known["commit"], known["versions"].get("torch")


def _row(
    curve: Curve, reference: Curve, twin: Curve | None, updates: int
) -> tuple[dict[str, Any], list[str]]:
    """Return the row of an arm and what is wrong with it."""
    arm, outcome, losses = curve.arm, curve.outcome, curve.losses
    row: dict[str, Any] = {"crop": arm.crop, "impl": arm.name, "run": 2 if arm.again else 1}
    if outcome is not None and outcome.state in ("unavailable", "failed"):
        row |= {"verdict": outcome.state, "reason": outcome.reason, "updates": len(curve.records)}
        title = f"crop {arm.crop}, {arm.name}"
        return row, [f"{title}: {outcome.reason}"] if outcome.state == "failed" else []
    verdict = judge(losses, reference.losses, updates)
    peak_update, peak = _peak(losses)
    row |= {
        "verdict": verdict.name,
        "reason": curve.nonfinite_reason or verdict.reason,
        "updates": len(curve.records),
        "first_mean": losses.first_mean,
        "end_mean": losses.end_mean,
        "max_loss": peak,
        "max_loss_update": peak_update,
        "max_grad_norm": max((_number(g) for g in curve.column("grad_norm") if g), default=None),
        "nonfinite_update": losses.nonfinite,
        "nonfinite_updates": sum(not math.isfinite(v) for v in losses.raw) or None,
    }
    checks = _checks(curve, reference) if curve is not reference else {}
    if twin is not None:
        row["repeats"] = _repeats(curve, twin)
        if row["repeats"] is not True and arm.impl in DETERMINISTIC and not arm.fault:
            checks = checks | {"repeats": row["repeats"]}
    row |= checks
    return row, _complaints(row, checks)


def _checks(curve: Curve, reference: Curve) -> dict[str, Any]:
    """Compare what must be equal between an arm and the reference arm of its crop."""
    if not curve.records or not reference.records:
        return {}
    off = first_loss_difference(curve.losses, reference.losses)
    return {
        "batches_equal": first_difference(curve.column("batch"), reference.column("batch")) is None,
        "weights_equal": curve.records[0].get("weights") == reference.records[0].get("weights"),
        "first_loss_difference": off,
    }


def _complaints(row: dict[str, Any], checks: dict[str, Any]) -> list[str]:
    title, found = f"crop {row['crop']}, {row['impl']}", []
    if not checks.get("batches_equal", True):
        found.append(f"{title}: its batches are not those of the reference arm")
    if not checks.get("weights_equal", True):
        found.append(f"{title}: it did not start from the weights of the reference arm")
    if "repeats" in checks:
        found.append(f"{title}: its second run {checks['repeats']}, though it is deterministic")
    off = checks.get("first_loss_difference")
    if off is not None and off > FIRST_LOSS_TOLERANCE:
        found.append(
            f"{title}: its first loss is {100 * off:.1f} % off that of the reference arm, more "
            f"than {100 * FIRST_LOSS_TOLERANCE:.0f} %"
        )
    return found


def _repeats(curve: Curve, twin: Curve) -> bool | str:
    """Say whether the second run of an arm has the losses of the first, bit by bit."""
    update = first_difference(curve.column("loss"), twin.column("loss"))
    if update is not None:
        return f"differs from update {update}"
    if len(curve.records) != len(twin.records):
        return "has another number of updates"
    return True


def document(study: Study, results: Results) -> dict[str, Any]:
    """Return the content of ``study.json``."""
    return {
        "environment": conditions(),
        "command": shlex.join(["tpf", *sys.argv[1:]]),
        "settings": asdict(study.settings),
        "warmup": results.warmup,
        "reference": study.settings.reference,
        "rows": [{k: v for k, v in row.items() if v is not None} for row in results.rows],
        "failures": results.failures,
        "notes": results.notes,
    }


def curves_csv(results: Results) -> str:
    """Return every update of every arm as CSV; an update that was not finite has no loss."""
    terms = dict.fromkeys(
        name
        for curve in results.curves
        for record in curve.records
        for name, value in record.items()
        if isinstance(value, int | float) and name not in NOT_TERMS
    )
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    head = ("crop", "impl", "run", "update", "loss", "trailing_mean", "grad_norm", "samples")
    writer.writerow([*head, *terms, "nonfinite"])
    for curve in results.curves:
        means = dict(zip((k for k, _ in curve.losses.finite), curve.losses.means, strict=True))
        for k, record in enumerate(curve.records, 1):
            values = [record.get("loss"), means.get(k), record.get("grad_norm")]
            who = [curve.arm.crop, curve.arm.name, 2 if curve.arm.again else 1, k]
            rest = [record.get(name) for name in terms]
            samples = " ".join(record.get("samples", ()))
            writer.writerow([*who, *values, samples, *rest, record.get("nonfinite")])
    return text.getvalue()


def write_json_and_csv(study: Study, results: Results) -> None:
    """Write ``study.json`` and ``curves.csv``, each whole or not at all."""
    write_text(study.path / "curves.csv", curves_csv(results))
    content = json.dumps(document(study, results), indent=1)
    write_text(study.path / RESULT, content + "\n")
