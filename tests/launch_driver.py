"""``tpf train --gpus`` on a machine without GPUs: OUT RANKS RESTARTS NODES RENDEZVOUS KEY=VALUE."""

from __future__ import annotations

import sys
from pathlib import Path

from ranks import small

from tpf.cli.rank import run_rank
from tpf.errors import TpfError
from tpf.launch import Plan, launch


def main() -> None:
    out, ranks, restarts, nodes, rendezvous, *overrides = sys.argv[1:]
    config = small("validate.max_tokens=10", *overrides)  # a validation that scores nothing
    chosen = Plan("launch", int(ranks), int(nodes), rendezvous)
    try:
        launch(chosen, run_rank, config, Path(out), False, None, True, restarts=int(restarts))
    except TpfError as error:
        print(f"tpf: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
