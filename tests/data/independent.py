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


@dataclass
class Counts:
    """What is expected of the tables and tokens of an entry."""

    polymer_chains: int = 0
    ligand_chains: int = 0
    residues: int = 0
    atoms: int = 0
    tokens: int = 0
    atomized: Counter[str] | None = None
    """Residues of polymers that are atomised, by code."""


def heavy_atoms(ccd: Path) -> dict[str, int]:
    """Return the number of heavy atoms of each component of a dictionary file."""
    return {
        block.name: sum(
            symbol not in ("H", "D") for symbol in block.find_values("_chem_comp_atom.type_symbol")
        )
        for block in cif.read(str(ccd))
    }


def leaving_atoms(ccd: Path) -> dict[str, dict[str, set[str]]]:
    """Return the heavy leaving atoms of each component of a dictionary and what they hang on."""
    result: dict[str, dict[str, set[str]]] = {}
    for block in cif.read(str(ccd)):
        atoms = block.find("_chem_comp_atom.", ["atom_id", "type_symbol", "pdbx_leaving_atom_flag"])
        leaving = {a.str(0): set[str]() for a in atoms if a[1] not in ("H", "D") and a[2] == "Y"}
        for bond in block.find("_chem_comp_bond.", ["atom_id_1", "atom_id_2"]):
            for one, two in ((bond.str(0), bond.str(1)), (bond.str(1), bond.str(0))):
                if one in leaving:
                    leaving[one].add(two)
        result[block.name] = leaving
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


def _gone(leaving: dict[str, set[str]], seen: gemmi.Residue | None, anchors: set[str]) -> int:
    """Return the number of leaving atoms that hang on ``anchors`` and are not seen."""
    names = set() if seen is None else {a.name for a in seen if a.occ > 0}
    return sum(bool(near & anchors) and atom not in names for atom, near in leaving.items())


def count(path: Path, heavy: dict[str, int], leaving: dict[str, dict[str, set[str]]]) -> Counts:
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
        if entity.entity_type == gemmi.EntityType.Polymer:
            result.polymer_chains += n
            codes = [gemmi.Entity.first_mon(item) for item in entity.full_sequence]
            seen = {r.label_seq: r for chain in st[0] for r in chain if r.subchain == subchain}
            for i, code in enumerate(codes):
                code = "MET" if code == "MSE" else code
                result.residues += n
                terminal = 0
                if code in AMINO:
                    terminal = 0 if code == "UNK" and heavy[code] == 6 else 1
                elif code in NUCLEIC:
                    terminal = 1
                size = heavy[code] - terminal
                if not terminal and code != "UNK":
                    anchors = {"C", "O3'"} if i + 1 < len(codes) else set[str]()
                    anchors |= {"N", "P"} if i else set()
                    own = seen.get(i + 1)
                    if own is not None:
                        anchors |= linked.get((subchain, str(own.seqid)), set())
                    size -= _gone(leaving[code], own, anchors)
                result.atoms += n * size
                whole = terminal and (subchain, i + 1) not in bonded
                result.tokens += n * (1 if whole else size)
                if not whole:
                    result.atomized[code] += n
            continue
        parts = [r for chain in st[0] for r in chain if r.subchain == subchain]
        parts = [r for r in parts if r.name not in ("HOH", "DOD", *(AIDS if xray else ()))]
        result.ligand_chains += n * bool(parts)
        result.residues += n * len(parts)
        size = sum(heavy[r.name] for r in parts)
        for r in parts:
            size -= _gone(leaving[r.name], r, linked.get((subchain, str(r.seqid)), set()))
        result.atoms += n * size
        result.tokens += n * size
    return result


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
