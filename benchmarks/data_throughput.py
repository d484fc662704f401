"""Measure the data pipeline: entries per second per core at each stage, and scaling with workers.

    python benchmarks/data_throughput.py PATH [--crop 384] [--workers 1 2 4] [--out FILE]

PATH is a folder or list of structure files. Prints the table of docs/data.md; --out keeps the
numbers as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402 (after the number of threads)
import torch  # noqa: E402

from tpf.config import DataConfig  # noqa: E402
from tpf.data.ccd import Dictionary  # noqa: E402
from tpf.data.crop import crop  # noqa: E402
from tpf.data.dataset import CropDataset, Loader  # noqa: E402
from tpf.data.features import featurize  # noqa: E402
from tpf.data.load import load_tables  # noqa: E402
from tpf.data.prepare import Prepared, prepare  # noqa: E402
from tpf.data.records import Entries, Record  # noqa: E402
from tpf.data.store import read_entry  # noqa: E402
from tpf.data.tokens import tokenize  # noqa: E402


def timed(function: Callable[[Any], Any], items: list[Any]) -> tuple[list[Any], float]:
    """Return the results and the median milliseconds of one core for one of them."""
    results, times = [], []
    for item in items:
        begin = time.process_time()
        results.append(function(item))
        times.append(1e3 * (time.process_time() - begin))
    return results, statistics.median(times)


def stages(prepared: list[Prepared], cache: Path, config: DataConfig) -> dict[str, float]:
    """Return the median milliseconds per entry (or per crop) of each stage."""
    done = [item for item in prepared if isinstance(item.result, Record)]
    rng = np.random.default_rng(0)
    dictionary = Dictionary()
    load_tables(done[0].source)
    tables, parse = timed(load_tables, [item.source for item in done])
    tokens, tokenise = timed(tokenize, tables)
    _, stored = timed(read_entry, [cache / item.result.path for item in done])
    weights = (config.crop_contiguous, config.crop_spatial, config.crop_interface)
    crops, cut = timed(lambda t: (t, crop(t, config.crop, rng, weights)), tokens)

    def features(pair: tuple[Any, Any]) -> Any:
        return featurize(pair[0], pair[1], dictionary, rng, config=config)

    for pair in crops[:20]:  # conformers of the standard residues
        features(pair)
    _, feature = timed(features, crops)
    return {
        "parse and clean": parse, "tokenise": tokenise, "read from the cache": stored,
        "crop": cut, "featurise": feature,
    }  # fmt: skip


def samples_per_second(cache: Path, config: DataConfig, workers: int, n: int) -> float:
    """Return the rate at which a loader gives crops, after every worker has warmed up."""
    torch.set_num_threads(1)
    entries = Entries(config)
    warm = 32 * max(workers, 1)
    loader = iter(Loader(CropDataset(entries, config), stop_step=warm + n, workers=workers))
    for _ in range(warm):
        next(loader)
    begin = time.perf_counter()
    for _ in range(n):
        next(loader)
    return n / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("--crop", type=int, default=384)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        cache = Path(scratch) / "cache"
        prepared = list(prepare(arguments.path, cache))
        config = DataConfig(path=str(cache), crop=arguments.crop)
        sizes = [item.n_bytes for item in prepared if item.n_bytes]
        tokens = [item.result.n_tokens for item in prepared if isinstance(item.result, Record)]
        table = stages(prepared, cache, config)
        rates = {w: samples_per_second(cache, config, w, arguments.samples)
                 for w in arguments.workers}  # fmt: skip
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"{len(sizes)} entries, median {statistics.median(tokens):.0f} tokens")
    for name, ms in table.items():
        print(f"| {name} | {ms:.1f} ms | {1e3 / ms:.0f} per second per core |")
    for workers, rate in rates.items():
        print(f"| loader, {workers} workers | | {rate:.1f} crops per second |")
    print(f"cache {statistics.mean(sizes) / 1e3:.0f} kB per entry; largest worker {peak:.0f} MB")
    if arguments.out is not None:
        result = {
            "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
            "command": f"data_throughput.py --crop {arguments.crop}", "entries": len(sizes),
            "median_tokens": statistics.median(tokens), "median_ms": table,
            "crops_per_second_by_workers": rates, "mean_bytes": statistics.mean(sizes),
            "worker_mb": peak,
        }  # fmt: skip
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
