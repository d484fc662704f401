"""``tpf data assemble``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tpf.errors import TpfError, UsageError

if TYPE_CHECKING:
    from tpf.data.assemble_table import Row

REPORTED = 20
"""Failed rows that are named; the index in the output folder has all."""


def assemble(
    protein: Annotated[
        Path | None, typer.Option(help="Protein as mmCIF or PDB, in the frame of the poses.")
    ] = None,
    ligand: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SDF|SMILES",
            help="An SDF pose (FILE, or FILE#RECORD by number or title), or a SMILES to place on a "
            "ligand of the protein file; may be repeated.",
        ),
    ] = None,
    chain: Annotated[
        list[str] | None,
        typer.Option(help="Polymer chain to keep, with its ligands; may be repeated. Default all."),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(help="Code of the new ligand (LIG), one for each --ligand in turn."),
    ] = None,
    template: Annotated[
        list[str] | None,
        typer.Option(
            help="Ligand to place a SMILES on: CODE, CHAIN:CODE or CHAIN:CODE:NUMBER, one for each "
            "SMILES in turn. Default the one that shares most with it, in every copy."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The .cif or .cif.gz file to write; a folder for --table.")
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option(
            help="CSV with columns protein, ligand and, if wanted, id, chain, name, template; "
            "';' separates several values. Goes on where it stopped.",
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes for --table.")] = 1,
    memory: Annotated[float, typer.Option(min=0.5, help="GB that a row of --table may use.")] = 4.0,
    seconds: Annotated[
        float, typer.Option(min=1.0, help="Seconds that a row of --table may take.")
    ] = 300.0,
    ccd: Annotated[str | None, typer.Option(help="Further component dictionary.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON, one line for each file.")] = False,
) -> None:
    """Join a protein and ligands that no dictionary knows into a complete mmCIF."""
    if out is None:
        raise UsageError("--out is missing; give the file to write, or a folder with --table")
    if table is not None:
        if protein or ligand or chain or name or template:
            raise UsageError("--table takes protein, ligand, chain, name and template from columns")
        from tpf.data.assemble_table import assemble_table, files_of_no_row

        rows = assemble_table(table, out, ccd=ccd, workers=workers, memory=memory, seconds=seconds)
        _tell(rows, out, as_json, lambda: files_of_no_row(table, out))
        return
    if protein is None or not ligand or not all(ligand):
        what = "--protein" if protein is None else "--ligand"
        raise UsageError(f"{what} is missing; give --protein and --ligand, or --table")
    if not out.name.lower().endswith((".cif", ".cif.gz")):
        raise UsageError(f"--out {out}: name a .cif or .cif.gz file")
    if out.exists():
        raise UsageError(f"--out {out} exists; nothing is overwritten: choose another name")
    from tpf.data.assemble import Order, assemble

    order = Order(
        protein=protein,
        ligands=tuple(ligand),
        out=out,
        chains=tuple(chain or ()),
        names=tuple(name or ()),
        templates=tuple(template or ()),
    )
    result = assemble(order, ccd=ccd)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(result), default=str))
        return
    gone = f" in place of {', '.join(result.replaced)}" if result.replaced else ""
    typer.echo(f"{out}: {', '.join(result.ligands)}{gone}")
    for note in result.notes:
        typer.echo(f"    {note}")


def _tell(
    rows: Iterator[Row | None], out: Path, as_json: bool, others: Callable[[], list[str]]
) -> None:
    """Print the outcome of each row; raise ``TpfError`` at the end if any failed."""
    total = earlier = failed = 0
    for row in rows:
        total += 1
        if row is None:
            earlier += 1
            continue
        failed += not row.file
        if as_json:
            typer.echo(json.dumps(dataclasses.asdict(row)))
        elif not row.file and failed <= REPORTED:
            typer.echo(f"row {row.row} ({row.id}): {row.stage}: {row.reason}")
        if total % 100 == 0 and not as_json:
            typer.echo(f"{total} rows done, {failed} failed", err=True)
    before = f" ({earlier} before)" if earlier else ""
    index = f"see index-1-of-1.jsonl in {out}"
    typer.echo(f"{total} rows: {total - failed} assembled{before}; {index}", err=as_json)
    if spare := others():
        what = f"{len(spare)} files in {out} are of rows that the table has no longer"
        typer.echo(f"{what}, such as {spare[0]}: training would read them", err=True)
    if failed:
        raise TpfError(f"{failed} of {total} rows failed; {index}, mend them and call again")
