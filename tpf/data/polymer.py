"""Which groups of a file form polymers, their sequences, and the place of each residue in them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tpf.data import chem
from tpf.data.atom_site import Group, residue_number
from tpf.data.ccd import Dictionary
from tpf.data.cif import Block
from tpf.data.structure import Chain, Site, counted
from tpf.data.tables import DNA, LIGAND, PROTEIN, RNA

_ONE_TO_CODE = {
    kind: {
        letter: code
        for code, letter in chem.ONE_LETTER.items()
        if chem.molecule_type(code) == kind and code != "N"
    }
    for kind in (PROTEIN, RNA, DNA)
}


@dataclass(frozen=True)
class Placed:
    """A chain and its groups, each with its place in the sequence."""

    chain: Chain
    groups: tuple[tuple[int, Group], ...]
    """(res_id, group); several groups share a res_id where residues are alternatives."""


@dataclass(frozen=True)
class Records:
    """What a file says about entities and sequences."""

    entity_type: dict[str, str]
    poly_type: dict[str, str]
    asym_entity: dict[str, str]
    by_asym: dict[str, tuple[Site, ...]]
    """``pdbx_poly_seq_scheme`` by chain; alternative residues share a res_id."""
    by_entity: dict[str, tuple[Site, ...]]
    """``entity_poly_seq`` by entity."""
    one_letter: dict[str, str]


def read_records(block: Block) -> Records:
    """Return the entity and sequence records of a block; every one may be missing."""
    entity = block.columns("entity", ("id", "type"))
    poly = block.columns("entity_poly", ("entity_id", "type", "pdbx_seq_one_letter_code"))
    asym = block.columns("struct_asym", ("id", "entity_id"))
    poly_ids = poly.get("entity_id", ())
    by_asym: dict[str, list[Site]] = {}
    columns = ("asym_id", "seq_id", "mon_id", "pdb_seq_num", "pdb_ins_code")
    for name, seq, code, number, insertion in _rows(block, "pdbx_poly_seq_scheme", columns, 3):
        place = residue_number(seq)
        if place is not None and place > 0:
            by_asym.setdefault(name, []).append(Site(place, code, number + insertion))
    by_entity: dict[str, list[Site]] = {}
    for name, seq, code in _rows(block, "entity_poly_seq", ("entity_id", "num", "mon_id"), 3):
        place = residue_number(seq)
        if place is not None and place > 0:
            by_entity.setdefault(name, []).append(Site(place, code, ""))
    return Records(
        entity_type=_mapping(entity.get("id", ()), entity.get("type", ())),
        poly_type=_mapping(poly_ids, poly.get("type", ())),
        asym_entity=_mapping(asym.get("id", ()), asym.get("entity_id", ())),
        by_asym={name: tuple(sites) for name, sites in by_asym.items()},
        by_entity={name: tuple(sites) for name, sites in by_entity.items()},
        one_letter=_mapping(poly_ids, poly.get("pdbx_seq_one_letter_code", ())),
    )


def _mapping(keys: Iterable[str], values: Iterable[str]) -> dict[str, str]:
    return {str(k): str(v) for k, v in zip(keys, values, strict=False) if str(v)}


def _rows(
    block: Block, category: str, names: tuple[str, ...], required: int
) -> list[tuple[str, ...]]:
    columns = block.columns(category, names)
    if not all(name in columns for name in names[:required]):
        return []
    n = len(columns[names[0]])
    lists = [columns[name].tolist() if name in columns else [""] * n for name in names]
    return list(zip(*lists, strict=True))


def _kind(code: str, dictionary: Dictionary) -> int | None:
    """Return the molecule type that a residue can belong to, None if it is no monomer."""
    if code in chem.STANDARD:
        return chem.molecule_type(code)
    component = dictionary.get(code)
    text = "" if component is None else component.type
    if "LINKING" not in text and "TERMIN" not in text:
        return None
    if "PEPTIDE" in text:
        return PROTEIN
    return RNA if "RNA" in text else DNA if "DNA" in text else None


def _monomer(group: Group, dictionary: Dictionary) -> bool:
    if group.comp in chem.WATERS:
        return False
    if _kind(group.comp, dictionary) is not None:
        return True
    return not group.hetero and dictionary.get(group.comp) is None


def _is_polymer(entity: str, groups: list[Group], records: Records, known: Dictionary) -> bool:
    declared = records.entity_type.get(entity, "").lower()
    if declared:
        return declared == "polymer"
    if entity in records.poly_type or entity in records.by_entity:
        return True
    monomers = [group for group in groups if _monomer(group, known)]
    standard = [group for group in monomers if group.comp in chem.STANDARD]
    return bool(standard) and (len(monomers) > 1 or not standard[0].hetero)


def _chain_type(declared: str, codes: list[str], dictionary: Dictionary) -> int:
    """Return the type of a polymer from its entity record, else from most of its residues."""
    text = declared.lower()
    if text.startswith("polypeptide") or text == "cyclic-pseudo-peptide":
        return PROTEIN
    if text == "polyribonucleotide":
        return RNA
    if text == "polydeoxyribonucleotide":
        return DNA
    votes = Counter(kind for kind in (_kind(c, dictionary) for c in codes) if kind is not None)
    return votes.most_common(1)[0][0] if votes else LIGAND


def expand_letters(text: str, kind: int) -> tuple[Site, ...]:
    """Return the positions of a one-letter sequence with (CODE) for modified residues."""
    table = _ONE_TO_CODE.get(kind, {})
    unknown = chem.UNKNOWN_RESIDUE.get(kind, "UNK")
    items = re.findall(r"\(([^)]*)\)|([A-Za-z])", text)
    codes = [code or table.get(letter.upper(), unknown) for code, letter in items]
    return tuple(Site(i + 1, code, "") for i, code in enumerate(codes))


def place_chains(
    groups: list[Group], records: Records, dictionary: Dictionary, notes: list[str]
) -> list[Placed]:
    """Return the chains of a file; hetero groups inside a polymer's chain become their own."""
    by_asym: dict[str, list[Group]] = {}
    for group in groups:
        by_asym.setdefault(group.asym, []).append(group)
    placed: list[Placed] = []
    for asym, members in by_asym.items():
        entity = members[0].entity or records.asym_entity.get(asym, "")
        if not _is_polymer(entity, members, records, dictionary):
            placed.append(_ligand(asym, entity, members))
            continue
        inside = _residues(members, entity in records.entity_type, dictionary)
        chosen = {id(group) for group in inside}
        outside = [group for group in members if id(group) not in chosen]
        if inside:
            placed.append(_polymer(asym, entity, inside, records, dictionary, notes))
        water = [group for group in outside if group.comp in chem.WATERS]
        others = [[group] for group in outside if group.comp not in chem.WATERS]
        for k, part in enumerate(others + ([water] if water else [])):
            placed.append(_ligand(_free_name(asym, k + 1, by_asym), "", part))
        if others:
            notes.append(
                f"{counted(len(others), 'hetero group')} of chain {asym} split off as ligands."
            )
    return placed


