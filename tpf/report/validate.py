"""The report of a validation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tpf.metrics.calibration import Table, calibration_error
from tpf.metrics.picture import Trace
from tpf.metrics.schema import Column, Validation, correlations, dataset_values
from tpf.metrics.selection import dataset_means, lower_is_better, selection_weights
from tpf.report.html import Cell, cards, grid, page, section, table, write
from tpf.report.svg import Series, bar_chart, histogram, line_chart
from tpf.report.targets import (
    group_section,
    ligand_section,
    mean_over_seeds,
    target_pages,
    target_table,
)

HEADLINE = (
    "lddt_intra_protein",
    "lddt_intra_ligand",
    "lddt_inter_protein_ligand",
    "lddt_inter_protein_protein",
    "lddt_intra_complex",
    "rmsd",
    "gdt_ts",
    "ligand_rmsd_pocket",
    "ligand_success",
    "dfg_shift",
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


CALIBRATION_NOTE = (
    "The lDDT of an atom counts its distances to the resolved C-alpha (C1') atoms around it, as "
    "the confidence head is trained (AF3 SI 4.3.1); all targets, seeds and samples."
)


def write_validation_report(
    result: Validation,
    path: Path,
    pictures: Mapping[str, list[Trace]] | None = None,
    confidence: Table | None = None,
) -> None:
    """Write report.html of a validation; arguments as ``validation_report``."""
    write(path, validation_report(result, pictures, confidence))


def validation_report(
    result: Validation,
    pictures: Mapping[str, list[Trace]] | None = None,
    confidence: Table | None = None,
) -> str:
    """Return the HTML document of a validation.

    ``pictures`` show a prediction on the experiment by target id; ``confidence`` counts atoms by
    pLDDT (``tpf.metrics.calibration``).
    """
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
        _seed_section(result, shown),
        _confidence_section(result, confidence),
        group_section(result, shown),
        ligand_section(result),
        section(
            "Targets", target_table(result, shown), target_pages(result, shown, pictures or {})
        ),
    ]
    if result.skipped:
        rows = [(s.id, s.reason) for s in result.skipped]
        body.append(section("Skipped", table(("target", "reason"), rows, text_columns=2)))
    settings = [(k, str(v)) for k, v in result.settings.items()]
    body.append(section("Settings", table(("setting", "value"), settings, text_columns=2)))
    return page("Validation", f"{result.checkpoint}; {selection.weights} selection weights", body)


def _seed_section(result: Validation, names: list[str]) -> str:
    """Return the data set value under each evaluation seed, "" for one seed."""
    seeds = sorted({seed.seed for target in result.targets for seed in target.seeds})
    if len(seeds) < 2:
        return ""
    rows: list[list[Cell]] = []
    by_seed = [
        dataset_means(s.reported for t in result.targets for s in t.seeds if s.seed == number)
        for number in seeds
    ]
    for name in names:
        value = result.dataset[name]
        rows.append([name, *(m[name][0] if name in m else None for m in by_seed), value.sd])
    scores = [name for name in names if not lower_is_better(name)]
    bars = bar_chart(
        [name.removeprefix("lddt_") for name in scores],
        [result.dataset[name].mean for name in scores],
        title="mean over seeds, with the sample SD",
        errors=[result.dataset[name].sd for name in scores],
    )
    header = ("metric", *(f"seed {number}" for number in seeds), "SD")
    return section("Seeds", table(header, rows), grid([bars]))


def _confidence_section(result: Validation, confidence: Table | None) -> str:
    """Return how well pLDDT tells lDDT, "" if nothing is known."""
    parts: list[str] = []
    linear = correlations(result)
    if linear:
        rows = list(linear.items())
        parts.append(table(("class", "Pearson r of pLDDT and lDDT"), rows))
    used = [row for row in confidence or [] if row[0] > 0]
    if used:
        x = [predicted / count for count, predicted, _ in used]
        bins = Series("atoms by pLDDT", x, [true / count for count, _, true in used])
        ideal = Series("perfect", [0.0, 100.0], [0.0, 100.0], faint=True, colour=7)
        names = [f"{row[1] / row[0]:.0f}" for row in used]
        error = calibration_error(confidence or [])
        parts.append(
            grid(
                [
                    line_chart(
                        [bins, ideal],
                        title=f"calibration; mean error {error or 0.0:.1f}",
                        x_label="predicted pLDDT",
                        y_label="lDDT of the atoms x 100",
                    ),
                    bar_chart(
                        names,
                        [row[0] for row in used],
                        title="atoms in each bin of pLDDT",
                        y_label="atoms",
                    ),
                ]
            )
        )
    note = "Correlations are over targets and samples. " * bool(linear) + CALIBRATION_NOTE * bool(
        used
    )
    return section("Confidence", *parts, note=note.strip()) if parts else ""


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


def _histogram(result: Validation, name: str) -> str:
    values = [v for t in result.targets if (v := mean_over_seeds(t, name)) is not None]
    bounded = name.startswith(("lddt", "gdt", "rasa"))
    return histogram(values, title=name, x_label=name, limits=(0.0, 1.0) if bounded else None)
