"""``tpf predict``: inputs of every kind, their errors, and what is written."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import gemmi
import numpy as np
import pytest
from test_cli import one_sentence, tpf

from tests.untrained import save_untrained
from tpf.config import DataConfig
from tpf.data.ccd import Dictionary
from tpf.data.jobs import Job, read_job
from tpf.data.load import load_tables
from tpf.data.write import write_mmcif
from tpf.errors import UsageError
from tpf.predict import Prediction, predict_files
from tpf.report.predict import prediction_report
from tpf.weights.convert import import_file

EXAMPLES = Path(__file__).resolve().parents[1] / "data" / "examples"
UBIQUITIN = "MQIFVKTLTGKTITLEVEPSDTIENVKAKIQDKEGIPPDQQRLIFAGKQLEDGRTLSDYNIQKESTLHLVLRLRGG"
CONFIG = DataConfig(conformers="ideal", max_templates=0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of an untrained tiny model that samples in two steps."""
    options = ["validate.samples=2", "validate.sampling_steps=2", "validate.recycles=0"]
    return save_untrained(tmp_path_factory.mktemp("model") / "run", options, confident=True)


def write(folder: Path, name: str, content: str | dict[str, Any]) -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def protein(**fields: Any) -> list[dict[str, Any]]:
    return [{"protein": {"sequence": "MKV"} | fields}]


def job(tmp_path: Path, *sequences: dict[str, Any]) -> Job:
    return read_job(write(tmp_path, "job.json", {"sequences": list(sequences)}), CONFIG)


def test_a_single_chain_has_both_ranking_scores(run: Path, tmp_path: Path) -> None:
    (found,) = predict_files(run, [write(tmp_path, "x.fa", ">p\nMKVLQ\n")], [], out=tmp_path / "o")
    for sample in found.document["samples"]:
        rest = 0.5 * sample["disorder"] - 100 * sample["has_clash"]
        assert sample["iptm"] == 0
        assert sample["ranking_score"] == pytest.approx(0.2 * sample["ptm"] + rest)
        assert sample["ranking_score_si"] == pytest.approx(sample["ptm"] + rest)
    report = (tmp_path / "o" / "report.html").read_text()
    assert "ranking_score_si" in report


def test_an_mmcif_is_predicted_from_its_sequence_alone(run: Path, tmp_path: Path) -> None:
    """Its coordinates play no part: a job with the same sequence gives the same structure."""
    named = {"name": "1ubq", "sequences": [{"protein": {"sequence": UBIQUITIN}}]}
    inputs = [EXAMPLES / "1ubq.cif.gz", write(tmp_path, "u.json", named)]
    said: list[str] = []
    found = predict_files(run, inputs, [], out=tmp_path / "out", say=said.append)
    assert [p.error for p in found] == ["", ""]
    assert said == ["1ubq: 58 waters dropped."]
    assert [p.document["notes"] for p in found] == [["58 waters dropped."], []]
    assert "58 waters dropped." in (tmp_path / "out" / "report.html").read_text()
    first, second = (
        load_tables(tmp_path / "out" / name / "seed0-sample1.cif", filters=False).pos
        for name in ("1ubq", "1ubq-2")
    )
    assert np.array_equal(first, second)


