"""Read a structure file: mmCIF or BinaryCIF to ``Structure`` (first model, first assembly).

What a file lacks is inferred and said in the notes; what cannot be read is a ``DataError`` that
names the entry, the stage and the reason.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tpf.data.assembly import expand, read_assembly
from tpf.data.atom_site import AtomSite, Group, read_atom_site, residue_groups
from tpf.data.ccd import Component, Dictionary, component_from, read_components
from tpf.data.cif import Block, entry_name, plain_name, read_blocks
from tpf.data.links import Link, infer_links, read_links
from tpf.data.polymer import Placed, place_chains, read_records
from tpf.data.structure import Chain, Site, Structure, counted
from tpf.errors import DataError

_LINKS_LISTED = ("struct_conn", "struct_conn_type", "database_2", "pdbx_audit_revision_history")
"""A file with any of these categories, as every entry of the archive, records all its links."""
NO_NAMES = ("", "xxxx", "model", "default", "unknown", "untitled")
"""Entry ids that programs write into every file; the name of the file stands for them."""


def read_structure(
    path: Path, dictionary: Dictionary | None = None
) -> tuple[Structure, Dictionary]:
    """Return the first model and assembly of a file, and the dictionary with its own components.

    Raises ``DataError`` with stage read, parse or assembly.
    """
    blocks, notes = read_blocks(path)
    return structure_of(entry_name(path), blocks, notes, dictionary or Dictionary())


def structure_of(
    stem: str,
    blocks: Sequence[Block],
    notes: list[str],
    dictionary: Dictionary,
    *,
    expanded: bool = True,
) -> tuple[Structure, Dictionary]:
    """Return what ``read_structure`` returns, of data blocks already read from the file ``stem``.

    Without ``expanded`` the deposited chains are taken and not the first assembly. ``notes`` say
    what was found while reading.
    """
    block = _choose_block(stem, blocks, notes)
    entry = _entry_id(block, stem)
    site = read_atom_site(entry, block, notes)
    groups = residue_groups(site, notes)
    own, spare = _file_components(blocks, site, groups)
    known = dictionary.with_own(own).with_spare(spare)
    placed = place_chains(groups, read_records(block), known, notes)
    selected = [_select(part, site, notes) for part in placed]
    method, resolution, released = read_metadata(block)
    structure = _assemble(entry, site, selected, read_links(block, groups), groups)
    structure = replace(
        structure,
        method=method,
        resolution=resolution,
        release_date=released,
        notes=tuple(notes),
    )
    if not any(block.has(category) for category in _LINKS_LISTED):
        structure = _with_inferred_links(structure)
    copies = read_assembly(entry, block) if expanded else None
    if copies is not None:
        origin = {part.chain.id: part.groups[0][1].asym for part in placed}
        structure = expand(structure, copies, origin)
    return structure, known


def _choose_block(entry: str, blocks: Sequence[Block], notes: list[str]) -> Block:
    having = [block for block in blocks if block.has("atom_site")]
    if not having:
        small = any(block.has("atom_site_label") or block.has("cell_length_a") for block in blocks)
        hint = "; this looks like a small-molecule CIF" if small else ""
        raise DataError(entry, "parse", f"no coordinates (_atom_site is absent){hint}")
    if len(having) > 1:
        notes.append(f"The first of {len(having)} data blocks with coordinates was taken.")
    return having[0]


def _file_components(
    blocks: Sequence[Block], site: AtomSite, groups: list[Group]
) -> tuple[dict[str, Component], dict[str, Component]]:
    """Return the definitions in the file with coordinates, and those without.

    The latter say less than the CCD and are spare. Bonds without an atom list (some programs write
    only those) are joined to the atoms of the first residue of that name.
    """
    own: dict[str, Component] = {}
    spare: dict[str, Component] = {}
    for block in blocks:
        for code, part in read_components(block).items():
            complete = np.isfinite(part.ideal).any() or np.isfinite(part.model).any()
            if complete:
                own[code] = part
            else:
                spare[code] = part
        if block.has("chem_comp_bond") and not block.has("chem_comp_atom"):
            first = {group.comp: group.rows for group in reversed(groups)}
            bonds = block.columns("chem_comp_bond")
            for code in set(bonds.get("comp_id", np.array([], dtype=np.str_)).tolist()):
                if code in first:
                    rows = first[code]
                    spare[code] = component_from(code, site.name[rows], site.element[rows], bonds)
    return own, spare


def _with_inferred_links(structure: Structure) -> Structure:
    links = infer_links(structure)
    if not len(links):
        return structure
    structure = replace(structure, links=links, dative=np.zeros(len(links), dtype=bool))
    return structure.noted(
        f"{counted(len(links), 'link')} between residues inferred from distances."
    )


def _entry_id(block: Block, stem: str) -> str:
    ids = block.columns("entry", ("id",)).get("id", np.array([], dtype=np.str_))
    name = str(ids[0]) if len(ids) else ""
    if name.lower() in NO_NAMES:
        name = stem
    return plain_name(name).lower()


def read_metadata(block: Block) -> tuple[str, float | None, datetime.date | None]:
    """Return method, resolution in Angstrom and first release date of a block."""
    methods = block.columns("exptl", ("method",)).get("method", ())
    method = "; ".join(dict.fromkeys(str(text).upper() for text in methods if text))
    resolution: float | None = None
    for category, column in (("refine", "ls_d_res_high"), ("em_3d_reconstruction", "resolution")):
        values = block.numbers(category, column)
        usable = [] if values is None else [float(v) for v in values if np.isfinite(v) and v > 0]
        if usable:
            resolution = usable[0]
            break
    history = block.columns("pdbx_audit_revision_history", ("revision_date", "data_content_type"))
    dates = history.get("revision_date", np.array([], dtype=np.str_))
    if len(dates) and "data_content_type" in history:
        dates = dates[history["data_content_type"] == "Structure model"]
    if not len(dates):  # entries of the archive before 2017
        dates = block.columns("database_PDB_rev", ("date",)).get("date", dates)
    days = [day for day in map(_date, dates.tolist()) if day is not None]
    return method, resolution, min(days) if days else None


def _date(text: str) -> datetime.date | None:
    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        return None


def _select(part: Placed, site: AtomSite, notes: list[str]) -> Placed:
    """Keep one residue at each place and one conformer of each residue."""
    by_place: dict[int, list[Group]] = {}
    for place, group in part.groups:
        by_place.setdefault(place, []).append(group)
    chosen: list[tuple[int, Group]] = []
    sites = {s.res_id: s for s in part.chain.sequence}
    alternatives = 0
    for place, groups in by_place.items():
        best = max(groups, key=lambda g: float(site.occupancy[g.rows].mean()))
        alternatives += len(groups) - 1
        chosen.append((place, replace(best, rows=_conformer(site, best.rows))))
        if place in sites:
            sites[place] = Site(place, best.comp, best.auth_seq or sites[place].auth_seq)
    if alternatives:
        notes.append(
            f"{counted(alternatives, 'alternative residue')} of chain {part.chain.id} gave way to "
            "the residue of highest occupancy."
        )
    chain = replace(part.chain, sequence=tuple(sites.values()))
    return Placed(chain, tuple(chosen))


def _conformer(site: AtomSite, rows: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the rows of the conformer with the largest total occupancy, ties to the first."""
    alts = site.alt[rows]
    labels = [label for label in dict.fromkeys(alts.tolist()) if label]
    if labels:
        totals = [float(site.occupancy[rows[alts == label]].sum()) for label in labels]
        best = labels[int(np.argmax(totals))]
        rows = rows[(alts == "") | (alts == best)]
        # an atom may be written both without and with a conformer; the first one counts
        _, first = np.unique(site.name[rows], return_index=True)
        rows = rows[np.sort(first)]
    return rows


