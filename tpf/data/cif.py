"""Files to blocks: gzip, mmCIF (gemmi) and BinaryCIF (biotite) behind one view of a category.

A ``Block`` answers ``columns(category)`` with string arrays in which ``?`` and ``.`` are "".
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from tpf.errors import DataError

T = TypeVar("T")
Columns = dict[str, NDArray[np.str_]]
"""Column name in lower case to values; every column has the same length."""

MAX_GZIP_LAYERS = 3


class Block(Protocol):
    """One data block of a CIF or BinaryCIF file."""

    name: str

    def columns(self, category: str, only: Collection[str] | None = None) -> Columns:
        """Return columns (all, or those in lower case in ``only``) of a category; {} if absent."""
        ...

    def numbers(self, category: str, column: str) -> NDArray[np.float64] | None:
        """Return a column as numbers, NaN where there is none; None if the column is absent."""
        ...

    def has(self, category: str) -> bool:
        """Return whether the block has the category, or the item of a CIF without categories."""
        ...


@dataclass
class TextBlock:
    """A data block parsed by gemmi."""

    name: str
    block: Any
    entry: str = ""

    def columns(self, category: str, only: Collection[str] | None = None) -> Columns:
        if not self.has(category):
            return {}
        raw = self.block.get_mmcif_category(f"_{category}.", raw=True)
        return {
            name.lower(): _unquote(values)
            for name, values in raw.items()
            if only is None or name.lower() in only
        }

    def numbers(self, category: str, column: str) -> NDArray[np.float64] | None:
        values = self.columns(category, (column,)).get(column)
        return None if values is None else to_numbers(values)

    def has(self, category: str) -> bool:
        try:
            if self.block.find_mmcif_category(f"_{category}."):
                return True
        except RuntimeError as error:  # a loop that mixes categories
            raise DataError(self.entry, "parse", f"not valid mmCIF ({error})") from error
        return len(self.block.find_values(f"_{category}")) > 0


@dataclass
class BinaryBlock:
    """A data block decoded by biotite; absent and unknown values read as ""."""

    name: str
    block: Any
    entry: str = ""

    def columns(self, category: str, only: Collection[str] | None = None) -> Columns:
        def decode() -> Columns:
            table = self.block[category]
            return {
                name.lower(): _binary_column(table[name])
                for name in table
                if only is None or name.lower() in only
            }

        return self._guarded(decode) if self.has(category) else {}

    def numbers(self, category: str, column: str) -> NDArray[np.float64] | None:
        def decode() -> NDArray[np.float64] | None:
            table = self.block[category]
            names = [name for name in table if name.lower() == column]
            return _binary_numbers(table[names[0]]) if names else None

        return self._guarded(decode) if self.has(category) else None

    def has(self, category: str) -> bool:
        return category in self.block

    def _guarded(self, decode: Callable[[], T]) -> T:
        """Decode lazily stored columns; biotite and msgpack raise many kinds on damaged ones."""
        try:
            return decode()
        except Exception as error:
            raise DataError(self.entry, "parse", _binary_reason(error)) from error


def _binary_reason(error: Exception) -> str:
    return f"not valid BinaryCIF ({type(error).__name__}: {error})"


def _binary_column(column: Any) -> NDArray[np.str_]:  # noqa: ANN401 (biotite has no types)
    values = column.data.array
    strings: NDArray[np.str_] = values if values.dtype.kind == "U" else values.astype(np.str_)
    absent = (strings == "?") | (strings == ".")
    if column.mask is not None:
        absent |= column.mask.array != 0
    return np.where(absent, "", strings) if absent.any() else strings


def _binary_numbers(column: Any) -> NDArray[np.float64]:  # noqa: ANN401
    values = column.data.array
    if values.dtype.kind not in "iuf":
        return to_numbers(_binary_column(column))
    present = True if column.mask is None else column.mask.array == 0
    return np.where(present & np.isfinite(values), values, np.nan).astype(np.float64)


def to_numbers(values: NDArray[np.str_]) -> NDArray[np.float64]:
    """Return the values as numbers, NaN for every text that is no finite number."""
    texts = np.where(values == "", "nan", values)
    try:
        numbers = texts.astype(np.float64)
    except ValueError:
        numbers = np.array([_number(str(text)) for text in texts], dtype=np.float64)
    return np.where(np.isfinite(numbers), numbers, np.nan)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _unquote(values: list[str | None]) -> NDArray[np.str_]:
    from gemmi import cif

    array = np.array(["" if value is None else value for value in values], dtype=np.str_)
    array[(array == "?") | (array == ".")] = ""
    for i in np.flatnonzero(np.isin(array.astype("U1"), ("'", '"', ";"))):
        array[i] = cif.as_string(str(array[i]))
    return array


def entry_name(path: Path) -> str:
    """Return the file name without structure and compression endings."""
    name = path.name
    for ending in (".gz", ".cif", ".bcif", ".mmcif"):
        if name.lower().endswith(ending):
            name = name[: -len(ending)]
    return name


def plain_name(text: str) -> str:
    """Return a text as the name of an entry and its files: letters, digits, ``_ . + -``."""
    return re.sub(r"[^A-Za-z0-9_.+-]", "_", text).lstrip(".") or "_"


def read_bytes(path: Path) -> tuple[bytes, list[str]]:
    """Return the decompressed content of a file and notes on what was unusual.

    Compression is recognised by content, not by name. Raises ``DataError`` (stage read) if the
    file cannot be opened or its gzip stream is damaged.
    """
    entry = entry_name(path)
    notes: list[str] = []
    try:
        data = path.read_bytes()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise DataError(entry, "read", f"cannot open {path} ({reason})") from error
    for layer in range(MAX_GZIP_LAYERS + 1):
        if data[:2] != b"\x1f\x8b":
            break
        if layer == MAX_GZIP_LAYERS:
            raise DataError(entry, "read", f"gzip inside gzip, more than {layer} layers")
        if layer == 1:
            notes.append("The file is compressed twice.")
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(entry, "read", f"damaged gzip stream ({error})") from error
    else:
        raise AssertionError("unreachable")
    if layer == 0 and path.suffix.lower() == ".gz":
        notes.append("The file is named .gz but is not compressed.")
    if not data.strip():
        raise DataError(entry, "read", "the file is empty")
    return data, notes


def _clean_text(data: bytes, notes: list[str]) -> bytes:
    """Return bytes that the CIF grammar accepts: no byte-order mark, LF or CRLF, ASCII or UTF-8."""
    if data.startswith(b"\xef\xbb\xbf"):
        data = data[3:]
        notes.append("A byte-order mark was skipped.")
    if b"\r" in data and b"\n" not in data:
        data = data.replace(b"\r", b"\n")
        notes.append("Carriage returns were read as line ends.")
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        data = data.decode("latin-1").encode("ascii", "replace")
        notes.append("Bytes that are not UTF-8 were replaced by '?'.")
    return data


def _refuse_other_formats(entry: str, data: bytes) -> None:
    head = data[:4096].lstrip()
    first = head[:6].decode("latin-1")
    records = ("HEADER", "ATOM  ", "HETATM", "CRYST1", "REMARK", "MODEL ", "TITLE ", "COMPND")
    if first in records:
        raise DataError(
            entry, "read", "this is a PDB-format file; convert it to mmCIF (gemmi convert)"
        )
    if head[:2] == b"\x1f\x9d":
        raise DataError(entry, "read", "compressed with 'compress' (.Z); repack it with gzip")
    if head[:1] == b"<":
        raise DataError(entry, "read", "this is XML or HTML, not mmCIF")
    if head[:1] == b">":
        raise DataError(entry, "read", "this is a FASTA file, not mmCIF")
    if b"\0" in head:
        raise DataError(entry, "read", "binary content that is neither gzip nor BinaryCIF")


def is_binary_cif(data: bytes) -> bool:
    """Return whether the bytes are BinaryCIF."""
    # a MessagePack map of at most 15 entries whose keys are those of BinaryCIF
    return 0x80 <= data[0] <= 0x8F and b"dataBlocks" in data[:4096] + data[-4096:]


def text_blocks(entry: str, data: bytes, notes: list[str]) -> Iterator[TextBlock]:
    """Yield the blocks of CIF text; raise ``DataError`` (stage parse) on a syntax error."""
    from gemmi import cif

    _refuse_other_formats(entry, data)
    try:
        document = cif.read_string(_clean_text(data, notes))
    except (ValueError, RuntimeError, UnicodeError) as error:
        text = str(error).removeprefix("data:").splitlines()
        reason = text[0] if text else type(error).__name__
        raise DataError(entry, "parse", f"not valid CIF (line {reason})") from error
    for block in document:
        yield TextBlock(block.name, block, entry)


def binary_blocks(entry: str, data: bytes) -> Iterator[BinaryBlock]:
    """Yield the blocks of BinaryCIF; raise ``DataError`` if biotite is missing or it is broken."""
    try:
        from biotite.structure.io.pdbx import BinaryCIFFile
    except ImportError as error:
        reason = "BinaryCIF needs biotite: pip install 'tpf[chem]', or give the mmCIF file"
        raise DataError(entry, "read", reason) from error
    import io

    try:
        file = BinaryCIFFile.read(io.BytesIO(data))
        names = list(file)
    except Exception as error:  # biotite and msgpack raise many kinds on damaged input
        raise DataError(entry, "parse", _binary_reason(error)) from error
    for name in names:
        yield BinaryBlock(name, file[name], entry)


def read_blocks(path: Path) -> tuple[list[Block], list[str]]:
    """Return the data blocks of a .cif, .cif.gz, .bcif or .bcif.gz file and notes on reading it.

    Raises ``DataError`` with stage read or parse.
    """
    entry = entry_name(path)
    data, notes = read_bytes(path)
    if is_binary_cif(data):
        return list(binary_blocks(entry, data)), notes
    return list(text_blocks(entry, data, notes)), notes