def _residues(members: list[Group], declared: bool, dictionary: Dictionary) -> list[Group]:
    """Return the groups of a polymer's chain that are its residues.

    Where the file declares the polymer, these have label numbers; some programs number everything
    or nothing, then the kind of component decides.
    """
    numbered = [g for g in members if g.seq is not None and g.comp not in chem.WATERS]
    if declared and numbered:
        return numbered
    if any(not group.hetero for group in numbered):
        return [g for g in numbered if not g.hetero or _monomer(g, dictionary)]
    return [group for group in members if _monomer(group, dictionary)]


def _free_name(asym: str, k: int, taken: dict[str, list[Group]]) -> str:
    name = f"{asym}.{k}"
    while name in taken:
        name += "x"
    return name


def _ligand(asym: str, entity: str, members: list[Group]) -> Placed:
    chain = Chain(id=asym, auth=members[0].auth_asym, entity=entity, type=LIGAND, polymer=False)
    return Placed(chain, tuple((i + 1, group) for i, group in enumerate(members)))


def _polymer(
    asym: str,
    entity: str,
    members: list[Group],
    records: Records,
    dictionary: Dictionary,
    notes: list[str],
) -> Placed:
    declared = records.poly_type.get(entity, "")
    kind = _chain_type(declared, [group.comp for group in members], dictionary)
    if kind == LIGAND:
        notes.append(f"Chain {asym} is a polymer of no known kind and was taken as a ligand.")
        return _ligand(asym, entity, members)
    sequence = records.by_asym.get(asym) or records.by_entity.get(entity, ())
    if not sequence and entity in records.one_letter:
        sequence = expand_letters(records.one_letter[entity], kind)
    ids = _places(asym, members, sequence, notes)
    groups = tuple(sorted(zip(ids, members, strict=True), key=lambda item: item[0]))
    if not sequence:
        notes.append(f"No sequence record for chain {asym}; the residues in the file were taken.")
    chain = Chain(
        id=asym,
        auth=members[0].auth_asym,
        entity=entity,
        type=kind,
        polymer=True,
        sequence=_reconcile(asym, sequence, groups, notes),
    )
    return Placed(chain, groups)


