"""``tpf data prepare``, ``fetch`` and ``cluster``: what is made before training."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tpf.errors import TpfError, UsageError

if TYPE_CHECKING:
    from tpf.data.records import Record


def prepare(
    path: Annotated[Path, typer.Argument(help="Folder, list file or structure file.")],
    out: Annotated[Path, typer.Option(help="Folder of the cache.")],
    workers: Annotated[int, typer.Option(help="Processes.", min=1)] = 1,
    shard: Annotated[str, typer.Option(help="I/N: only the I-th of N parts of the files.")] = "1/1",
    ccd: Annotated[str | None, typer.Option(help="Extra component dictionary.")] = None,
    msa: Annotated[str | None, typer.Option(help="Folder or table of alignments.")] = None,
    memory: Annotated[float, typer.Option(help="GB that a process may use.", min=0.5)] = 4.0,
    seconds: Annotated[float, typer.Option(help="Seconds that a file may take.", min=1.0)] = 600.0,
    retry: Annotated[
        bool, typer.Option("--retry", help="Try the files again that failed before.")
    ] = False,
    prune: Annotated[
        bool,
        typer.Option(
            "--prune",
            help="Afterwards drop the entries of files that are gone, and what "
            "changed ones left behind.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines.")] = False,
) -> None:
    """Parse and tokenise every file once into a cache that ``tpf train --data`` reads.

    Resumable: files that are done and did not change, nor their alignments, are passed over.
    Several shards may run at once; the last one that ends prunes.
    """
    from tpf.data.check import shared_ids
    from tpf.data.prepare import prepare as prepared
    from tpf.data.records import Record, Skipped, stored_records

    begin = time.perf_counter()
    done = failed = size = 0
    results = prepared(
        str(path), out, ccd=ccd, msa=msa, shard=_shard(shard), workers=workers, memory=memory,
        seconds=seconds, retry=retry,
    )  # fmt: skip
    for item in results:
        bad = item.result if isinstance(item.result, Skipped) else None
        done, failed, size = done + (bad is None), failed + (bad is not None), size + item.n_bytes
        if as_json:
            ok = {"source": item.source, "ok": bad is None, "bytes": item.n_bytes}
            typer.echo(json.dumps(ok if bad is None else ok | dataclasses.asdict(bad)))
        elif bad is not None:
            typer.echo(f"{bad.id}: {bad.stage}: {bad.reason}")
        if (done + failed) % 1000 == 0:
            typer.echo(f"{done + failed} files", err=True)
    _clean(out, prune)
    held = stored_records(out)
    usable = sum(isinstance(record, Record) for record in held)
    if not as_json:
        passed = time.perf_counter() - begin
        rate = f", {size / done / 1e3:.0f} kB each, {done / passed:.1f}/s" if done else ""
        typer.echo(f"{done} entries stored in {out}{rate}; {failed} cannot be used")
        typer.echo(f"in the cache: {usable}; files that cannot be used: {len(held) - usable}")
    if text := shared_ids(record.id for record in held if isinstance(record, Record)):
        typer.echo(text, err=True)
    if msa is not None:
        _tell_of_alignments(msa, [record for record in held if isinstance(record, Record)])
    if held and not usable:
        raise TpfError(f"{out} has no entry that can be used; see tpf data check {path}")


def _tell_of_alignments(msa: str, records: list[Record]) -> None:
    """Say how many chains have no alignment, and which files of alignments cannot be read."""
    from tpf.data.alignment import AlignmentFolder
    from tpf.data.records import NO_ALIGNMENT, without_alignment

    missing, chains = without_alignment(records)
    typer.echo(NO_ALIGNMENT.format(missing, chains), err=True)
    for text in AlignmentFolder(Path(msa)).unreadable() if missing else ():
        typer.echo(f"in {msa}, not read: {text}", err=True)


def _clean(out: Path, wanted: bool) -> None:
    """Prune a cache, or say how many of its entries have lost their files."""
    from tpf.data.prune import gone_sources, prune
    from tpf.data.store import newest_lines

    if not wanted:
        if gone := len(gone_sources(newest_lines(out))):
            typer.echo(f"entries of files that are gone: {gone}; --prune drops them", err=True)
        return
    pruned = prune(out)
    if pruned is None:
        typer.echo("not pruned: another process prepares entries there", err=True)
        return
    for source in pruned.sources:
        typer.echo(f"dropped, its file is gone: {source}", err=True)
    megabytes = f"{pruned.n_bytes / 1e6:.1f} MB"
    typer.echo(f"pruned {pruned.n_files} stored files, {megabytes}", err=True)


def _shard(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    try:
        return int(number), int(count)
    except ValueError:
        raise UsageError(f"--shard {text}: write I/N, such as 1/8") from None


def fetch(
    ids: Annotated[list[str] | None, typer.Argument(help="PDB ids.")] = None,
    listing: Annotated[Path | None, typer.Option("--list", help="File with an id a line.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the files.")] = Path("structures"),
    url: Annotated[
        str | None, typer.Option(help="Of a mirror, with {id}. Default: files.rcsb.org.")
    ] = None,
    workers: Annotated[int, typer.Option(help="Downloads at a time.", min=1, max=16)] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines.")] = False,
) -> None:
    """Download entries of the PDB as mmCIF; those that are there and whole are kept."""
    from tpf.data import fetch as module

    names = module.read_ids(ids or [], listing)
    new = failed = 0
    for item in module.fetch(names, out, url=url or module.URL, workers=workers):
        new, failed = new + item.new, failed + bool(item.failure)
        if as_json:
            typer.echo(json.dumps(dataclasses.asdict(item), default=str))
        elif item.failure:
            typer.echo(f"{item.id}: {item.failure}")
    if not as_json:
        typer.echo(f"{new} downloaded, {len(names) - new - failed} were there, in {out}")
    if failed:
        raise TpfError(f"{failed} of {len(names)} entries cannot be had")


def cluster(
    path: Annotated[Path, typer.Argument(help="Prepared cache, folder or list file.")],
    out: Annotated[Path, typer.Option(help="File to write, for data.clusters.")],
    threads: Annotated[int, typer.Option(help="Threads of MMseqs2.", min=1)] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="JSON.")] = False,
) -> None:
    """Cluster the protein chains by sequence (40 % identity) with MMseqs2, for sampling weights."""
    from tpf.config import DataConfig
    from tpf.data import cluster as module
    from tpf.data.records import Entries

    entries = Entries(DataConfig(path=str(path)))
    chains = [
        chain
        for record in entries.records
        for chain in module.protein_chains(entries.cache.get(record.path).tokens.tables)
    ]
    found = module.cluster(chains, threads=threads)
    module.write_clusters(out, found)
    clusters = len(set(found.values()))
    if as_json:
        typer.echo(json.dumps({"out": str(out), "chains": len(found), "clusters": clusters}))
        return
    typer.echo(f"{len(found)} chains in {clusters} cluster{'' if clusters == 1 else 's'}: {out}")
