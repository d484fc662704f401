"""Write ``Tables`` as a complete mmCIF that reads back to the same tables."""

from __future__ import annotations

import gzip
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpf.data import chem
from tpf.data.ccd import Component, Dictionary, component_of
from tpf.data.identity import agrees
from tpf.data.tables import DNA, LIGAND, PROTEIN, RNA, Tables
from tpf.errors import UsageError
from tpf.files import write_whole

_POLY_TYPE = {
    PROTEIN: "polypeptide(L)",
    RNA: "polyribonucleotide",
    DNA: "polydeoxyribonucleotide",
}
_MONOMER_TYPE = {PROTEIN: "L-peptide linking", RNA: "RNA linking", DNA: "DNA linking"}
_ORDER = {1: "sing", 2: "doub", 3: "trip", 4: "arom"}

_Columns = dict[str, list[Any]]


def write_mmcif(
    path: Path | str | None,
    tables: Tables,
    positions: NDArray[np.floating[Any]] | None = None,
    b_factors: NDArray[np.floating[Any]] | None = None,
    *,
    components: Mapping[str, Component] | None = None,
) -> str:
    """Return tables as mmCIF text, and write it (.cif or .cif.gz, whole or not at all).

    ``positions`` [A, 3] and ``b_factors`` [A] stand in for those of the tables, as for a
    prediction; every finite position is then written with occupancy 1, rounded to 0.001. Atoms
    without a position are left out. ``components`` are stored with their coordinates, so that a
    reader prefers them to any dictionary. Raises ``UsageError`` if a shape does not fit.
    """
    from gemmi import cif

    tables_pos, occupancy = tables.pos, tables.occupancy
    if positions is not None:
        if positions.shape != tables.pos.shape:
            raise UsageError(f"positions have shape {positions.shape}, not {tables.pos.shape}")
        tables_pos = np.round(positions, 3).astype(np.float32)
        occupancy = np.ones(len(tables_pos), dtype=np.float32)
    b_factor = tables.b_factor
    if b_factors is not None:
        if b_factors.shape != tables.b_factor.shape:
            raise UsageError(f"b_factors have shape {b_factors.shape}, not {b_factor.shape}")
        b_factor = np.round(b_factors, 3).astype(np.float32)
    document = cif.Document()
    block = document.add_new_block(re.sub(r"\s", "_", tables.id) or "tpf")
    for category, columns in (
        *_header(tables).items(),
        *_entities(tables).items(),
        *_components(tables, components or {}).items(),
        ("struct_conn_type", {"id": ["covale"]}),  # says that all links are listed
        ("struct_conn", _links(tables)),
        ("atom_site", _atoms(tables, tables_pos, occupancy, b_factor)),
    ):
        if columns and len(next(iter(columns.values()))):
            block.set_mmcif_category(f"_{category}.", columns)
    text: str = document.as_string()
    if path is not None:
        _store(Path(path), text)
    return text


def _store(path: Path, text: str) -> None:
    data = text.encode()
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    try:
        write_whole(path, data)
    except OSError as error:
        reason = f"cannot write {path} ({error.strerror})"
        raise UsageError(f"{reason}; make its folder, or choose another") from error


def _header(tables: Tables) -> dict[str, _Columns]:
    result: dict[str, _Columns] = {"entry": {"id": [tables.id]}}
    if tables.release_date is not None:
        result["pdbx_audit_revision_history"] = {
            "ordinal": ["1"],
            "data_content_type": ["Structure model"],
            "revision_date": [tables.release_date.isoformat()],
        }
    methods = [method for method in tables.method.split("; ") if method]
    if methods:
        result["exptl"] = {"entry_id": [tables.id] * len(methods), "method": methods}
    if tables.resolution is not None:
        result["refine"] = {
            "entry_id": [tables.id],
            "pdbx_refine_id": [methods[0] if methods else None],
            "ls_d_res_high": [repr(tables.resolution)],
        }
    return result


def _author(text: str) -> tuple[str | None, str | None]:
    """Split an author number into number and insertion code."""
    match = re.fullmatch(r"(-?\d+)(.*)", text)
    if match is None:
        return text or None, None
    return match[1], match[2] or None


