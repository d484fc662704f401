#!/usr/bin/env bash
# The optimiser's state shared over ranks: the same bits as with all of it on every rank, checkpoints
# that the other mode and a single rank go on from, and what a step costs. On GPUs, else on the CPU.
#   benchmarks/sharding.sh [OUT]      PYTHON chooses the interpreter, RANKS [2], CONFIG [compact]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python} ranks=${RANKS:-2}
out=${1:-runs/sharding-$(date +%Y%m%d-%H%M%S)}
mkdir -p "$out"
train() { # RANKS, then options
  local count=$1
  shift
  "$python" -m torch.distributed.run --standalone --nproc-per-node "$count" -m tpf.cli train "$@" \
    --json validate.max_tokens=1 >>"$out/log"
}
recipe=(
  --config "${CONFIG:-compact}" --crop 64 --steps 8 --checkpoint-every 4 --batch-size "$ranks"
  --data data/examples/1ubq.cif.gz data.conformers=ideal data.workers=0 train.warmup=1
  train.rollout_steps=2 train.max_recycles=0 train.diffusion_samples=4
)
train "$ranks" "${recipe[@]}" --out "$out/shared" train.shard=true
train "$ranks" "${recipe[@]}" --out "$out/whole" train.shard=false
cp -r "$out/shared" "$out/across"
rm -r "$out/across/checkpoints/step-000008"
cp -r "$out/across" "$out/alone"
train "$ranks" --resume "$out/across" train.shard=false
train 1 --resume "$out/alone" --steps 6
"$python" - "$out" <<'END'
import json
import statistics
import sys
from pathlib import Path

import torch

from tpf import checkpoint

out = Path(sys.argv[1])


def tensors(run: str) -> dict[str, torch.Tensor]:
    saved = checkpoint.load(out / run / "checkpoints" / "step-000008")
    parts = {"model": saved.model, "ema": saved.ema, "optimizer": saved.optimizer}
    return {f"{part}/{name}": x for part, named in parts.items() for name, x in named.items()}


shared = tensors("shared")
wrong = 0
for other in ("whole", "across"):
    found = tensors(other)
    bad = [name for name, x in shared.items() if not torch.equal(x, found[name])]
    print(f"shared against {other}: {len(bad)} of {len(shared)} tensors differ", *bad[:1])
    wrong += len(bad) + (shared.keys() != found.keys())
for run in ("shared", "whole", "alone"):
    lines = (out / run / "train.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines][-2:]
    names = ("step_ms", "reduce_ms", "optimiser_ms", "ema_ms", "max_mem_gb")
    known = {n: [r[n] for r in records if r.get(n) is not None] for n in names}
    print(run, {n: round(statistics.median(v), 3) for n, v in known.items() if v})
sys.exit(1 if wrong else 0)
END
