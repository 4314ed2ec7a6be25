"""The urgent rows of streams in two orders: predicted from a profile, and counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.yambda_like import Catalogue, HistoryRule, Log, listens_of, read
from hotrec.cost_model.blocks import Block
from hotrec.cost_model.builtin import BUILTIN
from hotrec.cost_model.demand import expected_distinct, expected_urgent
from hotrec.cost_model.forms import Workload
from hotrec.cost_model.histogram import build_histogram
from hotrec.cost_model.profile import count_rows
from hotrec.cost_model.reuse import (
    DEPTHS,
    ENOUGH_BATCHES,
    LogReuse,
    ReuseMeter,
    TableReuse,
    excess_reuse,
    reuses_from_json,
    reuses_to_json,
    urgent_frac,
)
from hotrec.planner.machine import Machine
from hotrec.planner.situation import TableShape, build_situation, urgent_by_depth
from hotrec.types import Feature, Rows, Schema, Table, TableOutput
from tests.unit.cost_model import samples

SCHEMA = Schema(
    dense=(),
    features=(Feature("history", "items", is_multi_hot=True), Feature("target", "items")),
    tables=(Table("items", 100),),
)


def batch_of(*ids: int) -> Block:
    """A sample with a history of all ids but the last."""
    rows = {"history": np.array(ids[:-1], np.int64), "target": np.array(ids[-1:])}
    return Block(1, rows, {"history": np.array([len(ids) - 1], np.int32)})


def reuse_of(batches: list[Block], schema: Schema = SCHEMA) -> dict[str, TableReuse]:
    meter = ReuseMeter(schema)
    for batch in batches:
        meter.observe(batch)
    return meter.reuse()


def test_by_hand() -> None:
    batches = [batch_of(1, 1, 2), batch_of(2, 3, 4), batch_of(1, 4), batch_of(7, 2)]
    # One batch before: 2 of 3; 4 of 2; none of 2. Two before, from the third on: 1, 4; 2.
    expected = TableReuse(1, (2 / 7, 3 / 4))
    assert reuse_of(batches) == {"items": expected}
    assert reuse_of(batches[:1]) == {}
    assert expected.at(2**0.5) == pytest.approx((2 / 7 + 3 / 4) / 2)
    assert (expected.at(1), expected.at(64)) == (2 / 7, 3 / 4)
    assert reuses_from_json(reuses_to_json({"items": expected})) == {"items": expected}
    assert reuse_of([batch_of(1)] * (ENOUGH_BATCHES + 5))["items"].read_frac == (1.0,) * 5


def test_independent_batches_have_no_excess() -> None:
    counts, probs = samples.zipf(5000, 1.05)
    rng = np.random.default_rng(1)
    schema = Schema((), (Feature("item", "items"),), (Table("items", 5000),))
    batches = [Block(400, {"item": rng.choice(5000, 400, p=probs)}, {}) for _ in range(81)]
    reuse = reuse_of(batches, schema)["items"]
    histogram = build_histogram(counts)
    for depth, share in zip(DEPTHS, reuse.read_frac, strict=True):
        excess = excess_reuse(histogram, 400.0, reuse, 400 * depth)
        assert abs(excess) < 0.02
        assert urgent_frac(histogram, (400.0, 400.0), depth, excess) == pytest.approx(
            share, abs=0.01
        )
    assert excess_reuse(histogram, 400.0, None, 400) == 0


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


def shares_by_hand(batches: list[Block], table: str) -> tuple[float, ...]:
    """The share by depth, from sets of rows."""
    of_table = [feature.name for feature in TWO.features_of(table)]
    sets = [{int(row) for name in of_table for row in b.rows[name]} for b in batches]
    shares = []
    for depth in DEPTHS:
        later = range(depth, len(sets))
        again = [len(sets[at] & set().union(*sets[at - depth : at])) for at in later]
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


def test_shuffled_chunks_have_the_reuse_of_their_samples() -> None:
    log, batch_size = drifting_log(4000), 10
    chunks = list(log.pieces(500))
    meter = LogReuse(TWO, 4000, seed=3, batch_size=batch_size)
    for chunk in chunks:
        meter.observe(chunk)
    in_order, shuffled = meter.reuses()
    rng = np.random.default_rng(8)  # another order than the meter's
    batches = [batch for of in chunks for batch in of.at(rng.permutation(500)).pieces(batch_size)]
    for name in ("items", "users"):
        expected = shares_by_hand(batches, name)
        assert shuffled[name].read_frac == pytest.approx(expected, abs=0.04)
        assert in_order[name].read_frac[0] > expected[0] + 0.1
    again = LogReuse(TWO, 4000, seed=3, batch_size=batch_size)
    for chunk in chunks:
        again.observe(chunk)
    assert again.reuses() == (in_order, shuffled)


def test_the_held_out_part_and_an_empty_log_have_none() -> None:
    log = drifting_log(300)
    options: Any = {"num_samples": 300, "heldout_frac": 0.5}
    profile = count_rows([log], TWO, reuse=LogReuse(TWO, 150, batch_size=5), **options)
    assert profile.reuse["users"].read_frac == shares_by_hand(
        list(log.split(150)[0].pieces(5)), "users"
    )
    assert LogReuse(TWO, 0).reuses() == ({}, {})


@pytest.mark.parametrize(
    ("num_samples", "lookups", "size"), [(50, 4, 1), (4000, 3, 32), (1 << 30, 40, 2048)]
)
def test_batches_of_a_log_are_few(num_samples: int, lookups: int, size: int) -> None:
    meter = LogReuse(SCHEMA, num_samples)
    rows = {"history": np.zeros(300 * (lookups - 1), np.int64), "target": np.zeros(300, np.int64)}
    for _ in range(2 * ENOUGH_BATCHES * size // 300 + 1):
        meter.observe(Block(300, rows, {"history": np.full(300, lookups - 1)}))
    in_order, shuffled = meter.reuses()
    assert in_order["items"].batch_size == shuffled["items"].batch_size == size


def test_batches_of_all_ranks_are_between_those_of_a_log() -> None:
    read_frac = (0.1, 0.2, 0.3, 0.4, 0.5)
    assert TableReuse(16, read_frac).num_between(32, 4) == 32
    assert TableReuse(16, read_frac, is_of_log=True).num_between(32, 4) == 128


LOG = Log(Catalogue(frac=0.02), num_users=20_000)
RULE = HistoryRule(per_pool=60, max_events=2000)
BATCH, NUM_BATCHES, DAY = 4, 40, 200


def stream(*, is_shuffled: bool, rank: int = 0, num_ranks: int = 1) -> list[Rows]:
    """The items of this rank's batches of a day, by user or in random order."""
    step, num = BATCH * num_ranks, BATCH * num_ranks * NUM_BATCHES
    users = iter(range(100, LOG.num_users))
    listens = listens_of(LOG, DAY, users, 8 * num if is_shuffled else num)
    if is_shuffled:
        listens = np.random.default_rng(2).permutation(listens)[:num]
    parts = [listens[at + rank : at + step : num_ranks] for at in range(0, num, step)]
    return [read(LOG, part, RULE).item_ids for part in parts]


