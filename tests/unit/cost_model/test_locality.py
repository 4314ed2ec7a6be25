import numpy as np
import pytest

from hotrec.cost_model.blocks import Block
from hotrec.cost_model.demand import expected_distinct, prob_drawn
from hotrec.cost_model.histogram import build_histogram
from hotrec.cost_model.locality import TableLocality, effective_draws, step_draws
from hotrec.cost_model.profile import count_rows
from hotrec.types import Feature, Schema, Table
from tests.unit.cost_model.samples import make_demand

NUM_ROWS = 4096
ONE = Schema((), (Feature("a", "t"),), (Table("t", NUM_ROWS),))


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


def test_what_may_be_noise_is_no_locality():
    # Two standard errors are one row, with 4 batches of spread 1.
    near, far = (with_ratios(ZIPF, {256: 1.0}, error=error) for error in (-0.99, -2.0))
    assert effective_draws(ZIPF, near, 256, 1.0) == 256
    assert effective_draws(ZIPF, far, 256, 1.0) < 256
    more = with_ratios(ZIPF, {256: 1.0}, error=-0.99, num_batches=16)
    assert effective_draws(ZIPF, more, 256, 1.0) < 256


def test_all_ranks_draw_no_less_than_one():
    falling = with_ratios(ZIPF, {1024: 1.0, 2048: 0.3})
    for batch_size, world_size, expected in ((1024, 2, 1024), (2048, 1, 0.3 * 2048)):
        draws = step_draws(
            ZIPF, falling, batch_size=batch_size, world_size=world_size, lookups_per_sample=1.0
        )
        assert draws == pytest.approx((expected,) * 2, rel=1e-4)
