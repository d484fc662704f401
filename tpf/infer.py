"""Structures of one entry from a model, for validation and prediction alike."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tpf import checkpoint, dist
from tpf.config import PRESETS, Config, from_dict, load, to_dict
from tpf.data.batch import Batch
from tpf.data.tables import Tables
from tpf.data.write import write_mmcif
from tpf.errors import DataError
from tpf.kernels.describe import check_impl
from tpf.metrics.confidence import PLDDT_RANGE, expected
from tpf.model.model import Model
from tpf.weights.convert import fit, start_from
from tpf.weights.files import Weights, read

_TORCH_STREAM = 3
"""Keeps the network's noise apart from other uses of the evaluation seed."""


@dataclass(frozen=True)
class Loaded:
    """Weights in a model that is ready to sample."""

    model: Model
    config: Config
    path: Path
    """Checkpoint folder or weight file."""
    origin: str
    """What results say they were made with."""
    digest: str
    """SHA-256 of the weights."""


def load_model(path: Path, overrides: list[str], device: torch.device) -> Loaded:
    """Load the EMA weights of a run or checkpoint, or a weight file of tpf or OpenFold3.

    ``overrides`` are dotted values on top of the run's configuration; a file has that of the preset
    with its dimensions. Raises ``UsageError`` for a wrong path or value, ``HardwareError`` for a
    backend that this machine cannot run.
    """
    weights: Weights | None = None
    if path.is_file():
        weights = read(path)
        found = fit(weights)
        base = load(found.name if found.name in PRESETS else "full")
        config = from_dict(to_dict(dataclasses.replace(base, model=found.config)), overrides)
        origin = str(path)
    else:
        path = checkpoint.resolve(path)
        saved = checkpoint.load(path)
        config = from_dict(to_dict(saved.config), overrides)
        origin = f"{path}, step {saved.step}"
    check_impl(config.model.impl, device)
    if config.train.cpu_threads:
        torch.set_num_threads(config.train.cpu_threads)
    if config.train.deterministic and device.type == "cuda":
        dist.make_deterministic()
    model = Model(config.model)
    if weights is not None:
        start_from(model, weights)
    else:
        checkpoint.load_weights(model, saved.ema, str(path))
    return Loaded(model.to(device).eval(), config, path, origin, digest(model))


def digest(model: torch.nn.Module) -> str:
    """Return the SHA-256 of names and values of a model's parameters and buffers."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


@dataclass(frozen=True)
class Drawn:
    """Samples of one entry under one seed, and the heads' logits for them."""

    x: Tensor
    """[1, S, A, 3] Angstrom."""
    heads: dict[str, Tensor]
    """plddt [1, S, A, 50], pae and pde [1, S, N, N, 64], resolved."""
    distogram: Tensor
    """[1, N, N, 64], shared by the samples."""

    def plddt(self) -> NDArray[np.float32]:
        """Return the expected pLDDT [S, A], 0 to 100."""
        return array(100 * expected(self.heads["plddt"][0], PLDDT_RANGE))


@torch.no_grad()
def draw(model: Model, batch: Batch, config: Config, seed: int) -> Drawn:
    """Sample ``config.validate.samples`` structures of a batch of one as one batched rollout.

    The noise follows from ``seed`` and the entry's id alone. Raises ``DataError`` if a coordinate
    is not finite.
    """
    name, wanted = str(batch["id"][0]), config.validate
    stream = np.random.SeedSequence([seed, _TORCH_STREAM, *name.encode()])
    torch.manual_seed(int(stream.generate_state(1, np.uint64)[0] >> 1))
    with torch.compiler.set_stance("force_eager"):  # every entry has its own sizes
        trunk = model.trunk(batch, wanted.recycles + 1, config.train.precision)
        x = model.rollout(model.prepare(batch, trunk), wanted.samples, wanted.sampling_steps)
        if not x.isfinite().all():
            raise DataError(name, "sampling", "the sampled coordinates are not finite")
        return Drawn(x, model.confidence(batch, trunk, x), model.distogram(trunk))


def array(tensor: Tensor) -> NDArray[np.float32]:
    """Return a tensor as an FP32 array in main memory."""
    return np.asarray(tensor.float().cpu().numpy(), np.float32)


def write_prediction(
    path: Path, tables: Tables, x: NDArray[Any], plddt: NDArray[Any], **written: Any
) -> None:
    """Write positions [A, 3] with pLDDT [A] in the B column; nothing claims an experiment."""
    plain = dataclasses.replace(tables, method="", resolution=None, release_date=None)
    write_mmcif(path, plain, x, plddt, **written)
