"""Alignments: reading, profile, features."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import numpy as np
import pytest
from assemblies import make_tables, make_tokens

from tpf.data.alignment import (
    Alignment,
    AlignmentFolder,
    concatenate,
    parse_a3m,
    parse_stockholm,
    read_alignment,
    species_of,
)
from tpf.data.cache import read
from tpf.data.chem import GAP, RESTYPE
from tpf.data.msa import msa_features, pair_rows
from tpf.data.tables import LIGAND, PROTEIN, RNA
from tpf.errors import DataError, UsageError

A3M = """>query
MFAG
>one insertion of two, a gap
MfaF-G
>another
>
--AG
"""
A3M_OK = ">query\nMFAG\n>a\nMfaF-G\n>b wrapped\n--\nAG\n"
STOCKHOLM = """# STOCKHOLM 1.0
#=GF ID test
query  MF..A
other  M-fgA
third  -FFFA

query  -G
other  CG
third  .-
//
"""


def letters(text: str) -> list[int]:
    names = {"M": "MET", "F": "PHE", "A": "ALA", "G": "GLY", "X": "UNK", "-": "-"}
    return [RESTYPE[names[c]] for c in text]


def test_a3m() -> None:
    alignment = parse_a3m(A3M_OK)
    assert alignment.rows.tolist() == [letters("MFAG"), letters("MF-G"), letters("--AG")]
    assert alignment.deletions.tolist() == [[0, 0, 0, 0], [0, 2, 0, 0], [0, 0, 0, 0]]


def test_stockholm_columns_are_those_of_the_query() -> None:
    alignment = parse_stockholm(STOCKHOLM)
    assert alignment.rows.tolist() == [letters("MFAG"), letters("M-AG"), letters("-FA-")]
    assert alignment.deletions.tolist() == [[0, 0, 0, 0], [0, 0, 2, 1], [0, 0, 2, 0]]


def test_letters_depend_on_the_molecule() -> None:
    protein = parse_a3m(">q\nBZUOXJ-\n").rows[0].tolist()
    assert protein == [RESTYPE[n] for n in ("ASP", "GLU", "CYS", "LYS", "UNK", "UNK", "-")]
    rna = parse_a3m(">q\nACGUTN\n", RNA).rows[0].tolist()
    assert rna == [RESTYPE[n] for n in ("A", "C", "G", "U", "U", "N")]


def test_uneven_rows_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="row 2 has 0 columns, the query 4"):
        parse_a3m(A3M)
    for name, text in (("x.a3m", A3M), ("y.a3m", ""), ("z.sto", "# STOCKHOLM 1.0\n//\n")):
        file = tmp_path / name
        file.write_text(text)
        with pytest.raises(DataError, match=f"{name}: msa"):
            read_alignment(file)
    (tmp_path / "w.a3m.gz").write_bytes(gzip.compress(A3M_OK.encode())[:-12])
    with pytest.raises(DataError, match="w.a3m.gz"):
        read_alignment(tmp_path / "w.a3m.gz")


def test_concatenate_drops_repeats() -> None:
    first, second = parse_a3m(A3M_OK), parse_a3m(">q\nMFAG\n>c\nGGGG\n>d\nMF-G\n")
    rows = concatenate([first, second]).rows.tolist()
    assert rows == [letters(t) for t in ("MFAG", "MF-G", "--AG", "GGGG")]


def test_single_row() -> None:
    tokens = make_tokens(make_tables([(PROTEIN, ["MET", "PTR"]), (LIGAND, ["SO4"])]))
    f = msa_features(tokens, np.arange(len(tokens)), {}, 1)
    assert f["msa"].shape == (1, len(tokens), 32)
    np.testing.assert_array_equal(f["msa"][0].argmax(-1), tokens.restype)
    assert (f["msa_mask"] == 1).all() and (f["deletion_mean"] == 0).all()


def test_features_of_two_chains() -> None:
    """Chain A (twice) has three rows, chain B none; a modified residue takes its column."""
    peptide = ["MET", "PTR", "ALA", "GLY"]
    tokens = make_tokens(make_tables([(PROTEIN, peptide), (PROTEIN, peptide), (PROTEIN, ["ALA"])]))
    alignment = parse_a3m(A3M_OK.replace("\nMFAG", "\nMXAG"))
    f = msa_features(tokens, np.arange(len(tokens)), {1: alignment}, 100)
    n = len(tokens)
    chain = tokens.tables.res_chain[tokens.residue]
    assert f["msa"].shape == (3, n, 32)
    np.testing.assert_array_equal(f["msa"][0].argmax(-1), tokens.restype)
    rows = f["msa"].argmax(-1)
    res_id = tokens.tables.res_id[tokens.residue]
    np.testing.assert_array_equal(rows[1][chain == 0], rows[1][chain == 1])
    assert set(rows[1][(chain == 0) & (res_id == 2)]) == {RESTYPE["PHE"]}
    assert set(rows[1][(chain == 0) & (res_id == 3)]) == {GAP}
    np.testing.assert_array_equal(f["msa_mask"][1], chain < 2)
    inserted = f["deletion_value"][1][(chain == 0) & (res_id == 2)]
    np.testing.assert_allclose(inserted, 2 / math.pi * math.atan(2 / 3), rtol=1e-6)
    np.testing.assert_allclose(f["deletion_mean"][(chain == 0) & (res_id == 2)], 2 / 3, rtol=1e-6)
    np.testing.assert_allclose(f["profile"].sum(-1), 1, rtol=1e-6)
    np.testing.assert_allclose(f["profile"][0][[RESTYPE["MET"], GAP]], [2 / 3, 1 / 3], rtol=1e-6)
    assert f["profile"][-1][RESTYPE["ALA"]] == 1
    np.testing.assert_array_equal(f["has_deletion"], f["deletion_value"] > 0)


def test_training_keeps_a_random_number_of_rows_in_order() -> None:
    text = ">q\nMFAG\n" + "".join(f">{k}\n{c}FAG\n" for k, c in enumerate("ACDEFGHIK"))
    alignment = parse_a3m(text)
    tokens = make_tokens(make_tables([(PROTEIN, ["MET", "PHE", "ALA", "GLY"])]))
    depths = []
    order = {code: k for k, code in enumerate(alignment.rows[:, 0].tolist())}
    for seed in range(400):
        rng = np.random.default_rng(seed)
        f = msa_features(tokens, np.arange(4), {1: alignment}, 100, rng)
        first = [order[code] for code in f["msa"][:, 0].argmax(-1).tolist()]
        assert first[0] == 0 and first == sorted(set(first))
        depths.append(len(first))
        np.testing.assert_allclose(f["profile"][0].max(), 0.1, rtol=1e-6)  # before the cut
    counts = np.bincount(depths, minlength=11)
    assert counts[0] == 0 and (counts[1:] > 15).all()
    cut = msa_features(tokens, np.arange(4), {1: alignment}, 5)
    assert len(cut["msa"]) == 5


def test_alignment_of_another_length_is_an_error() -> None:
    tokens = make_tokens(make_tables([(PROTEIN, ["ALA"] * 5)]))
    with pytest.raises(DataError, match="msa: residue 5 lies outside an alignment of 4"):
        msa_features(tokens, np.arange(5), {1: parse_a3m(A3M_OK)}, 10)


def test_real_alignments(shared_data: Path) -> None:
    files = shared_data / "msa"
    a3m = read_alignment(files / "1k1a_A_nonpairing.a3m.gz")
    sto = read_alignment(files / "2q2k_B_uniref90.sto.gz")
    for alignment in (a3m, sto):
        assert alignment.rows.shape == alignment.deletions.shape
        assert (alignment.rows[0] < 20).all() and (alignment.deletions[0] == 0).all()
        assert len(alignment.rows) > 1
    tokens = read(str(shared_data / "general" / "1k1a.cif.gz"), None, None).tokens
    found = AlignmentFolder(files).find(tokens)
    f = msa_features(tokens, np.arange(len(tokens)), found, 50)
    assert f["msa"].shape == (50, len(tokens), 32)
    same = (f["msa"][1:].argmax(-1) == tokens.restype).mean()
    assert same > 0.15  # homologues in register


def test_folder_finds_alignments_by_sequence(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "any.a3m").write_text(A3M_OK)
    (tmp_path / "more.sto.gz").write_bytes(gzip.compress(STOCKHOLM.encode()))
    (tmp_path / "any_pairing.a3m").write_text(">q\nMFAG\n>p\nAAAA\n")
    (tmp_path / "other.a3m").write_text(">q\nGGGG\n")
    chains = [(PROTEIN, ["MET", "PHE", "ALA", "GLY"]), (PROTEIN, ["MET", "PTR", "ALA", "GLY"])]
    tokens = make_tokens(make_tables([*chains, (PROTEIN, ["GLY"] * 4), (PROTEIN, ["PHE"] * 4)]))
    found = AlignmentFolder(tmp_path).find(tokens)
    assert set(found) == {1, 2, 3}
    rows = [letters(t) for t in ("MFAG", "MF-G", "--AG", "M-AG", "-FA-")]
    assert found[1].rows.tolist() == rows
    assert found[2].rows.tolist() == rows  # a modified residue matches any letter
    assert len(found[3].rows) == 1


def test_species_of_headers() -> None:
    assert (
        species_of("tr|A0A2W3M096|A0A2W3M096_STAAU ParR OS=Staphylococcus aureus OX=1280") == "1280"
    )
    assert species_of("sp|P00519|ABL1_HUMAN/229-500") == "HUMAN"
    assert species_of("UniRef100_A0A0S7JZT1_188132/\t246\t0.897") == "188132"
    assert species_of("UniRef90_A0A141BHY3 n=37 Tax=Staphylococcaceae TaxID=90964") == ""
    assert species_of("MGYP000836687451/14-154") == species_of("query") == ""


def of_species(*rows: tuple[str, str]) -> Alignment:
    return parse_a3m(">q\nMFAG\n" + "".join(f">x OX={taxon}\n{text}\n" for taxon, text in rows))


def test_rows_are_paired_by_species() -> None:
    first = of_species(("1", "MFGG"), ("1", "MFAA"), ("2", "GGGG"), ("3", "MFAG"), ("7", "AAAA"))
    second = of_species(("3", "MFAG"), ("2", "MFAG"), ("1", "GGAG"), ("9", "MFAG"))
    third = of_species(("1", "GGGG"), ("1", "MGGG"))
    paired = pair_rows({1: first, 2: second, 3: third}, 100)
    # species 1 is in all three; of the two-chain ones, 3 is more like the queries than 2
    assert {e: rows.tolist() for e, rows in paired.items()} == {
        1: [1, 4, 3],
        2: [3, 1, 2],
        3: [2, -1, -1],
    }
    assert all(len(rows) == 2 for rows in pair_rows({1: first, 2: second, 3: third}, 2).values())
    assert (
        pair_rows({1: first}, 100) == {} == pair_rows({1: first, 2: of_species(("5", "MFAG"))}, 9)
    )


def test_paired_rows_come_first_and_side_by_side() -> None:
    peptide = ["MET", "PHE", "ALA", "GLY"]
    tokens = make_tokens(make_tables([(PROTEIN, peptide), (PROTEIN, peptide[:3] + ["ALA"])]))
    a = of_species(("5", "MFGG"), ("6", "M--G"))
    b = parse_a3m(">q\nMFAA\n>x OX=6\naMAAA\n>y\nGGGG\n>z\nFFFF\n")
    f = msa_features(tokens, np.arange(8), {1: a, 2: b}, 100)
    rows = f["msa"].argmax(-1).tolist()
    assert f["num_paired_seqs"].tolist() == [2]
    assert rows[1] == letters("M--G") + letters("MAAA")
    assert f["has_deletion"][1].tolist() == [0, 0, 0, 0, 1, 0, 0, 0]
    assert rows[2:] == [letters("MFGG") + letters("MAAA"), letters("M--G") + letters("GGGG"),
                        letters("----") + letters("FFFF")]  # fmt: skip
    assert f["msa_mask"][4].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    cropped = msa_features(tokens, np.arange(4), {1: a, 2: b}, 100)  # one chain: nothing to pair
    assert cropped["num_paired_seqs"].tolist() == [1] and len(cropped["msa"]) == 3
    for limit in (1, 2, 3, 4):
        assert len(msa_features(tokens, np.arange(8), {1: a, 2: b}, limit)["msa"]) <= limit


def test_names_and_tables_find_alignments(tmp_path: Path) -> None:
    """Names decide between chains of equal sequence; a wrong sequence is never taken."""
    tokens = make_tokens(make_tables([(PROTEIN, ["MET", "PHE", "ALA", "GLY"])], entry="1abc"))
    chain = tokens.tables.auth_chain[0]
    folder = tmp_path / "msa"
    folder.mkdir()
    (folder / "0other.a3m").write_text(A3M_OK)
    (folder / f"1ABC_{chain}_jackhmmer.a3m").write_text(">q\nMFAG\n>x\nAAAA\n")
    (folder / f"1abc_{chain}_uniprot.a3m").write_text(">q\nMFAG\n>x OX=5\nFFFF\n")
    found = AlignmentFolder(folder).find(tokens)[1]
    assert found.rows.tolist() == [letters("MFAG"), letters("AAAA")]
    assert found.for_pairing.rows.tolist() == [letters("MFAG"), letters("FFFF")]
    (folder / f"1ABC_{chain}_jackhmmer.a3m").write_text(">q\nMFA\n>x\nAAA\n")
    (folder / f"1abc_{chain}_uniprot.a3m").unlink()
    assert len(AlignmentFolder(folder).find(tokens)[1].rows) == 3
    table = tmp_path / "table.txt"
    table.write_text(f"# chain file\n1abc_{chain}\tmsa/0other.a3m\n")
    assert len(AlignmentFolder(table).find(tokens)[1].rows) == 3
    table.write_text("1abc_A nowhere.a3m\n")
    for path in (table, tmp_path / "absent"):
        with pytest.raises(UsageError, match="line 1 is|data.msa"):
            AlignmentFolder(path)


def test_a_sample_holds_some_of_the_rows_and_of_whole_entries_always_as_many() -> None:
    alignment = parse_a3m(">q\nMFAG\n" + ">x\nAAAA\n" * 50)
    tokens = make_tokens(make_tables([(PROTEIN, ["MET", "PHE", "ALA", "GLY"])]))
    index = np.arange(4)
    for seed in range(20):
        f = msa_features(tokens, index, {1: alignment}, 100, np.random.default_rng(seed), 5)
        assert 1 <= len(f["msa"]) <= 5 and (f["msa"][0].argmax(-1) == tokens.restype).all()
        f = msa_features(
            tokens, index, {1: alignment}, 100, np.random.default_rng(seed), 5, vary_depth=False
        )
        assert len(f["msa"]) == 5 and (f["msa"][0].argmax(-1) == tokens.restype).all()
    assert len(msa_features(tokens, index, {1: alignment}, 100, None, 5)["msa"]) == 51
