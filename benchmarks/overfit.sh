#!/usr/bin/env bash
# Overfit the compact preset on one entry on one GPU: ./benchmarks/overfit.sh 1aki.cif.gz OUT [STEPS]
# A high rate for 60 % of the steps, then a steep decay; then five structures in 20 and 200 steps.
set -u
entry=$1 out=$2 steps=${3:-2000}
timeout -s INT 560 tpf train --config compact --data "$entry" --crop 136 --steps "$steps" \
  --lr 1.8e-3 --warmup 100 --ema 0.98 --out "$out" --checkpoint-every 100000 \
  model.checkpoint=false train.rollout_steps=1 train.max_recycles=0 \
  train.diffusion_samples=128 train.diffusion_chunk=128 \
  train.decay_after=$((steps * 6 / 10)) train.decay_every=$((steps * 3 / 100)) train.decay=0.75 \
  data.conformers=ideal data.workers=2 loss.plddt=0 loss.pde=0 loss.pae=0 loss.resolved=0 \
  validate.samples=1 validate.sampling_steps=10 validate.recycles=0
tpf validate "$out" --samples 5 --sampling-steps 20 --out "$out/validation-20"
tpf validate "$out" --samples 5 --sampling-steps 200 --out "$out/validation-200"
