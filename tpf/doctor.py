"""What this machine offers to tpf: hardware, software, folders, kernels, third-party backends."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Status = Literal["ok", "missing", "failed"]

BACKENDS: dict[str, tuple[str, str]] = {
    "openfold3": ("openfold3", "pip install openfold3"),
    "cuequivariance": (
        "cuequivariance_torch",
        "pip install cuequivariance-torch cuequivariance-ops-torch-cu12",
    ),
    "protenix": ("protenix", "pip install protenix"),
    "trifast": ("trifast", "pip install trifast"),
    "megafold": ("megafold", "from source"),
    "deepspeed": ("deepspeed", "pip install deepspeed"),
    "turbopairformer": ("turbopairformer", "pip install turbopairformer"),
}
"""Optional third-party backends: module to import, how to get it."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    status: Status
    detail: str


def examine() -> list[Finding]:
    """Return every finding; a probe that raises becomes a ``failed`` line, never a traceback."""
    probes: list[tuple[str, Callable[[], Finding]]] = [
        ("python", _python),
        ("torch", _torch),
        ("gpu", _gpu),
        ("driver", _driver),
        ("nvrtc", _nvrtc),
        ("nccl", _nccl),
        ("cache folder", _cache),
        ("disk", lambda: _space("disk", Path.cwd())),
        ("/dev/shm", lambda: _space("/dev/shm", Path("/dev/shm"))),
        ("conformers", _conformers),
        ("component dictionary", _components),
        ("triangle attention", _attention),
        ("triangle multiplication", _multiplication),
        ("pair block", _pair_block),
    ]
    findings = []
    for name, probe in probes:
        try:
            findings.append(probe())
        except Exception as error:
            findings.append(Finding(name, "failed", f"{type(error).__name__}: {error}"))
    return findings + [_backend(name, *how) for name, how in BACKENDS.items()]


def conclusion() -> str:
    """Say what ``--impl auto`` will use on this machine."""
    import torch

    from tpf.kernels.describe import describe_impl

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return f"--impl auto uses: {describe_impl('auto', device)}"


def _python() -> Finding:
    return Finding("python", "ok", f"{platform.python_version()} on {platform.platform()}")


def _torch() -> Finding:
    import torch

    return Finding(
        "torch", "ok", f"{torch.__version__}, CUDA {torch.version.cuda}, "
        f"{torch.get_num_threads()} CPU threads"
    )  # fmt: skip


def _gpu() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding("gpu", "missing", "no NVIDIA GPU is visible; training runs on the CPU")
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    text = "; ".join(
        f"{g.name} {g.total_memory / 2**30:.0f} GiB sm_{g.major}{g.minor}" for g in gpus
    )
    return Finding("gpu", "ok", text)


def _driver() -> Finding:
    from tpf.runfolder import environment

    driver = environment()["driver"]
    if driver is None:
        return Finding("driver", "missing", "nvidia-smi is not there or does not answer")
    return Finding("driver", "ok", str(driver))


def _nvrtc() -> Finding:
    cuda = importlib.util.find_spec("cuda")
    if cuda is None or importlib.util.find_spec("cuda.bindings") is None:
        return Finding(
            "nvrtc", "missing", "cuda-bindings is not installed (CUDA builds of torch bring it)"
        )
    from cuda.bindings import nvrtc

    error, major, minor = nvrtc.nvrtcVersion()
    if int(error):
        return Finding("nvrtc", "failed", f"nvrtcVersion returned {error}")
    return Finding("nvrtc", "ok", f"{major}.{minor}")


def _nccl() -> Finding:
    import torch

    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return Finding("nccl", "missing", "this torch build has no NCCL; several ranks use Gloo")
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return Finding("nccl", "ok", ".".join(map(str, version)))


def _cache() -> Finding:
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(os.environ.get("TPF_CACHE") or Path(home) / "tpf")
    parent = folder
    while not parent.exists():
        parent = parent.parent
    if not os.access(parent, os.W_OK):
        return Finding("cache folder", "failed", f"{folder} is not writable; set TPF_CACHE")
    return Finding("cache folder", "ok", str(folder))


def _space(name: str, path: Path) -> Finding:
    if not path.is_dir():
        return Finding(name, "missing", f"{path} is not there; loader workers need it")
    usage = shutil.disk_usage(path)
    status: Status = "ok" if usage.free > 2**30 else "failed"
    detail = f"{usage.free / 2**30:.1f} GiB free of {usage.total / 2**30:.1f}"
    return Finding(name, status, detail)


def _conformers() -> Finding:
    if importlib.util.find_spec("rdkit") is None:
        return Finding(
            "conformers", "missing", "RDKit is not installed (pip install 'tpf[chem]'); "
            "ideal coordinates of the dictionary serve"
        )  # fmt: skip
    return Finding("conformers", "ok", f"RDKit {importlib.metadata.version('rdkit')}")


def _components() -> Finding:
    from tpf.data.ccd import Dictionary

    if Dictionary().get("NAG") is None:
        return Finding("component dictionary", "failed", "the built-in subset cannot be read")
    if importlib.util.find_spec("biotite") is None:
        return Finding(
            "component dictionary", "missing", "only the built-in subset: pip install 'tpf[chem]' "
            "brings the whole dictionary, or give data.ccd=FILE"
        )  # fmt: skip
    version = importlib.metadata.version("biotite")
    return Finding("component dictionary", "ok", f"built-in subset and biotite {version}")


