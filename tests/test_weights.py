"""Weight files: every way OpenFold3 keeps its weights is read, nothing in a file is ever run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy.testing
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner

from tpf import checkpoint
from tpf.cli.app import app
from tpf.cli.display import Silent
from tpf.config import load, to_yaml
from tpf.errors import TpfError, UsageError
from tpf.model.model import Model
from tpf.train import Options, train
from tpf.weights import convert, files
from tpf.weights.names import map_names, shapes_of

ENTRY = Path(__file__).resolve().parents[1] / "data" / "examples" / "1ubq.cif.gz"
ALIAS = "sample_diffusion."
NORM = "layer_norm_s.weight"

State = dict[str, Tensor]


@pytest.fixture(scope="module")
def weights() -> State:
    """Random values for every tensor of the tiny model."""
    g = torch.Generator().manual_seed(1)
    shapes = shapes_of(load("tiny").model)
    state = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}
    return state | {"version_tensor": torch.tensor([2.0, 0.0, 0.0])}


def as_openfold3(weights: State) -> State:
    """Return the state dict as OpenFold3 has it: the diffusion module twice, stored apart."""
    twice = {ALIAS + k: v.clone() for k, v in weights.items() if k.startswith("diffusion_module.")}
    return weights | twice


def prefixed(state: State, prefix: str) -> State:
    return {prefix + name: x for name, x in state.items()}


def fused(weights: State) -> State:
    """Join the projections a and b of every triangle multiplication."""
    state = dict(weights)
    for name in weights:
        if ".linear_a_" in name and ".tri_mul_" in name:
            one, two = state.pop(name), state.pop(name.replace("linear_a_", "linear_b_"))
            state[name.replace("linear_a_", "linear_ab_")] = torch.cat([one, two])
    return state


FORMS: dict[str, Callable[[State], Any]] = {
    "flat": as_openfold3,
    "flat without aliases": lambda w: w,
    "averaged": lambda w: {"ema": {"params": as_openfold3(w), "decay": 0.999}},
    "averaged alone": lambda w: {"params": as_openfold3(w), "decay": 0.999},
    "Lightning": lambda w: {"state_dict": prefixed(as_openfold3(w), "model."), "global_step": 7},
    "averaged before the last": lambda w: {
        "state_dict": prefixed({name: x + 1 for name, x in w.items()}, "model."),
        "ema": {"params": w, "decay": 0.999},
        "global_step": 7,
    },
    "data parallel": lambda w: prefixed(as_openfold3(w), "module."),
    "both wrappers": lambda w: {"state_dict": prefixed(w, "module.model.")},
    "compiled": lambda w: {"state_dict": prefixed(w, "model._orig_mod.")},
    "DeepSpeed": lambda w: {"module": prefixed(as_openfold3(w), "model."), "optimizer": {}},
    "fused": lambda w: as_openfold3(fused(w)),
    "without a version": lambda w: {k: v for k, v in w.items() if k != "version_tensor"},
    "double precision": lambda w: {k: v.double() for k, v in w.items()},
}


def saved(path: Path, content: object) -> Path:
    torch.save(content, path)
    return path


def imported(path: Path, out: Path) -> State:
    convert.import_file(path, out, None, strict=True)
    return files.read(out).tensors


def assert_equal(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    assert [k for k in expected if not torch.equal(found[k], expected[k])] == []
    assert {x.dtype for x in found.values()} == {torch.float32}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_tensors_bitwise(
    form: str, weights: State, tmp_path: Path
) -> None:
    path = saved(tmp_path / "of3.pt", FORMS[form](weights))
    assert_equal(imported(path, tmp_path / "ours.safetensors"), weights)
    step = 7 if form in ("Lightning", "averaged before the last") else None
    assert files.read(tmp_path / "ours.safetensors").step == step


def test_report_accounts_for_every_tensor(weights: State) -> None:
    shapes = shapes_of(load("tiny").model)
    n_aliases = len(as_openfold3(weights)) - len(weights)
    mapped = map_names(prefixed(as_openfold3(fused(weights)), "model."), shapes)
    assert mapped.problem() is None and mapped.tensors.keys() == shapes.keys()
    assert mapped.stored + mapped.split == len(shapes) + n_aliases
    assert (len(mapped.aliases), mapped.split) == (n_aliases, 2 * 2 * (2 + 1 + 1 + 1))
    assert mapped.summary() == (
        f"{mapped.stored} tensors read: {len(shapes)} used, 522,996 parameters, {n_aliases} "
        f"aliases skipped, {mapped.split} fused split, prefix model. removed"
    )


def test_round_trip_through_openfold3_names_is_bitwise(weights: State, tmp_path: Path) -> None:
    first, back = tmp_path / "first.safetensors", tmp_path / "back.pt"
    imported(saved(tmp_path / "of3.pt", as_openfold3(weights)), first)
    convert.export_file(first, back)
    assert_equal(torch.load(back, weights_only=True), as_openfold3(weights))
    assert back.stat().st_size < 1.2 * first.stat().st_size  # aliases cost no space
    assert_equal(imported(back, tmp_path / "second.safetensors"), weights)
    assert (tmp_path / "second.safetensors").stat().st_mode & 0o777 == 0o644


def edited(weights: State, **changes: Tensor | None) -> State:
    state = as_openfold3(weights) | {k: v for k, v in changes.items() if v is not None}
    return {name: x for name, x in state.items() if changes.get(name, x) is not None}


DIFFUSION = "diffusion_module.linear_s.weight"
BAD = {
    "shape": ({NORM: torch.zeros(33)}, r"layer_norm_s.weight is \[33\], the model has \[32\] \(1 "),
    "missing": ({NORM: None}, r"layer_norm_s.weight is missing \(1 missing\); .*--no-strict"),
    "unknown": ({"extra.weight": torch.zeros(2)}, "extra.weight is unknown to the model"),
    "alias alone": ({DIFFUSION: None}, r"diffusion_module.linear_s.weight is missing"),
    "twice": ({f"model.{NORM}": torch.zeros(32)}, "model.layer_norm_s.weight comes twice"),
    "alias differs": ({ALIAS + DIFFUSION: torch.zeros(64, 32)}, "should be one tensor and differ"),
    "not finite": ({NORM: torch.full((32,), torch.nan)}, "layer_norm_s.weight holds NaN"),
    "version": ({"version_tensor": torch.tensor([1.0, 0, 0])}, "is 1.0.0, this model is 2.0.0"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_does_not_fit_is_named(kind: str, weights: State, tmp_path: Path) -> None:
    changes, message = BAD[kind]
    path, out = saved(tmp_path / "of3.pt", edited(weights, **changes)), tmp_path / "out.safetensors"
    with pytest.raises(UsageError, match=message) as error:
        convert.import_file(path, out, None, strict=True)
    assert "\n" not in str(error.value) and str(path) in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ["of3.pt"]
    if kind == "not finite":
        return
    report = convert.import_file(path, out, None, strict=False)
    found = files.read(out).tensors
    same = [k for k in weights if torch.equal(found[k], weights[k])]
    assert len(same) >= len(weights) - 1 and found.keys() == weights.keys()
    assert ("not strict" in report) == (kind != "alias differs")


class Call:
    """Unpickles into a call of a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.reduced = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.reduced


