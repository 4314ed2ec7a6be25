import itertools
import math

import numpy as np
import pytest

from hotrec.cost_model import locality
from hotrec.cost_model.blocks import Block, take_bags
from hotrec.cost_model.demand import expected_distinct, prob_drawn
from hotrec.cost_model.histogram import build_histogram
from hotrec.cost_model.locality import (
    LocalityMeter,
    TableLocality,
    count_distinct,
    effective_draws,
    step_draws,
)
from hotrec.cost_model.profile import Sampling, count_rows
from hotrec.types import Feature, Schema, Table
from tests.unit.cost_model.samples import (
    SCHEMA,
    as_lists,
    count_slowly,
    cut,
    make_demand,
    make_samples,
)

NUM_ROWS = 4096
ONE = Schema((), (Feature("a", "t"),), (Table("t", NUM_ROWS),))
TWO = Schema((), (Feature("a", "t"), Feature("b", "t")), (Table("t", NUM_ROWS),))


def zipf_rows(rng, size):
    probs = 1 / np.arange(1, NUM_ROWS + 1)
    return rng.choice(NUM_ROWS, size, p=probs / probs.sum()).astype(np.int32)


def profile_of(blocks, schema=ONE, **options):
    num_samples = sum(block.num_samples for block in blocks)
    return count_rows(blocks, schema, num_samples=num_samples, **options)


def draws_of(profile, batch_size, lookups_per_sample=1.0):
    histogram = profile.build_histograms()["t"]
    return effective_draws(histogram, profile.locality["t"], batch_size, lookups_per_sample)


def test_independent_lookups_count_as_they_are():
    rng = np.random.default_rng(0)
    profile = profile_of([Block(8192, {"a": zipf_rows(rng, 8192)}) for _ in range(8)])
    assert profile.locality["t"].batch_sizes[-1] == 8192
    for batch_size in (64, 256, 1000, 8192):
        assert draws_of(profile, batch_size) == pytest.approx(batch_size, rel=0.02)


def test_blocks_with_rows_of_their_own():
    """Each of 4 blocks reads 512 rows of its own 8 times: as many as fewer lookups of all rows."""
    rng = np.random.default_rng(1)
    size, num_own, count = 4096, 512, 8
    blocks = [
        Block(size, {"a": rng.permutation(np.tile(np.arange(num_own) + i * num_own, count))})
        for i in range(4)
    ]
    profile = profile_of(blocks)
    for batch_size in (256, 1024):
        read = num_own * prob_drawn(np.array([8.0]), size, batch_size)[0]
        # 4 x 512 (1 - (1 - n / K)^8) rows are read by n independent draws of the K lookups.
        expected = 4 * size * (1 - (1 - read / (4 * num_own)) ** (1 / count))
        assert expected < 0.9 * batch_size
        assert draws_of(profile, batch_size) == pytest.approx(expected, rel=0.03)
        num_draws = (draws_of(profile, batch_size),) * 2
        demand = make_demand(profile.counts["t"], batch_size=batch_size, num_draws=num_draws)
        assert expected_distinct(demand)[1] == pytest.approx(read, rel=0.02)


def test_features_that_share_a_table_count_their_union():
    """Two features that read the same ids: half of the lookups count."""
    rng = np.random.default_rng(2)
    blocks = []
    for _ in range(4):
        rows = zipf_rows(rng, 8192)
        blocks.append(Block(8192, {"a": rows, "b": rows}))
    profile = profile_of(blocks, TWO)
    assert profile.locality["t"].lookups[0] == 128
    num_lookups = 2 * 4 * 8192
    for batch_size in (128, 1024, 4096):
        # (1 - n / K)^(2 s) = (1 - B / N)^s for a row in s samples
        expected = num_lookups * (1 - math.sqrt(1 - batch_size / (4 * 8192)))
        assert draws_of(profile, batch_size, 2.0) == pytest.approx(expected, rel=0.03)


def test_bags_and_empty_bags_by_the_loop():
    """A draw of a whole block reads what the block reads."""
    block = make_samples(64)
    meter = LocalityMeter(SCHEMA, seed=0)
    meter.observe(block, num_counted=64)
    counts = count_slowly(as_lists(block))
    for table, found in meter.localities().items():
        assert found.batch_sizes == (64,)
        assert found.lookups == (sum(counts[table]),)
        assert found.mean == (np.count_nonzero(counts[table]),)
        assert found.spread == (0.0,)


