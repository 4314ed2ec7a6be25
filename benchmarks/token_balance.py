"""Counts the work of the busiest rank with equal samples and balanced, on 2 to 64 ranks.

    PYTHONPATH=. python benchmarks/token_balance.py [--page benchmarks/results/token_balance.md]
        [--dataset data/kuairand_histories/dataset --sequence history_video]

Lengths of histories are drawn by the marginals of `benchmarks/yambda_like.py`, and dealt by the
code that deals samples in training (`order.assign=by_tokens`). With a prepared dataset it also
counts the rows that ranks exchange, by each value of `order.assign`. No rank is started and no step
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

from benchmarks.locality import make_batch, sent_bytes
from benchmarks.locality_samples import dataset_source
from benchmarks.yambda_like import KIND_PCT, LOG_EVENTS, LOG_EVENTS_DEVIATION, MAX_EVENTS
from hotrec.config.groups import OrderAssign
from hotrec.data.locality import ByOwner, ShardOwner
from hotrec.data.tokens import ByTokens, SampleWork, assign_by_work
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

OF_DATASET = """## Rows that ranks exchange

Global batches of `{dataset}`, {num_batches} of each size, by what `order.assign` deals them by.
**MB**: rows and gradients of 64 values that a rank sends in a step, all rows cold and row-wise,
and each distinct row of a rank once; **of as_read**: their share of those as read. **busiest**:
work of the busiest rank over the mean, for the lengths of `{sequence}`. Owners only decide among
samples of the same work, such as histories of the maximum length.
"""

# Ranks, and samples of each.
CASES = ((2, 256), (4, 256), (8, 256), (8, 64))
ROWS_COLUMNS = ("ranks", "batch", "order.assign", "MB", "of as_read", "busiest")

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


def count_rows(path: Path, sequence: str, num_batches: int) -> list[dict[str, Any]]:
    """Bytes of a step and the busiest rank's work, by case and assignment; means over batches."""
    source, results = dataset_source(path), []
    schema, hot = source.schema, source.hot(0)
    names = schema.feature_names
    by_tokens = ByTokens(names, SampleWork(1, {sequence: PER_TOKEN}, {sequence: PER_PAIR}))
    for num_ranks, batch_size in CASES:
        shards = {
            table.name: [
                ShardOwner(rank * -(-table.num_rows // num_ranks), rank)
                for rank in range(num_ranks)
                if rank * -(-table.num_rows // num_ranks) < table.num_rows
            ]
            for table in schema.tables
        }
        by_owner = ByOwner(schema, shards, {})
        found: dict[OrderAssign, list[tuple[float, float]]] = {kind: [] for kind in OrderAssign}
        for ids in source.read(num_ranks, batch_size, num_batches):
            batch = make_batch(ids, schema, hot)
            columns = [part.to_dict() for part in ids]
            parts = [[part[name] for part in columns] for name in names]
            lengths = np.concatenate([p.lengths().numpy() for part in parts for p in part])
            values = np.concatenate([p.values().numpy() for part in parts for p in part])
            lengths, shares_W = lengths.astype(np.int32), np.full(num_ranks, batch_size)
            work_S = by_tokens.work.of(names, lengths)
            for kind, rank_S in (
                (OrderAssign.as_read, batch.today()),
                (OrderAssign.by_owner, by_owner(values, lengths, shares_W)),
                (OrderAssign.by_tokens, by_tokens(lengths, num_ranks)),
            ):
                work_W = np.bincount(rank_S, work_S, minlength=num_ranks)
                sent = sent_bytes(batch, rank_S)["cold"]
                found[kind].append((sent, work_W.max() / work_W.mean()))
        as_read, _ = np.mean(found[OrderAssign.as_read], axis=0)
        for kind in OrderAssign:
            sent, busiest = np.mean(found[kind], axis=0).tolist()
            results.append(
                {
                    "num_ranks": num_ranks,
                    "batch_size": batch_size,
                    "assign": kind.name,
                    "bytes": sent,
                    "bytes_frac": sent / as_read,
                    "busiest": busiest,
                }
            )
    return results


def as_rows_row(found: dict[str, Any]) -> list[str]:
    """One row of text, as ``ROWS_COLUMNS``."""
    return [
        f"{found['num_ranks']}",
        f"{found['batch_size']}",
        found["assign"],
        f"{found['bytes'] / 1e6:.2f}",
        f"{found['bytes_frac']:.3f}",
        f"{found['busiest']:.3f}",
    ]


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


def render(
    results: Sequence[dict[str, Any]],
    of_rows: Sequence[dict[str, Any]],
    options: argparse.Namespace,
) -> str:
    command = shlex.join(["python", *sys.argv]).replace(" --", " \\\n    --")
    facts = {"per_token": PER_TOKEN, "per_pair": PER_PAIR, "ratio": round(PER_TOKEN / PER_PAIR)}
    parts = [
        PAGE.format(command=command, num_batches=options.num_batches, pool=MAX_OF_POOL, **facts)
    ]
    for kind in KINDS:
        rows = [as_row(found) for found in results if found["kind"] == kind]
        parts += [f"## {kind.capitalize()}", markdown_table(COLUMNS, rows)]
    if of_rows:
        parts.append(OF_DATASET.format(**vars(options)))
        parts.append(markdown_table(ROWS_COLUMNS, [as_rows_row(found) for found in of_rows]))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", type=Path)
    parser.add_argument("--num-batches", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=BATCH_SIZES)
    parser.add_argument("--dataset", type=Path, help="a prepared dataset with sequences")
    parser.add_argument("--sequence", default="history_video")
    options = parser.parse_args(arguments)
    results = []
    for kind in KINDS:
        for batch_size in options.batch_sizes:
            for num_ranks in options.ranks:
                results.append(measure(kind, num_ranks, batch_size, options.num_batches))
                print(kind, *as_row(results[-1]), file=sys.stderr, flush=True)
    of_rows = []
    if options.dataset is not None:
        of_rows = count_rows(options.dataset, options.sequence, options.num_batches)
    if options.page is not None:
        options.page.write_text(render(results, of_rows, options))
    print(json.dumps([*results, *of_rows]))


if __name__ == "__main__":
    main()
