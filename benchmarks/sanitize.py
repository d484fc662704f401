"""Small calls of the operators for NVIDIA's checkers of device code.

    compute-sanitizer --tool memcheck python benchmarks/sanitize.py [--every-lane]

Tools: memcheck, synccheck, initcheck, racecheck. racecheck follows an order between threads only
where each of them takes part in the barrier, so it wants ``--every-lane``, which compiles the
attention kernels with such barriers (tile.cuh). Prints one line of errors a case.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import attention_check as attention
import trimul_check as trimul

from tpf.kernels import jit

ATTENTION = (
    attention.Case(65, 32, 3, 1, 2, "rows", "end", "heads_last", torch.float32),
    attention.Case(130, 16, 5, 2, 2, "random"),
    attention.Case(70, 48, 2, 1, 1, "none", "fused", "transposed"),
    attention.Case(257, 32, 9, 1, 1, "tail"),
    attention.Case(7, 13, 3, 1, 2),
)
UPDATES = (
    trimul.Case(65, 64, 64, "outgoing", "bool"),
    trimul.Case(33, 128, 128, "incoming", "float", "transposed"),
)


def main() -> int:
    """Run the calls; fail on an error that is no rounding error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every-lane", action="store_true")
    if parser.parse_args().every_lane:
        jit.BASE_OPTIONS = (*jit.BASE_OPTIONS, "-DEVERY_LANE=1")
    failures = 0
    for case in ATTENTION:
        errors = attention.check_case(case, backward=True)
        failures += any(errors[name] > 0.01 for name in ("out", "dq", "dk", "dv", "dbias"))
        print(case.n, {name: f"{error:.2g}" for name, error in errors.items()}, flush=True)
    for update in UPDATES:
        bad = trimul.failed(update, trimul.check_case(update))
        failures += bool(bad)
        print(update.n, update.c, bad or "ok", flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(main())
