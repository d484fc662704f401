"""The typer application, its exit codes, and how errors are shown."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any, NoReturn

import typer

import tpf
from tpf.cli import bench, data, doctor, predict, score, stability, train, validate, weights
from tpf.cli.options import NEWEST
from tpf.errors import Interrupted, UsageError, told

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
            result[index] = f"--resume={NEWEST}"
    return result, debug


def _misread(error: Any, words: list[str]) -> str:
    """Return in one sentence what the parser did not take: option, value and rule."""
    rule = " ".join(error.message.split()).rstrip(".")
    names = getattr(getattr(error, "param", None), "opts", [""])
    value = _value_of(names, words)
    if value is None or not rule:
        text = " ".join(error.format_message().split()).rstrip(".?")
        sentence = text[:1].lower() + text[1:]
    else:
        sentence = f"{names[-1]} {value}: {rule[:1].lower()}{rule[1:]}"
    command = error.ctx.command_path.strip() if error.ctx is not None else "tpf"
    return f"{sentence}; {command} --help lists what it takes"


def _value_of(names: list[str], words: list[str]) -> str | None:
    """Return what follows the last of an option's names among the words of the command line."""
    found = None
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name.startswith("-") and name in names:
            found = value if equals else following
    return found


def _end(sentence: str, code: int) -> NoReturn:
    """Say on one line why the command ends, and end it."""
    print(f"tpf: {' '.join(sentence.split())}", file=sys.stderr)
    sys.exit(code)


def main() -> None:
    """Run the command line and exit with the code of ``tpf.errors``."""
    # OpenMP threads that spin without end stall each step for seconds on a busy machine.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    arguments, debug = _arguments(sys.argv[1:])
    try:
        code = app(arguments, prog_name="tpf", standalone_mode=False) or 0
        if code == Interrupted.exit_code:  # typer's for Ctrl-C
            raise KeyboardInterrupt
        sys.exit(code)
    except (KeyboardInterrupt, typer.Abort):
        _end("interrupted", Interrupted.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if not hasattr(error, "format_message"):
            if debug:
                raise
            _end(str(told(error)), told(error).exit_code)
        text = error.format_message()  # of typer's parser
        if text.startswith("Usage:"):  # the help of a group without a command
            print(text, file=sys.stderr)
            sys.exit(UsageError.exit_code)
        _end(_misread(error, arguments), UsageError.exit_code)
