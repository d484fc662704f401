"""The parts of a validation's report that show targets: groups, ligands, a page for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from tpf.metrics.ligand import SUCCESS
from tpf.metrics.picture import Trace
from tpf.metrics.schema import LigandResult, TargetResult, Validation
from tpf.report.html import Cell, grid, section, table, text
from tpf.report.structure import structure_figure
from tpf.report.svg import Series, line_chart

SAMPLE_COLUMNS = ("gpde", "sample_ranking_score", "plddt_complex")
LIGAND_COLUMNS = ("class", "ligands", "median RMSD, Å", f"share < {SUCCESS:g} Å")
LIGAND_NOTE = (
    "Ligand RMSD after a fit of the C-alpha atoms of the pocket (residues within 10 Angstrom, one "
    "chain), minimum over equivalent atoms and copies; top-1 sample, mean over seeds. Ions have "
    "none."
)


def mean_over_seeds(target: TargetResult, name: str) -> float | None:
    """Return the reported value of a target, averaged over the seeds that have it."""
    found = [s.reported[name] for s in target.seeds if name in s.reported]
    return sum(found) / len(found) if found else None


def target_table(result: Validation, names: Sequence[str]) -> str:
    """Return a row of reported values for each target."""
    rows: list[list[Cell]] = [
        [t.id, t.group, t.n_tokens, *(mean_over_seeds(t, name) for name in names)]
        for t in result.targets
    ]
    return table(("target", "group", "tokens", *names), rows, text_columns=2)


def group_rows(result: Validation, names: Sequence[str]) -> list[list[Cell]]:
    """Return group, number of targets, and the mean of each metric over those that have it."""
    rows: list[list[Cell]] = []
    for group in sorted({t.group for t in result.targets if t.group}):
        members = [t for t in result.targets if t.group == group]
        means: list[Cell] = []
        for name in names:
            found = [v for t in members if (v := mean_over_seeds(t, name)) is not None]
            means.append(sum(found) / len(found) if found else None)
        rows.append([group, len(members), *means])
    return rows


def ligand_rows(result: Validation) -> list[list[Cell]]:
    """Return class, number of ligands, median RMSD and share of poses found (< 2 Angstrom)."""
    by_kind: dict[str, list[float]] = {}
    for target in result.targets:
        for ligand in target.ligands:
            by_kind.setdefault(ligand.kind, []).append(_rmsd(ligand))
    return [
        [kind, len(values), float(np.median(values)), float(np.mean(np.less(values, SUCCESS)))]
        for kind, values in sorted(by_kind.items())
    ]


def group_section(result: Validation, names: Sequence[str]) -> str:
    """Return means over the targets of each group, "" without groups."""
    rows = group_rows(result, names)
    note = "Mean over the targets that have the metric."
    return section("Groups", table(("group", "targets", *names), rows), note=note) if rows else ""


def ligand_section(result: Validation) -> str:
    """Return poses by class and for each ligand, "" if none was scored."""
    rows = [
        (t.id, t.group, ligand.chain, ligand.component, ligand.kind, _rmsd(ligand))
        for t in result.targets
        for ligand in t.ligands
    ]
    if not rows:
        return ""
    return section(
        "Ligands",
        table(LIGAND_COLUMNS, ligand_rows(result)),
        table(("target", "group", "chain", "component", "class", "RMSD, Å"), rows, text_columns=5),
        note=LIGAND_NOTE,
    )


def _rmsd(ligand: LigandResult) -> float:
    return sum(ligand.rmsd) / len(ligand.rmsd)


def target_pages(
    result: Validation, names: Sequence[str], pictures: Mapping[str, list[Trace]]
) -> str:
    """Return a page for each target, closed until the reader opens it."""
    return "".join(
        _target_page(target, names, pictures.get(target.id, [])) for target in result.targets
    )


def _target_page(target: TargetResult, names: Sequence[str], picture: list[Trace]) -> str:
    own = [n for n in names if any(n in s.reported for s in target.seeds)]
    columns = [*own, *(n for n in SAMPLE_COLUMNS if n not in own)]
    rows: list[list[Cell]] = []
    for seed in target.seeds:
        choices = [(f"sample {k}", s) for k, s in enumerate(seed.samples)]
        choices += [("top-1", seed.top1), ("best", seed.best), ("reported", seed.reported)]
        rows += [[seed.seed, label, *(v.get(n) for n in columns)] for label, v in choices]
    confidence = [
        Series(t.chain, list(range(1, len(t.plddt) + 1)), t.plddt) for t in picture if not t.ligand
    ]
    first = own[0] if own else ""
    value = mean_over_seeds(target, first) if first else None
    head = f"{target.id} {target.group}".strip()
    figures = []
    if picture:
        figures = [
            structure_figure(picture, f"{target.id}: top-1 of the first seed on the experiment"),
            line_chart(
                confidence, title="pLDDT of that sample", x_label="residue", y_label="pLDDT"
            ),
        ]
    return (
        f"<details><summary>{escape(head)}, {target.n_tokens} tokens"
        f"{f', {escape(first)} {text(value)}' if first else ''}</summary>"
        f"{grid(figures)}{table(('seed', 'choice', *columns), rows, text_columns=2)}</details>"
    )
