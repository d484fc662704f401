"""Reference conformers and symmetry-equivalent atom orders of components (AF3 SI 2.8).

A conformer is an RDKit (ETKDGv3) embedding whose seed depends on the component code and a drawn
number only, so that a draw is the same in every process (unless an embedding takes about as long as
``TIMEOUT_S``). One embedding takes 5-10 ms for an amino acid, 80 ms for a drug and 10 s for a
fullerene. Ligands and modified residues get a new one at every visit. For each residue of a crop
that would take seconds: standard residues draw from a pool of ``POOL``, as do large and difficult
components from one of ``LARGE_POOL``; the process keeps what it has made.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.util
import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tpf.config import DataConfig
from tpf.data.ccd import Component, Dictionary, component_of
from tpf.data.chem import COVALENT_RADIUS, STANDARD
from tpf.data.identity import agrees, bond_labels
from tpf.data.interrupts import interrupts_held
from tpf.data.symmetry import automorphisms
from tpf.data.tables import Tables
from tpf.errors import UsageError

POOL, LARGE_POOL, LARGE = 32, 4, 50
"""Conformers of a standard residue, and of a component of more than ``LARGE`` heavy atoms."""
UNLIMITED = 2**16
"""Numbers that the conformers of all other components are drawn from."""
TIMEOUT_S = 10
"""Longest time for one embedding."""
CUTOFF = datetime.date(2021, 9, 30)
"""Coordinates of PDB entries after this day are not used (AF3 SI 2.8)."""

_SHOWN: dict[bytes, Component] = {}
"""Components that entries show and no dictionary has, by content."""

Source = Literal["auto", "rdkit", "ideal"]


def reference_conformer(
    component: Component,
    *,
    source: Source,
    rng: np.random.Generator,
    cutoff: datetime.date = CUTOFF,
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return a conformer [n, 3] in Angstrom and which of its atoms [n] have a position.

    ``source`` "rdkit" embeds by ETKDGv3 (default, then small-ring torsions, then random
    coordinates) and falls back to the ideal coordinates, then to model coordinates if the
    component was defined by ``cutoff``, then to none; "ideal" starts at the ideal coordinates;
    "auto" is "rdkit" where it is installed. Raises ``UsageError`` if "rdkit" is not installed.
    """
    number = int(rng.integers(_pool(component)))
    if use_rdkit(source):
        embedded = embedded_conformer(component, number)
        if embedded is not None:
            return embedded, np.ones(len(component), np.bool_)
    defined = _date(component.date)
    model_allowed = defined is not None and defined <= cutoff
    for pos in (component.ideal, component.model) if model_allowed else (component.ideal,):
        known: NDArray[np.bool_] = np.all(np.isfinite(pos), axis=1)
        if known.any():
            return pos, known
    return np.full((len(component), 3), np.nan, np.float32), np.zeros(len(component), np.bool_)


def _pool(component: Component) -> int:
    if len(component) > LARGE:
        return LARGE_POOL
    return POOL if component.code in STANDARD else UNLIMITED


def use_rdkit(source: Source) -> bool:
    """Tell whether conformers come from RDKit; raise ``UsageError`` if it is needed and absent."""
    installed = _has_rdkit()
    if source == "rdkit" and not installed:
        raise UsageError(
            "data.conformers is rdkit, which is not installed; pip install rdkit or use ideal"
        )
    return source != "ideal" and installed


@functools.cache
def _has_rdkit() -> bool:
    return importlib.util.find_spec("rdkit") is not None


def _date(text: str) -> datetime.date | None:
    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        return None


@functools.lru_cache(maxsize=4096)
def rdkit_molecule(component: Component) -> Any:  # noqa: ANN401 - an RDKit Mol
    """Return the RDKit molecule with stereo, hydrogens added last, None if RDKit rejects it."""
    from rdkit import Chem, rdBase

    mol = drawn_molecule(component)
    with rdBase.BlockLogs():
        for candidate in _hydrogen_choices(mol):
            try:
                Chem.SanitizeMol(candidate)
                _assign_stereo(candidate, component)
                return Chem.AddHs(candidate.GetMol())
            except (ValueError, RuntimeError):  # valences or rings that RDKit does not know
                continue
    return None


