"""Chemical constants: the residue alphabet, standard residues, elements, crystallisation aids.

The tables of standard residues follow the atom order of the Chemical Component Dictionary (CCD)
and are checked against it by the tests; charges, bonds and ideal coordinates come from ``ccd``.
"""

from __future__ import annotations

from collections.abc import Iterable

from tpf.data.tables import DNA, PROTEIN, RNA

# fmt: off
RESIDUES: tuple[str, ...] = (
    "ALA", "ARG", "ASN", "ASP", "CYS", "GLN", "GLU", "GLY", "HIS", "ILE",
    "LEU", "LYS", "MET", "PHE", "PRO", "SER", "THR", "TRP", "TYR", "VAL", "UNK",
    "A", "G", "C", "U", "N",
    "DA", "DG", "DC", "DT", "DN",
    "-",
)
"""The residue alphabet of 32: amino acids, RNA, DNA, gap (spec model.md 1.2)."""

ONE_LETTER: dict[str, str] = {
    "ALA": "A", "ARG": "R", "ASN": "N", "ASP": "D", "CYS": "C", "GLN": "Q", "GLU": "E",
    "GLY": "G", "HIS": "H", "ILE": "I", "LEU": "L", "LYS": "K", "MET": "M", "PHE": "F",
    "PRO": "P", "SER": "S", "THR": "T", "TRP": "W", "TYR": "Y", "VAL": "V", "UNK": "X",
    "A": "A", "G": "G", "C": "C", "U": "U", "N": "N",
    "DA": "A", "DG": "G", "DC": "C", "DT": "T", "DN": "N",
}
"""Standard residue to one-letter code."""

_RIBOSE = ("P", "OP1", "OP2", "O5'", "C5'", "C4'", "O4'", "C3'", "O3'", "C2'", "O2'", "C1'")
_DEOXYRIBOSE = tuple(name for name in _RIBOSE if name != "O2'")
_ADENINE = ("N9", "C8", "N7", "C5", "C6", "N6", "N1", "C2", "N3", "C4")
_GUANINE = ("N9", "C8", "N7", "C5", "C6", "O6", "N1", "C2", "N2", "N3", "C4")
_CYTOSINE = ("N1", "C2", "O2", "N3", "C4", "N4", "C5", "C6")
_URACIL = ("N1", "C2", "O2", "N3", "C4", "O4", "C5", "C6")
_THYMINE = ("N1", "C2", "O2", "N3", "C4", "O4", "C5", "C7", "C6")

ATOMS: dict[str, tuple[str, ...]] = {
    "ALA": ("N", "CA", "C", "O", "CB"),
    "ARG": ("N", "CA", "C", "O", "CB", "CG", "CD", "NE", "CZ", "NH1", "NH2"),
    "ASN": ("N", "CA", "C", "O", "CB", "CG", "OD1", "ND2"),
    "ASP": ("N", "CA", "C", "O", "CB", "CG", "OD1", "OD2"),
    "CYS": ("N", "CA", "C", "O", "CB", "SG"),
    "GLN": ("N", "CA", "C", "O", "CB", "CG", "CD", "OE1", "NE2"),
    "GLU": ("N", "CA", "C", "O", "CB", "CG", "CD", "OE1", "OE2"),
    "GLY": ("N", "CA", "C", "O"),
    "HIS": ("N", "CA", "C", "O", "CB", "CG", "ND1", "CD2", "CE1", "NE2"),
    "ILE": ("N", "CA", "C", "O", "CB", "CG1", "CG2", "CD1"),
    "LEU": ("N", "CA", "C", "O", "CB", "CG", "CD1", "CD2"),
    "LYS": ("N", "CA", "C", "O", "CB", "CG", "CD", "CE", "NZ"),
    "MET": ("N", "CA", "C", "O", "CB", "CG", "SD", "CE"),
    "PHE": ("N", "CA", "C", "O", "CB", "CG", "CD1", "CD2", "CE1", "CE2", "CZ"),
    "PRO": ("N", "CA", "C", "O", "CB", "CG", "CD"),
    "SER": ("N", "CA", "C", "O", "CB", "OG"),
    "THR": ("N", "CA", "C", "O", "CB", "OG1", "CG2"),
    "TRP": ("N", "CA", "C", "O", "CB", "CG", "CD1", "CD2", "NE1", "CE2", "CE3",
            "CZ2", "CZ3", "CH2"),
    "TYR": ("N", "CA", "C", "O", "CB", "CG", "CD1", "CD2", "CE1", "CE2", "CZ", "OH"),
    "VAL": ("N", "CA", "C", "O", "CB", "CG1", "CG2"),
    "UNK": ("N", "CA", "C", "O", "CB", "CG"),
    "A": _RIBOSE + _ADENINE,
    "G": _RIBOSE + _GUANINE,
    "C": _RIBOSE + _CYTOSINE,
    "U": _RIBOSE + _URACIL,
    "N": _RIBOSE,
    "DA": _DEOXYRIBOSE + _ADENINE,
    "DG": _DEOXYRIBOSE + _GUANINE,
    "DC": _DEOXYRIBOSE + _CYTOSINE,
    "DT": _DEOXYRIBOSE + _THYMINE,
    "DN": _DEOXYRIBOSE,
}
"""Heavy atoms of a standard residue inside a chain, in CCD order (no OXT, no OP3)."""

