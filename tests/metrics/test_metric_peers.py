"""Agreement with biotite and Biopython on models of real entries (called as black boxes)."""

from __future__ import annotations

import gzip
import time
from pathlib import Path
from typing import Any

import gemmi
import numpy as np
import pytest
from metric_structures import build_structure

from tpf.data.tables import DNA, LIGAND, PROTEIN
from tpf.metrics.lddt import THRESHOLDS_UHA, lddt, lddt_metrics
from tpf.metrics.sasa import protor_radii, sasa
from tpf.metrics.structure import Floats, Sample, Scored
from tpf.metrics.superpose import gdt, superpose, superposed_metrics

struc = pytest.importorskip("biotite.structure")

EXAMPLES = Path(__file__).resolve().parents[2] / "data" / "examples"
ENSEMBLES = ("1bo0", "1grm", "1l2y", "1lvz", "1psm", "1qxb", "1ssu", "2lwu", "6a5j")
"""NMR entries: two of their models are two real structures of one molecule."""
DIMER = "1k6p"
"""Its two chains are the tenth pair."""
PAIRS = (*ENSEMBLES, DIMER, "1ubq", "2q2k", "4cup", "1bna", "1aki")
"""The others are crystals (a protein-DNA and a ligand complex among them) with a perturbed copy."""
TOLERANCE = 1e-3


def atoms_of(path: Path) -> Any:  # noqa: ANN401 (biotite has no types)
    from biotite.structure.io.pdbx import CIFFile, get_structure

    with gzip.open(path, "rt") as handle:
        stack = get_structure(CIFFile.read(handle), use_author_fields=False)
    keep = (stack.element != "H") & (stack.element != "D") & (stack.res_name != "HOH")
    return stack[:, keep]


def common(first: Any, second: Any) -> tuple[Any, Any]:  # noqa: ANN401
    """Return the atoms that two chains of one molecule share, in one order."""
    keys = [
        list(zip(a.res_id.tolist(), a.atom_name.tolist(), strict=True)) for a in (first, second)
    ]
    both = [key for key in keys[0] if key in set(keys[1])]
    return first[[keys[0].index(k) for k in both]], second[[keys[1].index(k) for k in both]]


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    path = EXAMPLES / f"{request.param}.cif.gz"
    if not path.is_file():
        path = request.getfixturevalue("shared_data") / "general" / path.name
    if not path.is_file():
        pytest.skip(f"{path.name} is not in shared/data/general")
    stack = atoms_of(path)
    if stack.stack_depth() > 1:
        return stack[0], stack[1]
    if request.param == DIMER:
        return common(*(protein_of(stack[0][stack.chain_id == name]) for name in "AB"))
    model = stack[0].copy()
    model.coord = model.coord + np.random.default_rng(0).normal(0, 0.8, model.coord.shape)
    return stack[0], model


def positions(pair: tuple[Any, Any]) -> tuple[Floats, Floats]:
    return pair[0].coord.astype(np.float64), pair[1].coord.astype(np.float64)


def test_lddt_agrees_with_biotite(pair: tuple[Any, Any]) -> None:
    truth, model = positions(pair)
    for radius, thresholds in ((15.0, (0.5, 1.0, 2.0, 4.0)), (30.0, THRESHOLDS_UHA)):
        peer = struc.lddt(
            pair[0],
            pair[1],
            inclusion_radius=radius,
            distance_bins=thresholds,
            exclude_same_residue=False,
        )
        assert lddt(model, truth, radius=radius, thresholds=thresholds) == pytest.approx(
            float(peer), abs=1e-4
        )


def test_class_scores_agree_with_biotite(pair: tuple[Any, Any]) -> None:
    reference, subject = pair
    nucleic = struc.filter_nucleotides(reference)
    kinds = np.where(nucleic, DNA, np.where(struc.filter_amino_acids(reference), PROTEIN, LIGAND))
    chains = np.unique(reference.chain_id, return_inverse=True)[1]
    structure = build_structure(kinds.tolist(), chains.tolist())
    truth, model = positions(pair)
    sample = Sample.make(model, truth, np.ones(len(truth)))
    found = lddt_metrics(structure, sample, Scored.everything(structure))
    for kind, name, radius in ((PROTEIN, "protein", 15), (DNA, "dna", 30), (DNA, "dna", 15)):
        use = kinds == kind
        if not use.any():
            continue
        hits, count = 0.0, 0
        for c in np.unique(chains[use]):
            same = use & (chains == c)
            a, b = reference[same], subject[same]
            d = np.linalg.norm(a.coord[:, None].astype(float) - a.coord[None], axis=-1)
            n = int((d < radius).sum()) - len(a)
            score = struc.lddt(a, b, inclusion_radius=radius, exclude_same_residue=False)
            hits, count = hits + float(score) * n, count + n
        suffix = "_15" if (kind, radius) == (DNA, 15) else ""
        assert found[f"lddt_intra_{name}{suffix}"] == pytest.approx(hits / count, abs=1e-4)


