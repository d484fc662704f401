"""From a path to ``Tables``, and from a folder or list to the files in it."""

from __future__ import annotations

from pathlib import Path

from tpf.data.ccd import Dictionary
from tpf.data.cif import entry_name
from tpf.data.clean import clean
from tpf.data.mmcif import read_structure
from tpf.data.tables import Tables
from tpf.errors import UsageError

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


def find_files(path: Path | str) -> list[Path]:
    """Return the structure files that a folder (with subfolders), a list file or a file means.

    A list file holds one path or id per line, relative to its own folder; ``#`` starts a comment.
    Raises ``UsageError`` if there is nothing.
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and is_structure_name(p))
        if not files:
            raise UsageError(
                f"{path} has no structure files; they are named {', '.join(ENDINGS[:4])}"
            )
        return files
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder; give a folder, a list or an mmCIF file")
    if path.suffix.lower() in (".txt", ".list", ".lst", ".tsv", ".csv"):
        return _listed(path)
    return [path]


def _listed(path: Path) -> list[Path]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise UsageError(f"{path}: cannot read the list ({error})") from error
    items = [line.split("#")[0].strip() for line in lines]
    files = [_resolve(item, path) for item in items if item]
    if not files:
        raise UsageError(f"{path}: the list is empty; write one path or id per line")
    return files


def _resolve(item: str, path: Path) -> Path:
    """Return the file of a list entry: a path, else an id beside the list or in its sub-folders."""
    for folder in (path.parent, Path()):
        if (folder / item).is_file():
            return folder / item
    for ending in ENDINGS:
        for name in (item, item.lower()):
            if (path.parent / f"{name}{ending}").is_file():
                return path.parent / f"{name}{ending}"
    inside = sorted(p for p in path.parent.rglob("*") if is_structure_name(p))
    found = [p for p in inside if entry_name(p).lower() == item.lower()]
    if not found:
        raise UsageError(f"{path}: no file for {item!r} in {path.parent}")
    return found[0]