def drawn_molecule(component: Component) -> Any:  # noqa: ANN401 - an RDKit RWMol
    """Return the heavy atoms and bonds of a definition as RDKit takes them, not sanitised."""
    from rdkit import Chem

    metal = [int(z) not in COVALENT_RADIUS for z in component.elements]
    mol = Chem.RWMol()
    for z, charge in zip(component.elements.tolist(), component.charges.tolist(), strict=True):
        atom = Chem.Atom(int(z))
        atom.SetFormalCharge(int(charge))
        mol.AddAtom(atom)
    kinds = {2: Chem.BondType.DOUBLE, 3: Chem.BondType.TRIPLE, 4: Chem.BondType.AROMATIC}
    for (i, j), order in zip(component.bonds.tolist(), component.bond_orders.tolist(), strict=True):
        if metal[i] != metal[j]:
            donor, acceptor = (j, i) if metal[i] else (i, j)
            mol.AddBond(donor, acceptor, Chem.BondType.DATIVE)
            mol.GetAtomWithIdx(donor).SetNoImplicit(True)
            continue
        mol.AddBond(i, j, kinds.get(order, Chem.BondType.SINGLE))
        if order == 4:
            mol.GetBondBetweenAtoms(i, j).SetIsAromatic(True)
            mol.GetAtomWithIdx(i).SetIsAromatic(True)
            mol.GetAtomWithIdx(j).SetIsAromatic(True)
    return mol


def _hydrogen_choices(mol: Any) -> Iterator[Any]:  # noqa: ANN401 - RDKit Mols
    """Yield the molecule, then copies with a hydrogen on one or two aromatic nitrogens.

    Rings whose bonds are only known to be aromatic do not say which nitrogen has the hydrogen.
    """
    from rdkit import Chem

    yield Chem.RWMol(mol)
    nitrogens = [
        atom.GetIdx()
        for atom in mol.GetAtoms()
        if atom.GetAtomicNum() == 7 and atom.GetIsAromatic() and atom.GetDegree() == 2
    ]
    for size in (1, 2):
        for chosen in itertools.islice(itertools.combinations(nitrogens, size), 20):
            copy = Chem.RWMol(mol)
            for index in chosen:
                copy.GetAtomWithIdx(index).SetNumExplicitHs(1)
            yield copy


def _assign_stereo(mol: Any, component: Component) -> None:  # noqa: ANN401 - an RDKit Mol
    """Set chirality from the ideal (or else model) coordinates, if they are complete."""
    from rdkit import Chem

    for pos in (component.ideal, component.model):
        if np.isfinite(pos).all():
            conformer = Chem.Conformer(len(component))
            for i, xyz in enumerate(pos.tolist()):
                conformer.SetAtomPosition(i, xyz)
            mol.RemoveAllConformers()
            mol.AddConformer(conformer)
            Chem.AssignStereochemistryFrom3D(mol, replaceExistingTags=True)
            mol.RemoveAllConformers()
            return


@functools.lru_cache(maxsize=4096)
def _first_method(component: Component) -> int | None:
    """Return the first embedding method that works for conformer 0, None if none does."""
    return next((m for m in range(3) if _embed(component, 0, m) is not None), None)


@functools.lru_cache(maxsize=16384)
def embedded_conformer(component: Component, number: int) -> NDArray[np.float32] | None:
    """Return conformer ``number`` of the pool, None if every method fails."""
    first = _first_method(component)
    if first is None:
        return None
    if first > 0:  # the plain method fails, and what comes after it takes long
        number %= LARGE_POOL
    attempts = (_embed(component, number, method) for method in range(first, 3))
    return next((pos for pos in attempts if pos is not None), None)


def _embed(component: Component, number: int, method: int) -> NDArray[np.float32] | None:
    template = rdkit_molecule(component)
    if template is None or not len(component):
        return None
    seed = (zlib.crc32(component.code.encode()) + number) & 0x7FFFFFFF
    pos = embed_molecule(template, seed, method)
    return None if pos is None else pos[: len(component)]


def embed_molecule(
    template: Any,  # noqa: ANN401 - an RDKit Mol
    seed: int,
    method: int,
) -> NDArray[np.float32] | None:
    """Return ETKDGv3 coordinates of all atoms of a molecule with hydrogens, None if it fails.

    Method 0 is plain, 1 takes small-ring torsions, 2 random starting coordinates too.
    """
    from rdkit import rdBase
    from rdkit.Chem import rdDistGeom

    mol = type(template)(template)
    settings: Any = rdDistGeom.ETKDGv3()
    settings.randomSeed = seed
    settings.useSmallRingTorsions = method >= 1
    settings.useRandomCoords = method >= 2
    if hasattr(settings, "timeout"):
        settings.timeout = TIMEOUT_S
    with rdBase.BlockLogs(), interrupts_held():
        try:
            failed = rdDistGeom.EmbedMolecule(mol, settings) < 0
        except (ValueError, RuntimeError):
            return None
    if failed:
        return None
    pos: NDArray[np.float32] = mol.GetConformer().GetPositions().astype(np.float32)
    return pos if np.isfinite(pos).all() else None


