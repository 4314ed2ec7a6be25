"""Yambda, a log of music listening: its published columns, and histories as of DLRMv4.

A user's events are sorted by time. A sample is a listen; its history are the last events before it
of three pools: listens of at least half a track, likes, and shorter listens (skips).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hotrec.data.columns import offsets_of
from hotrec.types import Rows

EVENT_TYPES = ("listen", "like", "dislike", "unlike", "undislike")
LISTEN, LIKE = 0, 1
LISTENED_PCT = 50  # a shorter listen is a skip
# Bits of the pools, as in the reference.
LISTENED_BIT, LIKED_BIT, SKIPPED_BIT = POOL_BITS = 1, 2, 4
# The columns of multi_event.parquet. In sequential/ all but uid are lists.
FLAT_SCHEMA = pa.schema(
    [
        pa.field("uid", pa.uint32()),
        pa.field("timestamp", pa.uint32()),
        pa.field("item_id", pa.uint32()),
        pa.field("is_organic", pa.uint8()),
        pa.field("played_ratio_pct", pa.uint16()),
        pa.field("track_length_seconds", pa.uint32()),
        pa.field("event_type", pa.dictionary(pa.uint32(), pa.string())),
    ]
)
SEQUENTIAL_SCHEMA = pa.schema(
    [
        FLAT_SCHEMA.field("uid"),
        *(pa.field(column.name, pa.list_(column.type)) for column in list(FLAT_SCHEMA)[1:]),
    ]
)


@dataclass(frozen=True)
class HistoryRule:
    """Which events are the history of a sample.

    Args:
        per_pool: The number of last events of each pool.
        max_events: How many events to look back.
    """

    per_pool: int = 1362
    max_events: int = 20_000


def pool_bits(event_types: npt.NDArray[np.uint8], played_pct: npt.NDArray[np.uint16]) -> Rows:
    """The pool of each event as a bit, 0 for events of none; int64 (n,).

    Args:
        event_types: Index into ``EVENT_TYPES``, (n,).
        played_pct: The percentage played, (n,); any value where the event is no listen.
    """
    is_listen, is_listened = event_types == LISTEN, played_pct >= LISTENED_PCT
    cases = [is_listen & is_listened, event_types == LIKE, is_listen & ~is_listened]
    return np.select(cases, POOL_BITS, 0).astype(np.int64)


def find_histories(pools_N: Rows, samples_B: Rows, rule: HistoryRule) -> tuple[Rows, Rows]:
    """The histories of some events of one user.

    Args:
        pools_N: The pool of each event of the user, see ``pool_bits``.
        samples_B: The positions of the samples among these events, increasing.
        rule: Which events are a history.

    Returns:
        The positions of the histories' events, int64 (K,), increasing in each history; and where
        each history begins, int64 (B + 1,).
    """
    positions, owners = [], []
    for pool in POOL_BITS:
        of_pool = np.flatnonzero(pools_N == pool)
        ends = np.searchsorted(of_pool, samples_B)
        oldest = np.searchsorted(of_pool, samples_B - rule.max_events)
        lengths = ends - np.maximum(ends - rule.per_pool, oldest)
        before = offsets_of(lengths)
        owners.append(np.repeat(np.arange(samples_B.size), lengths))
        positions.append(of_pool[np.arange(before[-1]) + np.repeat(ends - before[1:], lengths)])
    # One sort merges the pools of all samples: the sample is the upper digit.
    stride = pools_N.size + 1
    keys = np.sort(np.concatenate(owners) * stride + np.concatenate(positions))
    begins = np.searchsorted(keys, np.arange(samples_B.size + 1) * stride)
    return keys % stride, begins
