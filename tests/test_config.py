"""Presets, overrides, and the sentence that each wrong value gets."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tpf.config import PRESETS, Config, ModelConfig, from_dict, load, to_dict, to_yaml
from tpf.errors import UsageError


@pytest.mark.parametrize("name", PRESETS)
def test_presets_load_and_survive_storage(name: str, tmp_path: Path) -> None:
    config = load(name)
    assert config.name == name
    assert from_dict(to_dict(config)) == config
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert load(str(path)) == config


def test_full_preset_has_the_default_dimensions() -> None:
    assert load("full").model == ModelConfig()


def test_overrides_win_over_the_preset() -> None:
    config = load("tiny", ["train.lr=0.5", "data.crop=48", "model.templates=false"])
    assert (config.train.lr, config.data.crop, config.model.templates) == (0.5, 48, False)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.c_zz=3", "Did you mean: 'c_z'"),
        ("train.lr=-1", "lr is -1.0"),
        ("data.crop=0", "crop is 0"),
        ("train.ema=1.5", "train.ema is 1.5"),
        ("train.seed=-1", "train.seed is -1"),
        ("train.warmup=-1", "train.warmup is -1"),
        ("train.precision=fp16", "fp16"),
        ("train.steps=many", "many"),
        ("crop", "has no '='"),
        ("model.single_heads=3", "model.single_heads is 3"),
    ],
)
def test_wrong_values_are_named(override: str, words: str) -> None:
    with pytest.raises(UsageError, match=words.replace(".", r"\.")):
        load("tiny", [override])


def test_unknown_preset_and_broken_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="neither a preset"):
        load("huge")
    path = tmp_path / "broken.yaml"
    path.write_text("model: [")
    with pytest.raises(UsageError, match="broken.yaml"):
        load(str(path))


def test_every_field_of_the_run_is_reachable_by_a_dotted_key() -> None:
    groups = {f.name for f in dataclasses.fields(Config)}
    assert groups == {"name", "model", "data", "loss", "train", "validate"}
