"""Reduce mmCIF files to the categories and columns that tpf reads.

The built-in examples and ``ccd_subset.cif.gz`` were made with these functions: ``reduce`` for an
entry, ``reduce_component`` for a block of the Chemical Component Dictionary, ``write_gzip`` to
store them so that equal content gives equal bytes.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

from tpf.files import write_whole

ENTRY_COLUMNS: dict[str, tuple[str, ...] | None] = {
    "entry": ("id",),
    "struct": ("entry_id", "title"),
    "exptl": ("entry_id", "method"),
    "refine": ("entry_id", "pdbx_refine_id", "ls_d_res_high"),
    "em_3d_reconstruction": ("entry_id", "id", "resolution"),
    "pdbx_audit_revision_history": ("ordinal", "data_content_type", "revision_date"),
    "database_PDB_rev": ("num", "date"),
    "entity": ("id", "type", "pdbx_description"),
    "entity_poly": ("entity_id", "type", "nstd_linkage", "pdbx_seq_one_letter_code"),
    "entity_poly_seq": ("entity_id", "num", "mon_id", "hetero"),
    "pdbx_poly_seq_scheme": (
        "asym_id", "entity_id", "seq_id", "mon_id", "auth_seq_num", "pdb_seq_num",
        "pdb_strand_id", "pdb_ins_code", "hetero",
    ),
    "struct_asym": ("id", "entity_id"),
    "chem_comp": ("id", "type", "name", "mon_nstd_parent_comp_id"),
    "struct_conn": (
        "id", "conn_type_id",
        "ptnr1_label_asym_id", "ptnr1_label_comp_id", "ptnr1_label_seq_id", "ptnr1_label_atom_id",
        "pdbx_ptnr1_label_alt_id", "pdbx_ptnr1_PDB_ins_code", "ptnr1_symmetry",
        "ptnr2_label_asym_id", "ptnr2_label_comp_id", "ptnr2_label_seq_id", "ptnr2_label_atom_id",
        "pdbx_ptnr2_label_alt_id", "pdbx_ptnr2_PDB_ins_code", "ptnr2_symmetry",
        "ptnr1_auth_asym_id", "ptnr1_auth_comp_id", "ptnr1_auth_seq_id",
        "ptnr2_auth_asym_id", "ptnr2_auth_comp_id", "ptnr2_auth_seq_id",
        "pdbx_dist_value", "pdbx_value_order",
    ),
    "pdbx_struct_assembly": ("id", "details", "oligomeric_count"),
    "pdbx_struct_assembly_gen": None,
    "pdbx_struct_oper_list": None,
    "atom_site": (
        "group_PDB", "id", "type_symbol", "label_atom_id", "label_alt_id", "label_comp_id",
        "label_asym_id", "label_entity_id", "label_seq_id", "pdbx_PDB_ins_code",
        "Cartn_x", "Cartn_y", "Cartn_z", "occupancy", "B_iso_or_equiv",
        "auth_seq_id", "auth_comp_id", "auth_asym_id", "pdbx_PDB_model_num",
    ),
}  # fmt: skip
"""Columns kept of each category of an entry; None keeps all."""

COMPONENT_COLUMNS: dict[str, tuple[str, ...]] = {
    "chem_comp": ("id", "name", "type", "mon_nstd_parent_comp_id", "pdbx_initial_date"),
    "chem_comp_atom": (
        "comp_id", "atom_id", "type_symbol", "charge", "pdbx_aromatic_flag",
        "pdbx_leaving_atom_flag", "model_Cartn_x", "model_Cartn_y", "model_Cartn_z",
        "pdbx_model_Cartn_x_ideal", "pdbx_model_Cartn_y_ideal", "pdbx_model_Cartn_z_ideal",
    ),
    "chem_comp_bond": ("comp_id", "atom_id_1", "atom_id_2", "value_order", "pdbx_aromatic_flag"),
}  # fmt: skip


def _copy(source: Any, target: Any, category: str, keep: tuple[str, ...] | None) -> None:  # noqa: ANN401
    values = source.get_mmcif_category(f"_{category}.", raw=True)
    columns = {name: v for name, v in values.items() if keep is None or name in keep}
    if columns:
        target.set_mmcif_category(f"_{category}.", columns, raw=True)


def reduce(document: Any, *, assembly: bool = True) -> Any:  # noqa: ANN401 (gemmi.cif.Document)
    """Return a new ``gemmi.cif.Document`` with only what the reader uses of an entry.

    Without ``assembly`` the reader takes the deposited chains instead of assembly 1.
    """
    from gemmi import cif

    result = cif.Document()
    for source in document:
        target = result.add_new_block(source.name)
        for category, keep in ENTRY_COLUMNS.items():
            if not assembly and category.startswith(("pdbx_struct_assembly", "pdbx_struct_oper")):
                continue
            _copy(source, target, category, keep)
    return result


def reduce_component(block: Any) -> Any:  # noqa: ANN401 (gemmi.cif.Block)
    """Return a new ``gemmi.cif.Block`` with the heavy atoms and bonds of one CCD component."""
    from gemmi import cif

    result = cif.Block(block.name)
    for category, keep in COMPONENT_COLUMNS.items():
        _copy(block, result, category, keep)
    atoms = result.find("_chem_comp_atom.", ["atom_id", "type_symbol"])
    hydrogen = {cif.as_string(row[0]) for row in atoms if row[1].upper() in ("H", "D")}
    for i in reversed(range(len(atoms))):
        if cif.as_string(atoms[i][0]) in hydrogen:
            atoms.remove_row(i)
    bonds = result.find("_chem_comp_bond.", ["atom_id_1", "atom_id_2"])
    for i in reversed(range(len(bonds))):
        if {cif.as_string(bonds[i][0]), cif.as_string(bonds[i][1])} & hydrogen:
            bonds.remove_row(i)
    return result


def write_gzip(document: Any, path: Path) -> None:  # noqa: ANN401 (gemmi.cif.Document)
    """Write a document as .cif.gz without a time stamp, through a temporary sibling."""
    content = gzip.compress(document.as_string().encode(), compresslevel=9, mtime=0)
    write_whole(path, content)
