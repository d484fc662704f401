"""Options that several commands share, and how their values become overrides."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from tpf.errors import UsageError

NEWEST = "newest"
"""Value of a ``--resume`` without a folder: ``--out`` if given, else the newest one in ``runs``."""

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Any configuration value, as train.clip=5."),
]
Preset = Annotated[
    str | None,
    typer.Option(
        "--config", help="tiny, compact, full or a YAML file [default: tiny; compact on a GPU]"
    ),
]
TrainingData = Annotated[
    str | None,
    typer.Option(
        "--data",
        help="Folder of mmCIF files, a list file or a prepared cache [default: built-in examples]",
    ),
]
Checkpoint = Annotated[Path, typer.Argument(help="A run, a checkpoint, or a weight file.")]
Impl = Annotated[str | None, typer.Option(help="Triangle operators: auto, cuda, flex, torch.")]
Nodes = Annotated[int, typer.Option(help="Machines that run this same command.")]
Rendezvous = Annotated[
    str | None, typer.Option("--rdzv", metavar="HOST:PORT", help="Address of the first machine.")
]
Samples = Annotated[int | None, typer.Option(help="Structures per entry and seed [default: 5]")]
Seeds = Annotated[int | None, typer.Option(help="Evaluation seeds [default: 1]")]
SamplingSteps = Annotated[int | None, typer.Option(help="Diffusion steps [default: 200; tiny: 20]")]


def dotted(options: Mapping[str, object], words: Iterable[str] | None) -> list[str]:
    """Return options given, named by configuration key, and KEY=VALUE words, which win."""
    given = [f"{key}={json.dumps(value)}" for key, value in options.items() if value is not None]
    return [*given, *(words or ())]


def listed(text: str | None) -> tuple[str, ...] | None:
    """Return the words of a comma-separated list, each once; None if it was not given."""
    return None if text is None else tuple(dict.fromkeys(filter(None, text.split(","))))


def numbers(flag: str, text: str | None, most: int | None = None) -> tuple[int, ...] | None:
    """Return the integers from 1 to ``most`` of a comma-separated list; None if it was not given.

    Raises ``UsageError`` naming the flag and the word that is none.
    """
    if text is None:
        return None
    try:
        found = tuple(dict.fromkeys(int(word) for word in text.split(",")))
    except ValueError:
        raise UsageError(f"{flag} {text}: give numbers separated by commas") from None
    for number in found:
        if number < 1 or (most is not None and number > most):
            raise UsageError(f"{flag} {number}: must be {f'1 to {most}' if most else 'at least 1'}")
    return found


def paths_and_overrides(words: Iterable[str | Path]) -> tuple[list[Path], list[str]]:
    """Sort words into paths and KEY=VALUE; one with ``=`` that is there is a path."""
    paths: list[Path] = []
    overrides: list[str] = []
    for word in map(str, words):
        if "=" in word and not Path(word).exists():
            overrides.append(word)
        else:
            paths.append(Path(word))
    return paths, overrides


def line_without_machines(command: str) -> str:
    """Return the line that was typed for ``command`` without --gpus, --nodes and --rdzv."""
    words = iter(sys.argv[1:])
    if next(words, "") != command:
        return f"tpf {command}"
    kept = ["tpf", command]
    for word in words:
        name, given, _ = word.partition("=")
        if name not in ("--gpus", "--nodes", "--rdzv"):
            kept.append(word)
        elif not given:
            next(words, None)
    return shlex.join(kept)