def _entities(tables: Tables) -> dict[str, _Columns]:
    entity: _Columns = {"id": [], "type": []}
    poly: _Columns = {
        "entity_id": [], "type": [], "pdbx_seq_one_letter_code": [], "pdbx_strand_id": [],
    }  # fmt: skip
    sequence: _Columns = {"entity_id": [], "num": [], "mon_id": []}
    scheme: _Columns = {
        name: []
        for name in (
            "asym_id", "entity_id", "seq_id", "mon_id", "pdb_seq_num", "pdb_strand_id",
            "pdb_ins_code",
        )
    }  # fmt: skip
    seen: set[int] = set()
    spans = np.searchsorted(tables.res_chain, np.arange(len(tables.chain_id) + 1))
    for c, number in enumerate(tables.chain_entity.tolist()):
        residues = range(spans[c], spans[c + 1])
        kind = int(tables.chain_type[c])
        codes = [str(tables.res_name[r]) for r in residues]
        if number not in seen:
            seen.add(number)
            entity["id"].append(str(number))
            other = "branched" if len(codes) > 1 else "non-polymer"
            entity["type"].append(other if kind == LIGAND else "polymer")
        if kind == LIGAND:
            continue
        if str(number) not in poly["entity_id"]:
            poly["entity_id"].append(str(number))
            poly["type"].append(_POLY_TYPE[kind])
            poly["pdbx_seq_one_letter_code"].append("".join(_letter(code, kind) for code in codes))
            same = tables.chain_entity == number
            poly["pdbx_strand_id"].append(",".join(tables.auth_chain[same].tolist()))
            sequence["entity_id"] += [str(number)] * len(codes)
            sequence["num"] += [str(tables.res_id[r]) for r in residues]
            sequence["mon_id"] += codes
        for r in residues:
            author, insertion = _author(str(tables.auth_seq[r]))
            row = (
                str(tables.chain_id[c]), str(number), str(tables.res_id[r]),
                str(tables.res_name[r]), author, str(tables.auth_chain[c]), insertion,
            )  # fmt: skip
            for values, value in zip(scheme.values(), row, strict=True):
                values.append(value)
    asym = {"id": tables.chain_id.tolist(), "entity_id": [str(e) for e in tables.chain_entity]}
    return {
        "entity": entity,
        "entity_poly": poly,
        "entity_poly_seq": sequence,
        "struct_asym": asym,
        "pdbx_poly_seq_scheme": scheme,
    }


def _letter(code: str, kind: int) -> str:
    known = code in chem.STANDARD and chem.molecule_type(code) == kind
    return chem.ONE_LETTER[code] if known and kind != DNA else f"({code})"


def _components(tables: Tables, given: Mapping[str, Component]) -> dict[str, _Columns]:
    """Return ``chem_comp`` of all, and atoms and bonds of the components that are not standard.

    Those that the dictionary defines otherwise get coordinates, which makes readers prefer them.
    """
    dictionary = Dictionary(own=given)
    about: _Columns = {"id": [], "type": [], "name": []}
    atoms: _Columns = {
        name: []
        for name in (
            "comp_id", "atom_id", "type_symbol", "charge", "pdbx_aromatic_flag",
            "model_Cartn_x", "model_Cartn_y", "model_Cartn_z", "pdbx_model_Cartn_x_ideal",
            "pdbx_model_Cartn_y_ideal", "pdbx_model_Cartn_z_ideal",
        )
    }  # fmt: skip
    bonds: _Columns = {
        "comp_id": [], "atom_id_1": [], "atom_id_2": [], "value_order": [],
        "pdbx_aromatic_flag": [],
    }  # fmt: skip
    for code in np.unique(tables.res_name).tolist():
        known = dictionary.get(code)
        about["id"].append(code)
        about["name"].append(known.name if known is not None and known.name else None)
        if code in chem.STANDARD:
            about["type"].append(_MONOMER_TYPE[chem.molecule_type(code)])
            continue
        about["type"].append(known.type if known is not None and known.type else "NON-POLYMER")
        part = given.get(code) or _fullest(tables, code)
        own = np.isfinite(part.ideal).any()
        special = code in given or own or known is None or not agrees(part, known)
        for i, name in enumerate(part.atom_names.tolist()):
            place = _texts(np.concatenate([part.model[i], part.ideal[i]]))
            flag = "Y" if part.aromatic[i] else "N"
            symbol = chem.ELEMENTS[int(part.elements[i])]
            row: list[str | None] = [code, name, symbol, f"{part.charges[i]:g}", flag]
            row += place if special else [None] * len(place)
            for values, value in zip(atoms.values(), row, strict=True):
                values.append(value)
        for k, (i, j) in enumerate(part.bonds.tolist()):
            flag = "Y" if part.bond_aromatic[k] else "N"
            order = _ORDER.get(int(part.bond_orders[k]))
            row = [code, str(part.atom_names[i]), str(part.atom_names[j]), order, flag]
            for values, value in zip(bonds.values(), row, strict=True):
                values.append(value)
    return {"chem_comp": about, "chem_comp_atom": atoms, "chem_comp_bond": bonds}


def _fullest(tables: Tables, code: str) -> Component:
    """Return the component as shown by the residue with the most bonds (stretched ones are cut)."""
    parts = [component_of(tables, int(r)) for r in np.flatnonzero(tables.res_name == code)]
    return max(parts, key=lambda part: len(part.bonds))