def invented(module: str, name: str) -> Callable[..., Any]:
    """Return a function of a module that no reader can import."""

    def run(command: str) -> None:
        raise AssertionError(command)

    run.__module__, run.__qualname__, run.__name__ = module, name, name
    return run


@pytest.mark.parametrize(
    ("function", "refused"),
    [
        (os.system, "holds posix.system, which is code and not a weight; nothing was loaded"),
        (subprocess.call, r"holds \w+.call, which is code"),
        (invented("openfold3.projects.settings", "run"), None),
        (invented("ml_collections.config_dict", "ConfigDict"), None),
        (numpy.testing.runstring, None),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_nothing_in_a_file_is_run(
    function: Callable[..., Any],
    refused: str | None,
    weights: State,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    marker = tmp_path / "ran"
    arguments: tuple[Any, ...] = (f"touch {marker}",)
    if function is subprocess.call:
        arguments = (["touch", str(marker)],)
    elif function is numpy.testing.runstring:
        arguments = (f"open({str(marker)!r}, 'w')", {})
    with monkeypatch.context() as patch:
        for name in (function.__module__.split(".")[0], function.__module__):
            if name not in sys.modules:
                patch.setitem(sys.modules, name, types.ModuleType(name))
                patch.setattr(sys.modules[name], function.__name__, function, raising=False)
        content = {"state_dict": weights, "hyper_parameters": Call(function, *arguments)}
        path = saved(tmp_path / "bad.pt", content)
    if refused is None:
        assert_equal(imported(path, tmp_path / "out.safetensors"), weights)
    else:
        with pytest.raises(UsageError, match=refused):
            files.read(path)
    assert not marker.exists()
    if function.__module__ in sys.modules:  # what a reader that trusts the file would do
        torch.load(saved(path, Call(function, *arguments)), weights_only=False)
        assert marker.exists()


def damaged(kind: str, path: Path, weights: State) -> Path:
    if kind == "truncated":
        data = saved(path, weights).read_bytes()
        path.write_bytes(data[: len(data) // 2])
    elif kind == "legacy":
        torch.save(weights, path, _use_new_zipfile_serialization=False)
    elif kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a.txt", "no weights")
    elif kind == "other content":
        saved(path, {"epoch": 3, "lr": 0.1})
    else:
        path.write_bytes({"empty": b"", "text": b"<html>not found</html>"}[kind])
    return path


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("truncated", "nor a whole PyTorch archive; copy it again"),
        ("legacy", "save it anew with torch.save"),
        ("zip", "damaged"),
        ("empty", "empty; copy it again"),
        ("text", "neither a safetensors file nor"),
        ("other content", "no weights under ema.params, .*; it holds epoch, lr"),
    ],
)
def test_unreadable_files_are_named(
    kind: str, message: str, weights: State, tmp_path: Path
) -> None:
    path = damaged(kind, tmp_path / "file.pt", weights)
    with pytest.raises(UsageError, match=message) as error:
        files.read(path)
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)


def test_writing_is_whole_or_not_at_all(
    weights: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = saved(tmp_path / "of3.pt", weights), tmp_path / "out" / "w.safetensors"
    for convert_one in (
        lambda: convert.import_file(path, out, None, strict=True),
        lambda: convert.export_file(path, out),
    ):
        out.parent.mkdir()
        out.write_text("precious")
        with pytest.raises(UsageError, match="exists and nothing is overwritten"):
            convert_one()
        assert out.read_text() == "precious"
        out.unlink()
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", _no_space)
            with pytest.raises(TpfError, match="No space left on device; free space"):
                convert_one()
        assert not list(out.parent.iterdir())
        out.parent.rmdir()
        out.parent.write_text("a file")
        with pytest.raises(TpfError, match="choose another"):
            convert_one()
        out.parent.unlink()


def _no_space(_: int) -> None:
    raise OSError("No space left on device")


def test_name_taken_while_writing_is_left_alone(
    weights: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "w.safetensors"
    monkeypatch.setattr(os, "fsync", lambda _: out.write_text("another's"))
    with pytest.raises(UsageError, match="nothing is overwritten"):
        convert.import_file(saved(tmp_path / "of3.pt", weights), out, None, strict=True)
    assert out.read_text() == "another's" and len(list(tmp_path.iterdir())) == 2


def test_a_broken_link_is_not_overwritten(weights: State, tmp_path: Path) -> None:
    out = tmp_path / "w.safetensors"
    out.symlink_to(tmp_path / "absent")
    with pytest.raises(UsageError, match="nothing is overwritten"):
        convert.import_file(saved(tmp_path / "of3.pt", weights), out, None, strict=True)


def test_info(weights: State, tmp_path: Path) -> None:
    path = saved(tmp_path / "of3.pt", {"state_dict": as_openfold3(weights), "global_step": 7})
    facts = convert.describe(path)
    n_aliases = len(as_openfold3(weights)) - len(weights)
    assert facts == {
        "file": str(path),
        "kind": "PyTorch file",
        "origin": "of3.pt (state_dict)",
        "step": 7,
        "preset": "tiny",
        "fits": True,
        "difference": None,
        "parameters": 522_996,
        "tensors": len(weights) + n_aliases,
        "aliases": n_aliases,
        "dtypes": {"float32": len(weights) - 1},
        "layout_version": [2, 0, 0],
    }
    path = tmp_path / "half.safetensors"
    save_file({name: x.bfloat16() for name, x in weights.items() if name != NORM}, path)
    facts = convert.describe(path)
    assert (facts["preset"], facts["fits"], facts["dtypes"]) == ("tiny", False, {"bfloat16": 494})
    assert facts["difference"] == f"{NORM} is missing (1 missing)"
    assert facts["parameters"] == 522_996 - 32


def test_a_model_of_other_dimensions(tmp_path: Path) -> None:
    config = load("tiny", ["model.pairformer_blocks=1", "model.dropout_pair=0.1"])
    path, out = saved(tmp_path / "x.pt", Model(config.model).state_dict()), tmp_path / "x"
    with pytest.raises(UsageError, match=r"does not fit tiny: .* is missing \(57 missing\)"):
        convert.import_file(path, out, None, strict=True)
    (tmp_path / "x.yaml").write_text(to_yaml(config))
    convert.import_file(path, out, str(tmp_path / "x.yaml"), strict=True)
    assert convert.fit(files.read(out)).config == config.model
    assert (convert.describe(out)["preset"], convert.describe(out)["fits"]) == (None, True)


def test_checkpoints_of_runs_are_exported(weights: State, tmp_path: Path) -> None:
    last = {name: x + 1 for name, x in weights.items()}
    tensors = {"model": last, "ema": weights, "optimizer": {"w": torch.zeros(1)}}
    checkpoint.save(tmp_path / "run", 12, load("tiny"), tensors, {"seed": 0})
    convert.export_file(tmp_path / "run", tmp_path / "of3.pt")
    assert_equal(torch.load(tmp_path / "of3.pt", weights_only=True), as_openfold3(weights))
    assert convert.describe(tmp_path / "run")["step"] == 12


def test_metadata_of_another_version_is_named(weights: State, tmp_path: Path) -> None:
    path = tmp_path / "new.safetensors"
    for metadata, message in (
        ({"format": "tpf 2"}, "format tpf 2, this version reads tpf 1"),
        ({"format": "tpf 1", "origin": "x", "model": '{"c_q": 1}'}, "c_q.*or update"),
    ):
        save_file(weights, path, metadata=metadata)
        with pytest.raises(UsageError, match=message):
            files.read(path)


def test_training_starts_from_openfold3_weights(weights: State, tmp_path: Path) -> None:
    small = {name: 0.1 * x for name, x in as_openfold3(weights).items()}
    small |= {"version_tensor": weights["version_tensor"]}
    path = saved(tmp_path / "of3.pt", {"ema": {"params": small, "decay": 0.9}, "global_step": 7})
    config = load("tiny", [f"data.path={ENTRY}", "data.crop=16", "train.steps=1"])
    messages = []

    class Listening(Silent):
        def message(self, text: str) -> None:
            messages.append(text)

    train(config, Options(tmp_path / "run", init=path, validate=False), Listening())
    start = checkpoint.load(tmp_path / "run" / "checkpoints" / "step-000000")
    for tensors in (start.model, start.ema):
        assert_equal(tensors, {name: small[name] for name in weights})
    assert start.step == 0 and start.config.train.ema == config.train.ema
    assert any(m.startswith("weights of of3.pt (ema.params): ") for m in messages)
    with pytest.raises(UsageError, match=r"the model has .*; train with --config tiny"):
        convert.start_from(Model(load("tiny", ["model.c_z=64"]).model), files.read(path))


def test_commands(weights: State, tmp_path: Path) -> None:
    def tpf(*words: str | Path) -> str:
        done = CliRunner().invoke(app, ["weights", *map(str, words)], catch_exceptions=False)
        return done.stdout

    path, ours, back = saved(tmp_path / "x", weights), tmp_path / "ours", tmp_path / "back.pt"
    assert "522,996 parameters" in tpf("import", path, "--out", ours)
    assert json.loads(tpf("export", ours, "--out", back, "--json"))["out"] == str(back)
    assert json.loads(tpf("info", ours, "--json"))["preset"] == "tiny"
    assert "parameters      522,996\n" in tpf("info", ours)
    with pytest.raises(UsageError, match="--format onnx is unknown; give openfold3"):
        tpf("export", ours, "--format", "onnx", "--out", tmp_path / "x")
