"""CUDA graphs of blocks: the same bits as eager code. Without a GPU a replay runs the function."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
import torch
from features import random_features, unzero
from torch import Tensor, nn

from tests.model.rerun import Rerun
from tpf.config import ModelConfig, load
from tpf.model import graphs
from tpf.model.graphs import Graphs
from tpf.model.model import Model
from tpf.model.msa import MSAModule
from tpf.model.pairformer import PairformerStack
from tpf.model.primitives import remat

T = TypeVar("T")
CPU = torch.device("cpu")
CONFIG = dataclasses.replace(
    load("tiny").model, checkpoint=True, impl="torch", msa_blocks=3, pairformer_blocks=3
)


Result = dict[str, Tensor]


def make_stack(cfg: ModelConfig = CONFIG, blocks: int = 3) -> PairformerStack:
    stack = PairformerStack(cfg, blocks)
    unzero(stack)
    return stack


def stack_step(stack: PairformerStack, n: int, seed: int, *, autocast: bool = True) -> Result:
    """Run one recycling cycle without and one with gradient, and the backward."""
    device = next(stack.parameters()).device
    torch.manual_seed(seed)
    cfg_s = stack.blocks[0].single_transition.layer_norm.shape[0]
    cfg_z = stack.blocks[0].pair_stack.pair_transition.layer_norm.shape[0]
    dtype = torch.bfloat16 if autocast else torch.float32
    s = torch.randn(1, n, cfg_s, device=device).to(dtype).requires_grad_()
    z = torch.randn(1, n, n, cfg_z, device=device).to(dtype).requires_grad_()
    mask = torch.rand(1, n, device=device) < 0.8
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
        with torch.no_grad():
            s_first, z_first = stack(s, z, mask)
        torch.clear_autocast_cache()  # its casts of weights carry no gradient
        s_out, z_out = stack(s + s_first, z + z_first, mask)
    grads = [torch.randn_like(s_out), torch.randn_like(z_out)]
    torch.autograd.backward([s_out, z_out], grads)
    found = {
        "s": s_out,
        "z": z_out,
        "ds": s.grad,
        "dz": z.grad,
        "random": torch.rand(1, device=device),
    }
    for name, parameter in stack.named_parameters():
        found[name] = parameter.grad
        parameter.grad = None
    return {name: value.detach().clone() for name, value in found.items()}


def assert_same(got: Result, want: Result) -> None:
    assert got.keys() == want.keys()
    bad = [name for name in want if not torch.equal(got[name], want[name])]
    assert not bad, f"not the same bits: {bad}"


def small_steps(model: nn.Module, factor: float = 0.99) -> None:
    """Change all weights, as an optimiser would."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)


def used(cache: Graphs | None, function: Callable[..., T], *args: Any, **options: Any) -> T:
    with graphs.using(cache):
        return function(*args, **options)


# ------------------------------------------------------------------------- the same bits


@pytest.mark.parametrize("autocast", [True, False])
def test_a_stack_has_the_bits_of_eager_code(autocast: bool) -> None:
    """Over steps, blocks that share graphs, changing sizes and weights, with dropout."""
    stack, capture = make_stack(dataclasses.replace(CONFIG, checkpoint=autocast)), Rerun()
    cache = Graphs(CPU, capture)
    for step, n in enumerate([7, 9, 7, 9]):
        want = stack_step(stack, n, step, autocast=autocast)
        assert_same(used(cache, stack_step, stack, n, step, autocast=autocast), want)
        small_steps(stack)
    assert len(cache) == 2 and capture.captures == 8  # three forwards and a backward of each size
    assert capture.replays > 30


def test_dropout_is_drawn_anew_and_repeats() -> None:
    stack, cache = make_stack(), Graphs(CPU, Rerun())
    for _ in range(2):
        first = used(cache, stack_step, stack, 6, 0)
    other, again = (used(cache, stack_step, stack, 6, seed) for seed in (1, 0))
    assert_same(again, first)
    assert not torch.equal(other["z"], first["z"])