def _place() -> tuple[str, torch.dtype]:
    """Return the device of the automatic path and the precision in which it is tested."""
    import torch

    return ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)


def _worst(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    """Return the largest relative error of tensors, NaN if one has it."""
    import torch

    errors = [
        (g.detach().cpu().double() - w.detach()).norm() / w.detach().norm()
        for g, w in zip(got, want, strict=True)
    ]
    return float(torch.stack(errors).max())


def _judged(name: str, error: float, limits: tuple[float, float]) -> Finding:
    """Return the finding for an error and its limits in BF16 and FP32."""
    import torch

    device, dtype = _place()
    status: Status = "ok" if error < limits[dtype == torch.float32] else "failed"
    return Finding(name, status, f"{device}, relative error {error:.1e} to FP64")


def _attention() -> Finding:
    """Run forward and backward of the automatic path for each head width against FP64."""
    import torch

    from tpf.kernels.ops import triangle_attention

    device, dtype = _place()
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(1, 48, 1, 1, 48, generator=generator) < 0.9
    errors = []

    def run(inputs: list[torch.Tensor], impl: Literal["auto", "torch"]) -> list[torch.Tensor]:
        q, k, v, bias = inputs = [x.detach().requires_grad_() for x in inputs]
        out = triangle_attention(q, k, v, bias, mask.to(q.device), impl=impl)
        return [out, *torch.autograd.grad(out.square().sum(), inputs)]

    for width in (16, 32, 64):
        shapes = [(1, 48, 4, 48, width)] * 3 + [(1, 1, 4, 48, 48)]
        exact = [torch.randn(s, generator=generator).to(dtype).double() for s in shapes]
        got = run([x.to(device, dtype) for x in exact], "auto")
        errors.append(_worst(got, run(exact, "torch")))
    return _judged("triangle attention", max(errors), (3e-2, 1e-5))


def _multiplication() -> Finding:
    """Run forward and backward of the automatic path in both directions against FP64."""
    import torch

    from tpf.kernels.ops import Direction, TriMulWeights, triangle_multiplication

    device, dtype = _place()
    generator = torch.Generator().manual_seed(0)
    c, n = 32, 24
    z = torch.randn(1, n, n, c, generator=generator).to(dtype)
    shapes = [(c,), (c,), *[(c, c)] * 4, (c,), (c,), (c, c), (c, c)]
    weights = [torch.randn(s, generator=generator) / c**0.5 for s in shapes]

    def run(direction: Direction, kind: torch.dtype, place: str) -> list[torch.Tensor]:
        whole = torch.float64 if kind == torch.float64 else torch.float32
        packed = TriMulWeights(*(w.to(place, whole) for w in weights))
        leaf = z.to(place, kind).requires_grad_()
        out = triangle_multiplication(leaf, None, packed, direction)
        return [out, *torch.autograd.grad(out.square().sum(), leaf)]

    directions: tuple[Direction, ...] = ("outgoing", "incoming")
    error = max(
        _worst(run(way, dtype, device), run(way, torch.float64, "cpu")) for way in directions
    )
    return _judged("triangle multiplication", error, (2e-2, 1e-3))


def _pair_block() -> Finding:
    """Run a block of the pair representation with all gradients against FP64."""
    import torch

    from tpf.model.pairformer import PairDims, PairStack

    device, dtype = _place()
    dims = PairDims(
        channels=64, c_hidden_mul=64, heads=4, head_dim=16, expansion=4, dropout=0.0, impl="auto"
    )
    generator = torch.Generator().manual_seed(0)
    block, exact = PairStack(dims), PairStack(dataclasses.replace(dims, impl="torch")).double()
    with torch.no_grad():
        for name, x in block.named_parameters():  # some start at zero
            scale = 0.1 if x.dim() == 1 else x.shape[-1] ** -0.5
            offset = float(x.dim() == 1 and name.endswith("weight"))
            x.copy_(offset + scale * torch.randn(x.shape, generator=generator))
    exact.load_state_dict(block.state_dict())
    z = torch.randn(1, 24, 24, 64, generator=generator).to(dtype)
    real = torch.arange(24) < 22
    mask = (real[:, None] & real)[None]

    def run(stack: PairStack, leaf: torch.Tensor) -> list[torch.Tensor]:
        leaf.requires_grad_()
        out = stack(leaf, mask.to(leaf.device))
        return [out, *torch.autograd.grad(out.square().sum(), [leaf, *stack.parameters()])]

    want = run(exact, z.double())
    with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
        got = run(block.to(device), z.to(device))
    return _judged("pair block", _worst(got, want), (8e-2, 1e-3))


def _backend(name: str, module: str, how: str) -> Finding:
    if importlib.util.find_spec(module) is None:
        return Finding(f"backend {name}", "missing", f"not installed ({how})")
    try:
        __import__(module)
    except Exception as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)
        return Finding(f"backend {name}", "missing", f"installed, but cannot be imported: {why}")
    return Finding(f"backend {name}", "ok", "importable")