def test_superposition_agrees_with_gemmi_biotite_and_biopython(pair: tuple[Any, Any]) -> None:
    from Bio.SVDSuperimposer import SVDSuperimposer

    truth, model = positions(pair)
    ours = superposed_metrics(Sample.make(model, truth, np.ones(len(truth))))
    places = [[gemmi.Position(*row) for row in x.tolist()] for x in (truth, model)]
    assert ours["rmsd"] == pytest.approx(gemmi.superpose_positions(*places).rmsd, abs=TOLERANCE)
    fitted, _ = struc.superimpose(pair[0], pair[1])
    assert ours["rmsd"] == pytest.approx(float(struc.rmsd(pair[0], fitted)), abs=1e-4)
    peer = SVDSuperimposer()
    peer.set(truth, model)
    peer.run()
    assert ours["rmsd"] == pytest.approx(float(peer.get_rms()), abs=1e-4)
    np.testing.assert_allclose(superpose(model, truth), peer.get_transformed(), atol=1e-4)
    distance = np.linalg.norm(peer.get_transformed() - truth, axis=-1)
    assert ours["gdt_ts"] == pytest.approx(gdt(distance, (1, 2, 4, 8)), abs=1e-4)


def protein_of(array: Any) -> Any:  # noqa: ANN401
    return array[struc.filter_canonical_amino_acids(array)]


@pytest.mark.parametrize("entry", [*(e for e in ENSEMBLES if e != "1qxb"), "1ubq", "1aki"])
def test_sasa_agrees_with_biotite(shared_data: Path, entry: str) -> None:
    protein = protein_of(atoms_of(shared_data / "general" / f"{entry}.cif.gz")[0])
    elements = np.array([{"C": 6, "N": 7, "O": 8, "S": 16}[e] for e in protein.element])
    radii = protor_radii(protein.res_name, protein.atom_name, elements)
    start = time.process_time()
    ours = sasa(protein.coord.astype(np.float64), radii)
    assert time.process_time() - start < 2.0
    peer = struc.sasa(protein, probe_radius=1.4, point_number=1000, vdw_radii="ProtOr")
    np.testing.assert_allclose(ours, peer, atol=TOLERANCE)


def test_radii_are_those_of_biotite() -> None:
    from biotite.structure.info import vdw_radius_protor

    from tpf.data.chem import ATOMS, ELEMENTS, molecule_type

    for residue, names in ATOMS.items():
        if molecule_type(residue) != PROTEIN:
            continue
        elements = np.array([ELEMENTS.index(name[0]) for name in names])
        ours = protor_radii(np.array([residue] * len(names)), np.array(names), elements)
        assert ours.tolist() == [vdw_radius_protor(residue, name) for name in names]


def test_sasa_agrees_with_biopython(shared_data: Path) -> None:
    from Bio.PDB.Atom import Atom
    from Bio.PDB.SASA import ShrakeRupley
    from Bio.PDB.StructureBuilder import StructureBuilder

    protein = protein_of(atoms_of(shared_data / "general" / "1l2y.cif.gz")[0])
    radius = {"C": 1.7, "N": 1.55, "O": 1.52, "S": 1.8}
    builder = StructureBuilder()
    builder.init_structure("x")
    builder.init_model(0)
    builder.init_chain("A")
    for number in np.unique(protein.res_id):
        residue = protein[protein.res_id == number]
        builder.init_seg(" ")
        builder.init_residue(residue.res_name[0], " ", int(number), " ")
        for atom in residue:
            builder.structure[0]["A"][int(number)].add(
                Atom(atom.atom_name, atom.coord, 0, 1, " ", atom.atom_name, 0, atom.element)
            )
    peer = ShrakeRupley(probe_radius=1.4, n_points=1000, radii_dict=radius)
    peer.compute(builder.structure, level="S")
    ours = sasa(protein.coord.astype(np.float64), np.array([radius[e] for e in protein.element]))
    assert ours.sum() == pytest.approx(builder.structure.sasa, rel=2e-3)