def test_bags_of_some_samples():
    block = make_samples(50, seed=3)
    chosen = np.array([7, 0, 49, 31])
    bags = as_lists(block)
    for name in block.rows:
        rows, offsets = take_bags(block, name, chosen)
        found = [rows[first:last].tolist() for first, last in itertools.pairwise(offsets)]
        assert found == [bags[i][name] for i in chosen]


def test_a_table_that_no_batch_reads():
    empty = np.zeros(128, np.int32)
    schema = Schema(
        (),
        (Feature("a", "t"), Feature("tags", "tags", is_multi_hot=True)),
        (Table("t", NUM_ROWS), Table("tags", 3)),
    )
    block = Block(128, {"a": np.arange(128), "tags": np.empty(0, np.int64)}, {"tags": empty})
    profile = profile_of([block], schema)
    assert profile.locality["tags"].mean == (0.0, 0.0)
    unread = profile.build_histograms()["tags"]
    assert effective_draws(unread, profile.locality["tags"], 64, 0.0) == 0.0
    # Read by the data, if so seldom that no drawn batch met it.
    seldom = build_histogram(np.array([1, 0, 0]))
    assert effective_draws(seldom, profile.locality["tags"], 64, 0.01) == pytest.approx(0.64)


@pytest.mark.parametrize("num_rows", [10, 100_000])
def test_distinct_rows_by_marking_and_by_sorting(num_rows):
    rng = np.random.default_rng(4)
    parts = [rng.integers(0, num_rows, size) for size in (500, 0, 70)]
    assert count_distinct(parts, num_rows) == len(set(np.concatenate(parts).tolist()))
    assert count_distinct([parts[1]], num_rows) == 0


def with_ratios(histogram, ratios, *, num_batches=4, error=0.0):
    """Batches that read what so many draws per lookup read, off by ``error`` rows."""
    counts = histogram.values.astype(float)
    return TableLocality(
        batch_sizes=tuple(ratios),
        num_batches=(num_batches,) * len(ratios),
        lookups=tuple(map(float, ratios)),
        mean=tuple(
            float(histogram.num_rows @ prob_drawn(counts, histogram.num_lookups, size * ratio))
            + error
            for size, ratio in ratios.items()
        ),
        spread=(0.0 if error == 0 else 1.0,) * len(ratios),
    )


ZIPF = build_histogram((100_000 / np.arange(1, 5001)).astype(np.int64))


def test_between_the_measured_batches_and_beyond():
    found = with_ratios(ZIPF, {64: 0.5, 1024: 0.8, 4096: 1.3})
    ratios = {1: 0.5, 64: 0.5, 256: math.sqrt(0.5 * 0.8), 1024: 0.8, 2048: math.sqrt(0.8 * 1.3)}
    for size, ratio in {**ratios, 4096: 1.3, 1 << 20: 1.3}.items():
        assert effective_draws(ZIPF, found, size, 3.0) == pytest.approx(3 * size * ratio, rel=1e-4)


def test_without_measurements_lookups_are_independent():
    draws = step_draws(ZIPF, None, batch_size=100, world_size=4, lookups_per_sample=2.5)
    assert draws == (250.0, 1000.0)
    # Blocks of fewer samples than the smallest batch
    assert count_rows(cut(make_samples(200), 63), SCHEMA).locality == {}


def test_what_may_be_noise_is_no_locality():
    # Two standard errors are one row, with 4 batches of spread 1.
    near, far = (with_ratios(ZIPF, {256: 1.0}, error=error) for error in (-0.99, -2.0))
    assert effective_draws(ZIPF, near, 256, 1.0) == 256
    assert effective_draws(ZIPF, far, 256, 1.0) < 256
    more = with_ratios(ZIPF, {256: 1.0}, error=-0.99, num_batches=16)
    assert effective_draws(ZIPF, more, 256, 1.0) < 256


def test_batches_that_read_all_rows_of_the_profile():
    few = build_histogram(np.array([3, 2, 1]))
    all_read = TableLocality((64,), (4,), (64.0,), (3.0,), (0.0,))
    # They read more than the profile's lookups together: independent draws can only take them all.
    assert effective_draws(few, all_read, 64, 1.0) == pytest.approx(64.0)
    sampled = TableLocality((4,), (4,), (4.0,), (5.0,), (0.0,))
    assert effective_draws(few, sampled, 4, 1.0) == pytest.approx(6.0)


