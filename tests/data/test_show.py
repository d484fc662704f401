"""What is shown of an entry: the picture of a crop agrees with its coordinates."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tpf.data.load import load_tables
from tpf.data.show import CONTACT, PICTURE, describe, render
from tpf.data.tokens import tokenize

EXAMPLE = Path(__file__).resolve().parents[2] / "data" / "examples" / "1a7g.cif.gz"


def dots(text: str) -> set[tuple[int, int]]:
    """Return (row, column) of each dot of the Braille picture at the end of a text."""
    rows = [line for line in text.splitlines() if line and 0x2800 <= ord(line[0]) < 0x2900]
    order = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (3, 1)]
    found = set()
    for r, row in enumerate(rows):
        for c, character in enumerate(row):
            bits = ord(character) - 0x2800
            found |= {(4 * r + y, 2 * c + x) for k, (y, x) in enumerate(order) if bits >> k & 1}
    return found


def test_the_contact_map_is_that_of_the_crop() -> None:
    facts = describe(EXAMPLE, crop=50, seed=3)
    tokens = tokenize(load_tables(EXAMPLE))
    chosen = facts["crop"]["tokens"]
    centre = tokens.tables.pos[tokens.center_atom[chosen]]
    distance = np.linalg.norm(centre[:, None] - centre[None], axis=-1)
    expected = set(zip(*np.nonzero(distance < CONTACT), strict=True))
    expected -= {(k, k) for k in range(50)}
    assert dots(render(facts)) == expected


def test_the_strips_show_what_was_taken() -> None:
    facts = describe(EXAMPLE, crop=120, seed=0)
    text = render(facts)
    strips = {line.split()[0]: line for line in text.splitlines() if line.endswith("|")}
    assert set(strips) == set(facts["crop"]["by_chain"])
    for chain, line in strips.items():
        bar = line[line.index("|") + 1 : -1]
        assert len(bar) == PICTURE
        assert bar.count("█") <= facts["crop"]["by_chain"][chain]
    picture = [line for line in text.splitlines() if line and 0x2800 <= ord(line[0]) < 0x2900]
    assert len(picture) == 120 // 4 and {len(row) for row in picture} == {60}
    whole = describe(EXAMPLE, crop=10_000)
    assert "█" * PICTURE in render(whole)
    assert len(render(whole).splitlines()[-1]) == PICTURE
