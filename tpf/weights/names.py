"""Names of tensors: what a file calls them, what the model calls them, and what does not fit."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tpf.config import ModelConfig
from tpf.model.model import ALIASES, VERSION, Model

VERSION_NAME = "version_tensor"
_OWN = "diffusion_module."
"""What the aliases of OpenFold3's sampler stand for."""
_WRAPPERS = ("module.", "model.", "_orig_mod.")
"""Prefixes put before every name by data parallelism, Lightning and torch.compile."""
_FUSED = re.compile(r"(.*\.tri_mul_(?:out|in)\.linear_)ab(_[pg]\.weight)")
"""OpenFold3's fused projections of the triangle multiplication: the first half of the rows is a."""

_CONSTANT = (".fourier_emb.w", ".fourier_emb.b")
"""Buffers that stand among the parameters."""

Shape = tuple[int, ...]


@functools.cache
def shapes_of(config: ModelConfig) -> Mapping[str, Shape]:
    """Return names and shapes of the parameters and buffers of a model, without its memory."""
    with torch.device("meta"):
        model = Model(config)
    return {name: tuple(x.shape) for name, x in model.state_dict().items()}


def with_aliases(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict as OpenFold3 names it: the diffusion module stands in it twice."""
    own = [name for name in tensors if name.startswith(_OWN)]
    return dict(tensors) | {ALIASES + n.removeprefix(_OWN): tensors[n] for n in own}


@dataclass(frozen=True, kw_only=True)
class Mapped:
    """Tensors of a file under the model's names, and how they got there."""

    tensors: dict[str, Tensor]
    """What the model takes; complete only without ``problems``."""
    stored: int
    """Tensors in the file."""
    parameters: int
    """Values of all parameters in the file."""
    dtypes: dict[str, int]
    """Number of tensors of each dtype in the file."""
    aliases: dict[str, str]
    """Second names in the file, and the name in the file of what they repeat."""
    split: int = 0
    """Fused tensors that were split in two."""
    wrappers: str = ""
    """Prefixes that were taken off, as ``model.``."""
    version: Shape | None = None
    """OpenFold3's version of the layout; None if the file does not say."""
    missing: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    misshapen: list[tuple[str, Shape, Shape]] = field(default_factory=list)
    """Name, shape in the file, shape in the model."""

    @property
    def differences(self) -> int:
        """Number of tensors that keep the file from fitting the model."""
        return len(self.missing) + len(self.unknown) + len(self.twice) + len(self.misshapen)

    def problem(self) -> str | None:
        """Say in one clause why the file does not fit the model; None if it does."""
        if self.version not in (None, VERSION):
            return f"{VERSION_NAME} is {_text(self.version)}, this model is {_text(VERSION)}"
        if not self.differences:
            return None
        if self.misshapen:
            name, found, wanted = self.misshapen[0]
            first = f"{name} is {list(found)}, the model has {list(wanted)}"
        elif self.missing:
            first = f"{self.missing[0]} is missing"
        elif self.twice:
            first = f"{self.twice[0]} comes twice"
        else:
            first = f"{self.unknown[0]} is unknown to the model"
        counts = {
            "missing": len(self.missing),
            "unknown": len(self.unknown),
            "of another shape": len(self.misshapen),
            "given twice": len(self.twice),
        }
        return f"{first} ({', '.join(f'{n} {kind}' for kind, n in counts.items() if n)})"

    def summary(self) -> str:
        """Say in one line what was taken from the file."""
        used = f"{self.stored} tensors read: {len(self.tensors)} used"
        notes = [used, f"{self.parameters:,} parameters"]
        if self.aliases:
            notes.append(f"{len(self.aliases)} aliases skipped")
        if self.split:
            notes.append(f"{self.split} fused split")
        if self.wrappers:
            notes.append(f"prefix {self.wrappers} removed")
        if self.version is None:
            notes.append(f"no {VERSION_NAME}, taken for {_text(VERSION)}")
        return ", ".join(notes)


def _text(version: Shape | None) -> str:
    return ".".join(map(str, version or ()))


def map_names(stored: Mapping[str, Tensor], wanted: Mapping[str, Shape]) -> Mapped:
    """Give the tensors of a file the names of a model with the shapes ``wanted``.

    Takes off wrappers, sets aliases aside, splits fused projections, and lists every tensor that
    is missing, unknown, given twice or of another shape. Reads no data but the version.
    """
    tensors: dict[str, Tensor] = {}
    sources: dict[str, str] = {}
    second: dict[str, str] = {}
    twice: list[str] = []
    wrappers: dict[str, None] = {}
    split, version = 0, None
    for source, x in stored.items():
        name, prefix = _unwrap(source)
        if prefix:
            wrappers[prefix] = None
        if name == VERSION_NAME:
            version = tuple(int(v) for v in x.flatten().tolist())
            continue
        if name.startswith(ALIASES):
            second[source] = _OWN + name.removeprefix(ALIASES)
            continue
        fused = _FUSED.fullmatch(name) if x.dim() == 2 else None
        split += fused is not None
        parts = _halves(fused, x) if fused else [(name, x)]
        for part, value in parts:
            if part in tensors:
                twice.append(source)
            tensors[part] = value.detach()
            sources[part] = source
    aliases = {alias: sources[name] for alias, name in second.items() if name in sources}
    fits = {n: x for n, x in tensors.items() if n in wanted and tuple(x.shape) == wanted[n]}
    if VERSION_NAME in wanted:
        fits[VERSION_NAME] = torch.tensor(VERSION, dtype=torch.float32)
    return Mapped(
        tensors=fits,
        stored=len(stored),
        parameters=sum(x.numel() for n, x in tensors.items() if not n.endswith(_CONSTANT)),
        dtypes=dict(Counter(str(x.dtype).removeprefix("torch.") for x in tensors.values())),
        aliases=aliases,
        split=split,
        wrappers=" ".join(wrappers),
        version=version,
        missing=[n for n in wanted if n not in tensors and n != VERSION_NAME],
        unknown=[sources[n] for n in tensors if n not in wanted]
        + [alias for alias in second if alias not in aliases],
        twice=twice,
        misshapen=[
            (n, tuple(x.shape), wanted[n])
            for n, x in tensors.items()
            if n in wanted and tuple(x.shape) != wanted[n]
        ],
    )


def _unwrap(name: str) -> tuple[str, str]:
    """Return a name without its wrappers, and the wrappers."""
    bare = name
    while bare.startswith(_WRAPPERS):
        bare = bare[bare.index(".") + 1 :]
    return bare, name[: len(name) - len(bare)]


def _halves(fused: re.Match[str], x: Tensor) -> list[tuple[str, Tensor]]:
    head, tail = fused.groups()
    return [(f"{head}{side}{tail}", half) for side, half in zip("ab", x.chunk(2), strict=False)]
