"""Check structure files one by one: what each holds, or at which stage it fails and why."""

from __future__ import annotations

import datetime
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tpf.data.cif import entry_name
from tpf.data.load import is_structure_name, load_tables
from tpf.data.records import failure_of
from tpf.data.tables import LIGAND, TYPE_NAMES, Tokens
from tpf.data.tokens import tokenize
from tpf.errors import DataError

SHARED = 5
"""Ids of several files that are named."""


@dataclass(frozen=True, kw_only=True)
class CheckRow:
    """The outcome for one file; ``stage`` and ``reason`` are "" if it is usable."""

    path: Path
    id: str
    ok: bool
    stage: str = ""
    reason: str = ""
    polymer_chains: int = 0
    ligand_chains: int = 0
    tokens: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Tokens of protein, RNA, DNA, ligand; modified residues count with their polymer."""
    atomized_residues: int = 0
    """Residues of polymers that have one token per atom."""
    atoms: int = 0
    resolved_atoms: int = 0
    method: str = ""
    resolution: float | None = None
    release_date: datetime.date | None = None
    notes: tuple[str, ...] = ()

    @property
    def n_tokens(self) -> int:
        """Tokens of all types."""
        return sum(self.tokens)


def check_file(path: Path | str, *, ccd: str | None = None) -> CheckRow:
    """Read, clean and tokenise one file and return what came of it; never raise ``DataError``."""
    path = Path(path)
    try:
        if not is_structure_name(path) and path.suffix.lower() in (".pdb", ".ent", ".z"):
            reason = f"{path.suffix} files are not read; convert to mmCIF (gemmi convert)"
            raise DataError(entry_name(path), "read", reason)
        return _row(path, tokenize(load_tables(path, ccd=ccd)))
    except Exception as error:  # a bug that one file uncovers is reported like a bad file
        bad = failure_of(entry_name(path), error)
        return CheckRow(path=path, id=bad.id, ok=False, stage=bad.stage, reason=bad.reason)


def _row(path: Path, tokens: Tokens) -> CheckRow:
    tables = tokens.tables
    polymer = tables.chain_type != LIGAND
    counts = [int((tokens.mol_type == kind).sum()) for kind in range(len(TYPE_NAMES))]
    atomized = set(tokens.residue[tokens.atomized].tolist())
    return CheckRow(
        path=path,
        id=tables.id,
        ok=True,
        polymer_chains=int(polymer.sum()),
        ligand_chains=int((~polymer).sum()),
        tokens=(counts[0], counts[1], counts[2], counts[3]),
        atomized_residues=sum(bool(polymer[tables.res_chain[r]]) for r in atomized),
        atoms=len(tables.atom_name),
        resolved_atoms=int((tables.occupancy > 0).sum()),
        method=tables.method,
        resolution=tables.resolution,
        release_date=tables.release_date,
        notes=tables.notes,
    )


def shared_ids(ids: Iterable[str]) -> str:
    """Return in a sentence which entry ids several files have, "" if none."""
    counts = [(name, n) for name, n in Counter(ids).most_common() if n > 1]
    if not counts:
        return ""
    named = ", ".join(f"{name} ({n})" for name, n in counts[:SHARED])
    more = f" and {len(counts) - SHARED} others" if len(counts) > SHARED else ""
    fix = "lists, alignments, clusters and validation go by id, so give each its own _entry.id"
    return f"ids of several files: {named}{more}; {fix}"


def check_paths(paths: Iterable[Path | str], *, ccd: str | None = None) -> Iterator[CheckRow]:
    """Yield a row for each file: named files always, in folders those named like structures.

    Folders are walked with their sub-folders, names sorted; a path that does not exist is a row
    with stage read.
    """
    for path in map(Path, paths):
        if not path.is_dir():
            yield check_file(path, ccd=ccd)
            continue
        for folder, folders, names in os.walk(path):
            folders.sort()
            for name in sorted(names):
                if is_structure_name(Path(name)):
                    yield check_file(Path(folder) / name, ccd=ccd)
