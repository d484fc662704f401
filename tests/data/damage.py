"""Seeded damage to structure files: what a bad disk, a bad program or a bad day does to them."""

from __future__ import annotations

import gzip
from typing import Any

import numpy as np

EDITS = (
    "?", ".", "0", "-1", "1e9", "nan", "inf", "abc", "UNK", "HOH", "999999999999", "(1-", "SEP",
)  # fmt: skip


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    """Return a variant of a (compressed) mmCIF or BinaryCIF file."""
    plain = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    kinds = [_cut, _bytes, _compressed]
    if plain.startswith(b"data_"):
        kinds += [_cut_line, _lines, _columns, _columns, _swapped, _swapped]
    return kinds[int(rng.integers(len(kinds)))](plain, rng)


def _cut(data: bytes, rng: np.random.Generator) -> bytes:
    return data[: int(rng.integers(len(data)))]


def _bytes(data: bytes, rng: np.random.Generator) -> bytes:
    raw = bytearray(data)
    for place in rng.integers(len(raw), size=int(2 ** rng.integers(0, 9))):
        raw[place] = rng.integers(256)
    return bytes(raw)


def _compressed(data: bytes, rng: np.random.Generator) -> bytes:
    packed = gzip.compress(data, mtime=0)
    return _cut(packed, rng) if rng.integers(2) else _bytes(packed, rng)


def _cut_line(data: bytes, rng: np.random.Generator) -> bytes:
    """Cut at the end of a line, as an interrupted download often looks valid."""
    lines = data.splitlines(keepends=True)
    return b"".join(lines[: int(rng.integers(1, len(lines)))])


def _lines(data: bytes, rng: np.random.Generator) -> bytes:
    """Drop, repeat and exchange single lines."""
    lines = data.splitlines(keepends=True)
    for _ in range(int(rng.integers(1, 20))):
        i, j = rng.integers(len(lines), size=2)
        action = rng.integers(3)
        if action == 0:
            del lines[i]
        elif action == 1:
            lines.insert(j, lines[i])
        else:
            lines[i], lines[j] = lines[j], lines[i]
    return b"".join(lines)


def _swapped(data: bytes, rng: np.random.Generator) -> bytes:
    """Exchange two columns of a table without their names, or shuffle one."""
    category, columns, document = _some_category(data, rng)
    if document is None:
        return _cut(data, rng)
    names = list(columns)
    a, b = rng.choice(names, size=2)
    if a != b and rng.integers(3):
        columns[a], columns[b] = columns[b], columns[a]
    else:
        columns[a] = [columns[a][k] for k in rng.permutation(len(columns[a]))]
    document[0].set_mmcif_category(category, columns, raw=True)
    text: str = document.as_string()
    return text.encode()


def _columns(data: bytes, rng: np.random.Generator) -> bytes:
    """Erase a category or a column, or overwrite some of its values."""
    category, columns, document = _some_category(data, rng)
    if document is None:
        return _cut(data, rng)
    name = str(rng.choice(list(columns)))
    action = rng.integers(4)
    if action == 0:
        document[0].find_mmcif_category(category).erase()
    elif action == 1 and len(columns) > 1:
        columns.pop(name)
    else:
        share, value = rng.uniform() ** 3, str(rng.choice(EDITS))
        columns[name] = [value if rng.uniform() < share else v for v in columns[name]]
    if action:
        document[0].set_mmcif_category(category, columns, raw=True)
    text: str = document.as_string()
    return text.encode()


def _some_category(data: bytes, rng: np.random.Generator) -> tuple[str, dict[str, Any], Any]:
    from gemmi import cif

    document = cif.read_string(data)
    names = document[0].get_mmcif_category_names()
    if not names:
        return "", {}, None
    # half of the damage goes where it matters most
    atoms = [name for name in names if name == "_atom_site."]
    category = str(rng.choice(atoms if atoms and rng.integers(2) else names))
    return category, document[0].get_mmcif_category(category, raw=True), document


PLAIN_DAMAGE = (_cut, _bytes, _cut_line, _lines)
"""Damage to text of any kind."""