def msa_step(module: MSAModule, seed: int) -> Result:
    torch.manual_seed(seed)
    m = torch.randn(1, 4, 6, CONFIG.c_m, requires_grad=True)
    z = torch.randn(1, 6, 6, CONFIG.c_z, requires_grad=True)
    mask, msa_mask = torch.rand(1, 6) < 0.8, torch.rand(1, 4, 6) < 0.8
    module(m, z, msa_mask, mask).square().sum().backward()
    found = {"dm": m.grad, "dz": z.grad}
    for name, parameter in module.named_parameters():
        found[name] = parameter.grad
        parameter.grad = None
    return {name: value for name, value in found.items() if value is not None}


def test_results_that_are_arguments_pass_through() -> None:
    """The last MSA block returns m as it came, and nothing takes a gradient from there."""
    module = MSAModule(CONFIG)
    unzero(module)
    capture = Rerun()
    cache = Graphs(CPU, capture)
    for seed in range(4):
        assert_same(used(cache, msa_step, module, seed), msa_step(module, seed))
    assert len(cache) == 2 and capture.replays


def model_step(model: Model, seed: int, n: int = 12) -> Result:
    """Do what a training step does with the network."""
    device = model.version_tensor.device
    f = {name: x.to(device) for name, x in random_features(n_batch=1, n_tokens=n).items()}
    torch.manual_seed(seed)
    trunk = model.trunk(f, 2, "bf16-mixed")
    context = model.prepare(f, trunk)
    x = model.rollout(context, 1, 4)
    t = torch.tensor([[0.5, 8.0, 200.0]], device=device)
    denoised = model.denoise(context, x.repeat(1, 3, 1, 1) + 1, t)
    logits = model.confidence(f, trunk, x)
    loss = denoised.square().mean() + sum(value.mean() for value in logits.values())
    loss.backward()
    found = {"x": x, "denoised": denoised, **logits, "random": torch.rand(1, device=device)}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[f"d {name}"] = parameter.grad
        parameter.grad = None
    return {name: value.detach() for name, value in found.items()}


def test_the_network_has_the_bits_of_eager_code() -> None:
    model, capture = Model(CONFIG), Rerun()
    unzero(model)
    cache = Graphs(CPU, capture)
    for seed in range(3):
        assert_same(used(cache, model_step, model, seed), model_step(model, seed))
        small_steps(model)
    names = {entry.plan.template.function for entry in cache._entries.values()}
    assert model.diffusion_module in names  # the whole denoiser, in rollouts
    assert not cache._failed


# ----------------------------------------------------------------- what is held and copied


def test_a_bound_function_copies_its_first_arguments_once() -> None:
    torch.manual_seed(0)
    linear, other = nn.Linear(3, 3), nn.Linear(3, 3)
    cache = Graphs(CPU, Rerun())
    calls = []

    def run(layer: nn.Linear) -> None:
        with graphs.using(cache), torch.no_grad():
            bound = graphs.bind(nn.Linear.forward.__get__(layer))
        for _ in range(4):
            x = torch.randn(2, 3)
            calls.append(bool(torch.equal(bound(x), layer(x))))

    with torch.no_grad():
        run(linear)
        run(other)
        run(linear)
        (entry,) = cache._entries.values()
        first = entry._operands[0]
        before = first._version
        run(linear)
    assert all(calls) and first._version == before + 1


def test_graphs_outlive_weights_that_are_replaced() -> None:
    stack, cache = make_stack(), Graphs(CPU, Rerun())
    state = copy.deepcopy(stack.state_dict())
    for _ in range(2):
        first = used(cache, stack_step, stack, 6, 0)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.data = torch.zeros_like(parameter)  # other memory
    assert not torch.equal(used(cache, stack_step, stack, 6, 0)["z"], first["z"])
    stack.load_state_dict(state)
    assert_same(used(cache, stack_step, stack, 6, 0), first)
    other = make_stack()
    other.load_state_dict(state)
    assert_same(used(cache, stack_step, other, 6, 0), first)
    assert len(cache) == 1


