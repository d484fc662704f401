"""Alignments: reading, profile, features."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import numpy as np
import pytest
from assemblies import make_tables, make_tokens

from tpf.data.chem import GAP, RESTYPE
from tpf.data.msa import (
    AlignmentFolder,
    concatenate,
    msa_features,
    parse_a3m,
    parse_stockholm,
    read_alignment,
    single_row,
)
from tpf.data.store import load_tokens
from tpf.data.tables import LIGAND, PROTEIN, RNA
from tpf.errors import DataError

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
    f = single_row(tokens)
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
    tokens = load_tokens(str(shared_data / "general" / "1k1a.cif.gz"))
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
