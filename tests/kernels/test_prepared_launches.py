"""Prepared launches: what a warm call does, what it writes, and what the plans keep."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.emulate import emulated
from tpf.kernels import jit, launch, library, pair_layers, tma, tri_attn
from tpf.kernels.launch import Launch
from tpf.kernels.ops import TriMulWeights
from tpf.kernels.tma import MapLayout, TensorMap
from tpf.model.pairformer import PairDims, TriangleAttention
from tpf.model.primitives import Transition

N, C = 16, 64


class Silent:
    """Stands for ``jit.Kernel`` and does nothing but remember its launches."""

    loads: list[str] = []
    launched: list[tuple[str, int]] = []
    shared_bytes = 0

    def __init__(self, name: str, *_: Any) -> None:
        self.name = name
        self.loads.append(name)

    def launch(self, sizes: jit.Sizes, arguments: int, stream: int) -> None:
        self.launched.append((self.name, stream))


class Operators(TorchDispatchMode):
    """Counts the operators of PyTorch that run."""

    count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture
def silent() -> Iterator[type[Silent]]:
    """Let the host code run without kernels."""
    Silent.loads.clear()
    Silent.launched.clear()
    with emulated(Silent):
        yield Silent


def pair() -> Tensor:
    return torch.zeros(1, N, N, C, dtype=torch.bfloat16, requires_grad=True)


def multiplication() -> tuple[Callable[..., Tensor], list[Tensor]]:
    shapes = [(C,) if "norm" in name else (C, C) for name in TriMulWeights._fields]
    mask = torch.ones(1, N, N, dtype=torch.bool)

    def call(z: Tensor, *weights: Tensor) -> Tensor:
        return library.multiplication(z, mask, TriMulWeights(*weights), "outgoing", "cuda")

    return call, [pair(), *(torch.zeros(shape, requires_grad=True) for shape in shapes)]


def attention() -> tuple[Callable[..., Tensor], list[Tensor]]:
    leaves = [torch.zeros(1, N, N, 2, 32, dtype=torch.bfloat16).transpose(2, 3) for _ in range(3)]
    leaves.append(torch.zeros(1, 2, N, N, dtype=torch.bfloat16))
    mask = torch.ones(1, N, N, dtype=torch.bool)
    return (
        lambda *x: library.attention(*x, mask, 0.2, "cuda"),
        [x.requires_grad_() for x in leaves],
    )


def layer_norm() -> tuple[Callable[..., Tensor], list[Tensor]]:
    return pair_layers.layer_norm, [pair(), *torch.zeros(2, C, requires_grad=True).unbind()]


def residual() -> tuple[Callable[..., Tensor], list[Tensor]]:
    scale = torch.ones(1, 1, N, C, dtype=torch.bfloat16)
    return lambda z, update: pair_layers.add_update(z, update, scale), [pair(), pair()]


def attention_layer() -> tuple[Callable[..., Tensor], list[Tensor]]:
    dims = PairDims(
        channels=C, c_hidden_mul=C, heads=2, head_dim=32, expansion=4, dropout=0.25, impl="cuda"
    )
    weights = TriangleAttention(dims, "ending").weights()
    mask, scale = torch.ones(1, N, N, dtype=torch.bool), torch.ones(1, N, 1, C).bfloat16()

    def call(z: Tensor, *weights: Tensor) -> Tensor:
        packed = pair_layers.AttentionWeights(*weights)
        return pair_layers.add_attention(z, mask, scale, packed, ending=True)

    return call, [pair(), *weights]


def transition() -> tuple[Callable[..., Tensor], list[Tensor]]:
    mask = torch.ones(1, N, N, dtype=torch.bool)

    def call(x: Tensor, *weights: Tensor) -> Tensor:
        return pair_layers.add_transition(x, mask, pair_layers.TransitionWeights(*weights))

    return call, [pair(), *Transition(C, 4).weights()]


@pytest.mark.parametrize(
    ("case", "forward", "both"),
    [(multiplication, 7, 27), (attention, 4, 11), (layer_norm, 1, 5), (residual, 1, 2),
     (attention_layer, 25, 62), (transition, 8, 30)],
)  # fmt: skip
def test_a_warm_call_runs_few_operators(
    case: Callable[[], tuple[Callable[..., Tensor], list[Tensor]]],
    forward: int,
    both: int,
    silent: type[Silent],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It loads nothing and encodes no map; each operator of PyTorch costs a microsecond or two."""
    function, leaves = case()
    dout = torch.zeros_like(function(*leaves))

    def train() -> None:
        torch.autograd.grad(function(*leaves), leaves, dout)

    train()
    with torch.no_grad():
        function(*leaves)
    silent.loads.clear()
    monkeypatch.setattr(tma, "_encode", None)
    counts = []
    with torch.no_grad(), Operators() as run:
        function(*leaves)
    counts.append(run.count)
    with Operators() as run:
        train()
    counts.append(run.count)
    assert not silent.loads
    assert counts[0] <= forward and counts[1] <= both


