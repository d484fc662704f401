"""Torch batches: axis, padding, constants, transport."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from assemblies import make_tables, make_tokens

from tpf.config import DataConfig
from tpf.data.batch import collate, pack, to_device, to_torch, unpack
from tpf.data.ccd import Dictionary
from tpf.data.features import featurize
from tpf.data.tables import LIGAND, PROTEIN


def features_of(length: int) -> dict[str, Any]:
    tokens = make_tokens(make_tables([(PROTEIN, ["ALA", "PHE"] * length), (LIGAND, ["SO4"])]))
    return featurize(
        tokens,
        np.arange(len(tokens)),
        Dictionary(),
        np.random.default_rng(0),
        config=DataConfig(conformers="ideal"),
    )


@pytest.fixture(scope="module")
def short() -> dict[str, Any]:
    return features_of(2)


@pytest.fixture(scope="module")
def long() -> dict[str, Any]:
    return features_of(4)


def check_equal(batch: dict[str, Any], features: dict[str, Any], row: int) -> None:
    for name, value in features.items():
        if name == "ref_space_uid_to_perm":
            assert batch[name][row].keys() == value.keys()
            for uid, orders in value.items():
                np.testing.assert_array_equal(batch[name][row][uid].numpy(), orders)
        elif isinstance(value, dict):
            check_equal(batch[name], value, row)
        elif isinstance(value, str):
            assert batch[name][row] == value
        else:
            tensor = batch[name][row]
            inside = tensor[tuple(slice(0, size) for size in np.shape(value))]
            np.testing.assert_array_equal(inside.numpy(), value, err_msg=name)
            assert inside.numpy().dtype == value.dtype
            if tensor.is_floating_point():
                assert float(tensor.abs().sum()) == pytest.approx(float(np.abs(value).sum()))
            else:
                assert int(tensor.sum()) == int(value.sum())  # the rest is zero


def test_one_sample(short: dict[str, Any]) -> None:
    batch = to_torch(short)
    assert batch["restype"].shape == (1, 9, 32)
    assert batch["resolution"].shape == (1,)
    assert batch["id"] == ["test"]
    check_equal(batch, short, 0)


def test_padding_is_zero_at_the_end(short: dict[str, Any], long: dict[str, Any]) -> None:
    batch = collate([short, long])
    assert batch["token_mask"].sum(1).tolist() == [9, 13]
    assert batch["token_bonds"].shape == (2, 13, 13)
    check_equal(batch, short, 0)
    check_equal(batch, long, 1)
    assert batch["template_restype"][0, :, 9:].sum() == 0


def test_absent_templates_take_no_memory(long: dict[str, Any]) -> None:
    batch = to_torch(long)
    distogram = batch["template_distogram"]
    assert distogram.shape == (1, 4, 13, 13, 39)
    assert distogram.untyped_storage().nbytes() == 4
    assert to_device(batch, "cpu")["template_distogram"].untyped_storage().nbytes() == 4


def test_to_device_keeps_names_and_values(short: dict[str, Any]) -> None:
    batch = to_torch(short)
    moved = to_device(batch, torch.device("cpu"))
    assert moved.keys() == batch.keys()
    check_equal(moved, short, 0)


def test_packed_features_are_small_and_come_back_equal(long: dict[str, Any]) -> None:
    wire = pickle.dumps(pack(long))
    whole = sum(v.nbytes for v in long.values() if isinstance(v, np.ndarray))
    template = long["template_distogram"].nbytes + long["template_unit_vector"].nbytes
    assert len(wire) < whole - template + 20_000
    back = unpack(pickle.loads(wire))
    assert back.keys() == long.keys()
    check_equal(to_torch(back), long, 0)
    assert back["template_distogram"].strides == (0, 0, 0, 0)
