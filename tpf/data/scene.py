"""A protein while ligands are put into it: what gives way, their names and contacts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpf.data import chem
from tpf.data.atom_site import residue_number
from tpf.data.ccd import Component, Dictionary
from tpf.data.clean import CLASH_DISTANCE, CLASH_FRACTION
from tpf.data.conformers import rdkit_molecule
from tpf.data.definitions import free_code
from tpf.data.identity import same_molecule
from tpf.data.ligands import Ligand, molecule_of_smiles, posed
from tpf.data.links import infer_links
from tpf.data.placing import Core, Template, common_core, place
from tpf.data.structure import Chain, Structure, chain_names, counted, keep_residues
from tpf.data.tables import LIGAND
from tpf.errors import DataError, UsageError

REPLACED_WITHIN = 1.6
"""Angstrom; a ligand of the protein file with an atom this near to a new one is replaced."""
FARTHEST = 6.0
"""Angstrom between a pose and the protein; beyond it the pose is in another frame."""
SURROUNDINGS = 12.0
"""Angstrom around a template in which a placed ligand keeps away from atoms."""
MIN_TEMPLATE = 6
"""Heavy atoms of a ligand that others are placed on."""
MIRRORED = 1.0
"""Cubic Angstrom spanned by three bonds of an atom from which on it has a hand."""


class Scene:
    """A structure and the ligands that were put into it so far."""

    def __init__(self, structure: Structure, known: Dictionary) -> None:
        """Take a structure all of whose components ``known`` defines."""
        self._structure = structure
        self._known = known
        self._added: list[tuple[str, NDArray[np.float64]]] = []
        self.components: dict[str, Component] = {}
        """Definitions of the new ligands."""
        self.replaced: list[str] = []
        """Ligands that gave way, as CODE of chain CHAIN."""
        self.notes: list[str] = []

    @property
    def codes(self) -> list[str]:
        """Code of each new ligand instance."""
        return [code for code, _ in self._added]

    def add(self, source: str, ligand: Ligand) -> None:
        """Put a ligand where its pose is; raise ``DataError`` if that is no place for it."""
        pose = ligand.pose
        assert pose is not None
        self.notes += [f"{source}: {note}" for note in ligand.notes]
        for code, other in self._added:
            if _nearest(pose, other).min() < REPLACED_WITHIN:
                raise DataError(source, "pose", f"it overlaps {code}, which was put there before")
        structure = self._structure
        distance = _nearest(pose, structure.pos[structure.resolved & structure.polymer_atom])
        if distance.min() > FARTHEST:
            reason = (
                f"it lies {distance.min():.1f} Angstrom from the protein; is the frame the same?"
            )
            raise DataError(source, "pose", reason)
        touching = int((distance < CLASH_DISTANCE).sum())
        if touching > CLASH_FRACTION * len(pose):
            what = f"{touching} of its {counted(len(pose), 'atom')} overlap the protein"
            raise DataError(source, "pose", f"{what}; training would drop it")
        if touching > 1:
            self.notes.append(f"{source}: {counted(touching, 'atom')} overlap the protein.")
        self._make_room(pose)
        self._added.append((self._named(source, ligand.component), pose))

    def place(self, source: str, ligand: Ligand, wish: str) -> None:
        """Lay a ligand without a pose on each copy of a ligand that is there.

        ``wish`` is CODE, CHAIN:CODE or CHAIN:CODE:NUMBER, "" the one that shares most with it.
        """
        candidates = list(self._templates(wish))
        if not candidates:
            what = f"no ligand {wish}" if wish else "no ligand"
            reason = f"the protein file has {what} to place it on; give a pose (SDF)"
            raise DataError(source, "ligand", reason)
        mol = molecule_of_smiles(ligand.smiles)
        cores: dict[str, Core] = {}
        for residue in candidates:
            code = str(self._structure.res_name[residue])
            if code not in cores:
                cores[code] = common_core(mol, self._component(code))
        best = max(cores, key=lambda code: cores[code].size)
        structure = self._structure
        poses: list[NDArray[np.float64]] = []
        for residue in candidates:
            if structure.res_name[residue] != best:
                continue
            template, around = self._template(residue)
            pose = place(source, mol, cores[best], template, around)
            if not poses:
                ligand = posed(ligand, pose)
                mol = rdkit_molecule(ligand.component) or mol
            poses.append(pose)
        self.notes.append(f"{source}: placed on {best}, {cores[best].size} atoms in common.")
        for pose in poses:
            self.add(source, dataclasses.replace(ligand, pose=pose, notes=()))
        self.notes += [f"{source}: {note}" for note in ligand.notes]

    def _component(self, code: str) -> Component:
        component = self._known.get(code)
        assert component is not None, code
        return component

    def _templates(self, wish: str) -> Iterator[int]:
        """Yield the residues that a ligand can be placed on; a wish is CHAIN:CODE:NUMBER."""
        structure = self._structure
        if wish.count(":") > 2:
            raise UsageError(f"template {wish}: write CODE, CHAIN:CODE or CHAIN:CODE:NUMBER")
        wanted = wish.split(":") if ":" in wish else ["", wish]
        seen = np.bincount(
            structure.atom_residue[structure.resolved], minlength=len(structure.res_name)
        )
        for residue, code in enumerate(structure.res_name.tolist()):
            chain = structure.chains[structure.res_chain[residue]]
            if chain.polymer or seen[residue] < MIN_TEMPLATE or code in chem.CRYSTAL_AIDS:
                continue
            facts = ({chain.auth, chain.id}, {code}, {str(structure.auth_seq[residue])})
            if all(not word or word in fact for word, fact in zip(wanted, facts, strict=False)):
                yield residue

    def _template(self, residue: int) -> tuple[Template, NDArray[np.float64]]:
        """Return a residue as a template, and the atoms near it, [k, 3]."""
        structure = self._structure
        component = self._component(str(structure.res_name[residue]))
        own = structure.atom_residue == residue
        pos = np.full((len(component), 3), np.nan)
        for row in np.flatnonzero(own & structure.resolved).tolist():
            place_of = component.index.get(str(structure.atom_name[row]))
            if place_of is not None:
                pos[place_of] = structure.pos[row]
        others = structure.pos[structure.resolved & ~own]
        near = _nearest(others, structure.pos[own & structure.resolved]) < SURROUNDINGS
        return Template(component, pos), others[near]

    def _make_room(self, pose: NDArray[np.float64]) -> None:
        """Remove the ligands of the protein file that overlap a pose."""
        structure = self._structure
        near = np.zeros(len(structure.atom_name), dtype=bool)
        near[structure.resolved] = (
            _nearest(structure.pos[structure.resolved], pose) < REPLACED_WITHIN
        )
        gone = np.unique(structure.atom_residue[near & ~structure.polymer_atom])
        for residue in gone.tolist():
            chain = structure.chains[structure.res_chain[residue]]
            self.replaced.append(f"{structure.res_name[residue]} of chain {chain.auth}")
        keep = ~np.isin(np.arange(len(structure.res_name)), gone)
        self._structure = keep_residues(structure, keep)

    def _named(self, source: str, component: Component) -> str:
        """Return the code of a new ligand: the wished one unless another molecule has it."""
        wish = component.code
        left = set(self._structure.res_name.tolist())
        given = self.components.get(wish)
        if given is None and wish in left:
            given = self._component(wish)
        if given is None or (same_molecule(given, component) and _same_hand(given, component)):
            self.components.setdefault(wish, component)
            return wish
        for code, other in self.components.items():
            if same_molecule(other, component) and _same_hand(other, component):
                return code
        code = free_code(wish, left | self.components.keys(), self._known)
        self.components[code] = dataclasses.replace(component, code=code)
        self.notes.append(f"{source}: {wish} is another molecule here; named {code}.")
        return code

    def joined(self) -> Structure:
        """Return the structure with the new ligands as chains of their own."""
        structure = self._structure
        names = chain_names({name for chain in structure.chains for name in (chain.id, chain.auth)})
        for code, pose in self._added:
            structure = _appended(structure, self.components[code], pose, next(names))
        first = len(self._structure.res_name)
        bonds = infer_links(structure)
        owner = structure.atom_residue[bonds]
        polymer = structure.polymer_atom
        for number, code in enumerate(self.codes):
            own = (owner == first + number).any(axis=1) & polymer[bonds].any(axis=1)
            if own.sum() != 1:  # several contacts are a clash and no bond
                continue
            link = bonds[own]
            structure = dataclasses.replace(
                structure,
                links=np.concatenate([structure.links, link]).astype(np.int32),
                dative=np.append(structure.dative, False),
            )
            end = int(link[polymer[link]][0])
            residue = int(structure.atom_residue[end])
            self.notes.append(
                f"{code} is bonded to {structure.atom_name[end]} of {structure.res_name[residue]} "
                f"{structure.auth_seq[residue]}."
            )
        return structure


def _nearest(points: NDArray[np.float64], others: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return [n] the distance of each point to the nearest of the others."""
    nearest = np.full(len(points), np.inf)
    if len(points) <= len(others):
        rows = [np.linalg.norm(others - point, axis=1).min() for point in points]
        return np.array(rows, dtype=np.float64)
    for other in others:
        nearest = np.minimum(nearest, np.linalg.norm(points - other, axis=1))
    return nearest


