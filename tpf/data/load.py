"""From a path to ``Tables``, and from a folder or list to the files in it."""

from __future__ import annotations

from pathlib import Path

from tpf.data.ccd import Dictionary
from tpf.data.cif import entry_name
from tpf.data.clean import clean
from tpf.data.mmcif import read_structure
from tpf.data.tables import Tables
from tpf.errors import UsageError
from tpf.files import read_list

ENDINGS = (".cif", ".cif.gz", ".bcif", ".bcif.gz", ".mmcif", ".mmcif.gz")
"""Names of structure files, compared in lower case."""


def load_tables(path: Path | str, *, ccd: str | None = None, filters: bool = True) -> Tables:
    """Read and clean a structure file; ``ccd`` names an additional component dictionary.

    ``filters=False`` keeps chains and ligands that training would drop for their quality.
    Raises ``DataError`` (stages read, parse, assembly, clean) for an entry that cannot be used and
    ``UsageError`` for a dictionary that cannot be read.
    """
    structure, dictionary = read_structure(Path(path), Dictionary(ccd))
    return clean(structure, dictionary, filters=filters)


def is_structure_name(path: Path) -> bool:
    """Return whether a file is named like mmCIF or BinaryCIF, compressed or not."""
    return path.name.lower().endswith(ENDINGS)


def find_files(path: Path | str, folder: Path | str | None = None) -> list[Path]:
    """Return the structure files that a folder (with subfolders), a list file or a file means.

    A list file (.txt, .list, .lst, .csv, .tsv) holds one path or id per line; ``#`` starts a
    comment. Paths are relative to the list's folder, ids are looked for there or in ``folder``.
    Raises ``UsageError`` if there is nothing.
    """
    path = Path(path)
    if path.is_dir():
        files = _structures(path)
        if not files:
            raise UsageError(
                f"{path} has no structure files; they are named {', '.join(ENDINGS[:4])}"
            )
        return files
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder; give a folder, a list or an mmCIF file")
    if path.suffix.lower() in (".txt", ".list", ".lst", ".tsv", ".csv"):
        return _listed(path, path.parent if folder is None else Path(folder))
    return [path]


def _listed(path: Path, folder: Path) -> list[Path]:
    items = read_list("data.path", path)
    by_name = {entry_name(p).lower(): p for p in reversed(_structures(folder))}
    files = [_resolve(item, path, folder, by_name) for item in items]
    if not files:
        raise UsageError(f"{path}: the list is empty; write one path or id per line")
    return files


def _structures(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and is_structure_name(p))


def _resolve(item: str, path: Path, folder: Path, by_name: dict[str, Path]) -> Path:
    """Return the file of a list entry: a path, else the file in ``folder`` with that id."""
    for base in (path.parent, Path()):
        if (base / item).is_file():
            return base / item
    found = by_name.get(item.lower())
    if found is None:
        raise UsageError(f"{path}: no file for {item!r} in {folder}")
    return found