def _assemble(
    entry: str,
    site: AtomSite,
    parts: list[Placed],
    links: list[Link],
    groups: list[Group],
) -> Structure:
    """Gather the chosen rows into arrays, chains sorted by id."""
    parts = sorted(parts, key=lambda part: part.chain.id)
    rows: list[NDArray[np.intp]] = []
    residues: list[tuple[str, int, str, int]] = []
    chains: list[Chain] = []
    sizes: list[int] = []
    for part in parts:
        for place, group in part.groups:
            rows.append(group.rows)
            sizes.append(len(group.rows))
            residues.append((group.comp, place, group.auth_seq, len(chains)))
        chains.append(part.chain)
    order = np.concatenate(rows)
    position = np.full(len(site.name), -1, dtype=np.int64)
    position[order] = np.arange(len(order))
    names = list(zip(*residues, strict=True))
    pairs, dative = _link_atoms(site, position, links, groups)
    return Structure(
        id=entry,
        method="",
        resolution=None,
        release_date=None,
        atom_name=site.name[order],
        element=site.element[order],
        pos=site.pos[order],
        occupancy=site.occupancy[order].astype(np.float32),
        b_factor=site.b_factor[order].astype(np.float32),
        atom_residue=np.repeat(np.arange(len(sizes)), sizes).astype(np.int32),
        res_name=np.array(names[0], dtype=np.str_),
        res_id=np.array(names[1], dtype=np.int32),
        auth_seq=np.array(names[2], dtype=np.str_),
        res_chain=np.array(names[3], dtype=np.int32),
        chains=tuple(chains),
        links=pairs,
        dative=dative,
    )


def _link_atoms(
    site: AtomSite,
    position: NDArray[np.int64],
    links: list[Link],
    groups: list[Group],
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Return the kept atoms of each link, [L, 2], and whether it is dative, [L].

    Links to a conformer that was not kept go.
    """

    def atom(group: int, name: str) -> int:
        rows = groups[group].rows
        found = position[rows[site.name[rows] == name]]
        found = found[found >= 0]
        return int(found[0]) if len(found) else -1

    found: dict[tuple[int, int], bool] = {}
    for link in links:
        i, j = sorted((atom(link.left, link.left_atom), atom(link.right, link.right_atom)))
        if 0 <= i < j:
            found[i, j] = link.dative
    pairs = sorted(found)
    return (
        np.array(pairs, dtype=np.int32).reshape(-1, 2),
        np.array([found[pair] for pair in pairs], dtype=bool),
    )
