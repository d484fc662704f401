"""The report of a prediction."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tpf.metrics.picture import Trace
from tpf.report.html import Cell, cards, grid, page, section, table, write
from tpf.report.structure import structure_figure
from tpf.report.svg import Series, line_chart

COLUMNS = ("ranking_score", "ranking_score_si", "ptm", "iptm", "plddt_complex", "disorder", "gpde")
NOTES = (
    "Samples are ordered by ranking score, 0.8 ipTM + 0.2 pTM + 0.5 disorder - 100 clash. The ipTM "
    "of a single chain counts as 0; ranking_score_si takes pTM in its place, as the SI of "
    "AlphaFold3 does. pLDDT is the expected lDDT of each atom, 0 to 100; gPDE the expected "
    "distance error of pairs in contact, Angstrom."
)


def write_prediction_report(
    path: Path, origin: str, done: Sequence[tuple[str, dict[str, Any], list[Trace], str]]
) -> None:
    """Write report.html of complexes given as (name, confidence.json, best sample, error)."""
    write(path, prediction_report(origin, done))


def prediction_report(
    origin: str, done: Sequence[tuple[str, dict[str, Any], list[Trace], str]]
) -> str:
    """Return the HTML document."""
    body = [f"<p class='note'>{NOTES}</p>"]
    for name, document, picture, error in done:
        if error:
            body.append(section(name, note=f"Not predicted: {error}"))
        else:
            body.append(_complex(name, document, picture))
    return page("Prediction", origin, body)


def _complex(name: str, document: dict[str, Any], picture: list[Trace]) -> str:
    best = document["samples"][0]
    head: dict[str, Cell] = {"tokens": document["n_tokens"], "samples": len(document["samples"])}
    head |= {column: best[column] for column in COLUMNS[:5]}
    chains = [
        (c["id"], c["type"], c["residues"], c["msa_rows"], best["chain_plddt"][c["id"]])
        for c in document["chains"]
    ]
    rows: list[list[Cell]] = [
        [s["file"], *(s[column] for column in COLUMNS), "clash" if s["has_clash"] else "none"]
        for s in document["samples"]
    ]
    confidence = [
        Series(t.chain, list(range(1, len(t.plddt) + 1)), t.plddt) for t in picture if not t.ligand
    ]
    return section(
        name,
        cards(head),
        grid(
            [
                structure_figure(picture, f"{name}, {best['file']}"),
                line_chart(
                    confidence, title="pLDDT of the best sample", x_label="residue", y_label="pLDDT"
                ),
            ]
        ),
        table(("chain", "type", "residues", "MSA rows", "mean pLDDT"), chains, text_columns=2),
        table(("sample", *COLUMNS, "clash"), rows),
        note=" ".join(document["notes"]),
    )
