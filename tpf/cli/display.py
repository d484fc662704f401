"""What a training run shows: rich tables and one progress line, or JSON lines."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from tpf.cli.screen import console
from tpf.loop import Display

SHOWN = ("lddt_intra_protein", "lddt_intra_complex", "lddt_inter_protein_ligand", "rmsd")


def make_display(as_json: bool, *, speaks: bool) -> Display:
    """Choose the display: none for ranks that do not speak, JSON if asked for or not a terminal."""
    if not speaks:
        return Silent()
    return JsonLines() if as_json or not sys.stdout.isatty() else Rich()


class Silent:
    """Shows nothing."""

    def start(self, facts: dict[str, Any]) -> None: ...
    def step(self, record: dict[str, Any], steps: int) -> None: ...
    def validation(self, step: int, result: dict[str, Any]) -> None: ...
    def message(self, text: str) -> None: ...
    def end(self, summary: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class JsonLines:
    """One JSON object a line on standard output; messages on standard error."""

    def _write(self, event: str, content: dict[str, Any]) -> None:
        print(json.dumps({"event": event, **content}), flush=True)

    def start(self, facts: dict[str, Any]) -> None:
        self._write("start", facts)

    def step(self, record: dict[str, Any], steps: int) -> None:
        self._write("step", record)

    def validation(self, step: int, result: dict[str, Any]) -> None:
        self._write("validation", {"step": step, "dataset": result["dataset"]})

    def message(self, text: str) -> None:
        print(f"tpf: {text}", file=sys.stderr, flush=True)

    def end(self, summary: dict[str, Any]) -> None:
        self._write("end", summary)

    def close(self) -> None: ...


class Rich:
    """Tables at the start and the end, one live line in between."""

    def __init__(self) -> None:
        self.console = console()
        self.progress = Progress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("loss {task.fields[loss]}  {task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self.task: Any = None

    def start(self, facts: dict[str, Any]) -> None:
        table = Table(title="tpf train", show_header=False)
        for name, value in facts.items():
            text = f"{value:,}" if isinstance(value, int) else str(value)
            if not isinstance(value, dict):
                table.add_row(name.replace("_", " "), text)
        self.console.print(table)
        for name, rows in facts.items():
            if isinstance(rows, dict):
                details = Table(title=name, show_header=False)
                for row in rows.items():
                    details.add_row(*row)
                self.console.print(details)
        self.console.print("validating the start weights ...")

    def step(self, record: dict[str, Any], steps: int) -> None:
        if self.task is None:
            self.task = self.progress.add_task("", total=steps, loss="", rate="")
            self.progress.start()
        rate = f"{1e3 / record['step_ms']:.2f} steps/s  {record['tokens_per_s']:.0f} tokens/s"
        loss = f"{record['loss']:.3f}"
        self.progress.update(self.task, completed=record["step"], loss=loss, rate=rate)
        if record["step"] == steps:
            self.progress.stop()

    def validation(self, step: int, result: dict[str, Any]) -> None:
        values = ", ".join(
            f"{name} {result['dataset'][name]['mean']:.3f}"
            for name in SHOWN
            if name in result["dataset"]
        )
        targets, skipped = len(result["targets"]), len(result["skipped"])
        self.console.print(f"validation at step {step} ({targets} targets): {values}")
        if skipped:
            self.console.print(f"  {skipped} entries not validated (listed in metrics.json)")

    def message(self, text: str) -> None:
        self.console.print(text)

    def end(self, summary: dict[str, Any]) -> None:
        self.progress.stop()
        steps = list(summary["validation"])
        table = Table(title="validation (mean over targets of ½(top-1 + best))")
        table.add_column("metric")
        for step in steps:
            table.add_column(f"step {step}", justify="right")
        names = {n: None for step in steps for n in summary["validation"][step]}
        first = [n for n in SHOWN if n in names]
        for name in first + [n for n in names if n not in first and n.startswith(("lddt", "gdt"))]:
            cells = [summary["validation"][step].get(name) for step in steps]
            table.add_row(name, *(f"{c['mean']:.4f}" if c else "–" for c in cells))
        self.console.print(table)
        if summary["skipped"]:
            self.console.print(f"{len(summary['skipped'])} draws skipped (see train.jsonl)")
        self.console.print(f"run folder: {summary['run']} (open report.html there)")

    def close(self) -> None:
        self.progress.stop()
