"""A second count of what an entry holds, by gemmi's own structure reader and the CCD."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import gemmi
from gemmi import cif

# AF3 SI Table 9 and the standard residues, written out here again on purpose
AIDS = "SO4 GOL EDO PO4 ACT PEG DMS TRS PGE PG4 FMT EPE MPD MES CD IOD".split()
AMINO = (
    "ALA ARG ASN ASP CYS GLN GLU GLY HIS ILE LEU LYS MET PHE PRO SER THR TRP TYR VAL UNK".split()
)
NUCLEIC = "A G C U N DA DG DC DT DN".split()
LONGEST = 2.4
"""Angstrom; a longer bond is torn."""


@dataclass
class Counts:
    """What is expected of the tables and tokens of an entry."""

    polymer_chains: int = 0
    ligand_chains: int = 0
    residues: int = 0
    atoms: int = 0
    bonds: int = 0
    """Inside residues, along polymers, and to ligands."""
    tokens: int = 0
    atomized: Counter[str] | None = None
    """Residues of polymers that are atomised, by code."""


@dataclass
class Component:
    """The heavy atoms of a component and the bonds between them."""

    atoms: list[str]
    bonds: list[tuple[str, str]]
    leaving: dict[str, set[str]]
    """Leaving atoms, and what they hang on."""

    def without(self, gone: set[str]) -> tuple[int, int]:
        """Return the number of atoms and bonds that are left without some atoms."""
        bonds = sum(not gone & set(bond) for bond in self.bonds)
        return len(set(self.atoms) - gone), bonds


def components(ccd: Path) -> dict[str, Component]:
    """Return the components of a dictionary file."""
    result: dict[str, Component] = {}
    for block in cif.read(str(ccd)):
        table = block.find("_chem_comp_atom.", ["atom_id", "type_symbol", "pdbx_leaving_atom_flag"])
        heavy = {row.str(0): row[2] == "Y" for row in table if row[1] not in ("H", "D")}
        pairs = block.find("_chem_comp_bond.", ["atom_id_1", "atom_id_2"])
        bonds = [(row.str(0), row.str(1)) for row in pairs]
        bonds = [bond for bond in bonds if set(bond) <= heavy.keys()]
        leaving = {
            name: {other for bond in bonds if name in bond for other in bond if other != name}
            for name, leaves in heavy.items()
            if leaves
        }
        result[block.name] = Component(list(heavy), bonds, leaving)
    return result


def _linked_atoms(st: gemmi.Structure) -> dict[tuple[str, str], set[str]]:
    """Return the atoms with a link by subchain and residue."""
    result: dict[tuple[str, str], set[str]] = {}
    for link in st.connections:
        if link.type in (gemmi.ConnectionType.Covale, gemmi.ConnectionType.Disulf):
            for end in (link.partner1, link.partner2):
                residue = st[0].find_cra(end).residue
                if residue is not None:
                    key = (residue.subchain, str(residue.seqid))
                    result.setdefault(key, set()).add(end.atom_name)
    return result


def _gone(part: Component, seen: gemmi.Residue | None, anchors: set[str]) -> set[str]:
    """Return the leaving atoms that hang on ``anchors`` and are not seen."""
    names = set() if seen is None else {a.name for a in seen if a.occ > 0}
    return {atom for atom, near in part.leaving.items() if near & anchors and atom not in names}


def count(path: Path, known: dict[str, Component]) -> Counts:
    """Count the first assembly of an entry after the removals of the specification."""
    st = gemmi.read_structure(str(path))
    st.setup_entities()
    xray = "X-RAY" in st.info["_exptl.method"] if "_exptl.method" in st.info else False
    copies: Counter[str] = Counter()
    if st.assemblies:
        for generator in st.assemblies[0].generators:
            for subchain in generator.subchains:
                copies[subchain] += len(generator.operators)
    entity_of = {name: e for e in st.entities for name in e.subchains}
    bonded, linked = _bonded(st), _linked_atoms(st)
    result = Counts(atomized=Counter())
    assert result.atomized is not None
    for subchain in {r.subchain for chain in st[0] for r in chain}:
        n = copies[subchain] if st.assemblies else 1
        entity = entity_of[subchain]
        parts = [r for chain in st[0] for r in chain if r.subchain == subchain]
        if entity.entity_type == gemmi.EntityType.Polymer:
            result.polymer_chains += n
            codes = [gemmi.Entity.first_mon(item) for item in entity.full_sequence]
            codes = ["MET" if code == "MSE" else code for code in codes]
            seen = {r.label_seq: r for r in parts}
            result.bonds += n * _along(codes, seen)
            for i, code in enumerate(codes):
                own = seen.get(i + 1)
                terminal = {"OXT", "OP3"} & set(known[code].atoms)
                if code in AMINO + NUCLEIC:
                    gone = terminal
                else:
                    anchors = {"C", "O3'"} if i + 1 < len(codes) else set[str]()
                    anchors |= {"N", "P"} if i else set()
                    if own is not None:
                        anchors |= linked.get((subchain, str(own.seqid)), set())
                    gone = _gone(known[code], own, anchors)
                atoms, bonds = known[code].without(gone)
                result.residues += n
                result.atoms += n * atoms
                result.bonds += n * bonds
                whole = code in AMINO + NUCLEIC and (subchain, i + 1) not in bonded
                result.tokens += n * (1 if whole else atoms)
                if not whole:
                    result.atomized[code] += n
            continue
        parts = [r for r in parts if not _dropped(r, xray)]
        result.ligand_chains += n * bool(parts)
        result.residues += n * len(parts)
        for r in parts:
            anchors = linked.get((subchain, str(r.seqid)), set())
            atoms, bonds = known[r.name].without(_gone(known[r.name], r, anchors))
            result.atoms += n * atoms
            result.bonds += n * bonds
            result.tokens += n * atoms
    result.bonds += _links(st, copies, xray)
    return result


def _dropped(residue: gemmi.Residue, xray: bool) -> bool:
    return residue.name in ("HOH", "DOD", *(AIDS if xray else ()))


def _along(codes: list[str], seen: dict[int, gemmi.Residue]) -> int:
    """Return the number of bonds between neighbours of a sequence that are not torn."""
    total = 0
    for i in range(1, len(codes)):
        ends = [("C", "N"), ("O3'", "P")][codes[i] in NUCLEIC or codes[i - 1] in NUCLEIC]
        left, right = seen.get(i), seen.get(i + 1)
        torn = False
        if left is not None and right is not None and ends[0] in left and ends[1] in right:
            torn = left[ends[0]][0].pos.dist(right[ends[1]][0].pos) > LONGEST
        total += not torn
    return total


def _links(st: gemmi.Structure, copies: Counter[str], xray: bool) -> int:
    """Return the number of covalent bonds that join a ligand to something."""
    found: dict[frozenset[tuple[str, str, str]], int] = {}
    for link in st.connections:
        if link.type != gemmi.ConnectionType.Covale or link.asu == gemmi.Asu.Different:
            continue
        ends = [st[0].find_cra(end) for end in (link.partner1, link.partner2)]
        if any(end.atom is None or _dropped(end.residue, xray) for end in ends):
            continue
        if all(end.residue.entity_type == gemmi.EntityType.Polymer for end in ends):
            continue
        if ends[0].atom.pos.dist(ends[1].atom.pos) > LONGEST:
            continue
        key = frozenset((e.residue.subchain, str(e.residue.seqid), e.atom.name) for e in ends)
        n = min(copies[e.residue.subchain] for e in ends) if st.assemblies else 1
        found[key] = n
    return sum(found.values())


def _bonded(st: gemmi.Structure) -> set[tuple[str, int]]:
    """Return (subchain, label number) of polymer residues with a covalent bond to a ligand."""
    result = set()
    for link in st.connections:
        if link.type not in (gemmi.ConnectionType.Covale, gemmi.ConnectionType.Disulf):
            continue
        if link.asu == gemmi.Asu.Different:
            continue
        ends = [st[0].find_cra(end) for end in (link.partner1, link.partner2)]
        if any(end.residue is None for end in ends):
            continue
        polymer = [e.residue.entity_type == gemmi.EntityType.Polymer for e in ends]
        if polymer[0] == polymer[1]:
            continue
        end = ends[polymer.index(True)]
        result.add((end.residue.subchain, end.residue.label_seq))
    return result
