#!/usr/bin/env bash
# Train under torchrun. Usage: cli/torchrun.sh OPTIONS OF tpf train
#   NPROC     ranks on this machine [its GPUs, or 1]
#   NNODES    machines; run this same line on each [1]
#   HEAD      HOST:PORT of the first machine, for several
#   RESTARTS  how often ranks start anew, from the last checkpoint, when one dies; needs --out [0]
#   TPF_DRY   1 prints the command and runs nothing
# tpf train --gpus N needs none of this; it is for clusters that expect torchrun.
here=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)
. "$here/env.sh" run || exit $?

gpus=$(nvidia-smi -L 2>/dev/null | wc -l)
nodes=${NNODES:-1}
if [ "$nodes" -gt 1 ]; then
  meet=(--rdzv-backend c10d --rdzv-id tpf --rdzv-endpoint "${HEAD:?set HEAD to HOST:PORT of the first machine}")
else
  meet=(--standalone)
fi
command=("$TPF_PYTHON" -m torch.distributed.run --nnodes "$nodes"
  --nproc-per-node "${NPROC:-$((gpus > 0 ? gpus : 1))}" --max-restarts "${RESTARTS:-0}"
  "${meet[@]}" -m tpf.cli train "$@")

if [ "${TPF_DRY:-0}" = 1 ]; then
  printf '%q ' "${command[@]}"
  echo
  exit 0
fi
# After a signal torchrun kills its ranks when this is over, in the middle of a save if need be.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-1800}
# Ranks that start anew must not meet at the addresses of those before them.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec "${command[@]}"
