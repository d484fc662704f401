"""Join a protein file and ligands that no dictionary knows into a complete mmCIF.

Ligands come as SDF poses in the frame of the protein, or as SMILES that are placed on a ligand of
the protein file. What overlaps a new ligand is replaced by it; waters and hydrogens go; the chains
are those of the file, not of its assembly. The written file defines the new ligands itself.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tpf.data.ccd import Dictionary
from tpf.data.cif import Block, entry_name, plain_name, read_blocks, read_bytes, text_blocks
from tpf.data.clean import clean, drop_hydrogens, drop_waters
from tpf.data.definitions import resolve_definitions
from tpf.data.ligands import define_ligand
from tpf.data.mmcif import structure_of
from tpf.data.scene import Scene
from tpf.data.structure import Structure, keep_chains
from tpf.data.write import write_mmcif
from tpf.errors import DataError, UsageError

PDB_ENDINGS = (".pdb", ".ent", ".pdb.gz", ".ent.gz")
"""Names of files in the PDB format, compared in lower case."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What to assemble; of names and templates there may be fewer than ligands."""

    protein: Path
    ligands: tuple[str, ...]
    """SMILES, or SDF files as FILE or FILE#RECORD."""
    out: Path
    """A .cif or .cif.gz file; its name becomes the entry id."""
    chains: tuple[str, ...] = ()
    """Author or label names of the polymer chains to keep, with their ligands; all if empty."""
    names: tuple[str, ...] = ()
    """Component codes of the ligands; LIG where none is given."""
    templates: tuple[str, ...] = ()
    """For each SMILES in turn CODE, CHAIN:CODE or CHAIN:CODE:NUMBER; the most similar if none."""


@dataclass(frozen=True, kw_only=True)
class Assembled:
    """What came of an order."""

    out: Path
    ligands: tuple[str, ...]
    """Code of each new ligand instance."""
    replaced: tuple[str, ...]
    """Ligands of the protein file that gave way."""
    notes: tuple[str, ...]


def assemble(order: Order, *, ccd: str | None = None) -> Assembled:
    """Write the complex of a protein and ligands; the file appears whole or not at all.

    Raises ``DataError`` for a protein, molecule or pose that cannot be used and ``UsageError`` for
    a wrong path, chain, name or template.
    """
    if not order.ligands:
        raise UsageError("no ligand is given; name SDF files or SMILES")
    if len(order.names) > len(order.ligands):
        raise UsageError(f"{len(order.names)} names for {len(order.ligands)} ligands")
    names = [*order.names, *["LIG"] * (len(order.ligands) - len(order.names))]
    protein, known = _protein(str(order.protein), _stamp(order.protein), order.chains, ccd)
    entry = plain_name(entry_name(order.out)).lower()
    scene = Scene(dataclasses.replace(protein, id=entry), known)
    templates = list(order.templates)
    for source, name in zip(order.ligands, names, strict=True):
        ligand = define_ligand(source, name)
        if ligand.pose is None:
            scene.place(source, ligand, templates.pop(0) if templates else "")
        else:
            scene.add(source, ligand)
    if templates:
        raise UsageError(f"template {templates[0]}: there is no SMILES left that it is for")
    structure = scene.joined()
    tables = clean(structure, known.with_own(scene.components), filters=False)
    write_mmcif(order.out, tables, components=scene.components)
    return Assembled(
        out=order.out,
        ligands=tuple(scene.codes),
        replaced=tuple(scene.replaced),
        notes=tuple(scene.notes),
    )


def _stamp(path: Path) -> tuple[int, int]:
    """Return what tells versions of a file apart; raise ``UsageError`` if there is no such file."""
    if not os.path.isfile(path):  # Path.is_file raises for a name that is too long
        raise UsageError(f"{path}: no such file; give the protein as mmCIF or PDB")
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size


@functools.lru_cache(maxsize=4)
def _protein(
    path: str, stamp: tuple[int, int], chains: tuple[str, ...], ccd: str | None
) -> tuple[Structure, Dictionary]:
    """Return the chosen chains of a file without waters and hydrogens, and what defines them."""
    file, notes = Path(path), list[str]()
    if file.name.lower().endswith(PDB_ENDINGS):
        blocks = _pdb_blocks(file, notes)
    else:
        blocks, notes = read_blocks(file)
    structure, known = structure_of(
        entry_name(file), blocks, notes, Dictionary(ccd), expanded=False
    )
    structure = drop_hydrogens(drop_waters(structure))
    if chains:
        structure = _chosen(file, structure, chains)
    if not any(chain.polymer for chain in structure.chains):
        raise DataError(entry_name(file), "read", f"{file.name} has no polymer chain")
    return resolve_definitions(structure, known)


def _pdb_blocks(path: Path, notes: list[str]) -> list[Block]:
    """Return a PDB file as the blocks of its mmCIF."""
    import gemmi

    entry = entry_name(path)
    data, _ = read_bytes(path)
    try:
        structure = gemmi.read_pdb_string(data.decode("latin-1"))
    except (RuntimeError, ValueError) as error:
        raise DataError(entry, "read", f"not a valid PDB file ({error})") from error
    if not len(structure) or not structure[0].count_atom_sites():
        raise DataError(entry, "read", f"{path.name} has no atoms in the PDB format")
    structure.setup_entities()
    structure.assign_label_seq_id()
    text = structure.make_mmcif_document().as_string()
    return list(text_blocks(entry, text.encode(), notes))


def _chosen(path: Path, structure: Structure, names: tuple[str, ...]) -> Structure:
    """Return the named polymer chains and the ligands with the author name of one of them."""
    polymers = [chain for chain in structure.chains if chain.polymer]
    authors: set[str] = set()
    for name in names:
        found = {c.auth for c in polymers if c.auth == name} or {
            c.auth for c in polymers if c.id == name
        }
        if not found:
            have = ", ".join(dict.fromkeys(chain.auth for chain in polymers)) or "none"
            raise UsageError(f"{path}: no polymer chain {name} (it has {have})")
        authors |= found
    keep = np.array([chain.auth in authors for chain in structure.chains])
    return keep_chains(structure, keep)
