"""The implementations that are compared: our own, PyTorch's, and third parties'."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tpf import doctor
from tpf.bench import peers
from tpf.bench.cases import Attend
from tpf.bench.limits import TimedOut, time_limit
from tpf.kernels.ops import Impl, triangle_attention

RECOMPILES = 256
"""Shapes and masks that one process may compile; beyond its limit torch.compile runs eagerly."""


class UnavailableError(Exception):
    """Why a backend cannot run here."""


Operator = TypeVar("Operator")


@dataclass(frozen=True)
class Backend(Generic[Operator]):
    """One implementation: how to get it and what it needs."""

    load: Callable[[], Operator] | None
    """None: there is nothing to load, for the reason ``absent``."""
    needs: Literal["anything", "gpu", "hopper"] = "gpu"
    peer: str = ""
    """Its name in ``tpf.doctor.BACKENDS``, which says how to install it, if it is a third party."""
    absent: str = ""


def configure_compiler() -> None:
    """Let torch.compile compile every shape of a study, and a backward run more than once."""
    import torch._dynamo
    import torch._functorch.config

    config: Any = torch._dynamo.config
    config.recompile_limit = RECOMPILES
    config.accumulated_recompile_limit = 4 * RECOMPILES
    functorch: Any = torch._functorch.config
    functorch.donated_buffer = False


def _operator(impl: Impl) -> Callable[[], Attend]:
    def load() -> Attend:
        if impl == "flex":
            configure_compiler()

        def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
            return triangle_attention(q, k, v, bias, mask, impl=impl)

        return attend

    return load


class _PaperAttention(torch.autograd.Function):
    """Our forward with the paper's backward."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None
    ) -> Tensor:
        from tpf.kernels.tri_attn import tri_attn_fwd

        scale = 1 / math.sqrt(q.shape[-1])
        flat_mask = None if mask is None else mask[:, :, 0, 0]
        out, lse, residual = tri_attn_fwd(q, k, v, bias[:, 0], flat_mask, scale, True)
        ctx.scale = scale
        ctx.save_for_backward(q, k, v, bias, flat_mask, out, lse, residual)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        from tpf.kernels.tri_attn_bwd_paper import tri_attn_bwd_paper

        q, k, v, bias, mask, out, lse, residual = ctx.saved_tensors
        dq, dk, dv, dbias = tri_attn_bwd_paper(
            q, k, v, bias[:, 0], mask, ctx.scale, out, lse, residual, dout
        )
        return dq, dk, dv, dbias[:, None], None


def _paper() -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
        run: Any = _PaperAttention.apply
        out: Tensor = run(q, k, v, bias, mask)
        return out

    return attend


def plain_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
    """Compute the formula as it stands, in the dtype of q."""
    scores = torch.matmul(q, k.transpose(-1, -2)) * (1 / math.sqrt(q.shape[-1])) + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return torch.matmul(torch.softmax(scores, -1), v)


def _compiled() -> Attend:
    configure_compiler()
    compiled: Attend = torch.compile(plain_attention, dynamic=False)
    return compiled


def fused_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
    """Call scaled_dot_product_attention with the bias repeated for every slice.

    On a GPU the memory-efficient kernel is demanded, because only it takes a bias with gradient.
    """
    b, o, h, n, d = q.shape
    added = bias.expand(b, o, h, n, n)
    if mask is not None:
        added = added.masked_fill(~mask, -math.inf)
    q, k, v = (x.reshape(b * o, h, n, d) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION) if q.is_cuda else nullcontext():
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=added.reshape(b * o, h, n, n))
    return out.reshape(b, o, h, n, d)


BACKENDS: dict[str, Backend[Attend]] = {
    "cuda": Backend(_operator("cuda"), "hopper"),
    "paper": Backend(_paper, "hopper"),
    "flex": Backend(_operator("flex")),
    "torch": Backend(_operator("torch"), "anything"),
    "eager": Backend(lambda: plain_attention, "anything"),
    "compiled": Backend(_compiled),
    "sdpa": Backend(lambda: fused_attention, "anything"),
    "openfold3": Backend(peers.openfold3, peer="openfold3"),
    "cuequivariance": Backend(peers.cuequivariance, peer="cuequivariance"),
    "protenix": Backend(peers.protenix, peer="protenix"),
    "trifast": Backend(peers.trifast, peer="trifast"),
    "megafold": Backend(peers.megafold, peer="megafold"),
    "deepspeed": Backend(peers.deepspeed, peer="deepspeed"),
    "turbopairformer": Backend(peers.turbopairformer, "hopper", peer="turbopairformer"),
    "scalefold": Backend(None, absent="has no public kernel"),
}
"""By the name that ``--impls`` takes. torch is the FP32 reference, eager the plain BF16 formula,
flex compiled flex_attention, paper our forward with the paper's backward."""


def check_backend(backend: Backend[Operator], device: torch.device) -> Callable[[], Operator]:
    """Return what loads a backend; raise ``UnavailableError`` if it is known not to run here."""
    if backend.load is None:
        raise UnavailableError(backend.absent)
    if backend.peer:
        module, how = doctor.BACKENDS[backend.peer]
        if importlib.util.find_spec(module) is None:
            raise UnavailableError(f"not installed ({how})")
    if backend.needs != "anything" and device.type != "cuda":
        raise UnavailableError("needs an NVIDIA GPU")
    if backend.needs == "hopper" and torch.cuda.get_device_capability(device) != (9, 0):
        raise UnavailableError("needs a Hopper GPU (compute capability 9.0)")
    return backend.load


def open_backend(backend: Backend[Operator], device: torch.device, limit: float = 0.0) -> Operator:
    """Return the function of a backend, whose import has ``limit`` seconds if that is not 0.

    Raises ``UnavailableError`` with the reason if it cannot run.
    """
    load = check_backend(backend, device)
    try:
        with time_limit(limit):
            return load()
    except Exception as error:
        raise UnavailableError(f"cannot be imported: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """Return the type and the first line of an error, shortened; a time-out as it says itself."""
    if isinstance(error, TimedOut):
        return str(error)
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0]}"[:200]


def versions() -> dict[str, str]:
    """Return the versions of the installed third-party backends."""
    found = {}
    for name, (module, _) in doctor.BACKENDS.items():
        try:
            found[name] = importlib.metadata.version(module.replace("_", "-"))
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
