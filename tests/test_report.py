"""Reports: valid, self-contained HTML; charts that survive bad values."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tpf.errors import UsageError
from tpf.metrics.schema import SeedResult, Skipped, TargetResult, Validation, write_json
from tpf.report.html import page, table
from tpf.report.svg import MAX_POINTS, Series, bar_chart, histogram, label, line_chart, nice_ticks
from tpf.report.train import read_records, train_report, write_train_report
from tpf.report.validate import validation_report, write_validation_report

VOID = {"meta", "br", "img", "link", "hr"}


class Balance(HTMLParser):
    """Checks that every tag is closed in order and nothing is loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "iframe", "img"), tag
        assert not {"src", "href"} & {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag


def check(document: str) -> None:
    parser = Balance()
    parser.feed(document)
    assert not parser.open
    assert "http://" not in document and "https://" not in document and "@import" not in document


def svg_of(figure: str) -> ElementTree.Element:
    match = re.search(r"<svg.*?</svg>", figure, re.S)
    assert match
    return ElementTree.fromstring(match.group(0))


def validation(shift: float = 0.0) -> Validation:
    samples = [{"gpde": 1.0, "lddt_intra_protein": 0.5 + shift, "rmsd": 9.0, "plddt_protein": 50.0}]
    better = [{"gpde": 1.0, "lddt_intra_protein": 0.7 + shift, "rmsd": 3.0, "plddt_protein": 80.0}]
    targets = [
        TargetResult("1a<b", 100, [SeedResult.build(0, samples)]),
        TargetResult("1bbb", 60, [SeedResult.build(0, better)]),
    ]
    skipped = [Skipped("9zzz", "tokens & atoms")]
    return Validation.build("run/step-000000", {"samples": 1}, targets, skipped)


def test_validation_report_holds_the_numbers(tmp_path: Path) -> None:
    document = validation_report(validation())
    check(document)
    for text in ("1a&lt;b", "tokens &amp; atoms", "0.6000", "fine-tuning", "LGA", "Pearson"):
        assert text in document, text
    assert "prefers-color-scheme:dark" in document
    write_validation_report(validation(), tmp_path / "report.html")
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_report_of_an_empty_validation() -> None:
    check(validation_report(Validation.build("x", {}, [], [])))


def run_folder(path: Path, steps: int = 40) -> Path:
    path.mkdir()
    lines = []
    for step in range(1, steps + 1):
        record = {
            "step": step,
            "loss": math.nan if step == 7 else 10 / step,
            "mse": 1 / step,
            "lr": 1e-3 * min(1, step / 10),
            "grad_norm": 2.0,
            "step_ms": 100.0 + step,
            "tokens_per_s": 640.0,
            "samples": ["1aki"],
            "skipped": 1,
        }
        lines.append(
            json.dumps(record | ({"events": ["naive matching: 1aki"]} if step == 3 else {}))
        )
    (path / "train.jsonl").write_text("\n".join(lines) + '\n{"step": 41, "lo')
    (path / "environment.json").write_text(json.dumps({"gpu": None, "tpf": "0.1"}))
    (path / "config.yaml").write_text("name: tiny\n")
    for step, shift in ((0, 0.0), (40, 0.1)):
        folder = path / "validation" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        write_json(validation(shift), folder / "metrics.json")
    return path


def test_train_report_shows_curves_and_before_and_after(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    assert len(read_records(run / "train.jsonl")) == 40
    written = write_train_report(run)
    assert written == run / "report.html"
    document = written.read_text()
    check(document)
    for text in ("mse", "step 0", "step 40", "+0.1000", "naive matching: 1aki", "name: tiny"):
        assert text in document, text
    assert "samples skipped" in document and document.count("<svg") >= 8


def test_train_report_shows_where_the_time_goes(tmp_path: Path) -> None:
    times = {"step_ms": 200.0, "data_ms": 10.0, "forward_ms": 60.0, "backward_ms": 100.0}
    records: list[dict[str, object]] = [
        {"step": k, "loss": 1.0, "mfu": 0.31, "skipped": k // 3, **times} for k in range(1, 6)
    ]
    records[2] = {"step": 3, "loss": None, "nonfinite": "loss is nan", "step_ms": 900.0}
    records[3]["events"] = ["loss 9 is far above the median 1 of the last 20 steps"]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    document = train_report(tmp_path)
    check(document)
    cells = re.sub(r"<[^>]*>", " ", document)
    assert re.search(r"forward\s+60\S*\s+30.0 %", cells)
    assert re.search(r"other\s+30\S*\s+15.0 %", cells)
    assert re.search(r"MFU, median\s+31.0 %|31.0 %\s+MFU, median", cells)
    assert "left out: loss is nan" in cells and "far above the median" in cells
    assert "samples skipped so far" in cells
    assert "forward_ms" not in document  # a time is no loss term


def test_train_report_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no train.jsonl"):
        train_report(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    check(train_report(tmp_path))


def test_line_chart_leaves_gaps_and_keeps_spikes() -> None:
    values = [1.0] * 5000
    values[2500], values[3000] = 99.0, math.nan
    figure = line_chart([Series("x", range(5000), values)], title="t < u", x_label="step")
    paths = [e.get("d", "") for e in svg_of(figure).iter() if e.get("fill") == "none"]
    (line,) = paths
    assert line.count("M") == 2 and line.count("L") <= MAX_POINTS + 10
    tops = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", line)]
    assert min(tops) < 40  # the spike reaches the top
    assert "t &lt; u" in figure


@pytest.mark.parametrize("values", [[], [math.nan], [math.inf, -math.inf]])
def test_charts_without_values_say_so(values: list[float]) -> None:
    for figure in (
        line_chart([Series("x", range(len(values)), values)], title="t"),
        histogram(values, title="t"),
        bar_chart(["a"] * len(values), values, title="t"),
    ):
        svg_of(figure)
        assert "no finite values" in figure


@example([5e-324], False)
@example([5e-324], True)
@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=30), st.booleans())
def test_charts_draw_any_numbers(values: list[float], log: bool) -> None:
    names = [f"<{k}>" for k in range(len(values))]
    for figure in (
        line_chart([Series("x", range(len(values)), values)], title="t", log_y=log),
        histogram(values, title="t"),
        bar_chart(names, values, title="t", errors=[0.5] * len(values)),
    ):
        text = ElementTree.tostring(svg_of(figure), encoding="unicode")
        assert "nan" not in text and "inf" not in text


def test_ticks_and_labels() -> None:
    assert nice_ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert nice_ticks(0.013, 0.087) == pytest.approx([0.02, 0.04, 0.06, 0.08])
    assert [label(v) for v in (0, 0.5, 1234.5, 2e6, 1.8e-4)] == [
        "0",
        "0.5",
        "1234",
        "2e6",
        "1.8e-4",
    ]


def test_page_escapes_and_tables_align() -> None:
    document = page("a<b", "c", [table(("n", "v"), [("x", 0.12345), ("y", None)])])
    check(document)
    assert "a&lt;b" in document and "0.1235" in document and "–" in document
