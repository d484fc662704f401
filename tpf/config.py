"""Configuration: frozen dataclasses, one YAML preset, dotted overrides.

``load("tiny", ["train.lr=1e-3"])`` merges the defaults below, one YAML file and overrides, and
returns plain dataclasses. OmegaConf is used in this file only.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tpf.errors import UsageError

PRESETS = ("tiny", "compact", "full")


_RULES: dict[str, Callable[[float], bool]] = {
    "a value above 0": lambda value: 0 < value < math.inf,
    "0 or more": lambda value: 0 <= value < math.inf,
    "a number": math.isfinite,
    "a probability from 0 to 1": lambda value: 0 <= value <= 1,
    "a decay in [0, 1)": lambda value: 0 <= value < 1,
}


def _check(owner: object, group: str, rule: str, names: str) -> None:
    """Raise ``UsageError`` for the first named field that breaks a rule; None breaks none."""
    for name in names.split():
        value = getattr(owner, name)
        if value is not None and not _RULES[rule](value):
            raise UsageError(f"{group}.{name} is {value}; give {rule}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Dimensions of the network (spec model.md section 9); the defaults are those of OpenFold3."""

    c_s: int = 384
    """Channels of the single representation."""
    c_z: int = 128
    """Channels of the pair representation."""
    c_m: int = 64
    """Channels of the MSA representation."""
    c_t: int = 64
    """Channels of the template pair representation."""
    c_atom: int = 128
    c_atom_pair: int = 16
    c_token: int = 384
    """Token channels of the input embedder's atom encoder."""
    c_token_diffusion: int = 768
    """Token channels of the diffusion module."""
    pairformer_blocks: int = 48
    tri_heads: int = 4
    tri_dim: int = 32
    """Head dimension of triangle attention in the trunk."""
    c_hidden_mul: int = 128
    """Hidden channels of the triangle multiplicative update in the trunk."""
    single_heads: int = 16
    msa_blocks: int = 4
    c_opm: int = 32
    """Hidden channels of the outer product mean."""
    msa_heads: int = 8
    msa_head_dim: int = 8
    msa_rows: int = 1024
    """MSA rows drawn for each recycling iteration."""
    templates: bool = True
    """False skips the template module (its parameters keep their names)."""
    template_blocks: int = 2
    template_heads: int = 4
    template_dim: int = 16
    diffusion_blocks: int = 24
    diffusion_heads: int = 16
    atom_blocks: int = 3
    atom_heads: int = 4
    n_query: int = 32
    n_key: int = 128
    confidence_blocks: int = 4
    fourier_dim: int = 256
    dropout_pair: float = 0.25
    dropout_msa: float = 0.15
    sigma_data: float = 16.0
    """Angstrom."""
    checkpoint: bool = True
    """Recompute block activations in the backward pass."""
    impl: str = "auto"
    """Backend of the triangle operators: auto, cuda, flex or torch."""

    def __post_init__(self) -> None:
        positive = "c_s c_z c_m c_t c_atom c_atom_pair c_token c_token_diffusion pairformer_blocks"
        positive += " tri_heads tri_dim c_hidden_mul c_opm msa_heads msa_head_dim msa_rows"
        positive += " template_heads template_dim n_query n_key fourier_dim sigma_data"
        blocks = "msa_blocks template_blocks diffusion_blocks atom_blocks confidence_blocks"
        _check(self, "model", "a value above 0", positive)
        _check(self, "model", "0 or more", blocks)
        _check(self, "model", "a probability from 0 to 1", "dropout_pair dropout_msa")
        for name, heads, width in (
            ("single_heads", self.single_heads, self.c_s),
            ("diffusion_heads", self.diffusion_heads, self.c_token_diffusion),
            ("atom_heads", self.atom_heads, self.c_atom),
        ):
            if heads <= 0 or width % heads:
                raise UsageError(f"model.{name} is {heads}; it must divide {width}")

    @property
    def c_s_input(self) -> int:
        """Channels of the input single representation: token, restype, profile, deletion mean."""
        return self.c_token + 32 + 32 + 1


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where entries come from and how they are cropped (spec model.md sections 1, 3, 4)."""

    path: str | None = None
    """Folder, list file or prepared cache; None takes the built-in examples."""
    crop: int = 384
    """Token budget of a training crop."""
    crop_contiguous: float = 0.2
    crop_spatial: float = 0.4
    crop_interface: float = 0.4
    msa: str | None = None
    """Folder of alignments, or table of ENTRY_CHAIN FILE; None gives one row, the query."""
    max_msa_rows: int = 16384
    sampled_msa_rows: int = 4096
    """Rows of these that a sample holds, drawn anew at every visit: the model looks at
    ``msa_rows`` random ones in each of at most four cycles."""
    max_templates: int = 4
    release_cutoff: str | None = None
    """Latest release date, YYYY-MM-DD; entries without a date are kept."""
    released_after: str | None = None
    """YYYY-MM-DD; entries released on that day or before, or without a date, are left out."""
    only: str | None = None
    """File of entry ids, one a line; the others are left out."""
    without: str | None = None
    """File of entry ids that are left out."""
    kinases: bool = False
    """Only entries with a protein kinase, found by the motifs of its catalytic loop."""
    max_resolution: float = 9.0
    """Angstrom; entries without a resolution (NMR) are kept."""
    max_chains: int = 300
    """Polymer chains."""
    clusters: str | None = None
    """File of lines ENTRY_CHAIN CLUSTER for the sampling weights; None: equal sequences."""
    ccd: str | None = None
    """Extra component dictionary (mmCIF or BinaryCIF), looked up before the installed one."""
    loader_limit: float = 600.0
    """Seconds that a step waits for a loader process before it counts as hung; 0 waits."""
    conformers: Literal["auto", "rdkit", "ideal"] = "auto"
    """Source of reference conformers; auto takes RDKit when installed, else ideal coordinates."""
    workers: int = 0
    """Loader processes; 0 loads in the main process."""

    def __post_init__(self) -> None:
        positive = "crop max_msa_rows sampled_msa_rows max_resolution max_chains"
        crops = "crop_contiguous crop_spatial crop_interface"
        _check(self, "data", "a value above 0", positive)
        _check(self, "data", "0 or more", f"{crops} max_templates loader_limit workers")
        if not self.crop_contiguous + self.crop_spatial + self.crop_interface:
            raise UsageError(
                "data.crop_contiguous, _spatial and _interface are 0; weigh one of them"
            )


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Weights of the loss terms (spec model.md section 5, stage 1)."""

    mse: float = 4.0
    smooth_lddt: float = 4.0
    bond: float = 0.0
    distogram: float = 0.03
    plddt: float = 1e-4
    pde: float = 1e-4
    pae: float = 1e-4
    resolved: float = 1e-4
    confidence_min_resolution: float = 0.1
    confidence_max_resolution: float = 4.0

    def __post_init__(self) -> None:
        _check(self, "loss", "0 or more", " ".join(f.name for f in dataclasses.fields(self)))


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The recipe (spec model.md section 7)."""

    steps: int = 500
    lr: float = 1.8e-3
    warmup: int = 1000
    """Steps of linear warm-up from 0."""
    decay_after: int = 50_000
    decay_every: int = 50_000
    decay: float = 0.95
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip: float = 10.0
    """Largest global gradient norm of one sample."""
    ema: float = 0.999
    batch_size: int = 1
    """Samples per optimiser step over all ranks."""
    seed: int = 0
    diffusion_samples: int = 48
    """Noised copies per sample."""
    diffusion_chunk: int = 4
    """Copies whose diffusion losses are evaluated at a time."""
    noise_mean: float = -1.2
    noise_sd: float = 1.5
    """Of the logarithm of the noise level in units of sigma_data (AF3 SI 3.7.1)."""
    rollout_steps: int = 20
    max_recycles: int = 3
    precision: Literal["bf16-mixed", "fp32"] = "fp32"
    deterministic: bool = True
    """Choose GPU algorithms that repeat bit by bit (a few percent slower); an operator without one
    ends the run."""
    tf32: bool = False
    """Let a GPU multiply FP32 matrices in TF32 (10 bits of fraction)."""
    shard: bool = True
    """Let every rank keep and update an equal part of the optimiser's state and of the moving
    average; the weights are those of false, where every rank keeps all."""
    compile: bool = False
    """Compile the repeated blocks with torch.compile, a minute or two at the start; the blocks then
    run without our fused layers, so it is for GPUs that those kernels do not serve."""
    graphs: bool = False
    """Replay blocks as CUDA graphs, with the same results, where a GPU waits for the host. Their
    activations are then recomputed in the backward pass, whatever model.checkpoint says."""
    cpu_threads: int = 0
    """Threads of torch's CPU operators; 0 leaves torch's choice. Small models run best on one."""
    validate_every: int = 0
    """Steps between validations; 0 validates before the first and after the last step only."""
    step_limit: float = 1800.0
    """Seconds after which a step counts as hung: all ranks write their stacks and end; 0 waits."""
    profile: int = 0
    """Steps, after a few, whose Chrome trace goes to profile/ in the run folder; 0 writes none."""
    checkpoint_every: int = 100
    keep: int = 3
    """Checkpoints kept."""
    wandb: Literal["auto", "disabled", "offline", "online"] = "auto"
    """auto is online when WANDB_API_KEY is set, else disabled."""

    def __post_init__(self) -> None:
        positive = "steps lr clip batch_size diffusion_samples rollout_steps checkpoint_every keep"
        natural = "warmup decay_after validate_every max_recycles seed cpu_threads profile"
        more = "diffusion_chunk noise_sd eps decay decay_every"
        _check(self, "train", "a value above 0", f"{positive} {more}")
        _check(self, "train", "0 or more", f"{natural} step_limit")
        _check(self, "train", "a decay in [0, 1)", "beta1 beta2 ema")
        _check(self, "train", "a number", "noise_mean")


@dataclass(frozen=True, kw_only=True)
class ValidateConfig:
    """Sampling of validation (spec metrics.md part B)."""

    samples: int = 5
    seeds: int = 1
    sampling_steps: int = 200
    recycles: int = 3
    path: str | None = None
    """Structures that training validates on; None takes the training entries themselves."""
    max_targets: int | None = None
    """Targets of a validation during training, taken evenly from the list; None takes all."""
    max_tokens: int | None = None
    """Targets above this number of tokens are skipped and listed."""
    extras: bool = False
    """Also score what OpenFold3 does not: ligand poses, pocket lDDT, DockQ, DFG of kinases."""
    selection_weights: Literal["fine-tuning", "initial"] = "fine-tuning"

    def __post_init__(self) -> None:
        positive = "samples seeds sampling_steps max_targets max_tokens"
        _check(self, "validate", "a value above 0", positive)
        _check(self, "validate", "0 or more", "recycles")


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    name: str = "full"
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    validate: ValidateConfig = field(default_factory=ValidateConfig)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.+-]+", self.name):
            raise UsageError(f"name is {self.name!r}; give letters, digits and . _ + -")


def _preset_path(config: str) -> Path:
    if config in PRESETS:
        return Path(str(importlib.resources.files("tpf.presets") / f"{config}.yaml"))
    path = Path(config)
    if not path.is_file():
        raise UsageError(f"--config {config}: neither a preset ({', '.join(PRESETS)}) nor a file")
    return path


def _dotted(overrides: list[str] | tuple[str, ...]) -> Any:
    """Return overrides as an OmegaConf; raise ``UsageError`` naming the one that is none."""
    from omegaconf import OmegaConf

    for item in overrides:
        if "=" not in item:
            raise UsageError(f"override {item!r} has no '='; write key=value, as train.lr=1e-3")
        try:
            OmegaConf.from_dotlist([item])
        except Exception as error:  # of the YAML reader
            raise UsageError(f"override {item!r}: the value is not YAML; quote it") from error
    return OmegaConf.from_dotlist(list(overrides))


def _merge(base: Any, values: Any, where: str) -> Any:
    """Return ``base`` with ``values`` from ``where``; raise ``UsageError`` naming key and value."""
    from omegaconf import OmegaConf
    from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

    try:
        return OmegaConf.merge(base, values)
    except OmegaConfBaseException as error:
        key, reason = error.full_key or "", str(error).splitlines()[0]
        if isinstance(error, ConfigKeyError) and "Did you mean" not in reason:
            reason += "; the config.yaml of any run lists the keys"
        elif not key:
            reason = f"a group takes keys, as train.lr=1e-3 ({reason})"
        raise UsageError(f"{where}{key and f'{key}: '}{reason}") from error
    except TypeError as error:
        raise UsageError(f"{where}not a table of keys and values; see configs/tiny.yaml") from error


def _build(merged: Any) -> Config:
    """Return the dataclasses of an OmegaConf, which check themselves."""
    from omegaconf import OmegaConf

    result = OmegaConf.to_object(merged)
    assert isinstance(result, Config)
    return result


def load(config: str, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Return the configuration of a preset name or YAML file with dotted ``key=value`` overrides.

    Raises ``UsageError`` naming the key (with the nearest existing one) or the value.
    """
    from omegaconf import OmegaConf

    values = _dotted(overrides)
    path = _preset_path(config)
    try:
        stored = OmegaConf.load(path)
    except Exception as error:  # a YAML syntax error or an unreadable file
        reason = " ".join(str(error).split())
        raise UsageError(f"--config {config}: not readable as YAML ({reason})") from error
    base = _merge(OmegaConf.structured(Config), stored, f"--config {config}: ")
    return _build(_merge(base, values, ""))


def to_dict(config: Config) -> dict[str, Any]:
    """Return the configuration as nested plain dictionaries."""
    return dataclasses.asdict(config)


def from_dict(values: dict[str, Any], overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Rebuild a configuration from ``to_dict`` with overrides; raise ``UsageError`` as ``load``."""
    from omegaconf import OmegaConf

    stored = OmegaConf.create(values)
    base = _merge(OmegaConf.structured(Config), stored, "stored configuration: ")
    return _build(_merge(base, _dotted(overrides), ""))


def to_yaml(config: Config) -> str:
    """Return the configuration as YAML that ``load`` reads back."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))
