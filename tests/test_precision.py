"""The number formats of a step are those of the table that a run prints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import small
from runs import Messages
from torch import Tensor, nn

from tpf.config import load
from tpf.errors import UsageError
from tpf.precision import policy
from tpf.train import Options, train
from tpf.trainer import Trainer


def formats(value: object) -> set[torch.dtype]:
    if isinstance(value, Tensor):
        return {value.dtype} if value.is_floating_point() else set()
    items = value.values() if isinstance(value, dict) else value
    return set().union(*map(formats, items)) if isinstance(items, tuple | list) else set()


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_parts_have_the_precision_of_the_table(precision: str, tmp_path: Path) -> None:
    seen: dict[str, set[torch.dtype]] = {}
    trainers: list[Trainer] = []

    def watch(trainer: Trainer) -> None:
        trainers.append(trainer)
        model = trainer.model
        parts = {
            "z, s": model.pairformer_stack,
            "m": model.msa_module_embedder,
            "multiplication": model.pairformer_stack.blocks[0].pair_stack.tri_mul_out,
            "attention": model.pairformer_stack.blocks[0].pair_stack.tri_att_start,
            "atoms": model.input_embedder.atom_attn_enc,
            "diffusion": model.diffusion_module,
            "heads": model.aux_heads,
        }
        for name, module in parts.items():

            def see(module: nn.Module, inputs: object, output: object, name: str = name) -> None:
                seen.setdefault(name, set()).update(formats(output))

            module.register_forward_hook(see)

    config = small("train.steps=1", "train.batch_size=1", f"train.precision={precision}")
    train(config, Options(tmp_path / "run", validate=False, prepare=watch), Messages())
    (trainer,) = trainers
    table = policy(config.train)
    trunk = torch.bfloat16 if precision == "bf16-mixed" else torch.float32
    assert table["trunk: residual streams m, z, s"] == ("BF16", "FP32")[precision == "fp32"]
    for name in ("z, s", "multiplication", "attention"):
        assert seen[name] == {trunk}, name
    for name in ("atoms", "diffusion"):
        assert seen[name] == {torch.float32}, name
    states = [
        *trainer.model.state_dict().values(),
        *trainer.ema.state_dict(trainer.ema.average).values(),
        trainer.optimizer.mean,
        trainer.optimizer.square,
        trainer.gradients.buffer,
    ]
    assert {s.dtype for s in states if s.is_floating_point()} == {torch.float32}
    assert not torch.backends.cuda.matmul.allow_tf32 and not torch.backends.cudnn.allow_tf32


def test_tf32_is_said() -> None:
    assert policy(load("tiny", ["train.tf32=true"]).train)["FP32 products on a GPU"] == "TF32"


@pytest.mark.parametrize("precision", ["fp16", "float16", "16-mixed"])
def test_fp16_is_refused(precision: str) -> None:
    with pytest.raises(UsageError, match=rf"{precision}.*bf16-mixed"):
        load("tiny", [f"train.precision={precision}"])
