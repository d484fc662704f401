"""Clusters of protein chains by sequence for the sampling weights, made by MMseqs2 (model.md 4)."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from tpf.data.chem import one_letters
from tpf.data.tables import PROTEIN, Tables
from tpf.errors import TpfError, UsageError
from tpf.files import write_whole

MIN_LENGTH = 10
"""Residues; shorter chains are clustered by identity, as are all other molecules."""
IDENTITY = 0.4
COVERAGE = 0.8


def protein_chains(tables: Tables) -> Iterator[tuple[str, str]]:
    """Yield ENTRY_CHAIN and sequence of each protein chain that is long enough."""
    for chain, kind in enumerate(tables.chain_type.tolist()):
        names = tables.res_name[tables.res_chain == chain].tolist()
        if kind == PROTEIN and len(names) >= MIN_LENGTH:
            yield f"{tables.id}_{tables.chain_id[chain]}", one_letters(names)


def cluster(
    chains: Iterable[tuple[str, str]], program: str = "mmseqs", threads: int = 1
) -> dict[str, str]:
    """Return the cluster (its first chain) of each chain at 40 % identity and 80 % coverage.

    Raises ``UsageError`` if the program is not installed, ``TpfError`` if it fails.
    """
    if shutil.which(program) is None:
        raise UsageError(
            f"{program} is not installed (conda install -c bioconda mmseqs2); without clusters "
            "equal sequences form one"
        )
    members: dict[str, list[str]] = {}
    for name, sequence in chains:
        members.setdefault(sequence, []).append(name)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        fasta = "".join(f">{k}\n{sequence}\n" for k, sequence in enumerate(members))
        (folder / "in.fasta").write_text(fasta)
        command = [
            program, "easy-cluster", str(folder / "in.fasta"), str(folder / "out"),
            str(folder / "tmp"), "--min-seq-id", str(IDENTITY), "-c", str(COVERAGE),
            "--threads", str(threads), "-v", "1",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr or done.stdout).strip().splitlines()[-1:]
            raise TpfError(f"{program} failed ({' '.join(last) or done.returncode})")
        lines = (folder / "out_cluster.tsv").read_text().splitlines()
    names = list(members.values())
    pairs = (map(int, line.split("\t")) for line in lines)
    return {name: names[representative][0] for representative, own in pairs for name in names[own]}


def write_clusters(path: Path, clusters: dict[str, str]) -> None:
    """Write lines ``ENTRY_CHAIN CLUSTER`` for ``data.clusters``."""
    text = "".join(f"{name} {clusters[name]}\n" for name in sorted(clusters))
    write_whole(path, f"# ENTRY_CHAIN CLUSTER, {IDENTITY:.0%} identity\n{text}".encode())