def test_the_least_used_shape_goes_first() -> None:
    stack, capture = make_stack(blocks=4), Rerun()
    cache = Graphs(CPU, capture, capacity=2)
    for n in (5, 6, 5, 7):
        used(cache, stack_step, stack, n, 0)
    shapes = [entry._operands[-1].shape[1] for entry in cache._entries.values()]
    assert shapes == [5, 7] and len(cache) == 2
    assert_same(used(cache, stack_step, stack, 6, 1), stack_step(stack, 6, 1))


def test_an_evicted_shape_still_has_its_backward() -> None:
    stack = make_stack(blocks=1)
    cache = Graphs(CPU, Rerun(), capacity=1)
    z = torch.randn(1, 5, 5, CONFIG.c_z, requires_grad=True)
    s, mask = torch.randn(1, 5, CONFIG.c_s), torch.ones(1, 5, dtype=torch.bool)
    stack.eval()
    with graphs.using(cache):
        for _ in range(3):
            out = stack(s, z, mask)[1]
        for _ in range(3):
            stack(torch.randn(1, 4, CONFIG.c_s), torch.randn(1, 4, 4, CONFIG.c_z), mask[:, :4])
    (got,) = torch.autograd.grad(out.sum(), z)  # s has no gradient: computed eagerly
    (want,) = torch.autograd.grad(stack(s, z, mask)[1].sum(), z)
    assert torch.equal(got, want)