def test_what_is_written(run: Path, tmp_path: Path) -> None:
    content = """
name: two things
sequences:
  - protein: {id: H, sequence: "MKV(SEP)LQ AGD"}
  - ligand: {ccd: ben}
"""
    (found,) = predict_files(
        run, [write(tmp_path, "x.yaml", content)], ["validate.seeds=2"], out=tmp_path / "out"
    )
    folder = tmp_path / "out" / "two_things"
    document = json.loads((folder / "confidence.json").read_text())
    assert document == found.document
    chains = [(c["id"], c["type"], c["residues"]) for c in document["chains"]]
    assert chains == [("A", "ligand", 1), ("H", "protein", 9)]
    samples = document["samples"]
    assert [s["ranking_score"] for s in samples] == sorted(
        (s["ranking_score"] for s in samples), reverse=True
    )
    assert {(s["seed"], s["sample"]) for s in samples} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    best = samples[0]
    assert {"ptm", "iptm", "plddt_complex", "gpde", "disorder", "has_clash"} <= best.keys()
    expected = 0.8 * best["iptm"] + 0.2 * best["ptm"] + 0.5 * best["disorder"]
    assert best["ranking_score"] == pytest.approx(expected - 100 * best["has_clash"])
    assert best["ranking_score_si"] == best["ranking_score"]  # two chains have an ipTM
    assert document["folder"] == folder.name
    structure = gemmi.read_structure(str(folder / best["file"]))
    mean = {
        chain.name: np.mean([atom.b_iso for residue in chain for atom in residue])
        for chain in structure[0]
    }
    assert mean == pytest.approx(best["chain_plddt"], abs=1e-2)
    assert not structure.resolution
    pae = np.load(folder / best["file"].replace(".cif", "-pae.npz"))["pae"]
    assert pae.shape == (document["n_tokens"],) * 2 and 0 < pae.min() < pae.max() < 32
    report = (tmp_path / "out" / "report.html").read_text()
    assert "two_things" in report and "<circle" in report and "https://" not in report


def test_job_chains_copies_and_modifications(tmp_path: Path) -> None:
    found = job(
        tmp_path,
        {"protein": {"id": ["X", "Y"], "sequence": "MKSA*", "modifications":
            [{"position": 3, "ccd": "sep"}]}},
        {"rna": {"sequence": "ACGU"}},
        {"dna": {"sequence": "ACGT"}},
        {"ligand": {"id": "B", "ccd": "MG"}},
    )  # fmt: skip
    tables = found.tokens.tables
    assert tables.chain_id.tolist() == ["A", "B", "C", "X", "Y"]
    assert tables.chain_type.tolist() == [1, 3, 2, 0, 0]
    assert tables.chain_entity.tolist() == [1, 2, 3, 4, 4]
    assert tables.res_name[tables.res_chain == 3].tolist() == ["MET", "LYS", "SEP", "ALA"]
    sep = Dictionary().get("SEP")
    assert sep is not None
    assert len(found.tokens) == 4 + 1 + 4 + 2 * (3 + int((sep.atom_names != "OXT").sum()))
    assert np.isnan(tables.pos).all() and (tables.occupancy == 0).all()


def test_ligands_by_smiles_and_sdf(run: Path, tmp_path: Path) -> None:
    chem = pytest.importorskip("rdkit.Chem")
    pytest.importorskip("rdkit.Chem.rdDistGeom")
    mol = chem.MolFromSmiles("c1ccccc1C(N)=O")
    chem.rdDistGeom.EmbedMolecule(mol, randomSeed=1)
    write(tmp_path, "pose.sdf", chem.MolToMolBlock(mol) + "$$$$\n")
    ligands = [{"smiles": "CC(=O)Nc1ccc(O)cc1"}, {"smiles": "CC(=O)Nc1ccc(O)cc1"}]
    ligands.append({"sdf": "pose.sdf"})
    sequences = [{"ligand": ligand} for ligand in ligands] + protein()
    (found,) = predict_files(
        run, [write(tmp_path, "l.json", {"sequences": sequences})], [], out=tmp_path / "out"
    )
    assert [c["entity"] for c in found.document["chains"]] == [1, 1, 2, 3]
    back = load_tables(tmp_path / "out" / "l" / "seed0-sample0.cif", filters=False)
    assert back.res_name[:3].tolist() == ["LIG1", "LIG1", "LIG2"]
    assert [(back.res_chain[back.atom_residue] == c).sum() for c in (0, 2)] == [11, 9]
    assert not any("no dictionary" in note for note in back.notes)


def test_fasta_kinds(tmp_path: Path) -> None:
    text = ">1abc_1|Chain A\nMKV\nLQ\n>second\nACGTA\n>third\nacgua\n>x|protein|\nGAT\n"
    tables = read_job(write(tmp_path, "a.fasta", text), CONFIG).tokens.tables
    assert tables.id == "a" and tables.chain_id.tolist() == ["A", "B", "C", "D"]
    assert tables.chain_type.tolist() == [0, 2, 1, 0]
    assert tables.res_name[tables.res_chain == 0].tolist() == ["MET", "LYS", "VAL", "LEU", "GLN"]


