"""Multiple sequence alignments: reading A3M and Stockholm, and the MSA features (AF3 SI 2.3).

An alignment belongs to one chain sequence and is found by it: the first row of a file is the
query. Rows of different chains share the rows of the feature (row k of every chain); there is no
pairing by species.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tpf.data.chem import GAP, ONE_LETTER, RESIDUES, RESTYPE, UNKNOWN, molecule_type
from tpf.data.tables import DNA, LIGAND, PROTEIN, RNA, Tokens
from tpf.errors import DataError

N_RESTYPES = len(RESIDUES)
SUFFIXES = (".a3m", ".sto", ".a3m.gz", ".sto.gz")
_AMBIGUOUS = {"B": "ASP", "Z": "GLU", "U": "CYS", "O": "LYS"}


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """An alignment of one chain: row 0 is the query, columns are its residues."""

    rows: NDArray[np.int8]
    """[M, L] index into the residue alphabet, ``GAP`` for a gap."""
    deletions: NDArray[np.float32]
    """[M, L] residues left out before the column."""


def _codes(mol_type: int) -> NDArray[np.int8]:
    """Return the residue index of each byte for a molecule type (unknown letters included)."""
    unknown = {PROTEIN: UNKNOWN, RNA: RESTYPE["N"], DNA: RESTYPE["DN"]}[mol_type]
    table = np.full(256, unknown, np.int8)
    for name, letter in ONE_LETTER.items():
        if molecule_type(name) == mol_type:
            table[ord(letter)] = RESTYPE[name]
    if mol_type == PROTEIN:
        for letter, name in _AMBIGUOUS.items():
            table[ord(letter)] = RESTYPE[name]
    elif mol_type == RNA:
        table[ord("T")] = RESTYPE["U"]
    else:
        table[ord("U")] = RESTYPE["DT"]
    table[ord("-")] = GAP
    return table


def parse_a3m(text: str, mol_type: int = PROTEIN) -> Alignment:
    """Read A3M: upper case and '-' are columns, lower case are insertions, '.' is skipped.

    Raises ``ValueError`` when a row's number of columns is not the query's.
    """
    sequences = ["".join(block.splitlines()[1:]) for block in ("\n" + text).split("\n>")[1:]]
    return _from_rows(sequences, mol_type)


def parse_stockholm(text: str, mol_type: int = PROTEIN) -> Alignment:
    """Read Stockholm; columns are those where the first sequence has a residue.

    Raises ``ValueError`` when a row's length is not the query's.
    """
    parts: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and not line.startswith(("#", "//")):
            name, _, piece = line.partition(" ")
            parts.setdefault(name, []).append(piece.strip())
    aligned = ["".join(pieces).upper().replace(".", "-") for pieces in parts.values()]
    if not aligned:
        raise ValueError("no sequence in the alignment")
    keep = np.frombuffer(aligned[0].encode(), np.uint8) != ord("-")
    sequences = []
    for sequence in aligned:
        letters = np.frombuffer(sequence.encode(), np.uint8)
        if len(letters) != len(keep):
            raise ValueError(f"a row has {len(letters)} columns, the query {len(keep)}")
        inserted = np.char.lower(letters[:, None].view("S1").ravel()).view(np.uint8)
        mixed = np.where(keep, letters, inserted)
        sequences.append(mixed[keep | (mixed != ord("-"))].tobytes().decode())
    return _from_rows(sequences, mol_type)


def _from_rows(sequences: list[str], mol_type: int) -> Alignment:
    if not sequences:
        raise ValueError("no sequence in the alignment")
    table = _codes(mol_type)
    rows, deletions = [], []
    for number, sequence in enumerate(sequences):
        letters = np.frombuffer(sequence.encode("ascii", "replace"), np.uint8)
        lower = (letters >= ord("a")) & (letters <= ord("z"))
        column = ((letters >= ord("A")) & (letters <= ord("Z"))) | (letters == ord("-"))
        inserted = np.cumsum(lower)[column]
        rows.append(table[letters[column]])
        deletions.append(np.diff(inserted, prepend=0).astype(np.float32))
        if len(rows[-1]) != len(rows[0]):
            raise ValueError(f"row {number} has {len(rows[-1])} columns, the query {len(rows[0])}")
    return Alignment(rows=np.stack(rows), deletions=np.stack(deletions))


def read_alignment(path: Path, mol_type: int = PROTEIN) -> Alignment:
    """Read one .a3m or .sto file (or .gz); raise ``DataError`` naming the file and the fault."""
    try:
        text = _read_text(path)
        if _is_stockholm(path):
            return parse_stockholm(text, mol_type)
        return parse_a3m(text, mol_type)
    except ValueError as error:
        raise DataError(path.name, "msa", str(error)) from error


def _is_stockholm(path: Path) -> bool:
    return ".sto" in path.suffixes[-2:]


def _read_text(path: Path) -> str:
    return "".join(_lines(path))


def _lines(path: Path) -> Iterator[str]:
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8", errors="replace") as file:
            yield from file
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(path.name, "msa", str(error)) from error


def concatenate(alignments: Sequence[Alignment]) -> Alignment:
    """Join alignments of one query; a row seen before is left out. The first query stays row 0."""
    rows = np.concatenate([a.rows for a in alignments])
    deletions = np.concatenate([a.deletions for a in alignments])
    _, first = np.unique(rows, axis=0, return_index=True)
    first.sort()
    return Alignment(rows=rows[first], deletions=deletions[first])


class AlignmentFolder:
    """The alignments of a folder, found by the sequence of their query row."""

    def __init__(self, path: Path) -> None:
        """List the files; names ending in ``_pairing`` hold rows for pairing and are not read."""
        self._files: dict[str, list[Path]] = {}
        for file in sorted(p for p in path.rglob("*") if p.name.endswith(SUFFIXES)):
            stem = file.name.split(".")[0]
            if not stem.endswith("_pairing"):
                self._files.setdefault(_query_letters(file), []).append(file)

    def find(self, tokens: Tokens) -> dict[int, Alignment]:
        """Return the alignments of an entry's polymers by entity number."""
        tables = tokens.tables
        found: dict[int, Alignment] = {}
        for chain, (entity, kind) in enumerate(
            zip(tables.chain_entity.tolist(), tables.chain_type.tolist(), strict=True)
        ):
            if kind == LIGAND or entity in found:
                continue
            names = tables.res_name[tables.res_chain == chain]
            files = self._matching("".join(ONE_LETTER.get(str(n), "X") for n in names))
            if files:
                found[entity] = concatenate([read_alignment(f, kind) for f in files])
        return found

    def _matching(self, sequence: str) -> list[Path]:
        """Return the files whose query equals the sequence where both name a residue."""
        if sequence in self._files:
            return self._files[sequence]
        for query, files in self._files.items():
            if len(query) == len(sequence) and all(
                a == b or "X" in (a, b) for a, b in zip(query, sequence, strict=True)
            ):
                return files
        return []