@pytest.mark.usefixtures("silent")
def test_plans_keep_no_tensor_of_a_caller() -> None:
    for case in (multiplication, attention, layer_norm, residual, attention_layer, transition):
        function, leaves = case()
        out = function(*leaves)
        grads = torch.autograd.grad(out, leaves, torch.zeros_like(out))
        alive = [weakref.ref(x) for x in (out, *grads, *leaves)]
        del function, leaves, out, grads
        gc.collect()
        assert not any(x() is not None for x in alive), case.__name__


def test_launches_take_the_stream_of_the_moment(
    silent: type[Silent], monkeypatch: pytest.MonkeyPatch
) -> None:
    function, leaves = multiplication()
    for stream in (0, 5, 7):
        monkeypatch.setattr(tri_attn, "raw_stream", lambda device, stream=stream: stream)
        silent.launched.clear()
        function(*leaves)
        assert {found for _, found in silent.launched} == {stream}


class _Inner(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("kind", ctypes.c_int32)]


Params = tma.params_type(
    "Params",
    [
        ("map", TensorMap), ("first", ctypes.c_void_p), ("many", ctypes.c_void_p * 2),
        ("size", ctypes.c_uint32), ("last", _Inner), ("tail", ctypes.c_float),
    ],
)  # fmt: skip


class Reader:
    """Stands for ``jit.Kernel`` and copies the parameters of a launch, as the driver does."""

    shared_bytes = 1234

    def __init__(self) -> None:
        self.seen: list[tuple[jit.Sizes, Any, int]] = []

    def launch(self, sizes: jit.Sizes, arguments: int, stream: int) -> None:
        at = ctypes.c_void_p.from_address(arguments).value
        assert at is not None and at % 64 == 0
        self.seen.append((sizes, Params.from_buffer_copy(ctypes.string_at(at, SIZE)), stream))


SIZE = ctypes.sizeof(Params)


def prepare(kernel: Reader) -> Launch:
    params = Params(size=9, last=_Inner(None, 3), tail=0.5)
    layout = MapLayout((4, 16), (16, 1), (4, 16), 32)
    return Launch(
        kernel, 6, 96, params,  # type: ignore[arg-type]
        maps={"map": layout}, pointers=("first", "many", "last"),
    )  # fmt: skip


@pytest.mark.usefixtures("silent")
def test_a_launch_changes_addresses_alone() -> None:
    kernel = Reader()
    prepared = prepare(kernel)
    for base in (1 << 20, 1 << 40):
        prepared(base + 1, (base,), (base + 16, base + 32, base + 48, base + 64))
        sizes, params, stream = kernel.seen.pop()
        assert (sizes, stream) == ((6, 1, 1, 96, 1, 1, 1234), base + 1)
        assert params.map.opaque[0] == base and params.map.opaque[1] == 2
        assert (params.first, *params.many, params.last.at) == tuple(
            base + 16 * i for i in range(1, 5)
        )
        assert (params.size, params.last.kind, params.tail) == (9, 3, 0.5)


@pytest.mark.usefixtures("silent")
def test_threads_do_not_mix_their_addresses() -> None:
    kernel = Reader()
    prepared = prepare(kernel)

    def work(thread: int) -> None:
        for i in range(300):
            base = (thread << 32) + 1024 * i
            prepared(thread, (base,), (base, base, base, base))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(kernel.seen) == 4 * 300
    for _, params, stream in kernel.seen:
        found = {params.map.opaque[0], params.first, *params.many, params.last.at}
        assert len(found) == 1 and found.pop() >> 32 == stream


def test_plans_are_bounded() -> None:
    built: list[int] = []

    @launch.plan
    def build(size: int) -> int:
        built.append(size)
        return size

    for size in range(launch.PLANS + 1):
        build(size)
    build(launch.PLANS)
    assert len(built) == launch.PLANS + 1
    build(0)  # was dropped
    assert built[-1] == 0
    launch._caches.pop()


@pytest.mark.gpu
def test_a_moved_map_is_the_map_of_its_place() -> None:
    x, y = torch.zeros(2, 64, 64, device="cuda", dtype=torch.bfloat16)
    layout = MapLayout(tuple(x.shape), x.stride(), (64, 64), 128)
    room = ctypes.create_string_buffer(tma.MAP_BYTES + 64)
    at = (ctypes.addressof(room) + 63) & ~63
    ctypes.memmove(at, layout.encode(x.data_ptr()), tma.MAP_BYTES)
    tma.move(at, y.data_ptr())
    assert ctypes.string_at(at, tma.MAP_BYTES) == layout.encode(y.data_ptr())