def test_a_second_backward_over_a_retained_graph() -> None:
    stack, cache = make_stack(blocks=1).eval(), Graphs(CPU, Rerun())
    s, z = torch.randn(1, 5, CONFIG.c_s), torch.randn(1, 5, 5, CONFIG.c_z, requires_grad=True)
    mask = torch.ones(1, 5, dtype=torch.bool)
    with graphs.using(cache):
        for _ in range(3):
            out = sum(x.sum() for x in stack(s, z, mask))
    assert isinstance(out, Tensor)
    first, second = (torch.autograd.grad(out, z, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


# -------------------------------------------------------------------- what runs without


def untouched(cache: Graphs, stack: PairformerStack) -> bool:
    """Return whether calls leave the cache empty and have the bits of eager code."""
    want = stack_step(stack, 6, 0)
    for _ in range(3):
        assert_same(used(cache, stack_step, stack, 6, 0), want)
    return len(cache) == 0


def test_no_graphs_outside_using_and_by_default() -> None:
    stack, cache = make_stack(), Graphs(CPU, Rerun())
    for _ in range(3):
        stack_step(stack, 6, 0)
    with graphs.using(cache), graphs.using(None):
        stack_step(stack, 6, 0)
    assert len(cache) == 0


def test_hooks_anomalies_and_foreign_modules_run_eagerly() -> None:
    stack, cache = make_stack(), Graphs(CPU, Rerun())
    seen: list[str] = []
    layer = stack.blocks[1].pair_stack.tri_mul_in
    handle = layer.register_forward_hook(lambda *_: seen.append("hook"))
    for _ in range(3):
        used(cache, stack_step, stack, 6, 0)
    handle.remove()
    assert len(seen) == 9 and len(cache) == 1  # the other blocks have none

    class Foreign(type(layer)):  # type: ignore[misc]
        pass

    for block in stack.blocks:
        block.pair_stack.tri_mul_in.__class__ = Foreign
    assert untouched(Graphs(CPU, Rerun()), stack)
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        assert untouched(Graphs(CPU, Rerun()), make_stack())
    stack = make_stack()
    for block in stack.blocks:
        block._compiled_call_impl = block.forward  # what nn.Module.compile sets
    assert graphs._target(stack.blocks[0], (), Graphs(CPU, Rerun())) is None


def test_another_device_runs_eagerly() -> None:
    assert untouched(Graphs(torch.device("meta"), Rerun()), make_stack())


def test_what_a_module_is_set_to_is_part_of_its_shape() -> None:
    stack, cache = make_stack(), Graphs(CPU, Rerun())
    for _ in range(2):
        used(cache, stack_step, stack, 6, 0)
    stack.eval()
    assert_same(used(cache, stack_step, stack, 6, 0), stack_step(stack, 6, 0))
    stack.train()
    for block in stack.blocks:
        block.pair_stack.dropout = 0.5
    assert_same(used(cache, stack_step, stack, 6, 0), stack_step(stack, 6, 0))
    assert len(cache) == 3


def test_a_failed_capture_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        cache = Graphs(CPU, Rerun(fail="operation not permitted\nwhen capturing"))
        assert untouched(cache, make_stack())
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "no CUDA graph of PairformerBlock.forward: operation not permitted when capturing"
    )


def test_functions_of_dictionaries_and_broadcast_tensors_run_eagerly() -> None:
    class Sum(nn.Module):
        def forward(self, x: Any) -> Tensor:
            return x["x"] if isinstance(x, dict) else x.sum()

    Sum.__module__ = "tpf.model.test"
    module, cache = Sum(), Graphs(CPU, Rerun())
    x = torch.ones(3)
    with graphs.using(cache):
        for _ in range(4):
            assert remat(module, {"x": x}, enabled=False) is x
            assert remat(module, x.expand(2, 3), enabled=False) == 6
            assert remat(lambda: 5, enabled=False) == 5
        assert len(cache) == 0
        for _ in range(4):
            remat(module, x, enabled=False)
    assert len(cache) == 1


# ------------------------------------------------------------------------------ on a GPU

FULL = ModelConfig()
"""The trunk at full width; its blocks are fused layers."""


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [True, False])
def test_stack_on_gpu(autocast: bool, deterministic: None) -> None:
    cfg = FULL if autocast else CONFIG
    stack = make_stack(cfg).cuda()
    cache = Graphs(torch.device("cuda"))
    for step, n in enumerate([65, 96, 65, 96]):
        want = stack_step(stack, n, step, autocast=autocast)
        assert_same(used(cache, stack_step, stack, n, step, autocast=autocast), want)
        small_steps(stack)
    assert len(cache) == 2 and not cache._failed
    held, free = cache.held_bytes()
    assert held > free > 0
    cache.clear()
    for step in range(2):  # captures in a new pool
        want = stack_step(stack, 65, step, autocast=autocast)
        assert_same(used(cache, stack_step, stack, 65, step, autocast=autocast), want)
    assert len(cache) == 1 and not cache._failed


@pytest.mark.gpu
def test_network_on_gpu(deterministic: None) -> None:
    cfg = dataclasses.replace(load("compact").model, msa_blocks=2, pairformer_blocks=3)
    model = Model(cfg)
    unzero(model)
    model.cuda()
    cache = Graphs(torch.device("cuda"))
    for seed, n in enumerate([40, 33, 40]):
        assert_same(used(cache, model_step, model, seed, n), model_step(model, seed, n))
        small_steps(model)
    assert not cache._failed
    names = {entry.plan.template.function for entry in cache._entries.values()}
    assert model.diffusion_module in names


@pytest.mark.gpu
def test_a_function_that_waits_for_the_gpu_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.sum().item()

    Waits.__module__ = "tpf.model.test"
    cache, x = Graphs(torch.device("cuda")), torch.ones(4, device="cuda")
    linear = nn.Linear(4, 4, device="cuda")
    with graphs.using(cache), torch.no_grad(), caplog.at_level(logging.WARNING):
        for _ in range(4):
            assert remat(Waits(), x, enabled=False).sum() == 16
        (record,) = caplog.records
        assert record.getMessage().startswith("no CUDA graph of Waits.forward: ")
        for _ in range(4):  # a failure does not spoil the next capture
            assert torch.equal(remat(linear, x, enabled=False), linear(x))
    assert len(cache) == 1
