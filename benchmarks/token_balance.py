"""Counts the work of the busiest rank with equal samples and balanced, on 2 to 64 ranks.

    PYTHONPATH=. python benchmarks/token_balance.py [--page benchmarks/results/token_balance.md]

Lengths of histories are drawn by the marginals of `benchmarks/yambda_like.py`, and dealt by the
code that deals samples in training (`order.assign=by_tokens`). No rank is started and no step
timed. The last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.yambda_like import KIND_PCT, LOG_EVENTS, LOG_EVENTS_DEVIATION, MAX_EVENTS
from hotrec.data.tokens import SampleWork, assign_by_work
from hotrec.report.render import markdown_table
from hotrec.report.units import show_count
from hotrec.types import Rows

RANKS, BATCH_SIZES = (2, 4, 8, 16, 32, 64), (32, 1024)
# Events that each pool of DLRMv4 keeps, and the parts of the events that are in the pools.
MAX_OF_POOL, POOLS = 4096 // 3 - 3, KIND_PCT[:3] / 100
CONTEXTUAL, NUM_DAYS, DAY = 8, 301, 250
# DLRMv4's 3 layers of width 512, forward and backward: the products with the weights (512, 2048)
# and (1536, 512) per token, and 4 causal heads with keys and values of 128 per pair.
LAYERS, FORWARD_AND_BACKWARD = 3, 3
PER_TOKEN = FORWARD_AND_BACKWARD * LAYERS * 2 * (512 * 2048 + 1536 * 512)
PER_PAIR = FORWARD_AND_BACKWARD * LAYERS * 2 * 4 * (128 + 128) // 2
WORK = SampleWork(1, {"history": PER_TOKEN}, {"history": PER_PAIR})

PAGE = """# Balance by tokens: the work of the busiest rank

Samples with histories of different lengths take different times, and all ranks wait for the busiest
one. How far is it from the mean, and what is left of that if a global batch's samples are dealt by
their work (`order.assign=by_tokens`)? Made by

```
{command}
```

Counted, not timed. Numbers of events of a user are log-normal, as Yambda's (median 2,695, mean
4,763, at most 27,738). The work of a sample is that of DLRMv4's three layers of width 512, in
operations: {per_token:,} per token and {per_pair:,} per pair of tokens, so that it is proportional
to L + L^2 / {ratio:,}. Means over {num_batches} global batches.

* **pools**: a sample's history is the last {pool:,} events of each of three kinds, as DLRMv4's, so
  that L is at most 4,095 with 9 other tokens; of random listens of random users.
* **whole**: all events of the user before the listen, so that L is at most 27,738.
* **pools, by user**: the order of a log sorted by user inside a day. A rank that reads a
  consecutive part of it has the samples of a few users, whose lengths are alike.
* **busiest, equal**: work of the busiest rank over the mean, if each rank has as many samples;
  **worst** is that of the worst global batch.
* **busiest, balanced**: the same by tokens.
* **shorter**: work of the busiest rank that the balance saves: how much shorter a step would be in
  which nothing but this work takes time.
* **samples**: fewest and most samples of a rank, balanced.
* **ms**: for dealing one global batch, on a shared machine.
"""

COLUMNS = (
    "ranks",
    "batch",
    "tokens of a sample",
    "busiest, equal",
    "worst",
    "busiest, balanced",
    "shorter",
    "samples",
    "ms",
)


def draw_events(rng: np.random.Generator, num: int, *, by_size: bool) -> Rows:
    """Numbers of events of users, int64 (num,); ``by_size`` if drawn in proportion to it."""
    # A log-normal weighted by its value is one whose mean of the logarithm is larger by sigma^2.
    shift = LOG_EVENTS_DEVIATION**2 if by_size else 0.0
    found = np.empty(0, np.int64)
    while found.size < num:
        normal = rng.standard_normal(4 * num)
        drawn = np.exp(LOG_EVENTS + shift + LOG_EVENTS_DEVIATION * normal).astype(np.int64)
        found = np.concatenate([found, drawn[(drawn >= 1) & (drawn <= MAX_EVENTS)]])
    return found[:num]


def draw_whole(rng: np.random.Generator, num: int) -> Rows:
    """Events before random listens, with the listen itself; int64 (num,)."""
    return (draw_events(rng, num, by_size=True) * rng.random(num)).astype(np.int64) + 1


def take_pools(num_before: Rows) -> Rows:
    """Tokens of a sample of DLRMv4 with so many events before, int64 of the same shape."""
    kept = np.minimum(POOLS[:, None] * num_before, MAX_OF_POOL).astype(np.int64)
    return kept.sum(axis=0) + CONTEXTUAL + 1


def draw_pools(rng: np.random.Generator, num: int) -> Rows:
    """Tokens of DLRMv4's samples of random listens, int64 (num,)."""
    return take_pools(draw_whole(rng, num))


