"""Measures the slot map's time per step on one core: foresee a batch, reserve slots for another.

    python benchmarks/slot_map.py [CASE ...]

For 8,192 samples of 26 ids with 33 million rows and a million slots, and for NVIDIA's table of
FBGEMM's cache (10 times 13.4 million rows, 1,048,576 ids) with 1.5% and 10% of the rows in slots.
Ids are Zipf's, exponent 1.05; slots begin with the most popular rows, 31 batches are known and two
are in flight. Prints the median processor time of steps with evictions, and the rows that move. The
last line on stdout is one JSON object. Takes 3 minutes and 4 GB.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import numpy as np
import torch

from hotrec.bench.machine import machine_facts
from hotrec.embedding.slots import MAX_KNOWN, SlotMap
from hotrec.types import POPULAR_ROW

# Rows, slots, ids of a batch, tables.
CASES = {
    "8192 x 26": (33_000_000, 1_000_000, 8192 * 26, 26),
    "NVIDIA 1.5%": (134_000_000, 2_010_000, 1 << 20, 10),
    "NVIDIA 10%": (134_000_000, 13_400_000, 1 << 20, 10),
}
EXPONENT, DEPTH, NUM_STEPS, NUM_SKIPPED = 1.05, 1, 24, 6


def draw(rng: np.random.Generator, num_rows: int, num_ids: int, num_tables: int) -> torch.Tensor:
    """The distinct rows of a batch, rows of a table by falling popularity."""
    per_table, power = num_rows // num_tables, 1 - EXPONENT
    places = ((per_table**power - 1) * rng.random(num_ids) + 1) ** (1 / power)
    ids = np.minimum(places.astype(np.int64) - 1, per_table - 1)
    return torch.from_numpy(np.unique(ids + np.arange(num_ids) % num_tables * per_table))


def measure(num_rows: int, num_slots: int, num_ids: int, num_tables: int) -> dict[str, float]:
    """Medians of the steps after the first ones."""
    rng, per_table = np.random.default_rng(0), num_rows // num_tables
    batches = [draw(rng, num_rows, num_ids, num_tables) for _ in range(NUM_STEPS + MAX_KNOWN)]
    ranks = np.arange(num_slots // num_tables)
    popular = np.empty(ranks.size * num_tables, POPULAR_ROW)
    popular["row"] = (ranks + np.arange(num_tables)[:, None] * per_table).ravel()
    popular["prob"] = np.tile((ranks + 1.0) ** -EXPONENT, num_tables)
    slots = SlotMap(num_rows, num_slots, popular, torch.device("cpu"))
    for number in range(MAX_KNOWN - 1):
        slots.foresee(batches[number], number)
    steps = []
    for number in range(NUM_STEPS):
        slots.release(number - DEPTH - 1, is_changed=True)
        known = number + MAX_KNOWN - 1
        start_s = time.process_time()
        slots.foresee(batches[known], known)
        middle_s = time.process_time()
        _, moves = slots.reserve(batches[number], number)
        end_s = time.process_time()
        steps.append(
            (middle_s - start_s, end_s - middle_s, moves.in_rows.numel(), moves.out_rows.numel())
        )
    foresee_s, reserve_s, num_in, num_out = np.median(steps[NUM_SKIPPED:], axis=0)
    return {
        "distinct_rows": float(np.mean([batch.numel() for batch in batches])),
        "foresee_s": float(foresee_s),
        "reserve_s": float(reserve_s),
        "in_rows": float(num_in),
        "out_rows": float(num_out),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    names = parser.parse_args().cases or list(CASES)
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"case: expected some of {list(CASES)}, got {unknown}")
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name in names:
        found[name] = of_case = measure(*CASES[name])
        total_ms = 1e3 * (of_case["foresee_s"] + of_case["reserve_s"])
        print(
            f"{name:>12}: {of_case['distinct_rows']:,.0f} distinct rows, "
            f"{of_case['in_rows']:,.0f} come and {of_case['out_rows']:,.0f} leave, "
            f"{total_ms:.1f} ms ({1e3 * of_case['foresee_s']:.1f} to foresee)",
            file=sys.stderr,
        )
    print(json.dumps({"machine": machine_facts(), "cases": found}))


if __name__ == "__main__":
    main()
