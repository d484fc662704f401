#!/usr/bin/env bash
# CUDA graphs on one Hopper GPU: the same bits as eager code, then one block and steps of the compact
# preset with 128 copies, with and without them.
#   benchmarks/graphs.sh [OUT]      PYTHON chooses the interpreter
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
out=${1:-runs/graphs-$(date +%Y%m%d-%H%M%S)}
mkdir -p "$out"
sed 's/^train:/train:\n  diffusion_samples: 128/' configs/compact.yaml > "$out/compact-128.yaml"

"$python" -m pytest -q -m gpu tests/model/test_graphs.py
"$python" -m tpf.cli bench block --impls graphs,cuda --crop 384 --reps 30 --out "$out/block"
"$python" -m tpf.cli bench step --impls graphs,cuda --crop 129 --config "$out/compact-128.yaml" \
  --reps 8 --profile --out "$out/step"
