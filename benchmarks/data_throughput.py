"""Measure the data pipeline: what one core does a second, and how it scales with workers.

    python benchmarks/data_throughput.py PATH [--crop 384] [--workers 1 2] [--seconds 10] [--out F]

PATH is a folder or list of structure files. The entries that one core prepares in three times
--seconds are taken; every stage, and every number of workers, is measured for --seconds. Prints the
tables of docs/data.md; --out keeps them as JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

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

T = TypeVar("T")


def rate(function: Callable[[Any], Any], items: Sequence[Any], seconds: float) -> dict[str, float]:
    """Return calls per second of one core and the median milliseconds of a call.

    Both are of processor time, of which ``seconds`` are spent (on a busy machine up to a fifth).
    """
    times: list[float] = []
    for item in within(5 * seconds, itertools.cycle(items)):
        begin = time.process_time()
        function(item)
        times.append(time.process_time() - begin)
        if sum(times) >= seconds:
            break
    return {
        "per_second_per_core": round(len(times) / sum(times), 2),
        "median_ms": round(1e3 * statistics.median(times), 3),
        "calls": len(times),
    }


def stages(
    done: list[Prepared], cache: Path, config: DataConfig, seconds: float
) -> dict[str, dict[str, float]]:
    """Return the rate of each stage over the entries in a cache."""
    rng = np.random.default_rng(0)
    dictionary = Dictionary()
    weights = (config.crop_contiguous, config.crop_spatial, config.crop_interface)
    sources = [item.source for item in done]
    stored = [cache / item.result.path for item in done if isinstance(item.result, Record)]
    tokens = [read_entry(path).tokens for path in stored]
    crops = [(whole, crop(whole, config.crop, rng, weights)) for whole in tokens]

    def features(pair: tuple[Any, Any]) -> Any:
        return featurize(pair[0], pair[1], dictionary, rng, config=config)

    load_tables(sources[0])
    rate(features, crops, seconds)  # makes the conformers of the standard residues
    return {
        "parse and clean": rate(load_tables, sources, seconds),
        "tokenise": rate(tokenize, [whole.tables for whole in tokens], seconds),
        "read from the cache": rate(read_entry, stored, seconds),
        "crop": rate(lambda whole: crop(whole, config.crop, rng, weights), tokens, seconds),
        "featurise": rate(features, crops, seconds),
    }


def within(seconds: float, items: Iterable[T]) -> Iterator[T]:
    """Yield items until the time is over."""
    end = time.perf_counter() + seconds
    for item in items:
        yield item
        if time.perf_counter() >= end:
            return


def prepared_per_second(path: str, cache: Path, workers: int, seconds: float) -> float:
    """Return files a second that ``tpf data prepare`` stores, processes started before."""
    results = prepare(path, cache, workers=workers)
    next(results)
    begin = time.perf_counter()
    number = sum(1 for _ in within(seconds, results))
    spent = time.perf_counter() - begin
    results.close()
    return round(number / spent, 2)


def crops_per_second(config: DataConfig, workers: int, seconds: float) -> float:
    """Return the rate at which a loader gives crops once every worker has given some."""
    torch.set_num_threads(1)
    loader = iter(Loader(CropDataset(Entries(config), config), workers=workers))
    for _ in range(8 * max(workers, 1)):
        next(loader)
    begin = time.perf_counter()
    number = sum(1 for _ in within(seconds, loader))
    return round(number / (time.perf_counter() - begin), 2)


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return everything measured, in a folder for caches."""
    seconds, cache = arguments.seconds, folder / "cache"
    results = prepare(arguments.path, cache)
    done = [i for i in within(3 * seconds, results) if isinstance(i.result, Record)]
    results.close()
    config = DataConfig(path=str(cache), crop=arguments.crop)
    tokens = [item.result.n_tokens for item in done if isinstance(item.result, Record)]
    scaling = {
        workers: {
            "prepared_per_second": prepared_per_second(
                arguments.path, folder / f"cache-{workers}", workers, seconds
            ),
            "crops_per_second": crops_per_second(config, workers, seconds),
        }
        for workers in arguments.workers
    }
    return {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "load": os.getloadavg()[0],
        "command": f"data_throughput.py --crop {arguments.crop} --seconds {seconds:g}",
        "entries": len(done),
        "median_tokens": statistics.median(tokens),
        "stages": stages(done, cache, config, seconds),
        "workers": scaling,
        "cache_bytes_per_entry": round(statistics.mean(item.n_bytes for item in done)),
        "source_bytes_per_entry": round(
            statistics.mean(Path(item.source).stat().st_size for item in done)
        ),
    }


def show(result: dict[str, Any]) -> None:
    """Print a result as the tables of docs/data.md."""
    print(f"{result['entries']} entries, median {result['median_tokens']:.0f} tokens")
    print("| stage | per entry or crop | per second and core |\n|---|---|---|")
    for name, row in result["stages"].items():
        print(f"| {name} | {row['median_ms']:.3g} ms | {row['per_second_per_core']:,.0f} |")
    print("| workers | prepared per second | crops per second |\n|---|---|---|")
    for workers, row in result["workers"].items():
        print(f"| {workers} | {row['prepared_per_second']:.1f} | {row['crops_per_second']:.1f} |")
    sizes = [result[f"{name}_bytes_per_entry"] / 1e3 for name in ("cache", "source")]
    print(f"cache {sizes[0]:.0f} kB per entry, source files {sizes[1]:.0f} kB")
    print(f"load of the machine {result['load']:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("--crop", type=int, default=384)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=10.0, help="for each measurement")
    parser.add_argument("--out", type=Path, help="JSON file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(arguments, Path(scratch))
    show(result)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