ELEMENTS: tuple[str, ...] = (
    "X",
    "H", "HE", "LI", "BE", "B", "C", "N", "O", "F", "NE", "NA", "MG", "AL", "SI", "P", "S", "CL",
    "AR", "K", "CA", "SC", "TI", "V", "CR", "MN", "FE", "CO", "NI", "CU", "ZN", "GA", "GE", "AS",
    "SE", "BR", "KR", "RB", "SR", "Y", "ZR", "NB", "MO", "TC", "RU", "RH", "PD", "AG", "CD", "IN",
    "SN", "SB", "TE", "I", "XE", "CS", "BA", "LA", "CE", "PR", "ND", "PM", "SM", "EU", "GD", "TB",
    "DY", "HO", "ER", "TM", "YB", "LU", "HF", "TA", "W", "RE", "OS", "IR", "PT", "AU", "HG", "TL",
    "PB", "BI", "PO", "AT", "RN", "FR", "RA", "AC", "TH", "PA", "U", "NP", "PU", "AM", "CM", "BK",
    "CF", "ES", "FM", "MD", "NO", "LR", "RF", "DB", "SG", "BH", "HS", "MT", "DS", "RG", "CN", "NH",
    "FL", "MC", "LV", "TS", "OG",
)
"""Upper-case element symbols; the index is the atomic number, 0 an unknown element."""

CRYSTAL_AIDS: frozenset[str] = frozenset({
    "SO4", "GOL", "EDO", "PO4", "ACT", "PEG", "DMS", "TRS",
    "PGE", "PG4", "FMT", "EPE", "MPD", "MES", "CD", "IOD",
})
"""Components dropped from X-ray entries (AF3 SI Table 9)."""

COVALENT_RADIUS: dict[int, float] = {
    5: 0.84, 6: 0.76, 7: 0.71, 8: 0.66, 9: 0.57, 14: 1.11, 15: 1.07, 16: 1.05, 17: 1.02,
    33: 1.19, 34: 1.20, 35: 1.20, 52: 1.38, 53: 1.39,
}
"""Angstrom, by atomic number, of the heavy elements that make covalent bonds (Cordero et al. 2008,
doi:10.1039/b801115j)."""
# fmt: on

WATERS: frozenset[str] = frozenset({"HOH", "DOD", "WAT", "H2O", "TIP3", "SOL"})
RESTYPE: dict[str, int] = {name: i for i, name in enumerate(RESIDUES)}
UNKNOWN = RESTYPE["UNK"]
UNKNOWN_RESIDUE: dict[int, str] = {PROTEIN: "UNK", RNA: "N", DNA: "DN"}
"""What stands for any residue, by molecule type."""
GAP = RESTYPE["-"]
ATOMIC_NUMBER: dict[str, int] = {symbol: i for i, symbol in enumerate(ELEMENTS)} | {"D": 1}
STANDARD: frozenset[str] = frozenset(ATOMS)
PURINES: frozenset[str] = frozenset({"A", "G", "DA", "DG"})
PYRIMIDINES: frozenset[str] = frozenset({"C", "U", "DC", "DT"})
TERMINAL_ATOMS: frozenset[str] = frozenset({"OXT", "OP3"})
MAX_TOKEN_ATOMS = 23


def molecule_type(residue: str) -> int:
    """Return PROTEIN, RNA or DNA of a standard residue; raise ``KeyError`` for any other."""
    index = RESTYPE[residue]
    if index <= UNKNOWN:
        return PROTEIN
    return RNA if index <= RESTYPE["N"] else DNA


def one_letters(residues: Iterable[str]) -> str:
    """Return the one-letter sequence of residues, X for those that are not standard."""
    return "".join(ONE_LETTER.get(residue, "X") for residue in residues)


def center_atom(residue: str) -> str:
    """Return the token centre atom of a standard residue (AF3 SI 2.6)."""
    return "CA" if molecule_type(residue) == PROTEIN else "C1'"


def representative_atom(residue: str) -> str:
    """Return the atom of a standard residue that stands for it in distances (AF3 SI 4.4).

    An unknown nucleotide has no base and is represented by its centre atom.
    """
    if residue in PURINES:
        return "C4"
    if residue in PYRIMIDINES:
        return "C2"
    if molecule_type(residue) != PROTEIN:
        return "C1'"
    return "CA" if residue == "GLY" else "CB"


def atomic_number(symbol: str) -> int:
    """Return the atomic number of an element symbol in any case; 0 if it is not an element."""
    return ATOMIC_NUMBER.get(symbol.upper(), 0)