def _query_letters(path: Path) -> str:
    """Return the residues of a file's first sequence as they are written, without gaps."""
    letters: list[str] = []
    name = ""
    for line in _lines(path):
        if _is_stockholm(path):
            first, _, piece = line.partition(" ")
            if line.strip() and not line.startswith(("#", "//")) and first == (name or first):
                name = first
                letters.append(piece)
        elif line.startswith(">"):
            if name:
                break
            name = line
        else:
            letters.append(line)
    return "".join(x for x in "".join(letters) if x.isalpha()).upper()


def one_hot(index: NDArray[np.integer], classes: int) -> NDArray[np.int32]:
    """Return ``index`` [...] as int32 one-hot [..., classes]."""
    out = np.zeros((*index.shape, classes), np.int32)
    np.put_along_axis(out, index[..., None].astype(np.int64), 1, axis=-1)
    return out


def msa_features(
    tokens: Tokens,
    index: NDArray[np.intp],
    alignments: Mapping[int, Alignment],
    max_rows: int,
    rng: np.random.Generator | None = None,
) -> dict[str, NDArray[np.generic]]:
    """Return msa [M,N,32], masks, deletions and the profile of the tokens ``index`` [N].

    ``alignments`` by entity; a chain without one has its query row only, whose profile is its
    one-hot residue. With ``rng`` (training) each chain keeps a random number of rows, in order.
    """
    tables = tokens.tables
    chain = tables.res_chain[tokens.residue[index]]
    query = tokens.restype[index]
    chosen = {
        int(c): alignments[int(tables.chain_entity[c])]
        for c in np.unique(chain)
        if int(tables.chain_entity[c]) in alignments and tables.chain_type[c] != LIGAND
    }
    picks = {c: _draw_rows(len(a.rows), max_rows, rng) for c, a in chosen.items()}
    depth = max([1, *(len(p) for p in picks.values())])

    rows = np.full((depth, len(index)), GAP, np.int32)
    deletions = np.zeros((depth, len(index)), np.float32)
    mask = np.zeros((depth, len(index)), np.float32)
    profile = one_hot(query, N_RESTYPES).astype(np.float32)
    deletion_mean = np.zeros(len(index), np.float32)
    for c, alignment in chosen.items():
        here = np.flatnonzero(chain == c)
        column = tables.res_id[tokens.residue[index[here]]] - 1
        _check_columns(tables.id, column, alignment)
        picked = picks[c]
        rows[: len(picked), here] = alignment.rows[picked][:, column]
        deletions[: len(picked), here] = alignment.deletions[picked][:, column]
        mask[: len(picked), here] = 1.0
        profile[here] = _profile(alignment)[column]
        deletion_mean[here] = alignment.deletions.mean(0)[column]
    rows[0], deletions[0], mask[0] = query, 0.0, 1.0
    return {
        "msa": one_hot(rows, N_RESTYPES),
        "has_deletion": (deletions != 0).astype(np.float32),
        "deletion_value": (2 / math.pi * np.arctan(deletions / 3)).astype(np.float32),
        "profile": profile,
        "deletion_mean": deletion_mean,
        "msa_mask": mask,
        "num_paired_seqs": np.ones(1, np.int32),
    }


def single_row(tokens: Tokens) -> dict[str, NDArray[np.generic]]:
    """Return the MSA features of an entry without alignments: the query row alone."""
    return msa_features(tokens, np.arange(len(tokens)), {}, 1)


def _draw_rows(n: int, max_rows: int, rng: np.random.Generator | None) -> NDArray[np.intp]:
    """Return the rows to keep in order; the query (row 0) is always one of them."""
    if rng is None:
        return np.arange(min(n, max_rows))
    depth = min(int(rng.integers(1, n + 1)), max_rows)
    others = rng.choice(n - 1, depth - 1, replace=False) + 1
    return np.concatenate([[0], np.sort(others)]).astype(np.intp)


def _profile(alignment: Alignment) -> NDArray[np.float32]:
    """Return the share of each residue in each column, [L, 32]."""
    counts = np.stack([(alignment.rows == code).sum(0) for code in range(N_RESTYPES)], axis=-1)
    return (counts / len(alignment.rows)).astype(np.float32)


def _check_columns(entry: str, column: NDArray[np.int32], alignment: Alignment) -> None:
    width = alignment.rows.shape[1]
    if len(column) and (column.min() < 0 or column.max() >= width):
        raise DataError(
            entry, "msa", f"residue {int(column.max()) + 1} lies outside an alignment of {width}"
        )
