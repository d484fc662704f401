"""Place a molecule on the pose of a similar one: largest common substructure, then embedding.

The common atoms get the positions of the template and the rest is embedded around them (RDKit), in
several ways; the pose that comes least near to the surrounding atoms is taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpf.data.ccd import Component
from tpf.data.conformers import drawn_molecule, rdkit_molecule
from tpf.data.interrupts import interrupts_held
from tpf.data.structure import counted
from tpf.errors import DataError

MIN_CORE = 5
"""Common heavy atoms that fix a pose."""
MCS_SECONDS = 5
EMBED_SECONDS = 20
MATCHES, CONFORMERS = 4, 4
"""Ways of laying the core on the template that are tried, and conformers for each."""
NEAR = 3.2
"""Angstrom; heavy atoms that are closer than this to the surroundings count against a pose."""
CORE_FORCE = 100.0
"""kcal/mol/Angstrom squared that holds the core while the rest relaxes."""
RELAX_STEPS = 200

Pose = NDArray[np.float64]
"""[n, 3] Angstrom."""
Match = tuple[tuple[int, int], ...]
"""Pairs (atom of the molecule, atom of the template)."""


@dataclass(frozen=True, eq=False)
class Template:
    """A ligand that is there already."""

    component: Component
    pos: Pose
    """[n, 3] Angstrom, by atom of the component; NaN where unresolved."""


@dataclass(frozen=True, eq=False)
class Core:
    """What a molecule has in common with a template."""

    size: int
    matches: tuple[Match, ...]
    """Ways of laying it."""


def common_core(mol: Any, template: Component) -> Core:  # noqa: ANN401 - an RDKit Mol
    """Return the largest common substructure of a molecule (with hydrogens) and a template."""
    from rdkit import Chem, rdBase
    from rdkit.Chem import rdFMCS

    with rdBase.BlockLogs():
        query, target = Chem.RemoveHs(mol), _bare(template)
        vague = bool((template.bond_orders == 0).any())
        compare = rdFMCS.BondCompare
        with interrupts_held():
            found = rdFMCS.FindMCS(
                [query, target],
                timeout=MCS_SECONDS,
                atomCompare=rdFMCS.AtomCompare.CompareElements,
                bondCompare=compare.CompareAny if vague else compare.CompareOrder,
                ringMatchesRingOnly=True,
            )
        if not found.numAtoms:
            return Core(0, ())
        pattern = Chem.MolFromSmarts(found.smartsString)
        own = query.GetSubstructMatches(pattern, uniquify=True, maxMatches=MATCHES)
        theirs = target.GetSubstructMatches(pattern, uniquify=False, maxMatches=MATCHES)
    pairs = itertools.islice(itertools.product(own, theirs), MATCHES)
    return Core(
        int(found.numAtoms),
        tuple(tuple(zip(mine, other, strict=True)) for mine, other in pairs),
    )


def _bare(template: Component) -> Any:  # noqa: ANN401 - an RDKit Mol
    from rdkit import Chem

    mol = rdkit_molecule(template)
    if mol is not None:
        return Chem.RemoveHs(mol)
    drawn = drawn_molecule(template)
    drawn.UpdatePropertyCache(strict=False)
    Chem.FastFindRings(drawn)
    return drawn.GetMol()


def place(
    name: str,
    mol: Any,  # noqa: ANN401 - an RDKit Mol
    core: Core,
    template: Template,
    surroundings: NDArray[np.float64],
) -> Pose:
    """Return heavy atom positions of a molecule (hydrogens last) laid on a template.

    ``surroundings`` [k, 3] are heavy atoms to keep away from. Raises ``DataError`` (stage ligand)
    if too little is common or nothing can be embedded.
    """
    code = template.component.code
    if core.size < MIN_CORE:
        common = counted(core.size, "atom")
        reason = f"it shares {common} with {code}, fewer than {MIN_CORE}; give a pose (SDF)"
        raise DataError(name, "ligand", reason)
    whole = tuple(_whole_rings(mol, match) for match in core.matches)
    best = _best(mol, core.matches, template, surroundings)
    if best is None and whole != core.matches:
        best = _best(mol, whole, template, surroundings)
    if best is None:
        reason = f"it cannot be embedded on {code}: the stereo or rings of the common part differ"
        raise DataError(name, "ligand", reason)
    return best


def _best(
    mol: Any,  # noqa: ANN401 - an RDKit Mol
    matches: Sequence[Match],
    template: Template,
    surroundings: NDArray[np.float64],
) -> Pose | None:
    """Return the least crowded pose of the heavy atoms, relaxed; None if there is none."""
    heavy = sum(atom.GetAtomicNum() != 1 for atom in mol.GetAtoms())
    scored: list[tuple[float, Pose, list[int]]] = []
    for match in matches:
        anchors = {i: template.pos[j] for i, j in match if np.isfinite(template.pos[j]).all()}
        if len(anchors) >= 3:
            for pose in _poses(mol, anchors):
                scored.append((_crowding(pose[:heavy], surroundings), pose, list(anchors)))
    if not scored:
        return None
    _, pose, held = min(scored, key=lambda item: item[0])
    return _relaxed(mol, pose, held)[:heavy]


def _whole_rings(
    mol: Any,  # noqa: ANN401 - an RDKit Mol
    match: Match,
) -> Match:
    """Return a match without the atoms whose rings are all only partly in it."""
    inside = {i for i, _ in match}
    rings = [set(ring) for ring in mol.GetRingInfo().AtomRings()]
    partly = set().union(*(ring for ring in rings if not ring <= inside))
    wholly = set().union(*(ring for ring in rings if ring <= inside))
    return tuple((i, j) for i, j in match if i in wholly or i not in partly)


def _poses(mol: Any, anchors: dict[int, Pose]) -> list[Pose]:  # noqa: ANN401 - an RDKit Mol
    """Return poses of all atoms whose anchored atoms are where they should be."""
    from rdkit import rdBase
    from rdkit.Chem import rdDistGeom, rdMolAlign
    from rdkit.Geometry import Point3D

    copy = type(mol)(mol)
    points = {i: Point3D(*map(float, xyz)) for i, xyz in anchors.items()}
    settings: Any = rdDistGeom.ETKDGv3()
    settings.randomSeed = 0
    settings.useRandomCoords = True
    settings.SetCoordMap(points)
    if hasattr(settings, "timeout"):
        settings.timeout = EMBED_SECONDS
    target = _points(copy, points)
    atom_map = [(i, i) for i in points]
    poses = []
    with rdBase.BlockLogs(), interrupts_held():
        try:
            made = list(rdDistGeom.EmbedMultipleConfs(copy, CONFORMERS, settings))
        except (ValueError, RuntimeError):
            return []
        for conformer in made:
            rdMolAlign.AlignMol(copy, target, prbCid=conformer, atomMap=atom_map)
            for i, point in points.items():
                copy.GetConformer(conformer).SetAtomPosition(i, point)
            pos = np.asarray(copy.GetConformer(conformer).GetPositions(), dtype=np.float64)
            if np.isfinite(pos).all():
                poses.append(pos)
    return poses


def _points(mol: Any, points: dict[int, Any]) -> Any:  # noqa: ANN401 - RDKit Mols
    """Return a copy with one conformer that has the given points."""
    from rdkit import Chem

    copy = Chem.Mol(mol)
    copy.RemoveAllConformers()
    conformer = Chem.Conformer(copy.GetNumAtoms())
    for i, point in points.items():
        conformer.SetAtomPosition(i, point)
    copy.AddConformer(conformer)
    return copy


def _relaxed(mol: Any, pose: Pose, held: Sequence[int]) -> Pose:  # noqa: ANN401 - an RDKit Mol
    """Return a pose of less energy in which the held atoms stay near their places."""
    from rdkit.Chem import rdForceFieldHelpers

    copy = _points(mol, dict(enumerate(pose.tolist())))
    properties = rdForceFieldHelpers.MMFFGetMoleculeProperties(copy)
    if properties is not None:
        field = rdForceFieldHelpers.MMFFGetMoleculeForceField(copy, properties)
    elif rdForceFieldHelpers.UFFHasAllMoleculeParams(copy):
        field = rdForceFieldHelpers.UFFGetMoleculeForceField(copy)
    else:
        return pose
    field.Initialize()
    for i in held:
        if properties is not None:
            field.MMFFAddPositionConstraint(i, 0.0, CORE_FORCE)
        else:
            field.UFFAddPositionConstraint(i, 0.0, CORE_FORCE)
    with interrupts_held():
        field.Minimize(maxIts=RELAX_STEPS)
    relaxed = np.asarray(copy.GetConformer().GetPositions(), dtype=np.float64)
    return relaxed if np.isfinite(relaxed).all() else pose


def _crowding(pos: Pose, surroundings: NDArray[np.float64]) -> float:
    """Return how much atoms overlap with their surroundings, in square Angstrom."""
    if not len(surroundings):
        return 0.0
    distance = np.linalg.norm(pos[:, None] - surroundings[None], axis=-1)
    return float((np.clip(NEAR - distance, 0, None) ** 2).sum())
