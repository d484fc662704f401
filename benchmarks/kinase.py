"""Train on kinases for a while, and validate before and after on families that were held out.

  python -m benchmarks.kinase OUT --data KINASES --train-seconds 300      # compact, one GPU
  python -m benchmarks.kinase OUT --data data/examples --cpu --train-seconds 20 --samples 1 \
      --only data/splits/examples-train.txt --targets data/splits/examples-holdout.txt --groups ''

KINASES holds the entries of data/splits/kinase-*.txt (tpf data fetch --list FILE). The training is
asked to stop at half its time, saves, and goes on with --resume; then the first and the last state
are validated with the same seeds and compared by paired bootstrap, and the last validation is done
again: its metrics.json must be the same bytes. ``OUT/result.json`` grows with each part. Exit code
1 if a part failed or the bytes differ.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.jobs import Job, breakdown, records
from benchmarks.train300 import QUICK_VALIDATION
from tpf.errors import Interrupted
from tpf.validate import compare_files

SPLITS = Path("data/splits")
RECIPE = ["train.lr=1e-3", "train.warmup=100", "train.ema=0.99"]
"""For some hundred steps from random weights: the average that is validated must not lag far."""
SHOWN = (
    "lddt_intra_protein", "lddt_inter_protein_ligand", "rmsd", "ligand_rmsd_pocket", "dfg_shift",
)  # fmt: skip


def train(job: Job, given: argparse.Namespace, run: Path) -> dict[str, Any]:
    """Train for the given time in two halves and return how it went."""
    words = [
        "train", "--config", given.config, "--data", given.data, "--crop", str(given.crop),
        "--steps", "1000000", "--wandb", "disabled", "--keep", "1000", "--checkpoint-every",
        "1000000", "--out", str(run), *QUICK_VALIDATION, f"data.only={given.only}",
        *RECIPE, *given.overrides,
    ]  # fmt: skip
    codes = [job.tpf(*words, seconds=given.train_seconds / 2)]
    half = len(records(run))
    codes.append(job.tpf("train", "--resume", str(run), seconds=given.train_seconds / 2))
    done = [record["step"] for record in records(run)]
    return {
        "exit_codes": codes,
        "steps": len(done),
        "steps_before_resume": half,
        "good": codes == [Interrupted.exit_code] * 2 and done == list(range(1, len(done) + 1)),
        **breakdown(run, 5),
    }


def validate(job: Job, given: argparse.Namespace, source: Path, out: Path) -> dict[str, Any]:
    """Validate a checkpoint and return the means of the metrics."""
    words = [
        "validate", str(source), "--data", given.data, "--targets", str(given.targets), "--samples",
        str(given.samples), "--seeds", str(given.seeds), "--sampling-steps",
        str(given.sampling_steps), "--extras", "--out", str(out), "data.only=null",
    ]  # fmt: skip
    words += ["--groups", given.groups] if given.groups else []
    code = job.tpf(*words)
    path = out / "metrics.json"
    if not path.is_file():
        return {"exit_code": code}
    found = json.loads(path.read_text())
    return {
        "exit_code": code,
        "targets": len(found["targets"]),
        "skipped": found["skipped"],
        "model_selection": found["model_selection"],
        "dataset": {name: found["dataset"][name] for name in SHOWN if name in found["dataset"]},
    }


def main() -> int:
    """Do the parts and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", required=True, help="folder of mmCIF files")
    parser.add_argument("--seconds", type=float, default=560, help="of all parts")
    parser.add_argument("--train-seconds", type=float, default=300)
    parser.add_argument("--config", default=None, help="[compact; tiny on the CPU]")
    parser.add_argument("--crop", type=int, default=None, help="[256; 24 on the CPU]")
    parser.add_argument("--only", default=str(SPLITS / "kinase-train.txt"))
    parser.add_argument("--targets", default=str(SPLITS / "kinase-holdout.txt"))
    parser.add_argument("--groups", default=str(SPLITS / "kinase-groups.txt"))
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sampling-steps", type=int, default=None, help="[40; 4 on the CPU]")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE of tpf train")
    given = parser.parse_intermixed_args()
    given.config = given.config or ("tiny" if given.cpu else "compact")
    given.crop = given.crop or (24 if given.cpu else 256)
    given.sampling_steps = given.sampling_steps or (4 if given.cpu else 40)
    job = Job(given.out, given.seconds, given.cpu)
    run, before, after, again = (given.out / x for x in ("run", "before", "after", "again"))
    job.note(train=train(job, given, run))
    job.note(before=validate(job, given, run / "checkpoints" / "step-000000", before))
    job.note(after=validate(job, given, run, after))
    if job.result["before"]["exit_code"] == job.result["after"]["exit_code"] == 0:
        job.note(compare=compare_files(after, before, 10_000))
    if job.left > 20:
        validate(job, given, run, again)
    files = [folder / "metrics.json" for folder in (after, again)]
    same = all(path.is_file() for path in files) and len({p.read_bytes() for p in files}) == 1
    job.note(bytes_equal=same, seconds=job.seconds - job.left)
    return 0 if same and job.result["train"]["good"] and "compare" in job.result else 1


if __name__ == "__main__":
    sys.exit(main())
