"""What is done with weights: described, checked against a model, put into one, converted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tpf.config import PRESETS, ModelConfig, load
from tpf.errors import UsageError
from tpf.model.model import Model
from tpf.weights.files import Weights, read, refuse_existing, write, write_openfold3
from tpf.weights.names import Mapped, map_names, shapes_of


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A file beside the model that it is of, or the preset that it comes closest to."""

    name: str
    """A preset, or ``own`` for other dimensions that the file states."""
    config: ModelConfig
    mapped: Mapped


def fit(weights: Weights) -> Fit:
    """Find the model that a file is of: that of the same shapes, else the closest."""
    presets = {name: load(name).model for name in PRESETS}
    fits = [
        Fit(name=name, config=config, mapped=map_names(weights.tensors, shapes_of(config)))
        for name, config in presets.items()
    ]
    best = min(fits, key=lambda f: f.mapped.differences)
    if weights.config is None:
        return best
    if not best.mapped.differences:
        return Fit(name=best.name, config=weights.config, mapped=best.mapped)
    mapped = map_names(weights.tensors, shapes_of(weights.config))
    return Fit(name="own", config=weights.config, mapped=mapped)


def describe(path: Path) -> dict[str, Any]:
    """Return what a file holds, in the order and words in which it is shown."""
    weights = read(path)
    found = fit(weights)
    mapped = found.mapped
    return {
        "file": str(weights.path),
        "kind": weights.kind,
        "origin": weights.origin,
        "step": weights.step,
        "preset": found.name if found.name in PRESETS else None,
        "fits": mapped.problem() is None,
        "difference": mapped.problem(),
        "parameters": mapped.parameters,
        "tensors": mapped.stored,
        "aliases": len(mapped.aliases),
        "dtypes": mapped.dtypes,
        "layout_version": list(mapped.version) if mapped.version else None,
    }


def import_file(path: Path, out: Path, config: str | None, *, strict: bool) -> str:
    """Write the weights of ``path`` as our own file and return a line that says what was taken.

    ``config`` names the model, by default that of the same shapes. Without ``strict`` what does not
    fit is left out and what is missing gets its initial value. Raises ``UsageError`` naming the
    first tensor that does not fit.
    """
    refuse_existing(out)
    weights = read(path)
    found = fit(weights) if config is None else _against(weights, config)
    if strict:
        _require(weights, found)
    _check_values(weights, found.mapped, strict=strict)
    tensors = found.mapped.tensors
    line = found.mapped.summary()
    if found.mapped.missing or found.mapped.misshapen:
        torch.manual_seed(0)
        tensors = Model(found.config).state_dict() | tensors
    if problem := found.mapped.problem():
        line += f"; not strict: {problem}"
    write(out, tensors, found.config, weights)
    return f"{out}: {found.name}, {line}"


def export_file(path: Path, out: Path) -> str:
    """Write the weights of a run or a file as OpenFold3 reads them; return what was written."""
    refuse_existing(out)
    weights = read(path)
    found = fit(weights)
    _require(weights, found)
    _check_values(weights, found.mapped, strict=True)
    write_openfold3(out, found.mapped.tensors)
    return f"{out}: {found.name}, {found.mapped.summary()}"


def start_from(model: Model, weights: Weights) -> str:
    """Load weights into a model and return a line that says what was taken.

    Raises ``UsageError`` naming the first tensor that does not fit, and the configuration that
    would.
    """
    mapped = map_names(weights.tensors, {n: tuple(x.shape) for n, x in model.state_dict().items()})
    if problem := mapped.problem():
        other = fit(weights)
        advice = "see tpf weights info, or convert the file with tpf weights import --no-strict"
        if other.mapped.problem() is None and other.name in PRESETS:
            advice = f"train with --config {other.name}"
        raise UsageError(f"--init {weights.path} belongs to another model: {problem}; {advice}")
    if weights.config is None:  # our own files hold what was checked, and runs what training left
        _check_values(weights, mapped, strict=True)
    model.load_state_dict(mapped.tensors)
    return f"weights of {weights.origin}: {mapped.summary()}"


def _against(weights: Weights, config: str) -> Fit:
    model = load(config).model
    mapped = map_names(weights.tensors, shapes_of(model))
    return Fit(name=config, config=model, mapped=mapped)


def _require(weights: Weights, found: Fit) -> None:
    if problem := found.mapped.problem():
        raise UsageError(
            f"{weights.path} does not fit {found.name}: {problem}; name the model with "
            "tpf weights import --config FILE, or take what fits with --no-strict"
        )


def _check_values(weights: Weights, mapped: Mapped, *, strict: bool) -> None:
    """Raise ``UsageError`` for values that are not finite and aliases unlike what they name."""
    for name, x in mapped.tensors.items():
        if not torch.isfinite(x).all():
            raise UsageError(f"{weights.path}: {name} holds NaN or infinity; take an earlier file")
    for alias, source in mapped.aliases.items() if strict else ():
        one, two = weights.tensors[alias], weights.tensors[source]
        if one.data_ptr() != two.data_ptr() and not torch.equal(one, two):
            raise UsageError(
                f"{weights.path}: {alias} and {source} should be one tensor and differ; "
                "tpf weights import --no-strict takes the latter"
            )
