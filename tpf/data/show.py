"""What one entry looks like to training: chains, tokens, atomised residues, links, a crop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpf.config import DataConfig
from tpf.data.crop import crop as draw_crop
from tpf.data.load import load_tables
from tpf.data.tables import LIGAND, Tokens
from tpf.data.tokens import tokenize

CONTACT = 8.0
"""Angstrom between token centres that are drawn as a contact."""
PICTURE = 64
"""Characters across a picture."""
TYPE_NAMES = ("protein", "RNA", "DNA", "ligand")


def describe(path: Path, crop: int | None = None, seed: int = 0) -> dict[str, Any]:
    """Return the facts of an entry, and of one crop of ``crop`` tokens drawn from ``seed``.

    Raises ``DataError`` if the entry cannot be used, ``UsageError`` for a crop below 1.
    """
    tokens = tokenize(load_tables(path))
    tables = tokens.tables
    chain_of_token = tables.res_chain[tokens.residue]
    facts: dict[str, Any] = {
        "id": tables.id,
        "method": tables.method,
        "resolution": tables.resolution,
        "release_date": tables.release_date and tables.release_date.isoformat(),
        "tokens": len(tokens),
        "atoms": len(tables.element),
        "resolved_atoms": int((tables.occupancy > 0).sum()),
        "chains": [_chain(tokens, c, chain_of_token) for c in range(len(tables.chain_id))],
        "atomised_residues": _atomised(tokens),
        "links": _links(tokens),
        "notes": list(tables.notes),
    }
    if crop is not None:
        facts["crop"] = _crop(tokens, DataConfig(crop=crop), seed, chain_of_token)
    return facts


def _chain(tokens: Tokens, chain: int, chain_of_token: NDArray[np.int32]) -> dict[str, Any]:
    tables = tokens.tables
    residues = np.flatnonzero(tables.res_chain == chain)
    return {
        "id": str(tables.chain_id[chain]),
        "author": str(tables.auth_chain[chain]),
        "type": TYPE_NAMES[tables.chain_type[chain]],
        "entity": int(tables.chain_entity[chain]),
        "copy": int(tables.chain_sym[chain]),
        "residues": len(residues),
        "tokens": int((chain_of_token == chain).sum()),
        "components": sorted(set(tables.res_name[residues].tolist()))
        if tables.chain_type[chain] == LIGAND
        else [],
    }


def _residue_name(tokens: Tokens, residue: int) -> str:
    tables = tokens.tables
    chain = tables.chain_id[tables.res_chain[residue]]
    return f"{chain}/{tables.res_name[residue]}{tables.res_id[residue]}"


def _atomised(tokens: Tokens) -> list[str]:
    polymer = tokens.atomized & (tokens.mol_type != LIGAND)
    return [_residue_name(tokens, int(r)) for r in np.unique(tokens.residue[polymer])]


def _links(tokens: Tokens) -> list[str]:
    """Return the bonds between residues other than those of the polymer backbone."""
    tables = tokens.tables
    links = []
    for i, j in tables.bonds:
        left, right = int(tables.atom_residue[i]), int(tables.atom_residue[j])
        names = (str(tables.atom_name[i]), str(tables.atom_name[j]))
        backbone = {names, names[::-1]} & {("C", "N"), ("O3'", "P")} and right == left + 1
        if left != right and not backbone:
            ends = (_residue_name(tokens, r) for r in (left, right))
            links.append("–".join(f"{e}:{n}" for e, n in zip(ends, names, strict=True)))
    return links


def _crop(
    tokens: Tokens, config: DataConfig, seed: int, chain_of_token: NDArray[np.int32]
) -> dict[str, Any]:
    weights = (config.crop_contiguous, config.crop_spatial, config.crop_interface)
    index = draw_crop(tokens, config.crop, np.random.default_rng(seed), weights)
    chains, counts = np.unique(chain_of_token[index], return_counts=True)
    ids = tokens.tables.chain_id[chains].tolist()
    return {
        "seed": seed,
        "budget": config.crop,
        "tokens": index.tolist(),
        "by_chain": dict(zip(ids, counts.tolist(), strict=True)),
        "contacts": _contacts(tokens.tables.pos[tokens.center_atom[index]]),
    }


def _contacts(centre: NDArray[np.float32]) -> list[list[int]]:
    """Return the pairs i < j of centres [n, 3] nearer than ``CONTACT``."""
    distance = np.linalg.norm(centre[:, None] - centre[None], axis=-1)
    return np.argwhere(np.triu(distance < CONTACT, k=1)).tolist()


def _strips(facts: dict[str, Any]) -> list[str]:
    """Return a line per chain of the crop: which part of it was taken."""
    chosen = np.zeros(facts["tokens"], bool)
    chosen[facts["crop"]["tokens"]] = True
    lines, start = [], 0
    for chain in facts["chains"]:
        own = chosen[start : start + chain["tokens"]]
        start += chain["tokens"]
        if own.any():
            parts = np.array_split(own, min(len(own), PICTURE))
            shades = "".join(" ░▒▓█"[int(np.ceil(4 * part.mean()))] for part in parts)
            lines.append(f"{chain['id']:<10} |{shades}|")
    return lines


def _map(crop: dict[str, Any]) -> list[str]:
    """Return the contact map of a crop in Braille dots, two by four to a character."""
    n = len(crop["tokens"])
    side = min(n, 2 * PICTURE)
    dots = np.zeros((-(-side // 4) * 4, -(-side // 2) * 2), np.int64)
    place = np.arange(n) * side // n
    pairs = place[np.array(crop["contacts"], dtype=np.intp).reshape(-1, 2)]
    dots[pairs[:, 0], pairs[:, 1]] = dots[pairs[:, 1], pairs[:, 0]] = 1
    bits = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
    rows, columns = dots.shape[0] // 4, dots.shape[1] // 2
    cells = (dots.reshape(rows, 4, columns, 2) * bits[:, None, :]).sum(axis=(1, 3))
    return ["".join(chr(0x2800 + cell) for cell in row) for row in cells.tolist()]


def render(facts: dict[str, Any]) -> str:
    """Return the facts as text for people."""
    resolution = f"{facts['resolution']:.2f} Å" if facts["resolution"] else "no resolution"
    lines = [
        f"{facts['id']}: {facts['method'] or 'unknown method'}, {resolution}, "
        f"released {facts['release_date'] or 'unknown'}",
        f"{facts['tokens']} tokens, {facts['atoms']} atoms ({facts['resolved_atoms']} resolved)",
        "chain      type     entity copy residues tokens components",
    ]
    for c in facts["chains"]:
        lines.append(
            f"{c['id']:<10} {c['type']:<8} {c['entity']:>6} {c['copy']:>4} {c['residues']:>8} "
            f"{c['tokens']:>6} {' '.join(c['components'])}".rstrip()
        )
    for title, key in (("atomised residues", "atomised_residues"), ("links", "links")):
        if facts[key]:
            lines.append(f"{title}: {', '.join(facts[key])}")
    lines += [f"note: {note}" for note in facts["notes"]]
    if "crop" in facts:
        c = facts["crop"]
        shares = ", ".join(f"{chain} {count}" for chain, count in c["by_chain"].items())
        lines.append(
            f"crop of {len(c['tokens'])} tokens (budget {c['budget']}, seed {c['seed']}): {shares}"
        )
        lines += _strips(facts)
        lines.append(f"contacts of token centres within {CONTACT:g} Å:")
        lines += _map(c)
    return "\n".join(lines)
