"""The report of a validation."""

from __future__ import annotations

from pathlib import Path

from tpf.metrics.schema import Column, Validation, correlations, dataset_values
from tpf.metrics.selection import lower_is_better, selection_weights
from tpf.report.html import Cell, cards, grid, page, section, table, write
from tpf.report.svg import histogram

HEADLINE = (
    "lddt_intra_protein",
    "lddt_intra_ligand",
    "lddt_inter_protein_ligand",
    "lddt_inter_protein_protein",
    "lddt_intra_complex",
    "rmsd",
    "gdt_ts",
    "rasa",
    "gpde",
)
"""Metrics that get a histogram and a column in the table of targets, where present."""
NOTES = (
    "reported is the mean of top-1 (the sample of smallest gPDE) and best of the samples. "
    "RMSD, GDT-TS and GDT-HA come from one superposition of all resolved atoms of the complex; "
    "the maximum over superpositions that LGA searches would be higher. lDDT pools all scored "
    "atom pairs of a target. A dash means that a target has nothing to score."
)


def write_validation_report(result: Validation, path: Path) -> None:
    """Write report.html of a validation."""
    write(path, validation_report(result))


def validation_report(result: Validation) -> str:
    """Return the HTML document of a validation."""
    selection = result.model_selection
    weights = selection_weights(selection.weights)
    shown = [name for name in HEADLINE if name in result.dataset]
    found: dict[str, Cell] = {"targets": len(result.targets), "skipped": len(result.skipped)}
    found[f"model selection ({selection.weights} weights)"] = selection.value
    for name in shown[:5]:
        found[name] = result.dataset[name].mean
    body = [
        cards(found),
        section("Data set", _dataset_table(result, weights), note=NOTES),
        section(
            "Model selection",
            table(
                ("metric", "weight", "value"),
                [
                    (n, w, result.dataset[n].mean if n in result.dataset else None)
                    for n, w in weights.items()
                ],
            ),
            note=_selection_note(selection.missing),
        ),
        section("Distribution over targets", grid([_histogram(result, n) for n in shown])),
        section("Targets", _target_table(result, shown)),
    ]
    linear = correlations(result)
    if linear:
        body.append(
            section(
                "Confidence",
                table(("class", "Pearson r of pLDDT and lDDT"), list(linear.items())),
                note="Over all targets and samples.",
            )
        )
    if result.skipped:
        rows = [(s.id, s.reason) for s in result.skipped]
        body.append(section("Skipped", table(("target", "reason"), rows, text_columns=2)))
    settings = [(k, str(v)) for k, v in result.settings.items()]
    body.append(section("Settings", table(("setting", "value"), settings, text_columns=2)))
    return page("Validation", f"{result.checkpoint}; {selection.weights} selection weights", body)


def _dataset_table(result: Validation, weights: dict[str, float]) -> str:
    columns: tuple[Column, ...] = ("top1", "best")
    top1, best = (dataset_values(result.targets, column) for column in columns)
    rows: list[list[Cell]] = []
    for name in sorted(result.dataset, key=lambda name: (name not in weights, name)):
        value = result.dataset[name]
        better = "lower" if lower_is_better(name) else "higher"
        others = [found[name].mean if name in found else None for found in (top1, best)]
        rows.append([name, better, value.mean, value.sd, *others, value.n])
    header = ("metric", "better", "reported", "SD over seeds", "top-1", "best", "targets")
    return table(header, rows, text_columns=2)


def _selection_note(missing: tuple[str, ...]) -> str:
    if not missing:
        return "Every metric of the weight set is present."
    return f"Left out, with their weights, for want of targets: {', '.join(missing)}."


def _means(result: Validation, name: str) -> list[float | None]:
    """Reported value of each target, averaged over the seeds that have it."""
    values: list[float | None] = []
    for target in result.targets:
        found = [s.reported[name] for s in target.seeds if name in s.reported]
        values.append(sum(found) / len(found) if found else None)
    return values


def _histogram(result: Validation, name: str) -> str:
    values = [v for v in _means(result, name) if v is not None]
    bounded = name.startswith(("lddt", "gdt", "rasa"))
    return histogram(values, title=name, x_label=name, limits=(0.0, 1.0) if bounded else None)


def _target_table(result: Validation, names: list[str]) -> str:
    columns = [_means(result, name) for name in names]
    rows: list[list[Cell]] = [
        [target.id, target.n_tokens, *(column[t] for column in columns)]
        for t, target in enumerate(result.targets)
    ]
    return table(("target", "tokens", *names), rows)
