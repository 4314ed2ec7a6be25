"""The urgent rows of streams in two orders: predicted from a profile, and counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hotrec.cost_model.blocks import Block
from hotrec.cost_model.builtin import BUILTIN
from hotrec.cost_model.demand import expected_distinct, expected_urgent
from hotrec.cost_model.forms import Workload
from hotrec.cost_model.histogram import build_histogram
from hotrec.cost_model.profile import count_rows
from hotrec.cost_model.reuse import (
    DISTANCES,
    ENOUGH_BATCHES,
    LogReuse,
    ReuseMeter,
    TableReuse,
)
from hotrec.planner.machine import Machine
from hotrec.planner.situation import TableShape, build_situation
from hotrec.types import Feature, Schema, Table, TableOutput


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


@pytest.mark.parametrize("is_shuffled", [False, True])
def test_urgent_rows_as_counted(is_shuffled: bool) -> None:
    """On two ranks, whose batches are small; predicted from a profile and one rank's batches."""
    batch_size, num_batches = 8, 60
    log = drifting_log(2 * batch_size * num_batches)
    if is_shuffled:
        log = log.at(np.random.default_rng(2).permutation(log.num_samples))
    of_ranks = [log.at(np.arange(rank, log.num_samples, 2)) for rank in range(2)]
    ranks, profile = [list(of.pieces(batch_size)) for of in of_ranks], count_rows([log], TWO)
    meter = ReuseMeter(TWO)
    for block in ranks[0]:
        meter.observe(block)
    measured: Any = meter.localities(), meter.reuse()
    on_two = Machine(2, 2, "cpu", 0, 1 << 30, batch_size)
    histograms = {name: build_histogram(counts) for name, counts in profile.counts.items()}
    facts = histograms, profile.num_samples
    names = "items", "users"
    rows = [
        [{(name, row) for name in names for row in rows_of(block, name)} for block in of_rank]
        for of_rank in ranks
    ]
    shares = [
        len(rows[0][step] & (rows[0][step - 1] | rows[1][step - 1])) / len(rows[0][step])
        for step in range(1, num_batches)
    ]
    shapes = [TableShape(name, 4, 16, 1, TableOutput.expanded) for name in names]
    work, costs = Workload(batch_size, 0.0, 0.0, 0), (BUILTIN["cpu_1gbit"], None)
    demands = build_situation(shapes, work, *facts, on_two, costs, *measured).demands
    num_rows = sum(expected_distinct(demand)[1] for demand in demands)
    assert num_rows == pytest.approx(np.mean([len(of) for of in rows[0]]), rel=0.05)
    num_urgent = sum(expected_urgent(demand) for demand in demands)
    assert num_urgent / num_rows == pytest.approx(np.mean(shares), abs=0.1)
