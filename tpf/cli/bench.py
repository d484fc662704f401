"""``tpf bench``."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tpf.cli.folders import new_folder
from tpf.cli.options import Preset, line_without_machines, listed, numbers
from tpf.cli.screen import console, say, table
from tpf.errors import Interrupted, TpfError, UsageError

if TYPE_CHECKING:
    from tpf.bench.cases import Settings
    from tpf.bench.record import Record
    from tpf.bench.studies import Study


def bench(
    operation: Annotated[
        str | None,
        typer.Argument(
            metavar="[OP]",
            help="attention, trimul, block, step, memory, determinism or accuracy.",
        ),
    ] = None,
    impls: Annotated[
        str | None, typer.Option(help="Backends, as cuda,flex,trifast [default: of the study]")
    ] = None,
    crop: Annotated[
        str | None, typer.Option(help="Tokens, as 384,640,768 [default: those of the paper]")
    ] = None,
    dim: Annotated[
        str | None, typer.Option(help="Head widths, as 16,32; channels of trimul, as 64,128.")
    ] = None,
    number: Annotated[
        int | None, typer.Option("--table", help="Table of the paper: 2, 4, 6, 8, 9, 10, 12, 13.")
    ] = None,
    figure: Annotated[int | None, typer.Option(help="Figure of the paper: 3, 4, 9, 10.")] = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="Random inputs a shape [default: 10; trimul: 3; figure 10: 100]"),
    ] = None,
    reps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Timed calls or steps [default: 20; table 13: 40; figure 3: 180; table 4: 380]",
        ),
    ] = None,
    layout: Annotated[
        str, typer.Option(help="Memory order of q, k, v: projection [O, N, H, D] or heads.")
    ] = "projection",
    config: Preset = None,
    errors: Annotated[
        bool, typer.Option("--errors", help="trimul, block: also compare with FP64 or FP32.")
    ] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="trimul, block, step: also list the GPU's kernels.")
    ] = False,
    device: Annotated[str, typer.Option(help="cuda, or cpu for tiny shapes.")] = "cuda",
    gpus: Annotated[int | None, typer.Option(help="GPUs of this machine for step.")] = None,
    capture: Annotated[
        Path | None, typer.Option(help="Captured calls for table 6, or a run to capture from.")
    ] = None,
    limit: Annotated[
        int, typer.Option(min=0, help="Seconds that a backend has for one case; 0: no limit.")
    ] = 300,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write [default: runs/<date>-bench-<study>]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result file.")] = False,
) -> None:
    """Compare backends side by side: speed, accuracy, determinism, memory of the kernels."""
    from tpf.bench import studies

    study = studies.choose(operation, number, figure)
    settings = _settings(study, impls, crop, dim, device, layout)
    settings = dataclasses.replace(
        settings, seeds=seeds or settings.seeds, reps=reps or study.reps, capture=capture,
        config=config or ("compact" if device == "cuda" else "tiny"), errors=errors,
        profile=profile,
    )  # fmt: skip
    command = shlex.join(["tpf", *sys.argv[1:]])
    request = Request((operation, number, figure), settings, command, out, as_json, limit)
    _start(study, request, gpus)


@dataclass(frozen=True)
class Request:
    """A study to run, as it travels to the ranks."""

    study: tuple[str | None, int | None, int | None]
    """Arguments of ``studies.choose``."""
    settings: Settings
    command: str
    out: Path | None
    as_json: bool
    limit: float = 0.0


def _start(study: Study, request: Request, gpus: int | None) -> None:
    """Run the study in this process, or in one for each GPU."""
    if not study.ranks:
        if gpus not in (None, 1):
            raise UsageError(f"--gpus {gpus}: bench {study.name} uses one GPU; leave it out")
        run_study(request)
        return
    import torch

    from tpf.launch import launch, plan

    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    chosen = plan(gpus, 1, None, available, line_without_machines("bench"))
    if chosen.kind == "launch":
        launch(chosen, run_study, request)
    else:
        run_study(request)


def run_study(request: Request) -> None:
    """Run a study on this rank; the main rank writes and shows the result.

    A signal ends it with what has been measured (``Interrupted``).
    """
    from tpf import dist
    from tpf.bench import studies
    from tpf.bench.limits import ended_by_signals
    from tpf.bench.record import Record

    study, settings = studies.choose(*request.study), request.settings
    is_main = int(os.environ.get("RANK", "0")) == 0
    if is_main:
        settings = dataclasses.replace(settings, say=say)
    shown = {"study": study.name, "seeds": settings.seeds, "reps": settings.reps}
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    record = Record(request.command, shown, request.limit if alone else 0.0)
    if is_main:
        record.open(request.out or new_folder(f"bench-{study.name}"))
    interrupted = False
    try:
        with ended_by_signals():
            study.run(settings, record)
    except UsageError:
        record.discard()
        raise
    except KeyboardInterrupt:
        interrupted = True
        record.notes.append("interrupted: these are the results until then")
    finally:
        record.finish()
        dist.stop()
    if is_main:
        _show(record, request.as_json)
    if interrupted:
        raise Interrupted(f"interrupted; what was measured is in {record.folder}")
    if record.failures:
        raise TpfError("; ".join(record.failures))


def _settings(
    study: Study, impls: str | None, crop: str | None, dim: str | None, device: str, layout: str
) -> Settings:
    """Return the settings that the options name; raise ``TpfError`` for what cannot be run."""
    import torch

    from tpf.bench import studies
    from tpf.bench.cases import Layout, Settings

    if device not in ("cuda", "cpu"):
        raise UsageError(f"--device {device}: choose cuda or cpu")
    order: Layout = "projection" if layout == "projection" else "heads"
    if order != layout:
        raise UsageError(f"--layout {layout}: choose projection or heads")
    given = listed(impls)
    names = study.impls if given is None else given
    studies.check_impls(study, names)
    if dim and not study.widest:
        raise UsageError(f"--dim {dim}: bench {study.name} has fixed widths; leave it out")
    crops, dims = numbers("--crop", crop), numbers("--dim", dim, study.widest)
    chosen = torch.device(device)
    studies.check_device(study, chosen)
    shapes = studies.default_shapes(study, chosen, crops or (), dims or ())
    seeds = min(studies.TINY_SEEDS, study.seeds) if device == "cpu" else study.seeds
    return Settings(names, shapes, chosen, seeds, layout=order)


def _show(record: Record, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(record.document()))
        return
    screen = console()
    for found in record.tables:
        screen.print(table(found.title, found.header, found.rows, found.text_columns, found.note))
    for note in record.notes:
        screen.print(note)
    screen.print(f"written to {record.folder} (open report.html there)")
