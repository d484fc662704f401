"""Entries of the archive and broken files: all are read or refused with a reason.

Chains, residues, atoms, bonds, tokens and atomised residues are compared with what ``independent``
counts (gemmi's own reader).
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from independent import Counts, components, count
from test_write_mmcif import differences

from tpf.data.cif import entry_name
from tpf.data.load import load_tables
from tpf.data.tables import LIGAND, PROTEIN, Tables, Tokens
from tpf.data.tokens import tokenize
from tpf.errors import DataError

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="shared/data is not beside the repo")


@cache
def load(folder: str, name: str) -> Tokens:
    (path,) = (SHARED / folder).glob(f"{name}.*")
    return tokenize(load_tables(path))


def names_in(folder: str) -> list[str]:
    if not SHARED.is_dir():
        return []
    return sorted(entry_name(path) for path in (SHARED / folder).iterdir())


def check_invariants(tokens: Tokens) -> None:
    """Assert what ``Tables`` and ``Tokens`` promise."""
    t = tokens.tables
    n = len(t.atom_name)
    for values in (t.element, t.charge, t.pos, t.occupancy, t.b_factor, t.atom_residue):
        assert len(values) == n
    resolved = t.occupancy > 0
    assert np.isfinite(t.pos[resolved]).all() and np.isnan(t.pos[~resolved]).all()
    assert (t.occupancy <= 1).all() and (t.b_factor[~resolved] == 0).all()
    assert (t.element != 1).all()
    for index, size in ((t.atom_residue, len(t.res_name)), (t.res_chain, len(t.chain_id))):
        assert (np.diff(index) >= 0).all() and np.unique(index).tolist() == list(range(size))
    assert t.chain_id.tolist() == sorted(set(t.chain_id.tolist()))
    assert set(zip(t.chain_entity.tolist(), t.chain_sym.tolist(), strict=True)) == {
        (e, s + 1) for e, k in Counter(t.chain_entity.tolist()).items() for s in range(k)
    }
    for e in set(t.chain_entity.tolist()):  # copies of an entity have the same residues
        chains = np.flatnonzero(t.chain_entity == e)
        assert len({tuple(t.res_name[t.res_chain == c].tolist()) for c in chains}) == 1
    pairs = t.bonds.tolist()
    assert pairs == sorted(pairs) and len({tuple(p) for p in pairs}) == len(pairs)
    assert (t.bonds[:, 0] < t.bonds[:, 1]).all() and (t.bonds < n).all()
    length = np.linalg.norm(t.pos[t.bonds[:, 0]] - t.pos[t.bonds[:, 1]], axis=1)
    assert not (length > 2.4).any()
    assert set(t.bond_order.tolist()) <= {0, 1, 2, 3, 4}
    assert np.isin(t.chain_type, range(4)).all()
    ends = tokens.start_atom + tokens.num_atoms
    assert (tokens.start_atom[1:] == ends[:-1]).all() and ends[-1] == n
    assert (tokens.num_atoms[tokens.atomized] == 1).all() and tokens.num_atoms.max() <= 23
    assert not (t.res_standard & (t.chain_type[t.res_chain] == LIGAND)).any()
    for atom in (tokens.center_atom, tokens.rep_atom):
        assert (atom >= tokens.start_atom).all() and (atom < ends).all()


REFUSED = {("general", "1m4x"): "more than 300 polymer chains"}  # a virus capsid


@pytest.mark.parametrize("folder", ["general", "kinase", "kinase_from_pdb"])
def test_every_entry_is_read(folder: str) -> None:
    for name in names_in(folder):
        if (folder, name) in REFUSED:
            with pytest.raises(DataError, match=REFUSED[folder, name]):
                load(folder, name)
            continue
        check_invariants(load(folder, name))


# Where the independent count differs: it knows no clashes, unknown polymers or occupancies.
DIFFERENT = {
    "1cbn": "microheterogeneity: first residue of the record, not that of highest occupancy",
    "1en2": "microheterogeneity",
    "1gbt": "the component was redefined since; its atoms were inferred",
    "1m4x": "refused",
    "1ncb": "calcium ions within 1.7 Angstrom of an oxygen clash",
    "1ql2": "gemmi keeps one operator of the helical assembly",
    "2a79": "chains of UNK, potassium ions on the axis",
    "3ek3": "unknown ligands",
    "5lwx": "copper within 1.7 Angstrom of a peroxide",
    "4gxy": "the bond of cobalt to the adenosyl of a cobalamin is torn",
    "7o1t": "iron within 1.7 Angstrom of a cyanide",
    "7x9k": "two ligands that alternate in one place",
    "8jjs": "a cross-link took an atom and is then removed",
}


def observed(tokens: Tokens) -> Counts:
    t = tokens.tables
    polymer = t.chain_type != LIGAND
    split = np.unique(tokens.residue[tokens.atomized])
    split = split[polymer[t.res_chain[split]]]
    return Counts(
        polymer_chains=int(polymer.sum()),
        ligand_chains=int((~polymer).sum()),
        residues=len(t.res_name),
        atoms=len(t.atom_name),
        bonds=len(t.bonds),
        tokens=len(tokens),
        atomized=Counter(t.res_name[split].tolist()),
    )


@pytest.mark.parametrize("folder", ["general", "kinase"])
def test_counts_against_an_independent_reader(folder: str) -> None:
    known = components(SHARED / "ccd" / "ccd_subset.cif.gz")
    compared = 0
    for name in names_in(folder):
        if name not in DIFFERENT:
            expected = count(SHARED / folder / f"{name}.cif.gz", known)
            assert observed(load(folder, name)) == expected, name
            compared += 1
    assert compared >= 31


def residues_of(tables: Tables, code: str) -> np.ndarray:
    return np.flatnonzero(tables.res_name == code)


@pytest.mark.parametrize(
    ("folder", "name", "auth", "ligand"),
    [
        ("kinase_from_pdb", "4g5j", "797", "0WN"),
        ("kinase_from_pdb", "4g5p", "797", "0WN"),
        ("kinase", "7qhl", "193", "SGM"),
    ],
)
def test_covalent_ligands_atomise_their_cysteine(
    folder: str, name: str, auth: str, ligand: str
) -> None:
    tokens = load(folder, name)
    t = tokens.tables
    split = np.unique(tokens.residue[tokens.atomized])
    cys = [r for r in split if t.res_name[r] == "CYS"]
    assert [str(t.auth_seq[r]) for r in cys] == [auth]
    own = tokens.residue == cys[0]
    assert own.sum() == 6 and (tokens.mol_type[own] == PROTEIN).all()
    ends = t.atom_residue[t.bonds]
    (link,) = t.bonds[((ends == cys[0]).any(axis=1)) & (t.res_name[ends] == ligand).any(axis=1)]
    assert "SG" in t.atom_name[link]


def test_glycosylation_sites_are_atomised_and_disulfides_are_not() -> None:
    tokens = load("general", "1igy")
    t = tokens.tables
    split = np.unique(tokens.residue[tokens.atomized])
    protein = split[t.chain_type[t.res_chain[split]] == PROTEIN]
    assert t.res_name[protein].tolist() == ["ASN", "ASN"]
    assert "18 polymer cross-links removed." in t.notes  # its disulfide bonds


def test_a_chromophore_is_joined_by_its_main_chain() -> None:
    tokens = load("general", "1ema")
    t = tokens.tables
    (cro,) = residues_of(t, "CRO")
    split = np.unique(tokens.residue[tokens.atomized])
    assert split.tolist() == [cro]
    ends = t.atom_residue[t.bonds]
    joined = set(ends[(ends == cro).any(axis=1)].reshape(-1).tolist())
    assert joined == {cro - 1, cro, cro + 1}


def test_microheterogeneity() -> None:
    t = load("general", "3jqh").tables
    assert "3 alternative residues of chain A gave way to the residue of highest occupancy." in (
        t.notes
    )
    first = t.res_chain == 0
    assert first.sum() == 167 and len(set(t.res_id[first].tolist())) == 167


def test_assembly_selects_and_copies_chains() -> None:
    two = load("general", "1a7g").tables
    assert two.chain_id.tolist() == ["A", "A-2"]
    atom_chain = two.res_chain[two.atom_residue]
    distances = [np.linalg.norm(np.diff(two.pos[atom_chain == c], axis=0), axis=1) for c in (0, 1)]
    np.testing.assert_allclose(*distances, atol=1e-3)
    one = load("kinase", "2hyy").tables
    assert one.chain_id.tolist() == ["A", "E"]


def test_nmr_entries_have_one_model_and_no_resolution() -> None:
    t = load("general", "1l2y").tables
    assert (t.method, t.resolution, len(t.res_name)) == ("SOLUTION NMR", None, 20)
    assert (t.occupancy == 1).all()


def test_negative_numbers_and_insertion_codes() -> None:
    t = load("general", "1o1z").tables
    protein = t.res_chain == 0
    assert str(t.auth_seq[protein][0]).startswith("-")
    assert t.res_id[protein].tolist() == list(range(1, 235))
    t = load("general", "3ptb").tables
    assert any(text.isalnum() and text[-1].isalpha() for text in t.auth_seq.tolist())
    assert t.res_id[t.res_chain == 0].tolist() == list(range(1, 224))


def test_modified_residues_belong_to_their_polymer() -> None:
    tokens = load("kinase", "7pih")
    t = tokens.tables
    modified = np.isin(t.res_name[tokens.residue], ["SEP", "TPO"])
    assert modified.sum() == 3 * 10 + 11  # none has its OXT inside the chain
    assert (tokens.mol_type[modified] == PROTEIN).all() and tokens.atomized[modified].all()


READ = {  # tokens of torture files that are read
    "af2_distill_b": 81, "afdb_P01112_v4": 189, "afdb_Q60392_v1": 249,
    "all_zero_occupancy_gpcr": 298, "arg_nh_swapped_101m": 203, "assembly_1fa8_ost": 270,
    "assembly_209d": 90, "assembly_2hiu": 51, "assembly_4rhn": 250, "assembly_6qwn_1": 513,
    "atom_site_missing_columns_1en2": 9, "atom_site_only_7ftv_A": 351, "auth_columns_absent": 76,
    "backbone_only": 76, "bcif_1aki": 129, "bcif_3jqh": 4008, "boltz2_olanzapine": 347,
    "boltz_8c3u": 188, "boltz_zincfinger_dna": 278, "cctbx_ncs_model": 140,
    "chimerax_export_1ake": 271, "colabfold_unrelaxed": 130, "duplicated_atoms": 76,
    "entity_poly_seq_only_1hbb": 373, "extended_pdb_id_4gfo": 320, "far_from_origin": 129,
    "gz_plain_text": 76, "gz_trailing_zeros": 76, "gz_twice": 76, "heme_nmr_small_1kx2": 134,
    "huge_chain_id": 76, "label_seq_id_all_dots": 76, "modelcif_branched": 2, "modelcif_mini": 7,
    "models_differ_1v5a": 28, "nan_coordinates": 76, "ncaa_penicillin": 29, "no_atoms_adh041": 46,
    "no_element": 129, "no_entity_poly": 76, "non_integer_ids_1uyd": 237, "old_mac_cr": 129,
    "one_letter_code_ins_1hbb": 141, "p2rank_3gf2A": 151, "padded_1j8z": 19,
    "phenix_output_cifpp": 684, "plinder_system_2y4i": 345, "protenix_8c3u": 188,
    "pymol_export_1fbl": 400, "refmac_final_3dg1": 6, "reordered_columns": 129,
    "seq_mismatch_insert_1cbs": 161, "stripped_1cbs": 159, "two_blocks": 76,
    "two_category_7cfn_aligned": 1141, "unk_every_fifth": 76, "unknown_ccd_9cox": 1146,
    "utf8_bom": 76,
}  # fmt: skip
NOT_READ = {  # stage and a word of the reason
    "altloc_edge": ("clean", "3 or fewer resolved"),
    "difficult_quoting": ("clean", "3 or fewer resolved"),
    "ensemble_tiny": ("clean", "3 or fewer resolved"),
    "gz_bad_crc": ("read", "CRC"),
    "gz_truncated": ("read", "end-of-stream"),
    "gz_zero_bytes": ("read", "empty"),
    "latin1_bytes": ("parse", "not valid CIF"),
    "loop_value_count_1bna": ("parse", "Wrong number of values"),
    "min_1mom": ("parse", "no coordinates"),
    "misc_syntax": ("parse", "no coordinates"),
    "no_block_header": ("parse", "block header"),
    "no_entry_id_5pti": ("clean", "3 or fewer resolved"),
    "only_water": ("clean", "78 waters dropped"),
    "small_molecule_cod": ("parse", "small-molecule"),
    "special_tokens": ("parse", "no coordinates"),
    "strange_quoting": ("parse", "duplicate tag"),
    "text_truncated_in_header": ("parse", "not valid CIF"),
    "trailing_garbage_text": ("parse", "Wrong number of values"),
    "two_models_minimal_1ssu": ("clean", "3 or fewer resolved"),
    "unicode": ("parse", "Wrong number of values"),
}
SAME_AS = {  # edited copies that must give the tables of the original, but for its name
    "auth_columns_absent": "1ubq", "duplicated_atoms": "1ubq", "gz_trailing_zeros": "1ubq",
    "gz_twice": "1ubq", "gz_plain_text": "1ubq", "utf8_bom": "1ubq", "two_blocks": "1ubq",
    "label_seq_id_all_dots": "1ubq", "bcif_1aki": "1aki", "bcif_3jqh": "3jqh",
    "old_mac_cr": "1aki", "reordered_columns": "1aki", "no_element": "1aki",
}  # fmt: skip


def test_torture_expectations_are_complete() -> None:
    assert sorted([*READ, *NOT_READ]) == sorted(names_in("torture"))


@pytest.mark.parametrize("name", READ)
def test_odd_files_are_read(name: str) -> None:
    tokens = load("torture", name)
    check_invariants(tokens)
    assert len(tokens) == READ[name]


@pytest.mark.parametrize("name", NOT_READ)
def test_broken_files_name_stage_and_reason(name: str) -> None:
    with pytest.raises(DataError) as caught:
        load("torture", name)
    stage, words = NOT_READ[name]
    assert caught.value.stage == stage
    assert words in caught.value.reason


@pytest.mark.parametrize("name", SAME_AS)
def test_edited_copies_give_the_tables_of_the_original(name: str) -> None:
    copy, original = load("torture", name).tables, load("general", SAME_AS[name]).tables
    allowed = {"release_date"} | ({"auth_chain"} if name == "auth_columns_absent" else set())
    assert set(differences(copy, original)) <= allowed


def test_reading_is_fast() -> None:
    import time

    path = SHARED / "kinase" / "6wtn.cif.gz"  # 310 residues
    load_tables(path)
    start = time.process_time()
    tokenize(load_tables(path))
    assert time.process_time() - start < 0.3