@dataclass(frozen=True)
class Conformers:
    """Where the conformers of an entry's residues come from."""

    dictionary: Dictionary
    source: Source = "auto"
    cutoff: datetime.date = CUTOFF

    @classmethod
    def of(cls, dictionary: Dictionary, config: DataConfig) -> Conformers:
        """Return the source that the configuration names; its release cutoff holds here too."""
        return cls(dictionary, config.conformers, _date(config.release_cutoff or "") or CUTOFF)

    def component(self, tables: Tables, residue: int, atoms: NDArray[np.intp]) -> Component:
        """Return a residue's definition: the dictionary's if it means the same molecule, else what
        the entry shows of it."""
        found = self.dictionary.get(str(tables.res_name[residue]))
        if found is not None and tables.res_standard[residue]:
            names = tuple(tables.atom_name[atoms].tolist())
            if _describes(found, names, tuple(tables.element[atoms].tolist())):
                return found
        shown = component_of(tables, residue)
        if found is not None and not np.isfinite(shown.ideal).any() and agrees(shown, found):
            return found
        return _shown(shown)

    def draw(
        self, component: Component, names: tuple[str, ...], rng: np.random.Generator
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Return a conformer [k, 3] of the named atoms and which of them [k] it has.

        Positions of atoms that it lacks are NaN.
        """
        pos, known = reference_conformer(component, source=self.source, rng=rng, cutoff=self.cutoff)
        place = _places(component, names)
        inside = place >= 0
        known = inside & known[place] if len(component) else inside
        return np.where(known[:, None], pos[place], np.nan).astype(np.float32), known


@functools.lru_cache(maxsize=16384)
def _describes(component: Component, names: tuple[str, ...], elements: tuple[int, ...]) -> bool:
    """Tell whether a component has these atoms."""
    place = [component.index.get(name) for name in names]
    return all(
        i is not None and (component.elements[i] == z or z == 0)
        for i, z in zip(place, elements, strict=True)
    )


def _shown(component: Component) -> Component:
    """Return the first component of equal content, so that its conformers are found again."""
    digest = hashlib.sha256(repr((component.code, component.atom_names.tolist())).encode())
    for array in (component.elements, component.charges, component.bonds, component.bond_orders):
        digest.update(array.tobytes())
    own = np.isfinite(component.ideal).any()
    digest.update((component.ideal if own else component.model).tobytes())
    key = digest.digest()
    if len(_SHOWN) >= 1024 and key not in _SHOWN:
        _SHOWN.pop(next(iter(_SHOWN)))
    return _SHOWN.setdefault(key, component)


@functools.lru_cache(maxsize=16384)
def _places(component: Component, names: tuple[str, ...]) -> NDArray[np.intp]:
    """Return the position of each named atom in the component, -1 if it has none."""
    return np.array([component.index.get(name, -1) for name in names], np.intp)


@functools.lru_cache(maxsize=16384)
def atom_orders(
    component: Component, names: tuple[str, ...], linked: tuple[bool, ...]
) -> NDArray[np.int32]:
    """Return the symmetry-equivalent orders [p, k] of the named atoms, the identity first.

    They are self-matches of the component's graph, chirality ignored, that map the named atoms to
    themselves and keep each ``linked`` atom (bonded to another residue) in its place. Terminal N,
    O and S are compared without bond order, which is that of one resonance form. An atom that the
    component lacks keeps its place.
    """
    place = _places(component, names)
    inside = np.flatnonzero(place >= 0)
    identity = np.arange(len(names), dtype=np.int32)[None]
    if len(inside) == 0 or len(set(place[inside].tolist())) < len(inside):
        return identity
    present = np.zeros(len(component), np.bool_)
    present[place[inside]] = True
    colours = [(0, int(z)) for z in component.elements]
    for k in inside.tolist():
        if linked[k]:
            colours[place[k]] = (1, int(place[k]))
    found = automorphisms(colours, component.bonds, bond_labels(component).tolist(), present)
    by_place = inside[np.argsort(place[inside])]  # present atoms in the component's order
    orders = np.repeat(identity, len(found), axis=0)
    orders[:, by_place] = by_place[found]
    return orders


def random_rotation(rng: np.random.Generator) -> NDArray[np.float64]:
    """Return a rotation matrix [3, 3] drawn uniformly (a normalised quaternion)."""
    quaternion = rng.standard_normal(4)
    w, x, y, z = quaternion / np.linalg.norm(quaternion)
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
            [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
            [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
        ]
    )
