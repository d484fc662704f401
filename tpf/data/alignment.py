"""Alignments of single chains: reading A3M and Stockholm, species of rows, finding by chain."""

from __future__ import annotations

import functools
import gzip
import hashlib
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tpf.data.chem import GAP, ONE_LETTER, RESIDUES, RESTYPE, UNKNOWN, molecule_type, one_letters
from tpf.data.tables import DNA, LIGAND, PROTEIN, RNA, Tokens
from tpf.errors import DataError, UsageError

SUFFIXES = (".a3m", ".sto", ".a3m.gz", ".sto.gz")
MAX_ROWS = 16384
"""Rows read from one file."""
_AMBIGUOUS = {"B": "ASP", "Z": "GLU", "U": "CYS", "O": "LYS"}
_TAXON = re.compile(r"\b(?:OX|TaxID)=(\d+)")
_MNEMONIC = re.compile(r"(?:sp|tr)\|[^|]+\|[A-Z0-9]+_([A-Z0-9]{2,5})\b")
_UNIREF_TAXON = re.compile(r"UniRef100_[A-Z0-9-]+_(\d+)(?:/|\s|$)")

Row = tuple[str, str]
"""Header and letters of one row: capitals and '-' are columns, small letters insertions."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Alignment:
    """An alignment of one chain: row 0 is the query, columns are its residues."""

    rows: NDArray[np.int8]
    """[M, L] index into the residue alphabet, ``GAP`` for a gap."""
    deletions: NDArray[np.uint16]
    """[M, L] residues left out before the column."""
    species: NDArray[np.str_]
    """[M] taxon number or UniProt mnemonic of the species, "" if unknown."""
    pairing: Alignment | None = None
    """Rows that are only paired with those of other chains; None: these rows are."""

    @property
    def nbytes(self) -> int:
        """Size in memory."""
        own = self.rows.nbytes + self.deletions.nbytes + self.species.nbytes
        return own + (0 if self.pairing is None else self.pairing.nbytes)

    @property
    def for_pairing(self) -> Alignment:
        """The rows that are paired with those of other chains."""
        return self if self.pairing is None else self.pairing

    @functools.cached_property
    def profile(self) -> NDArray[np.float32]:
        """[L, 32] share of each residue in each column."""
        counts = np.stack([(self.rows == code).sum(0) for code in range(len(RESIDUES))], axis=-1)
        share: NDArray[np.float32] = (counts / len(self.rows)).astype(np.float32)
        return share

    @functools.cached_property
    def deletion_mean(self) -> NDArray[np.float32]:
        """[L] mean number of residues left out before each column."""
        mean: NDArray[np.float32] = self.deletions.mean(axis=0, dtype=np.float64).astype(np.float32)
        return mean

    @functools.cached_property
    def by_species(self) -> dict[str, NDArray[np.intp]]:
        """Rows of each species, those most like the query first."""
        alike = (self.rows == self.rows[0]).sum(axis=1)
        order = np.lexsort((-alike, self.species))
        order = order[(self.species[order] != "") & (order > 0)]
        names, first = np.unique(self.species[order], return_index=True)
        return dict(zip(names.tolist(), np.split(order, first[1:]), strict=True))


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


def species_of(header: str) -> str:
    """Return the species that the description of a UniProt or UniRef100 sequence names, or ""."""
    if "UniRef90" in header or "UniRef50" in header:  # their taxon is that of a whole cluster
        return ""
    for pattern in (_TAXON, _MNEMONIC, _UNIREF_TAXON):
        found = pattern.search(header)
        if found:
            return found[1]
    return ""


def parse_a3m(text: str, mol_type: int = PROTEIN) -> Alignment:
    """Read A3M: upper case and '-' are columns, lower case are insertions, '.' is skipped.

    Raises ``ValueError`` when a row's number of columns is not the query's.
    """
    return _from_rows(_a3m_rows(text.splitlines()), mol_type)


def _a3m_rows(lines: Iterable[str]) -> Iterator[Row]:
    header: str | None = None
    letters: list[str] = []
    for line in lines:
        if line.startswith(">"):
            if header is not None:
                yield header, "".join(letters)
            header, letters = line[1:], []
        elif header is not None:
            letters.append(line.strip())
    if header is not None:
        yield header, "".join(letters)


def parse_stockholm(text: str, mol_type: int = PROTEIN) -> Alignment:
    """Read Stockholm; columns are those where the first sequence has a residue.

    Raises ``ValueError`` when a row's length is not the query's.
    """
    return _from_rows(_stockholm_rows(text.splitlines()), mol_type)


def _stockholm_rows(lines: Iterable[str]) -> Iterator[Row]:
    parts: dict[str, list[str]] = {}
    described: dict[str, str] = {}
    for line in lines:
        if line.startswith("#=GS"):
            name, _, text = line[4:].strip().partition(" ")
            described[name] = text
        elif line.strip() and not line.startswith(("#", "//")):
            name, _, piece = line.partition(" ")
            parts.setdefault(name, []).append(piece.strip())
    keep: NDArray[np.bool_] | None = None
    for name, pieces in parts.items():
        aligned = "".join(pieces).upper().replace(".", "-")
        letters = np.frombuffer(aligned.encode("ascii", "replace"), np.uint8)
        if keep is None:
            keep = letters != ord("-")
        if len(letters) != len(keep):
            raise ValueError(f"a row has {len(letters)} columns, the query {len(keep)}")
        inserted = np.char.lower(letters[:, None].view("S1").ravel()).view(np.uint8)
        mixed = np.where(keep, letters, inserted)
        row = mixed[keep | (mixed != ord("-"))].tobytes().decode()
        yield f"{name} {described.get(name, '')}", row


def _from_rows(read: Iterable[Row], mol_type: int) -> Alignment:
    table = _codes(mol_type)
    rows: list[NDArray[np.int8]] = []
    deletions: list[NDArray[np.uint16]] = []
    species: list[str] = []
    for header, sequence in read:
        if len(rows) == MAX_ROWS:
            break
        letters = np.frombuffer(sequence.encode("ascii", "replace"), np.uint8)
        lower = (letters >= ord("a")) & (letters <= ord("z"))
        column = ((letters >= ord("A")) & (letters <= ord("Z"))) | (letters == ord("-"))
        inserted = np.cumsum(lower)[column]
        rows.append(table[letters[column]])
        deletions.append(np.diff(inserted, prepend=0).clip(max=65535).astype(np.uint16))
        species.append(species_of(header))
        if len(rows[-1]) != len(rows[0]):
            number, columns = len(rows) - 1, len(rows[-1])
            raise ValueError(f"row {number} has {columns} columns, the query {len(rows[0])}")
    if not rows or not len(rows[0]):
        raise ValueError("no sequence in the alignment")
    return Alignment(
        rows=np.stack(rows), deletions=np.stack(deletions), species=np.array(species, np.str_)
    )


def read_alignment(path: Path, mol_type: int = PROTEIN) -> Alignment:
    """Read one .a3m or .sto file (or .gz); raise ``DataError`` naming the file and the fault."""
    read = _stockholm_rows if _is_stockholm(path) else _a3m_rows
    try:
        return _from_rows(read(_lines(path)), mol_type)
    except ValueError as error:
        raise DataError(path.name, "msa", str(error)) from error


def _is_stockholm(path: Path) -> bool:
    return ".sto" in path.suffixes[-2:]


def _lines(path: Path) -> Iterator[str]:
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8", errors="replace") as file:
            for line in file:
                yield line.rstrip("\n")
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(path.name, "msa", str(error)) from error


def concatenate(alignments: Sequence[Alignment]) -> Alignment:
    """Join alignments of one query; a row seen before is left out. The first query stays row 0."""
    rows = np.concatenate([a.rows for a in alignments])
    _, first = np.unique(rows, axis=0, return_index=True)
    first.sort()
    return Alignment(
        rows=rows[first],
        deletions=np.concatenate([a.deletions for a in alignments])[first],
        species=np.concatenate([a.species for a in alignments])[first],
    )


def _only_for_pairing(path: Path) -> bool:
    """Tell whether a file holds rows for pairing only: ``*_pairing`` or ``*_uniprot``."""
    return path.name.split(".")[0].endswith(("_pairing", "_uniprot"))


class AlignmentFolder:
    """Alignments found by the name of the file (ENTRY_CHAIN...), else by their query row.

    Instead of a folder there may be a table: lines ``ENTRY_CHAIN FILE``, white space between.
    """

    def __init__(self, path: Path) -> None:
        """List the files; raise ``UsageError`` if there are none or the table is bad."""
        self._named: dict[str, list[Path]] = {}
        self._files: list[Path] = []
        if path.is_dir():
            self._files = sorted(p for p in path.rglob("*") if p.name.endswith(SUFFIXES))
            for file in self._files:
                entry, _, rest = file.name.split(".")[0].partition("_")
                chain = rest.partition("_")[0]
                self._named.setdefault(f"{entry.lower()}_{chain}", []).append(file)
        else:
            self._read_table(path)
        if not self._named:
            raise UsageError(f"data.msa {path}: no alignments; they end in {', '.join(SUFFIXES)}")

    def _read_table(self, path: Path) -> None:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            fix = "give a folder of alignments or a table of ENTRY_CHAIN FILE"
            raise UsageError(f"data.msa {path}: cannot be read ({reason}); {fix}") from error
        for number, line in enumerate(lines, start=1):
            fields = line.split(maxsplit=1)
            if not fields or line.startswith("#"):
                continue
            file = path.parent / fields[-1].strip()
            if len(fields) != 2 or not file.is_file():
                raise UsageError(f"{path}: line {number} is {line!r}; write ENTRY_CHAIN FILE")
            entry, _, chain = fields[0].partition("_")
            self._named.setdefault(f"{entry.lower()}_{chain}", []).append(file)

    @functools.cached_property
    def _queries(self) -> tuple[dict[str, list[Path]], list[str]]:
        """Files by their first row, and what is wrong with those that have none to read."""
        found: dict[str, list[Path]] = {}
        unreadable: list[str] = []
        for file in self._files:
            try:
                found.setdefault(_query_letters(file), []).append(file)
            except DataError as error:  # it is of one entry, if any: the others do without it
                unreadable.append(f"{error.entry}: {error.reason}")
        return found, unreadable

    def unreadable(self) -> list[str]:
        """Return the files of the folder whose first row cannot be read, and why."""
        return self._queries[1]

    def find(self, tokens: Tokens) -> dict[int, Alignment]:
        """Return the alignments of an entry's polymers by entity number."""
        tables = tokens.tables
        kinds = dict(zip(tables.chain_entity.tolist(), tables.chain_type.tolist(), strict=True))
        return {entity: _joined(f, kinds[entity]) for entity, f in self.files(tokens).items()}

    def files(self, tokens: Tokens) -> dict[int, list[Path]]:
        """Return the alignment files of an entry's polymers by entity number.

        Files whose first row is not the sequence of the chain are not taken.
        """
        tables = tokens.tables
        found: dict[int, list[Path]] = {}
        for chain, (entity, kind) in enumerate(
            zip(tables.chain_entity.tolist(), tables.chain_type.tolist(), strict=True)
        ):
            if kind == LIGAND or entity in found:
                continue
            sequence = one_letters(tables.res_name[tables.res_chain == chain].tolist())
            keys = (str(tables.auth_chain[chain]), str(tables.chain_id[chain]))
            files = self._matching([f"{tables.id}_{key}" for key in keys], sequence)
            if files:
                found[entity] = files
        return found

    def stamp(self, tokens: Tokens | None = None) -> str:
        """Return a text that changes with the files, or with those of an entry alone.

        They are told apart by name, size and time.
        """
        if tokens is None:
            files = sorted({file for named in self._named.values() for file in named})
        else:
            files = [file for own in self.files(tokens).values() for file in own]
        facts = ((file.name, file.stat()) for file in files)
        text = "".join(f"{name}:{stat.st_size}:{stat.st_mtime_ns}\n" for name, stat in facts)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _matching(self, keys: list[str], sequence: str) -> list[Path]:
        """Return the files named like the chain, else those with its sequence."""
        for key in keys:
            named = [f for f in self._named.get(key, ()) if _alike(_query_letters(f), sequence)]
            if named:
                return named
        by_query = self._queries[0]
        if sequence in by_query:
            return by_query[sequence]
        alike = (files for query, files in by_query.items() if _alike(query, sequence))
        return next(alike, [])


def _joined(files: list[Path], kind: int) -> Alignment:
    """Return the alignment of a chain from its files, those for pairing apart."""
    pairing = [file for file in files if _only_for_pairing(file)]
    main = [file for file in files if file not in pairing] or pairing
    whole = concatenate([read_alignment(file, kind) for file in main])
    if not pairing or main is pairing:
        return whole
    return replace(whole, pairing=concatenate([read_alignment(file, kind) for file in pairing]))


def _alike(query: str, sequence: str) -> bool:
    """Tell whether two sequences are equal where both name a residue."""
    return len(query) == len(sequence) and all(
        a == b or "X" in (a, b) for a, b in zip(query, sequence, strict=True)
    )


def _query_letters(path: Path) -> str:
    """Return the residues of a file's first sequence as they are written, without gaps."""
    letters: list[str] = []
    if _is_stockholm(path):
        name = ""
        for line in _lines(path):
            first, _, piece = line.partition(" ")
            if line.strip() and not line.startswith(("#", "//")) and first == (name or first):
                name = first
                letters.append(piece)
    else:
        letters = [sequence for _, sequence in [next(_a3m_rows(_lines(path)), ("", ""))]]
    return "".join(x for x in "".join(letters) if x.isalpha()).upper()