@pytest.mark.parametrize("is_shuffled", [False, True])
def test_urgent_rows_by_depth_as_counted(is_shuffled: bool) -> None:
    num_items = LOG.catalogue.album_id_of.size
    feature = Feature("item", "items", is_multi_hot=True)
    schema = Schema((), (feature,), (Table("items", num_items),))
    ranks = [stream(is_shuffled=is_shuffled, rank=rank, num_ranks=2) for rank in range(2)]

    def blocks(of_rank: list[Rows]) -> list[Block]:
        # How the ids are distributed over the samples does not matter here.
        lengths = [np.diff(np.linspace(0, ids.size, BATCH + 1).astype(np.int32)) for ids in of_rank]
        return [
            Block(BATCH, {"item": ids}, {"item": of})
            for ids, of in zip(of_rank, lengths, strict=True)
        ]

    profile = count_rows([block for of in ranks for block in blocks(of)], schema)
    histogram = build_histogram(profile.counts["items"])
    meter = ReuseMeter(schema)
    for block in blocks(ranks[0]):
        meter.observe(block)
    reuse, locality = meter.reuse()["items"], meter.localities()["items"]
    assert profile.locality == {}  # of such small batches
    distinct = [np.unique(ids).size for ids in ranks[0]]
    assert (locality.batch_sizes, locality.num_batches) == ((BATCH,), (NUM_BATCHES,))
    assert locality.mean == (np.mean(distinct),)
    assert locality.spread == pytest.approx((np.std(distinct, ddof=1),))
    on_two = Machine(2, 2, "cpu", 0, 1 << 30, BATCH)
    facts = {"items": histogram}, profile.num_samples
    measured: Any = {"items": locality}, {"items": reuse}
    by_depth = urgent_by_depth(*facts, on_two, *measured)
    found = []
    for depth in (1, 4, 16):
        shares = []
        for step in range(depth, NUM_BATCHES):
            before = np.concatenate([of[at] for of in ranks for at in range(step - depth, step)])
            shares.append(np.isin(np.unique(ranks[0][step]), before).mean())
        assert by_depth[depth] == pytest.approx(np.mean(shares), abs=0.1), depth
        found.append(float(np.mean(shares)))
    shape = TableShape("items", 4, 16, 1, TableOutput.expanded)
    work, costs = Workload(BATCH, 0.0, 0.0, 0), (BUILTIN["cpu_1gbit"], None)
    [demand] = build_situation([shape], work, *facts, on_two, costs, *measured).demands
    _, num_rows, _ = expected_distinct(demand)
    assert num_rows == pytest.approx(np.mean(distinct), rel=0.05)
    assert expected_urgent(demand) / num_rows == pytest.approx(by_depth[1], abs=1e-3)
    if is_shuffled:  # deeper look-ahead has fewer rows to fetch early
        assert found[0] < 0.2 < found[2] - found[0]
    else:  # what a batch does not share with the one before, it shares with none
        assert found[0] > 0.75
        assert found[2] - found[0] < 0.1
