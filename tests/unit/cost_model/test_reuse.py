"""The urgent rows of streams in two orders: predicted from a profile, and counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hotrec.cost_model.blocks import Block
from hotrec.cost_model.profile import count_rows
from hotrec.cost_model.reuse import DISTANCES, ENOUGH_BATCHES, LogReuse, ReuseMeter, TableReuse
from hotrec.types import Feature, Schema, Table


def reuse_of(batches: list[Block], schema: Schema) -> dict[str, TableReuse]:
    meter = ReuseMeter(schema)
    for batch in batches:
        meter.observe(batch)
    return meter.reuse()


TWO = Schema(
    dense=(),
    features=(
        Feature("seen", "items", is_multi_hot=True),
        Feature("item", "items"),
        Feature("user", "users"),
    ),
    tables=(Table("items", 60), Table("users", 40)),
)


def drifting_log(num_samples: int, seed: int = 0) -> Block:
    """Samples whose items drift with time, from users who each come for a while."""
    rng = np.random.default_rng(seed)
    now = np.arange(num_samples)
    lengths = rng.integers(0, 4, num_samples).astype(np.int32)
    seen = (np.repeat(now, lengths) // 20 + rng.integers(0, 9, lengths.sum())) % 60
    rows = {"seen": seen, "item": (now // 20 + rng.integers(0, 5, num_samples)) % 60}
    return Block(num_samples, {**rows, "user": (now // 7 % 40).astype(np.int32)}, {"seen": lengths})


def rows_of(block: Block, table: str) -> set[int]:
    return {int(row) for feature in TWO.features_of(table) for row in block.rows[feature.name]}


def shares_by_hand(batches: list[Block], table: str) -> tuple[float, ...]:
    """The share by distance, from sets of rows."""
    sets = [rows_of(batch, table) for batch in batches]
    shares = []
    for far in DISTANCES:
        later = range(far, len(sets))
        again = [len(sets[at] & set().union(*sets[at - far : at])) for at in later]
        shares.append(sum(again) / sum(len(sets[at]) for at in later))
    return tuple(shares)


@pytest.mark.parametrize("chunk_size", [1, 7, 50, 1000])
@pytest.mark.parametrize("batch_size", [5, 16])
def test_a_log_has_the_reuse_of_its_batches(chunk_size: int, batch_size: int) -> None:
    """Whatever its chunks; the last batch may be smaller, and batches after enough do not count."""
    log = drifting_log(432)
    batches = list(log.pieces(batch_size))
    assert len(batches) in (27, 87)
    options: Any = {"num_samples": 432, "reuse": LogReuse(TWO, 432, batch_size=batch_size)}
    profile = count_rows(log.pieces(chunk_size), TWO, **options)
    assert {name: of.read_frac for name, of in profile.reuse.items()} == {
        name: shares_by_hand(batches[:ENOUGH_BATCHES], name) for name in ("items", "users")
    }
    of_loader = reuse_of(batches, TWO)
    assert profile.reuse == {
        name: TableReuse(of.batch_size, of.read_frac, is_of_log=True)
        for name, of in of_loader.items()
    }
