"""The state of a training run, and one optimiser step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tpf import checkpoint, dist
from tpf.budget import Budget
from tpf.config import Config
from tpf.data.batch import to_device
from tpf.errors import NonFinite, TpfError, told
from tpf.flat import FlatParameters
from tpf.flops import sample_flops
from tpf.journal import Sample
from tpf.memory import Sizes
from tpf.model import graphs
from tpf.model.graphs import Graphs
from tpf.model.model import Model
from tpf.optim import Adam, Ema, SampleGradients, learning_rate
from tpf.phases import Phases
from tpf.replay import locate, write_replay
from tpf.runfolder import RunFolder
from tpf.step import draws, sample_loss


@dataclass(frozen=True)
class Step:
    """What an optimiser step did with this rank's samples."""

    samples: list[Sample]
    lr: float
    stop: bool
    """Whether any rank was asked to stop."""


@dataclass(frozen=True)
class _Forwarded:
    """A sample whose gradient has been added; its numbers are still on the device."""

    features: dict[str, Any]
    names: list[str]
    values: Tensor
    """Gradient norm, then the loss terms of ``names``, of which the first is the loss."""
    events: list[str]
    flops: float

    def record(self) -> Sample:
        norm, *terms = self.values.tolist()
        tokens = int(self.features["token_mask"].sum())
        position, name = int(self.features["position"][0]), str(self.features["id"][0])
        named = dict(zip(self.names, terms, strict=True))
        return Sample(position, name, tokens, norm, named, self.events, self.flops)