def _cross_links(tables: Tables) -> list[tuple[int, int]]:
    """Return the bonds between residues that are not those along a polymer."""
    found = []
    residues = tables.atom_residue[tables.bonds]
    for i, j in tables.bonds[residues[:, 0] != residues[:, 1]].tolist():
        left, right = int(tables.atom_residue[i]), int(tables.atom_residue[j])
        names = {str(tables.atom_name[i]), str(tables.atom_name[j])}
        same = tables.res_chain[left] == tables.res_chain[right]
        polymer = tables.chain_type[tables.res_chain[left]] != LIGAND
        if same and polymer and right == left + 1 and names in ({"C", "N"}, {"O3'", "P"}):
            continue
        found.append((i, j))
    return found


def _links(tables: Tables) -> _Columns:
    rows = [
        [f"covale{k + 1}", "covale", *_end(tables, i), *_end(tables, j)]
        for k, (i, j) in enumerate(_cross_links(tables))
    ]
    names_of = [
        "label_asym_id", "label_comp_id", "label_seq_id", "label_atom_id", "auth_asym_id",
        "auth_seq_id", "PDB_ins_code", "symmetry",
    ]  # fmt: skip
    header = ["id", "conn_type_id"]
    for side in (1, 2):
        for name in names_of:
            prefix = "pdbx_" if name == "PDB_ins_code" else ""
            header.append(f"{prefix}ptnr{side}_{name}")
    return {name: [row[k] for row in rows] for k, name in enumerate(header)}


def _end(tables: Tables, atom: int) -> list[str | None]:
    r = int(tables.atom_residue[atom])
    c = int(tables.res_chain[r])
    author, insertion = _author(str(tables.auth_seq[r]))
    polymer = tables.chain_type[c] != LIGAND
    return [
        str(tables.chain_id[c]),
        str(tables.res_name[r]),
        str(tables.res_id[r]) if polymer else None,
        str(tables.atom_name[atom]),
        str(tables.auth_chain[c]),
        author,
        insertion,
        "1_555",
    ]


def _texts(values: NDArray[np.float32]) -> list[str | None]:
    """Return the shortest texts that read back to the same numbers; None for NaN."""
    return [None if text == "nan" else text for text in values.astype(np.str_).tolist()]


def _atoms(
    tables: Tables,
    pos: NDArray[np.float32],
    occupancy: NDArray[np.float32],
    b_factor: NDArray[np.float32],
) -> _Columns:
    # unresolved ligands and ends of links are listed all the same, else readers would miss them
    finite = np.isfinite(pos).all(axis=1)
    ligand = tables.chain_type[tables.res_chain] == LIGAND
    seen = np.bincount(tables.atom_residue, weights=finite, minlength=len(tables.res_name)) > 0
    needed = (ligand & ~seen)[tables.atom_residue]
    needed[[atom for pair in _cross_links(tables) for atom in pair]] = True
    shown = np.flatnonzero(finite | needed)
    occupancy = np.where(finite, occupancy, 0).astype(np.float32)
    residue = tables.atom_residue[shown]
    chain = tables.res_chain[residue]
    polymer = tables.chain_type[chain] != LIGAND
    authors = [_author(text) for text in tables.auth_seq.tolist()]
    symbols = np.array(chem.ELEMENTS)
    seq = tables.res_id[residue].astype(np.str_)
    auth_chain = tables.auth_chain[chain].tolist()
    return {
        "group_PDB": np.where(tables.res_standard[residue], "ATOM", "HETATM").tolist(),
        "id": [str(i + 1) for i in range(len(shown))],
        "type_symbol": symbols[tables.element[shown]].tolist(),
        "label_atom_id": tables.atom_name[shown].tolist(),
        "label_alt_id": [False] * len(shown),
        "label_comp_id": tables.res_name[residue].tolist(),
        "label_asym_id": tables.chain_id[chain].tolist(),
        "label_entity_id": tables.chain_entity[chain].astype(np.str_).tolist(),
        "label_seq_id": [s if p else False for s, p in zip(seq.tolist(), polymer, strict=True)],
        "pdbx_PDB_ins_code": [authors[r][1] for r in residue.tolist()],
        "Cartn_x": _texts(pos[shown, 0]),
        "Cartn_y": _texts(pos[shown, 1]),
        "Cartn_z": _texts(pos[shown, 2]),
        "occupancy": occupancy[shown].astype(np.str_).tolist(),
        "B_iso_or_equiv": b_factor[shown].astype(np.str_).tolist(),
        "auth_seq_id": [authors[r][0] for r in residue.tolist()],
        "auth_comp_id": tables.res_name[residue].tolist(),
        "auth_asym_id": auth_chain,
        "pdbx_PDB_model_num": ["1"] * len(shown),
    }