def draw_by_user(rng: np.random.Generator, num: int) -> Rows:
    """The same of consecutive listens of a day's log sorted by user."""
    events = draw_events(rng, 2 * num, by_size=False)
    num_of_day = rng.poisson(events * POOLS[:2].sum() / NUM_DAYS)
    before = np.repeat(events * DAY // NUM_DAYS, num_of_day)
    assert before.size >= num, before.size
    return take_pools(before[:num])


KINDS: dict[str, Callable[[np.random.Generator, int], Rows]] = {
    "pools": draw_pools,
    "whole": draw_whole,
    "pools, by user": draw_by_user,
}


def measure(kind: str, num_ranks: int, batch_size: int, num_batches: int) -> dict[str, Any]:
    """Means over global batches."""
    found: dict[str, list[float]] = {}
    for number in range(num_batches):
        rng = np.random.default_rng([number, batch_size, num_ranks])
        length_S = KINDS[kind](rng, num_ranks * batch_size)
        work_S = WORK.of(["history"], length_S.astype(np.int32))
        begin_s = time.perf_counter()
        rank_S = assign_by_work(work_S, num_ranks)
        seconds = time.perf_counter() - begin_s
        balanced_W = np.bincount(rank_S, work_S, minlength=num_ranks)
        samples_W = np.bincount(rank_S, minlength=num_ranks)
        mean = float(work_S.sum()) / num_ranks
        for name, value in (
            ("tokens", length_S.mean()),
            ("equal", work_S.reshape(num_ranks, -1).sum(axis=1).max() / mean),
            ("balanced", balanced_W.max() / mean),
            ("fewest", samples_W.min()),
            ("most", samples_W.max()),
            ("seconds", seconds),
        ):
            found.setdefault(name, []).append(float(value))
    means = {name: float(np.mean(values)) for name, values in found.items()}
    saved = 1 - sum(found["balanced"]) / sum(found["equal"])
    of_case = {"kind": kind, "num_ranks": num_ranks, "batch_size": batch_size}
    return {**of_case, **means, "worst_equal": max(found["equal"]), "saved_frac": saved}


def as_row(found: dict[str, Any]) -> list[str]:
    """One row of text, as ``COLUMNS``."""
    return [
        f"{found['num_ranks']}",
        f"{found['batch_size']:,}",
        show_count(round(found["tokens"])),
        f"{found['equal']:.2f}",
        f"{found['worst_equal']:.2f}",
        f"{found['balanced']:.3f}",
        f"{found['saved_frac']:.1%}",
        f"{found['fewest']:,.0f} to {found['most']:,.0f}",
        f"{1e3 * found['seconds']:.1f}",
    ]


def render(results: Sequence[dict[str, Any]], num_batches: int) -> str:
    command = shlex.join(["python", *sys.argv]).replace(" --", " \\\n    --")
    facts = {"per_token": PER_TOKEN, "per_pair": PER_PAIR, "ratio": round(PER_TOKEN / PER_PAIR)}
    parts = [PAGE.format(command=command, num_batches=num_batches, pool=MAX_OF_POOL, **facts)]
    for kind in KINDS:
        rows = [as_row(found) for found in results if found["kind"] == kind]
        parts += [f"## {kind.capitalize()}", markdown_table(COLUMNS, rows)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", type=Path)
    parser.add_argument("--num-batches", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=BATCH_SIZES)
    options = parser.parse_args(arguments)
    results = []
    for kind in KINDS:
        for batch_size in options.batch_sizes:
            for num_ranks in options.ranks:
                results.append(measure(kind, num_ranks, batch_size, options.num_batches))
                print(kind, *as_row(results[-1]), file=sys.stderr, flush=True)
    if options.page is not None:
        options.page.write_text(render(results, options.num_batches))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