@dataclass
class Trainer:
    """The state of a run: everything that a checkpoint restores, and what it is made with."""

    config: Config
    world: dist.World
    model: Model
    flat: FlatParameters
    optimizer: Adam
    ema: Ema
    gradients: SampleGradients
    phases: Phases
    graphs: Graphs | None = None
    """Serve the forward and backward of samples."""
    step: int = 0
    skipped: list[dict[str, str]] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    """What probes add to the record of the step in progress."""
    steps_left_out: int = 0
    """Steps that were not finite and did not stop the run, in this process."""

    @classmethod
    def build(cls, config: Config, world: dist.World) -> Trainer:
        """Make the model (weights drawn from the seed), optimiser and EMA."""
        torch.manual_seed(config.train.seed)
        model = Model(config.model).to(world.device)
        if config.train.compile:
            model.compile_blocks()
        flat = FlatParameters(model, world, shard=config.train.shard)
        optimizer, ema = Adam(flat, config.train), Ema(model, flat, config.train.ema)
        # Every rank has a flag for its failure, and all share one for the wish to stop.
        gradients = SampleGradients(flat, config.train.clip, flags=world.size + 1)
        phases = Phases(world.device)
        made = cls(config, world, model, flat, optimizer, ema, gradients, phases)
        if config.train.graphs and world.device.type == "cuda":
            made.graphs = Graphs(world.device)
        return made

    def save(self, run: RunFolder) -> None:
        """Begin to write the checkpoint of the present step; the oldest ones are deleted.

        Called on all ranks, between steps; the main one writes what the others have sent.
        """
        parts = {
            "average": self.ema.average, "mean": self.optimizer.mean,
            "square": self.optimizer.square,
        }  # fmt: skip
        copied = {}
        for name, part in parts.items():
            whole = self.flat.whole(part, self.gradients.sums)
            if self.world.is_main:
                copied[name] = run.saver.copy(name, whole)
        self.gradients.reset()  # whose memory the parts came together in
        if not self.world.is_main:
            return
        named = self.flat.named(run.saver.copy("weights", self.flat.vector))
        ema = self.ema.state_dict(copied["average"])
        others = {n: x for n, x in self.model.state_dict().items() if n not in named}
        tensors = {
            "model": named | {n: run.saver.copy(f"model {n}", x) for n, x in others.items()},
            "ema": ema | {n: run.saver.copy(f"ema {n}", ema[n]) for n in others},
            "optimizer": self.optimizer.state_dict(copied["mean"], copied["square"]),
        }
        extra = {
            "seed": self.config.train.seed, "skipped": self.skipped, "ranks": self.world.size
        }  # fmt: skip
        run.saver.save(self.step, self.config, tensors, extra)

    def restore(self, saved: checkpoint.Checkpoint) -> None:
        """Take over model, EMA, optimiser and step of a checkpoint."""
        checkpoint.load_weights(self.model, saved.model, str(saved.path))
        self.ema.load_state_dict(saved.ema)
        self.optimizer.load_state_dict(saved.optimizer)
        self.step = saved.step
        self.skipped = list(saved.extra.get("skipped", []))

    def train_step(
        self,
        samples: list[dict[str, Any]],
        run: RunFolder,
        *,
        stop: bool = False,
        failure: Exception | None = None,
    ) -> Step:
        """Do one optimiser step over this rank's samples.

        Each sample's gradient is clipped before the average (spec model.md section 7). With
        the gradients the ranks add up whether one failed (``failure``: before the step) and
        whether one was asked to ``stop``; the host waits for the device once, after that. When a
        rank failed all raise the same error with weights unchanged: ``NonFinite`` names the
        sample, module and tensor, after writing a replay file.
        """
        self.model.train()
        rate = learning_rate(self.step + 1, self.config.train)
        forwarded: list[_Forwarded] = []
        if failure is None:
            try:
                for features in samples:
                    forwarded.append(self._add(features))
            except Exception as error:
                failure = error
        self.phases.enter("reduce")
        self._raise_flags(forwarded, failure, stop)
        self.gradients.reduce()
        counts, flags = self.gradients.counted()
        if any(flags[:-1]):
            self._stop_together(run, forwarded, failure)
        records = [sample.record() for sample in forwarded]  # here the device has nothing to do
        self.phases.enter("optimiser")
        self.gradients.average(counts)
        self.optimizer.step(self.gradients.own, counts, rate)
        self.gradients.reset()
        self.phases.enter("ema")
        self.ema.update()
        self.phases.enter("reduce")
        self.flat.join_(self.flat.vector)
        self.phases.enter(None)
        self.step += 1
        return Step(records, rate, flags[-1] > 0)

    def _add(self, features: dict[str, Any]) -> _Forwarded:
        """Add the clipped gradient of one sample; nothing here waits for the device."""
        draw = draws(self.config.train, self.step, features["position"][0])
        batch = to_device(features, self.world.device)
        try:
            self.phases.enter("forward")
            with graphs.using(self.graphs):
                loss = sample_loss(self.model, batch, self.config, draw)
            self.phases.enter("backward")
            loss.total.backward()  # type: ignore[no-untyped-call]
        except torch.OutOfMemoryError as error:
            budget = Budget.of_model(self.config, self.model, self.world.device, self.world.size)
            raise TpfError(budget.out_of_memory(self.step + 1, batch)) from error
        self.phases.enter("clipping")
        norm = self.gradients.add()
        terms = {"loss": loss.total.detach(), **loss.terms}
        values = torch.stack([norm, *(term.float() for term in terms.values())])
        flops = sample_flops(self.config, Sizes.of(batch), draw.cycles)
        return _Forwarded(features, list(terms), values, loss.events, flops)

    def _raise_flags(
        self, forwarded: list[_Forwarded], failure: Exception | None, stop: bool
    ) -> None:
        flags = self.gradients.flags
        if failure is not None:
            flags[self.world.rank] = 1.0
        elif forwarded:
            norm_and_loss = torch.stack([sample.values[:2] for sample in forwarded])
            flags[self.world.rank] = (~norm_and_loss.isfinite().all()).float()
        if stop:
            flags[-1] = 1.0

    def _stop_together(
        self, run: RunFolder, forwarded: list[_Forwarded], failure: Exception | None
    ) -> None:
        """Save the state before the step, explain this rank's failure, and raise on all ranks."""
        self.gradients.reset()
        self.phases.enter(None)
        if not self.steps_left_out:
            self.save(run)
        for sample in forwarded if failure is None else []:
            norm, loss = sample.values[:2].tolist()
            if not math.isfinite(norm + loss):
                what = f"gradient norm is {norm}" if math.isfinite(loss) else f"loss is {loss}"
                failure = NonFinite(self._explain(run, sample.features, what))
                break
        if self.world.size == 1 and failure is not None:
            raise failure
        self.world.agree(failure)

    def _explain(self, run: RunFolder, features: dict[str, Any], what: str) -> str:
        what = f"step {self.step + 1}, sample {', '.join(features['id'])}: {what}"
        if self.steps_left_out:  # the first one was explained in full
            return what
        path = run.path / f"replay-step-{self.step + 1:06d}-rank-{self.world.rank}.pt"
        draw = draws(self.config.train, self.step, features["position"][0])
        try:
            write_replay(path, self.config, self.model, features, draw)
            where = locate(self.model, features, self.config, draw, self.world.device)
        except Exception as error:  # no space, no memory: the others wait for the reason
            return f"{what}; what was first not finite was not found: {told(error)}"
        finally:
            self.gradients.reset()
        again = f"Run the step again with: tpf train --replay {path}"
        return f"{what}; first not finite: {where}. {again}"

    def leave_out(self, samples: list[dict[str, Any]], reason: str) -> dict[str, Any]:
        """Go past a step that was not finite with weights unchanged, and return its record."""
        self.step += 1
        self.steps_left_out += 1
        ids = [name for features in samples for name in features["id"]]
        return {"loss": None, "samples": ids, "nonfinite": reason}
