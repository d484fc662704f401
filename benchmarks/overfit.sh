#!/usr/bin/env bash
# Overfit the compact preset on one entry on one GPU: ./benchmarks/overfit.sh 1aki.cif.gz OUT [SECONDS]
# First at high noise levels alone, where the model learns the structure in its one hand, then at all
# levels for SECONDS, with a high rate for 60 % of the steps and a steep decay; then five structures.
# Less than ten minutes in all.
set -u
entry=$1 out=$2 seconds=${3:-420}
recipe=(
  --config compact --data "$entry" --crop 136 --lr 1.8e-3 --warmup 50 --ema 0.98
  --checkpoint-every 100000 train.graphs=true train.clip=1 train.rollout_steps=1 train.max_recycles=0
  train.diffusion_samples=48 train.diffusion_chunk=48 data.conformers=ideal data.workers=2
  loss.plddt=0 loss.pde=0 loss.pae=0 loss.resolved=0 loss.smooth_lddt=0 loss.distogram=0.5
  validate.samples=1 validate.sampling_steps=10 validate.recycles=0
)
tpf train "${recipe[@]}" --steps 400 --out "$out-first" train.noise_mean=3 train.noise_sd=1.2 || exit
steps=$(tail -n 40 "$out-first/train.jsonl" | python3 -c "
import json, statistics, sys
times = [row['step_ms'] for row in map(json.loads, sys.stdin) if 'step_ms' in row]
print(int($seconds * 1000 / statistics.mean(times)))")
timeout -s INT $((seconds + 45)) tpf train "${recipe[@]}" --steps "$steps" --init "$out-first" \
  --out "$out" train.noise_mean=0 train.noise_sd=1.8 \
  train.decay_after=$((steps * 6 / 10)) train.decay_every=$((steps * 3 / 100)) train.decay=0.75
tpf validate "$out" --samples 5 --sampling-steps 200 --out "$out/validation-200"