def _places(
    asym: str, members: list[Group], sequence: tuple[Site, ...], notes: list[str]
) -> list[int]:
    """Return the res_id of each group: label numbers, else author numbers, else alignment."""
    labels = [group.seq for group in members if group.seq is not None and group.seq > 0]
    if len(labels) == len(members):
        return labels
    by_author = {site.auth_seq: site for site in sequence if site.auth_seq}
    if by_author and all(group.auth_seq in by_author for group in members):
        notes.append(f"Chain {asym} was matched to its sequence by author numbers.")
        return [by_author[group.auth_seq].res_id for group in members]
    if sequence:
        found = _aligned(members, sequence)
        if found is not None:
            notes.append(f"Chain {asym} was matched to its sequence by alignment.")
            return found
    notes.append(f"Chain {asym} has no label numbers; its residues were numbered anew.")
    return _renumbered(members)


def _renumbered(members: list[Group]) -> list[int]:
    numbers = [residue_number(group.auth_seq) for group in members]
    known = [number for number in numbers if number is not None]
    if len(known) == len(numbers) and all(a < b for a, b in zip(known, known[1:], strict=False)):
        return [number - known[0] + 1 for number in known]
    order = list(dict.fromkeys(group.auth_seq or str(id(group)) for group in members))
    place = {key: i + 1 for i, key in enumerate(order)}
    return [place[group.auth_seq or str(id(group))] for group in members]


def _aligned(members: list[Group], sequence: tuple[Site, ...]) -> list[int] | None:
    """Return the res_id of each group by global alignment, None if one has no counterpart."""
    import gemmi

    unique = {site.res_id: site for site in sequence}
    target = [site.code for site in unique.values()]
    result = gemmi.align_string_sequences(target, [group.comp for group in members], [])
    ids, row = list(unique), 0
    found: list[int] = []
    for count, operation in re.findall(r"(\d+)([MID])", result.cigar_str()):
        if operation == "M":
            found.extend(ids[row : row + int(count)])
            row += int(count)
        elif operation == "I":
            row += int(count)
        else:
            return None
    return found if len(found) == len(members) else None


def _reconcile(
    asym: str,
    sequence: tuple[Site, ...],
    groups: tuple[tuple[int, Group], ...],
    notes: list[str],
) -> tuple[Site, ...]:
    """Return one site per position; coordinates win where they disagree with the record."""
    codes: dict[int, set[str]] = {}
    sites: dict[int, Site] = {}
    for site in sequence:
        codes.setdefault(site.res_id, set()).add(site.code)
        sites.setdefault(site.res_id, site)
    differ = added = 0
    for res_id, group in groups:
        site = Site(res_id, group.comp, group.auth_seq)
        if res_id not in sites:
            added += bool(sequence)
            sites[res_id] = site
            codes[res_id] = {group.comp}
        elif group.comp not in codes[res_id]:
            differ += 1
            codes[res_id].add(group.comp)
            sites[res_id] = site
        elif group.auth_seq:
            sites[res_id] = replace(sites[res_id], auth_seq=group.auth_seq)
    if differ:
        notes.append(f"{counted(differ, 'residue')} of chain {asym} not as in the sequence record.")
    if added:
        notes.append(f"{counted(added, 'residue')} of chain {asym} outside the sequence record.")
    return tuple(sites[res_id] for res_id in sorted(sites))