def test_all_ranks_draw_no_less_than_one():
    falling = with_ratios(ZIPF, {1024: 1.0, 2048: 0.3})
    for batch_size, world_size, expected in ((1024, 2, 1024), (2048, 1, 0.3 * 2048)):
        draws = step_draws(
            ZIPF, falling, batch_size=batch_size, world_size=world_size, lookups_per_sample=1.0
        )
        assert draws == pytest.approx((expected,) * 2, rel=1e-4)


def drawn_from(monkeypatch, blocks, *, num_samples):
    """Size of each draw and which block it is of."""
    draws = []
    meter = LocalityMeter(ONE, seed=0, num_samples=num_samples)
    for index, block in enumerate(blocks):

        def record(_, size, index=index):
            draws.append((size, index))

        monkeypatch.setattr(meter, "_draw", record)
        meter.observe(block, num_counted=block.num_samples)
    return draws


def test_draws_are_few_and_spread_over_the_stream(monkeypatch):
    monkeypatch.setattr(locality, "FREE_LOOKUPS", 0)
    blocks = [Block(1 << 14, {"a": np.zeros(1 << 14, np.int32)})] * 40
    total = 40 << 14
    draws = drawn_from(monkeypatch, blocks, num_samples=total)
    sizes = {size for size, _ in draws}
    assert len(sizes) == 1
    assert total / 64 < sum(size for size, _ in draws) <= total / 32
    places = [index for _, index in draws]
    assert len(set(places)) == len(places) >= 4
    assert places[0] < 10
    assert places[-1] >= 30


def test_a_short_stream_is_drawn_from_all_the_same(monkeypatch):
    block = Block(100, {"a": np.zeros(100, np.int32)})
    for num_samples in (100, None):
        draws = drawn_from(monkeypatch, [block], num_samples=num_samples)
        assert {size for size, _ in draws} == {64}
        assert len(draws) >= locality.ENOUGH_BATCHES


def test_a_long_stream_has_a_bounded_number_of_draws():
    blocks = [Block(256, {"a": np.zeros(256, np.int32)})] * 50
    found = count_rows(blocks, ONE).locality["t"]
    assert found.batch_sizes == (64, 128, 256)
    assert found.num_batches[-1] == locality.ENOUGH_BATCHES


def test_draws_depend_on_the_seed_alone():
    rng = np.random.default_rng(6)
    blocks = [Block(4096, {"a": zipf_rows(rng, 4096)}) for _ in range(2)]
    found = [profile_of(blocks, sampling=Sampling(seed=seed)).locality for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]


def test_a_sampled_profile_draws_batches_from_all_samples():
    """Every row is read twice: batches of sampled samples would hardly read one twice."""
    rows = np.tile(np.arange(NUM_ROWS, dtype=np.int32), 2)
    profile = profile_of([Block(rows.size, {"a": rows})], sampling=Sampling(frac=0.25))
    found = profile.locality["t"]
    assert found.batch_sizes[-1] == rows.size
    assert found.mean[-1] == NUM_ROWS
    at = found.batch_sizes.index(2048)
    expected = NUM_ROWS * prob_drawn(np.array([2.0]), rows.size, 2048)[0]
    assert found.mean[at] == pytest.approx(expected, rel=0.02)


def test_held_out_batches_are_measured_apart():
    rng = np.random.default_rng(7)
    few = Block(2048, {"a": rng.integers(0, 5, 2048)})
    profile = profile_of(
        [Block(4096, {"a": zipf_rows(rng, 4096)})], heldout_blocks=[few], num_heldout_samples=2048
    )
    assert profile.heldout_locality["t"].mean[0] == 5.0
    assert profile.locality["t"].mean[0] > 20
    cut_off = profile_of([Block(4096, {"a": np.repeat([0, 1], [3072, 1024])})], heldout_frac=0.25)
    assert cut_off.locality["t"].mean[0] == 1.0
    assert cut_off.heldout_locality["t"].mean[0] == 1.0
    assert cut_off.heldout_locality["t"].batch_sizes[-1] == 1024


def test_a_sampled_profile_draws_a_share_of_what_it_counts(monkeypatch):
    monkeypatch.setattr(locality, "FREE_LOOKUPS", 0)
    block = Block(1 << 16, {"a": np.zeros(1 << 16, np.int32)})
    profile = profile_of([block] * 4, sampling=Sampling(frac=0.25))
    found = profile.locality["t"]
    # A 32nd of 65,536 counted samples, in four draws; the last may be missed by a few samples.
    assert found.batch_sizes[-1] == 512
    assert found.num_batches[-1] in (3, 4)
