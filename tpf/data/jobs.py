"""What to predict: the chains of an mmCIF, a FASTA file, or a YAML or JSON job.

A job file names its molecules: ::

    name: abl1-imatinib
    sequences:
      - protein: {id: A, sequence: MGQQ..., msa: abl1.a3m, modifications: [{position: 5, ccd: PTR}]}
      - ligand: {id: [B, C], ccd: STI}
      - ligand: {smiles: "CC(=O)O"}          # or sdf: FILE

Kinds are protein, rna, dna and ligand; several ids make copies; paths are relative to the file.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tpf.config import DataConfig
from tpf.data import chem
from tpf.data.alignment import Alignment, AlignmentFolder, read_alignment
from tpf.data.ccd import Component, Dictionary
from tpf.data.cif import plain_name
from tpf.data.complete import complete
from tpf.data.ligands import define_ligand, split_sdf
from tpf.data.load import is_structure_name, load_tables
from tpf.data.polymer import expand_letters
from tpf.data.structure import Chain, Site, Structure, chain_names
from tpf.data.tables import DNA, LIGAND, PROTEIN, RNA, Tables, Tokens
from tpf.data.tokens import tokenize
from tpf.errors import DataError, UsageError

KINDS = {"protein": PROTEIN, "rna": RNA, "dna": DNA, "ligand": LIGAND}
KEYS = {
    "polymer": {"id", "sequence", "msa", "modifications"},
    "ligand": {"id", "ccd", "smiles", "sdf"},
}
AMBIGUOUS = {PROTEIN: "BJOUXZ", RNA: "BDHKMNRSVWXY", DNA: "BDHKMNRSVWXY"}
"""Letters that stand for several residues and are taken as an unknown one."""
FASTA = (".fasta", ".fa", ".faa", ".fna", ".fas")
FILES = (".yaml", ".yml", ".json")
_CHAIN = re.compile(r"[A-Za-z0-9_.+-]+")
_SEQUENCE = re.compile(r"(\([A-Z0-9]{1,5}\)|[A-Z])+\*?")


@dataclass(frozen=True)
class Job:
    """One complex to predict."""

    tokens: Tokens
    """Without positions, unless they come from an mmCIF; prediction does not look at them."""
    dictionary: Dictionary
    alignments: dict[int, Alignment]
    """By entity."""
    components: dict[str, Component] = field(default_factory=dict)
    """Ligands that no dictionary has."""

    @property
    def name(self) -> str:
        return self.tokens.tables.id

    @property
    def notes(self) -> tuple[str, ...]:
        """What was inferred or dropped when the file was read, a sentence each."""
        return self.tokens.tables.notes


@dataclass(frozen=True)
class _Molecule:
    """One entry of a job: its copies, residues, and where its alignment lies."""

    ids: tuple[str, ...]
    kind: int
    codes: tuple[str, ...]
    msa: Path | None = None


def read_job(path: Path, config: DataConfig) -> Job:
    """Return the complex that a file describes, with alignments of ``config.msa`` by sequence.

    Raises ``UsageError`` for a job that cannot be understood (naming file, item and fix) and
    ``DataError`` for a structure or alignment that cannot be read.
    """
    if not path.is_file():
        what = "this is a folder" if path.is_dir() else "no such file"
        raise UsageError(f"{path}: {what}; give an mmCIF, FASTA, YAML or JSON file")
    suffix = path.suffix.lower()
    if suffix in FASTA or suffix in FILES:
        text = _text(path)
        own: dict[str, Component] = {}
        if suffix in FASTA:
            name, molecules = path.stem, list(_fasta_molecules(path, text))
        else:
            name, molecules, own = _job_molecules(path, text)
        dictionary = Dictionary(config.ccd).with_own(own)
        tables = _tables(path, name, molecules, dictionary)
        given = _alignments(path, tables, molecules)
    elif is_structure_name(path):
        own, given, dictionary = {}, {}, Dictionary(config.ccd)
        tables = load_tables(path, ccd=config.ccd, filters=False)
    else:
        endings = ", ".join((".cif", ".cif.gz", ".bcif", *FASTA, *FILES))
        raise UsageError(f"{path}: not a kind of input that tpf predict knows ({endings})")
    tokens = tokenize(tables)
    found = {} if config.msa is None else AlignmentFolder(Path(config.msa)).find(tokens)
    return Job(tokens, dictionary, found | given, own)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeError) as error:
        raise UsageError(f"{path}: cannot be read ({error})") from error


def _fasta_molecules(path: Path, text: str) -> Iterator[_Molecule]:
    """Yield a chain for each record; the kind is a field of the header or is seen in the letters.

    A record of A, C, G and T (N) is DNA, one with U for T is RNA, anything else is a protein.
    """
    before, *blocks = ("\n" + text).split("\n>")
    if before.strip() or not blocks:
        what = f"{before.split()[0][:20]!r} stands before the first" if before.strip() else "no"
        raise UsageError(f"{path}: {what} FASTA record (a line that begins with '>')")
    records = [block.splitlines() for block in blocks]
    for chain, (header, *lines) in zip(chain_names(set()), records, strict=False):
        where = f"{path}: record {header.strip() or chain!r}"
        sequence = "".join("".join(lines).split())
        fields = {part.strip().lower() for part in header.split("|")} & (KINDS.keys() - {"ligand"})
        letters = set(sequence.upper().rstrip("*"))
        if fields:
            kind = KINDS[fields.pop()]
        elif letters <= set("ACGTN"):
            kind = DNA
        else:
            kind = RNA if letters <= set("ACGUN") else PROTEIN
        yield _Molecule((chain,), kind, _codes(where, sequence, kind))


def _codes(where: str, sequence: str, kind: int) -> tuple[str, ...]:
    """Return the component codes of a one-letter sequence with (CODE) for modified residues."""
    sequence = sequence.upper()
    if not _SEQUENCE.fullmatch(sequence):
        odd = re.sub(r"\([A-Z0-9]{1,5}\)|[A-Z]", "", sequence)[:1]
        what = f"has {odd!r} in its sequence" if sequence else "has no sequence"
        raise UsageError(f"{where} {what}; write one letter a residue, (CODE) for a modified one")
    codes = tuple(site.code for site in expand_letters(sequence.rstrip("*"), kind))
    letters = re.sub(r"\([^)]*\)", ".", sequence)
    for letter, code in zip(letters, codes, strict=False):
        if code == chem.UNKNOWN_RESIDUE[kind] and letter not in AMBIGUOUS[kind] + ".":
            name = next(name for name, number in KINDS.items() if number == kind)
            raise UsageError(
                f"{where} has {letter!r}, which is no letter of {name}; (CODE) is any residue"
            )
    return codes


def _job_molecules(path: Path, text: str) -> tuple[str, list[_Molecule], dict[str, Component]]:
    """Return the name and the molecules of a job, and the components that it defines."""
    document = _parse(path, text)
    if not isinstance(document, Mapping) or not isinstance(document.get("sequences"), list):
        raise UsageError(f"{path}: has no list 'sequences' of molecules")
    items = [_item(f"{path}: sequences[{k}]", e) for k, e in enumerate(document["sequences"])]
    if not items:
        raise UsageError(f"{path}: 'sequences' is empty; name a protein, rna, dna or ligand")
    given = [name for where, _, body in items for name in _ids(where, body)]
    if twice := sorted({name for name in given if given.count(name) > 1}):
        raise UsageError(f"{path}: id {twice[0]!r} is given twice; every chain needs its own")
    free = chain_names(set(given))
    molecules = []
    defined: dict[str, Component] = {}
    for where, kind, body in items:
        ids = _ids(where, body) or (next(free),)
        if kind == LIGAND:
            molecules.append(_Molecule(ids, kind, (_ligand(path, where, body, defined),)))
            continue
        codes = list(_codes(where, re.sub(r"\s", "", str(body.get("sequence") or "")), kind))
        _modify(where, codes, body.get("modifications") or [])
        msa = None if body.get("msa") is None else path.parent / str(body["msa"])
        molecules.append(_Molecule(ids, kind, tuple(codes), msa))
    own = {component.code: component for component in defined.values()}
    return str(document.get("name") or path.stem), molecules, own


def _parse(path: Path, text: str) -> Any:
    import yaml

    try:
        return json.loads(text) if path.suffix.lower() == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", error)
        where = f"line {mark.line + 1}: " if mark else ""
        raise UsageError(f"{path}: not valid {path.suffix[1:]} ({where}{problem})") from error


def _item(where: str, entry: object) -> tuple[str, int, Mapping[str, Any]]:
    kinds = ", ".join(KINDS)
    if not isinstance(entry, Mapping) or len(entry) != 1:
        raise UsageError(f"{where}: write one of {kinds} with its fields")
    name, body = next(iter(entry.items()))
    if name not in KINDS or not isinstance(body, Mapping):
        raise UsageError(f"{where}: {name!r} is not one of {kinds} with its fields")
    allowed = KEYS["ligand" if name == "ligand" else "polymer"]
    if odd := sorted(str(key) for key in body if key not in allowed):
        raise UsageError(f"{where}: {name} has no field {odd[0]!r} ({', '.join(sorted(allowed))})")
    return where, KINDS[name], body


def _ids(where: str, body: Mapping[str, Any]) -> tuple[str, ...]:
    value = body.get("id")
    values = value if isinstance(value, list) else [] if value is None else [value]
    ids = tuple(map(str, values))
    for name in ids:
        if not _CHAIN.fullmatch(name):
            raise UsageError(f"{where}: id {name!r} is no chain name; write letters and digits")
    return ids


def _ligand(path: Path, where: str, body: Mapping[str, Any], defined: dict[str, Component]) -> str:
    """Return the code of a ligand; one that no dictionary has is added to ``defined`` once."""
    given = [key for key in ("ccd", "smiles", "sdf") if body.get(key)]
    if len(given) != 1:
        raise UsageError(f"{where}: a ligand has one of ccd, smiles and sdf, not {len(given)}")
    value = body[given[0]]
    if not isinstance(value, str):  # YAML reads 017 as a number, another one even
        raise UsageError(f"{where}: {given[0]} is {value!r} and no text; put it in quotes")
    if given[0] == "ccd":
        return value.upper()
    if (given[0] == "sdf") != (split_sdf(value) is not None):
        what = "no name of an SDF file" if given[0] == "sdf" else "an SDF file; give it as sdf"
        raise UsageError(f"{where}: {given[0]} {value!r} is {what}")
    source = str(path.parent / value) if given[0] == "sdf" else value
    if source not in defined:
        try:
            defined[source] = define_ligand(source, f"LIG{len(defined) + 1}").component
        except (DataError, UsageError) as error:
            raise UsageError(f"{where}: {error}") from error
    return defined[source].code


def _modify(where: str, codes: list[str], changes: object) -> None:
    for change in changes if isinstance(changes, list) else [changes]:
        fields = change if isinstance(change, Mapping) else {}
        place, code = fields.get("position"), fields.get("ccd")
        if (
            not (isinstance(place, int) and not isinstance(place, bool))
            or not 1 <= place <= len(codes)
            or not (isinstance(code, str) and code)
        ):
            raise UsageError(
                f"{where}: modification {change} needs ccd, and position from 1 to {len(codes)}"
            )
        codes[place - 1] = code.upper()


def _tables(
    path: Path, name: str, molecules: Sequence[_Molecule], dictionary: Dictionary
) -> Tables:
    """Return the tables of the chains, every atom unresolved."""
    chains: list[Chain] = []
    residues: list[tuple[str, int, int]] = []
    components: list[Component] = []
    for molecule in molecules:
        for chain in molecule.ids:
            polymer = molecule.kind != LIGAND
            sites = tuple(Site(k + 1, code, str(k + 1)) for k, code in enumerate(molecule.codes))
            for site in sites:
                component = dictionary.get(site.code)
                if component is None or not len(component):
                    raise UsageError(
                        f"{path}: component {site.code} of chain {chain} is in no dictionary; "
                        "check the code, or name a dictionary that has it with data.ccd=FILE"
                    )
                residues.append((site.code, site.res_id, len(chains)))
                components.append(component)
            chains.append(
                Chain(
                    id=chain,
                    auth=chain,
                    entity="",
                    type=molecule.kind,
                    polymer=polymer,
                    sequence=sites if polymer else (),
                )
            )
    codes, places, owners = zip(*residues, strict=True)
    sizes = [len(component) for component in components]
    atoms = sum(sizes)
    structure = Structure(
        id=plain_name(name),
        method="",
        resolution=None,
        release_date=None,
        atom_name=np.concatenate([c.atom_names for c in components]),
        element=np.concatenate([c.elements for c in components]),
        pos=np.full((atoms, 3), np.nan),
        occupancy=np.zeros(atoms, np.float32),
        b_factor=np.zeros(atoms, np.float32),
        atom_residue=np.repeat(np.arange(len(sizes)), sizes).astype(np.int32),
        res_name=np.array(codes, np.str_),
        res_id=np.array(places, np.int32),
        auth_seq=np.array(places, np.str_),
        res_chain=np.array(owners, np.int32),
        chains=tuple(chains),
        links=np.zeros((0, 2), np.int32),
        dative=np.zeros(0, np.bool_),
    )
    return dataclasses.replace(complete(structure, dictionary), notes=())


def _alignments(path: Path, tables: Tables, molecules: Sequence[_Molecule]) -> dict[int, Alignment]:
    """Read the alignments that a job names; refuse one whose first row is another sequence."""
    found: dict[int, Alignment] = {}
    files: dict[int, Path] = {}
    entity = dict(zip(tables.chain_id.tolist(), tables.chain_entity.tolist(), strict=True))
    for molecule in molecules:
        if molecule.msa is None:
            continue
        if not molecule.msa.is_file():
            raise UsageError(f"{path}: msa {molecule.msa}: no such file")
        alignment = read_alignment(molecule.msa, molecule.kind)
        query = [chem.RESIDUES[row] for row in alignment.rows[0]]
        differ = [
            k
            for k, (a, b) in enumerate(zip(query, molecule.codes, strict=False))
            if a != b and b in chem.STANDARD - set(chem.UNKNOWN_RESIDUE.values())
        ]
        same_length = len(query) == len(molecule.codes)
        if differ or not same_length:
            what = f"differs at residue {differ[0] + 1}" if same_length else f"has {len(query)}"
            raise UsageError(
                f"{path}: the first row of {molecule.msa} {what}; it must be the "
                f"{len(molecule.codes)} residues of chain {molecule.ids[0]}"
            )
        number = entity[molecule.ids[0]]
        if files.setdefault(number, molecule.msa) != molecule.msa:
            raise UsageError(
                f"{path}: chain {molecule.ids[0]} has the sequence of another chain and another "
                f"msa ({files[number].name} and {molecule.msa.name}); give both the same"
            )
        found[number] = alignment
    return found
