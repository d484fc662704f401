"""The typer application, its exit codes, and how errors are shown."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

import tpf
from tpf.cli import bench, data, doctor, predict, score, stability, train, validate, weights
from tpf.errors import TpfError, told

app = typer.Typer(
    name="tpf",
    help="Train AlphaFold3-style structure models: fast, stable, reproducible.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("train")(train.train)
app.add_typer(validate.app, name="validate")
app.command("score")(score.score)
app.command("predict")(predict.predict)
app.add_typer(data.app, name="data")
app.command("stability")(stability.stability)
app.command("bench")(bench.bench)
app.command("doctor")(doctor.doctor)
app.add_typer(weights.app, name="weights")


def _version(value: bool) -> None:
    if value:
        typer.echo(f"tpf {tpf.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks of errors (anywhere on the line).")
    ] = False,
) -> None:
    pass


def _arguments(words: list[str]) -> tuple[list[str], bool]:
    """Return the arguments with ``--debug`` taken out and a bare ``--resume`` made explicit."""
    debug = "--debug" in words
    result = [word for word in words if word != "--debug"]
    for index, word in enumerate(result):
        following = result[index + 1] if index + 1 < len(result) else "-"
        if word == "--resume" and (following.startswith("-") or "=" in following):
            result[index] = f"--resume={train.NEWEST}"
    return result, debug


def main() -> None:
    """Run the command line and exit with the code of ``tpf.errors``."""
    # OpenMP threads that spin without end stall each step for seconds on a busy machine.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    arguments, debug = _arguments(sys.argv[1:])
    try:
        app(arguments, prog_name="tpf")
    except TpfError as error:
        if debug:
            raise
        print(f"tpf: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        if debug:
            raise
        print("tpf: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if debug:
            raise
        print(f"tpf: {told(error)}", file=sys.stderr)
        sys.exit(1)
