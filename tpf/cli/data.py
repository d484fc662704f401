"""The commands ``tpf data``; check and show are here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tpf.cli import assemble, prepare
from tpf.errors import TpfError, UsageError

if TYPE_CHECKING:
    from tpf.data.check import CheckRow

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Structure files: look at them as training does, download, assemble, prepare.",
)
app.command("prepare")(prepare.prepare)
app.command("fetch")(prepare.fetch)
app.command("cluster")(prepare.cluster)
app.command("assemble")(assemble.assemble)


@app.command("check")
def check(
    paths: Annotated[list[Path], typer.Argument(help="Files or folders.")],
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit 1 if any file cannot be used.")
    ] = False,
    notes: Annotated[
        bool, typer.Option("--notes", help="Also say what was inferred or removed in each file.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines.")] = False,
) -> None:
    """Read every structure and say, a line each, what it holds or why it cannot be used."""
    import dataclasses

    from tpf.data.check import check_paths, shared_ids

    for path in paths:
        _must_exist(path)
    total, bad = 0, 0
    ids: list[str] = []
    for row in check_paths(paths):
        total += 1
        bad += not row.ok
        ids += [row.id] * row.ok
        if as_json:
            typer.echo(json.dumps(dataclasses.asdict(row), default=str))
            continue
        typer.echo(_line(row))
        for note in row.notes if notes else ():
            typer.echo(f"    {note}")
    if not total:
        raise UsageError(f"{', '.join(map(str, paths))}: no structure files (.cif, .bcif, .gz)")
    if not as_json:
        typer.echo(f"{total} files: {total - bad} ok, {bad} cannot be used")
        if text := shared_ids(ids):
            typer.echo(text, err=True)
    if strict and bad:
        raise TpfError(f"{bad} of {total} files cannot be used (--strict)")


def _must_exist(path: Path) -> None:
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder; give structures as mmCIF or BinaryCIF")


def _line(row: CheckRow) -> str:
    if not row.ok:
        return f"{row.path.name}: {row.stage}: {row.reason}"
    from tpf.data.tables import TYPE_NAMES

    tokens = ", ".join(f"{n} {kind}" for n, kind in zip(row.tokens, TYPE_NAMES, strict=True) if n)
    resolution = "" if row.resolution is None else f" {row.resolution:.2f} Å"
    return (
        f"{row.path.name}: ok: {row.id}, {row.polymer_chains} polymer and {row.ligand_chains} "
        f"other chains, {row.n_tokens} tokens ({tokens}), "
        f"{row.method or 'unknown method'}{resolution}, {row.release_date or 'no date'}"
    )


@app.command("show")
def show(
    file: Annotated[Path, typer.Argument(help="A structure file.")],
    crop: Annotated[int | None, typer.Option(help="Also draw a crop of this many tokens.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the crop.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="JSON.")] = False,
) -> None:
    """Show chains, entities, tokens, atomised residues, bonds, and a crop of one entry."""
    from tpf.data.show import describe, render

    _must_exist(file)
    if file.is_dir():
        raise UsageError(f"{file} is a folder; name one of its files")
    facts = describe(file, crop, seed)
    typer.echo(json.dumps(facts) if as_json else render(facts))