def test_no_fasta_record_is_lost(tmp_path: Path) -> None:
    marked = tmp_path / "marked.fasta"
    marked.write_bytes(b"\xef\xbb\xbf>a\r\nMKVL\r\n>b\r\nM(sep)VL*\r\n")
    tables = read_job(marked, CONFIG).tokens.tables
    assert tables.chain_id.tolist() == ["A", "B"] and "SEP" in tables.res_name
    with pytest.raises(UsageError, match="'MKVL' stands before the first FASTA record"):
        read_job(write(tmp_path, "bare.fasta", "MKVL\n>b\nMKVL\n"), CONFIG)
    with pytest.raises(UsageError, match="no FASTA record"):
        read_job(write(tmp_path, "empty.fasta", "\n"), CONFIG)


def test_a_name_stays_inside_the_folder(tmp_path: Path) -> None:
    for name, plain in (("..", "_"), ("../x y", "_x_y"), (".hidden", "hidden")):
        file = write(tmp_path, "n.json", {"name": name, "sequences": protein()})
        assert read_job(file, CONFIG).name == plain


def test_no_chain_of_an_mmcif_is_dropped_for_its_coordinates(tmp_path: Path) -> None:
    """Training drops chains that overlap and polymers with few resolved residues."""
    given = job(tmp_path, *protein(sequence="MKVLQ"), *protein(sequence="GAL"))
    tables = given.tokens.tables
    file = tmp_path / "piled.cif"
    write_mmcif(file, tables, np.zeros_like(tables.pos))
    again = read_job(file, CONFIG).tokens.tables
    assert again.res_name.tolist() == tables.res_name.tolist()


def test_alignments_of_a_job_and_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "msa").mkdir()
    write(tmp_path / "msa", "a.a3m", ">q\nMKVLQ\n>1\nMKILQ\n>2\n-KVLQ\n")
    own = job(tmp_path, {"protein": {"sequence": "MKVLQ", "msa": "msa/a.a3m"}})
    assert len(own.alignments[1].rows) == 3
    config = DataConfig(msa=str(tmp_path / "msa"))
    fasta = read_job(write(tmp_path, "f.fa", ">p\nMKVLQ\n"), config)
    assert len(fasta.alignments[1].rows) == 3


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("sequences: [", "not valid yaml"),
        ({"chains": []}, "has no list 'sequences'"),
        ({"sequences": []}, "'sequences' is empty"),
        ({"sequences": [{"peptide": {}}]}, r"sequences\[0\]: 'peptide' is not one of protein"),
        ({"sequences": [{"protein": {"seq": "M"}}]}, "protein has no field 'seq'"),
        ({"sequences": [{"protein": {}}]}, r"sequences\[0\] has no sequence"),
        ({"sequences": protein(sequence="MK-V")}, "has '-' in its sequence"),
        ({"sequences": protein(msa="none.a3m")}, "none.a3m: no such file"),
        ({"sequences": protein(msa="wrong.a3m")}, "first row of .*wrong.a3m differs at residue 2"),
        (
            {"sequences": protein(sequence="MKVA", msa="wrong.a3m")},
            "wrong.a3m has 3; it must be the 4 residues",
        ),
        ({"sequences": protein(modifications=[{"position": 4, "ccd": "SEP"}])}, "from 1 to 3"),
        ({"sequences": protein(id="A") * 2}, "id 'A' is given twice"),
        ({"sequences": [{"ligand": {"ccd": "ZZZZ9"}}]}, "component ZZZZ9 of chain A is in no dict"),
        ({"sequences": [{"ligand": {"ccd": "ATP", "smiles": "C"}}]}, "one of ccd, smiles and sdf"),
        ({"sequences": [{"ligand": {"smiles": "c1cc"}}]}, r"sequences\[0\]: c1cc: ligand: "),
        ({"sequences": [{"ligand": {"sdf": "none.sdf"}}]}, "none.sdf"),
        ({"sequences": [{"ligand": {"sdf": "x.mol2"}}]}, "'x.mol2' is no name of an SDF file"),
        ({"sequences": [{"ligand": {"smiles": "x.sdf"}}]}, "give it as sdf"),
        ("sequences:\n  - ligand: {ccd: 017}\n", "ccd is 15 and no text; put it in quotes"),
        ({"sequences": [{"rna": {"sequence": "ACGT"}}]}, "has 'T', which is no letter of rna"),
        ({"sequences": [{"dna": {"sequence": "ACGU"}}]}, "has 'U', which is no letter of dna"),
        ({"sequences": protein(modifications=5)}, "modification 5 needs ccd"),
        ({"sequences": protein(id="")}, "id '' is no chain name"),
        ({"sequences": protein(id="A B")}, "id 'A B' is no chain name"),
        (
            {"sequences": protein(msa="right.a3m") + protein(msa="other.a3m")},
            "chain B has the sequence of another chain and another msa",
        ),
    ],
)
def test_wrong_jobs_are_named(content: str | dict[str, Any], sentence: str, tmp_path: Path) -> None:
    write(tmp_path, "wrong.a3m", ">q\nMRV\n")
    for name in ("right.a3m", "other.a3m"):
        write(tmp_path, name, ">q\nMKV\n")
    with pytest.raises(UsageError, match=sentence) as error:
        read_job(write(tmp_path, "job.yaml", content), CONFIG)
    assert str(error.value).startswith(str(tmp_path)) and "\n" not in sentence