def _same_hand(a: Component, b: Component) -> bool:
    """Return whether two poses of one molecule have the same hand at every atom that shows one.

    Only carbon, phosphorus and sulphur with three or more heavy neighbours are looked at.
    """
    near: list[list[int]] = [[] for _ in range(len(a))]
    for i, j in a.bonds.tolist():
        near[i].append(j)
        near[j].append(i)
    for centre, others in enumerate(near):
        if len(others) < 3 or a.elements[centre] not in (6, 15, 16):
            continue
        volumes = [
            float(np.linalg.det(part.model[others[:3]] - part.model[centre])) for part in (a, b)
        ]
        if min(map(abs, volumes)) > MIRRORED and volumes[0] * volumes[1] < 0:
            return False
    return True


def _appended(
    structure: Structure, component: Component, pose: NDArray[np.float64], name: str
) -> Structure:
    """Return the structure with a ligand as the last chain, under the nearest polymer's author."""
    polymer = np.flatnonzero(structure.polymer_atom & structure.resolved)
    nearest = int(polymer[np.argmin(_nearest(structure.pos[polymer], pose))])
    auth = structure.chains[structure.atom_chain[nearest]].auth
    authors = np.array([chain.auth for chain in structure.chains])[structure.res_chain]
    numbers = [residue_number(text) for text in structure.auth_seq[authors == auth].tolist()]
    n, n_residues = len(pose), len(structure.res_name)
    number = max((value for value in numbers if value is not None), default=0) + 1
    chain = Chain(id=name, auth=auth, entity="", type=LIGAND, polymer=False)

    def more(array: NDArray[Any], values: object, count: int) -> NDArray[Any]:
        extra = np.broadcast_to(np.asarray(values), (count, *array.shape[1:]))
        return np.concatenate([array, extra])

    return dataclasses.replace(
        structure,
        atom_name=more(structure.atom_name, component.atom_names, n),
        element=more(structure.element, component.elements, n).astype(np.int32),
        pos=more(structure.pos, pose, n),
        occupancy=more(structure.occupancy, 1.0, n).astype(np.float32),
        b_factor=more(structure.b_factor, 0.0, n).astype(np.float32),
        atom_residue=more(structure.atom_residue, n_residues, n).astype(np.int32),
        res_name=more(structure.res_name, component.code, 1),
        res_id=more(structure.res_id, 1, 1).astype(np.int32),
        auth_seq=more(structure.auth_seq, str(number), 1),
        res_chain=more(structure.res_chain, len(structure.chains), 1).astype(np.int32),
        chains=(*structure.chains, chain),
    )
