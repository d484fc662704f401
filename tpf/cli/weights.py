"""``tpf weights``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tpf.errors import UsageError

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Look at weight files; take weights from OpenFold3 and give them back.",
)

_Out = Annotated[Path, typer.Option(help="File to write; nothing is overwritten.")]
_Json = Annotated[bool, typer.Option("--json", help="JSON.")]


@app.command("info")
def info(
    file: Annotated[Path, typer.Argument(help="A weight file, a run or a checkpoint folder.")],
    as_json: _Json = False,
) -> None:
    """Show which model a file fits, its parameters, dtype, origin and step."""
    from tpf.weights.convert import describe

    facts = describe(file)
    typer.echo(json.dumps(facts) if as_json else _table(facts))


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="OF3_CHECKPOINT", help="OpenFold3's file.")],
    out: _Out,
    config: Annotated[
        str | None, typer.Option(help="The model: a preset or YAML file [default: by its shapes]")
    ] = None,
    strict: Annotated[
        bool,
        typer.Option(help="Refuse a file with tensors missing, unknown or of another shape."),
    ] = True,
    as_json: _Json = False,
) -> None:
    """Write OpenFold3's weights as a safetensors file for --init; a run of tpf's own works too."""
    from tpf.weights.convert import import_file

    _say(import_file(file, out, config, strict=strict), out, as_json)


@app.command("export")
def export(
    file: Annotated[Path, typer.Argument(help="A weight file, a run or a checkpoint folder.")],
    out: _Out,
    to: Annotated[str, typer.Option("--format", help="Only openfold3.")] = "openfold3",
    as_json: _Json = False,
) -> None:
    """Write weights as the PyTorch file that OpenFold3 loads."""
    from tpf.weights.convert import export_file

    if to != "openfold3":
        raise UsageError(f"--format {to} is unknown; give openfold3")
    _say(export_file(file, out), out, as_json)


def _say(line: str, out: Path, as_json: bool) -> None:
    typer.echo(json.dumps({"out": str(out), "report": line}) if as_json else line)


def _table(facts: dict[str, Any]) -> str:
    def words(value: Any) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{name} ({n:,} tensors)" for name, n in value.items())
        if isinstance(value, list):
            return ".".join(map(str, value))
        if isinstance(value, bool):
            return "yes" if value else "no"
        return f"{value:,}" if isinstance(value, int) else str(value)

    shown = {name.replace("_", " "): value for name, value in facts.items() if value is not None}
    width = max(map(len, shown))
    return "\n".join(f"{name:<{width}}  {words(value)}" for name, value in shown.items())
