"""``tpf doctor``."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from tpf.cli.screen import console
from tpf.errors import TpfError


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this machine: hardware, software, kernels, folders, optional backends."""
    from tpf.doctor import conclusion, examine

    findings = examine()
    if as_json:
        report = {"findings": [dataclasses.asdict(f) for f in findings], "auto": conclusion()}
        typer.echo(json.dumps(report))
    else:
        from rich.table import Table
        from rich.text import Text

        table = Table(show_header=False)
        colours = {"ok": "green", "missing": "yellow", "failed": "red"}
        for f in findings:
            table.add_row(f.name, Text(f.status, colours[f.status]), f.detail)
        console().print(table)
        typer.echo(conclusion())
    broken = [f.name for f in findings if f.status == "failed"]
    if broken:
        raise TpfError(f"{len(broken)} checks failed: {', '.join(broken)}")
