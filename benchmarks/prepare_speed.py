"""Measures `prepare` on a generated Criteo-like log: rows/s and peak memory.

    python benchmarks/prepare_speed.py [--num-lines 2000000] [--compression gz] [--directory DIR]

The log has the cardinalities of Criteo Kaggle (33.8 M distinct values over 26 columns), Zipf 1.05,
and as many missing values. Prepare runs in a separate process, to measure its peak memory alone.
The last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

CARDINALITIES = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
HEX_DIGITS = np.frombuffer(b"0123456789abcdef", np.uint8)
MISSING_FRAC = 0.08
LINES_PER_PIECE = 100_000


def zipf_ranks(rng: np.random.Generator, num_values: int, size: int, exponent: float) -> np.ndarray:
    """Ranks 0..num_values-1 with probability ~ (rank + 1) ** -exponent, by a continuous inverse."""
    power = 1 - exponent
    largest = (num_values + 1) ** power
    uniform = rng.random(size)
    ranks = (1 + uniform * (largest - 1)) ** (1 / power)
    return np.minimum(ranks.astype(np.int64) - 1, num_values - 1)


def hexadecimal(ids: np.ndarray, column: int, is_missing: np.ndarray) -> pa.Array:
    # A bijection of 32-bit numbers, so that neighbours in rank have nothing in common as text.
    keys = ((ids.astype(np.uint64) + column * 2**26) * np.uint64(2654435761)) & np.uint64(
        0xFFFFFFFF
    )
    nibbles = (keys[:, None] >> np.arange(28, -1, -4, dtype=np.uint64)) & np.uint64(15)
    text = HEX_DIGITS[nibbles.astype(np.uint8)].tobytes()
    offsets = pa.py_buffer(np.arange(0, 8 * ids.size + 1, 8, dtype=np.int32).tobytes())
    array = pa.Array.from_buffers(pa.string(), ids.size, [None, offsets, pa.py_buffer(text)])
    return pc.if_else(pa.array(is_missing), pa.scalar(None, pa.string()), array)


def make_piece(rng: np.random.Generator, num_lines: int, exponent: float) -> pa.Table:
    columns: dict[str, pa.Array] = {"label": pa.array((rng.random(num_lines) < 0.25).astype(int))}
    for number in range(1, 14):
        values = np.floor(rng.lognormal(2.0, 2.0, num_lines)).astype(np.int64)
        columns[f"I{number}"] = pa.array(values, mask=rng.random(num_lines) < MISSING_FRAC)
    for column, num_values in enumerate(CARDINALITIES):
        ids = zipf_ranks(rng, num_values, num_lines, exponent)
        columns[f"C{column + 1}"] = hexadecimal(ids, column, rng.random(num_lines) < MISSING_FRAC)
    return pa.table(columns)


def write_log(path: Path, num_lines: int, *, exponent: float = 1.05, seed: int = 0) -> None:
    """Write a Criteo-like TSV; .gz and .zst are compressed."""
    rng = np.random.default_rng(seed)
    options = pa.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    with pa.output_stream(str(path), compression="detect") as sink:
        for start in range(0, num_lines, LINES_PER_PIECE):
            piece = make_piece(rng, min(LINES_PER_PIECE, num_lines - start), exponent)
            pa.csv.write_csv(piece, sink, options)


def peak_bytes() -> int:
    """Largest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_prepare(
    files: list[str], output: str, block_mib: int, results: multiprocessing.Queue
) -> None:
    from hotrec.config.data import SourceFormat, SourceSpec, SplitKind, SplitSpec
    from hotrec.data.prepare import prepare

    start_bytes = peak_bytes()
    start, start_cpu = time.perf_counter(), time.process_time()
    split = SplitSpec(SplitKind.last, valid_frac=0.05, test_frac=0.05)
    spec = SourceSpec(SourceFormat.criteo, files, split=split, block_mib=block_mib)
    artifact = prepare(spec, output)
    wall_s = time.perf_counter() - start
    tables = artifact.content["schema"]["tables"]
    results.put(
        {
            "wall_s": wall_s,
            "cpu_s": time.process_time() - start_cpu,
            "start_bytes": start_bytes,
            "peak_bytes": peak_bytes(),
            "num_rows_of_tables": sum(table["num_rows"] for table in tables),
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-lines", type=int, default=2_000_000)
    parser.add_argument(
        "--directory", type=Path, default=None, help="directory for the files, which are kept"
    )
    parser.add_argument("--compression", choices=["none", "gz", "zst"], default="none")
    parser.add_argument("--block-mib", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = options.directory or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        suffix = "" if options.compression == "none" else f".{options.compression}"
        log = directory / f"criteo_like_{options.num_lines}.tsv{suffix}"
        if not log.exists():
            write_log(log, options.num_lines)
        context = multiprocessing.get_context("spawn")
        results = context.Queue()
        arguments = ([str(log)], str(directory / "prepared"), options.block_mib, results)
        process = context.Process(target=run_prepare, args=arguments)
        process.start()
        process.join()
        if process.exitcode != 0:
            raise SystemExit(f"prepare: expected exit status 0, got {process.exitcode}.")
        figures = results.get()
        log_bytes = log.stat().st_size
    figures["num_lines"] = options.num_lines
    figures["rows_per_s"] = options.num_lines / figures["wall_s"]
    figures["log_bytes"] = log_bytes
    figures["num_cores"] = len(os.sched_getaffinity(0))
    figures["machine"] = platform.machine()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
