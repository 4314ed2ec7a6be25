"""Measures the ids per second that `profile` counts on one core: best and median of some runs.

python benchmarks/profile_speed.py [--repeats 7]
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from hotrec.cost_model.blocks import Block
from hotrec.cost_model.profile import count_rows
from hotrec.types import Feature, Schema, Table

NUM_IDS, NUM_BLOCKS, NUM_ROWS = 1 << 20, 4, 1_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    # Log-uniform: few rows are read often.
    drawn = NUM_ROWS ** np.random.default_rng(0).random(NUM_IDS)
    block = Block(NUM_IDS, {"c": drawn.astype(np.int32) - 1})
    schema = Schema((), (Feature("c", "c"),), (Table("c", NUM_ROWS),))
    rates = []
    for _ in range(repeats):
        start_s = time.process_time()
        count_rows([block] * NUM_BLOCKS, schema)
        rates.append(NUM_BLOCKS * NUM_IDS / (time.process_time() - start_s))
    print(f"{max(rates) / 1e6:.0f} M ids/s at best, {np.median(rates) / 1e6:.0f} median")


if __name__ == "__main__":
    main()