def test_wrong_inputs_leave_nothing_behind(run: Path, tmp_path: Path) -> None:
    cases = {"nothing.fasta": "no such file", "x.pdb": "not a kind of input that tpf predict knows"}
    write(tmp_path, "x.pdb", "ATOM")
    for name, sentence in cases.items():
        with pytest.raises(UsageError, match=f"{name}: {sentence}"):
            predict_files(run, [tmp_path / name], [], out=tmp_path / "out")
    message = one_sentence(tpf("predict", run, "data.crop=3", "--out", "out", cwd=tmp_path), 2)
    assert "tpf predict got no INPUT" in message and not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match=f"--out {tmp_path} exists"):
        predict_files(run, [tmp_path / "x.pdb"], [], out=tmp_path)


def test_a_failing_complex_does_not_end_the_others(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_nothing(path: Path, *rest: Any, **named: Any) -> None:
        if "bad" in str(path):
            raise UsageError("cannot write")

    monkeypatch.setattr("tpf.predict.write_prediction", write_nothing)
    inputs = [write(tmp_path, f"{name}.fa", ">p\nMKVLQ\n") for name in ("bad", "good")]
    found = predict_files(run, inputs, [], out=tmp_path / "out")
    assert [(p.name, p.error) for p in found] == [("bad", "cannot write"), ("good", "")]
    assert "Not predicted: cannot write" in (tmp_path / "out" / "report.html").read_text()


def test_a_weight_file_predicts_like_its_run(run: Path, tmp_path: Path) -> None:
    import_file(run, tmp_path / "w.safetensors", None, strict=True)
    fasta = write(tmp_path, "x.fa", ">p\nMKVLQ\n")
    steps = ["validate.sampling_steps=2", "validate.samples=1", "validate.recycles=0"]
    options = [*steps, "data.conformers=ideal"]
    for name, source in (("run", run), ("file", tmp_path / "w.safetensors")):
        predict_files(source, [fasta], options, out=tmp_path / name)
    texts = [(tmp_path / n / "x" / "seed0-sample0.cif").read_text() for n in ("run", "file")]
    assert texts[0] == texts[1]


def test_report_escapes(run: Path) -> None:
    empty = Prediction("a<b", error="x < y")
    document = prediction_report("run", [(empty.name, {}, [], empty.error)])
    assert "a&lt;b" in document and "x &lt; y" in document


def test_a_binary_cif_or_unzipped_name_is_read(tmp_path: Path) -> None:
    path = tmp_path / "1ubq.cif"
    path.write_bytes(gzip.decompress((EXAMPLES / "1ubq.cif.gz").read_bytes()))
    assert len(read_job(path, CONFIG).tokens) == 76
