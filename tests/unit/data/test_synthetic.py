import numpy as np
import pytest

from hotrec.config.data import SyntheticSpec
from hotrec.data.chunks import Dataset, Jagged
from hotrec.data.synthetic import SyntheticLog, write_synthetic


def small(**settings) -> SyntheticSpec:
    defaults = {
        "num_rows": [200, 50],
        "num_dense": 4,
        "num_train": 30_000,
        "rows_per_chunk": 8_000,
    }
    return SyntheticSpec(**{**defaults, **settings})


def rows_of(path, feature: str, split: str = "train") -> np.ndarray:
    dataset = Dataset.open(path)
    blocks = (dataset.block(split, at).features for at in range(len(dataset.chunks(split))))
    return np.concatenate([getattr(of[feature], "values", of[feature]) for of in blocks])


def test_the_same_specification_gives_the_same_dataset(tmp_path):
    spec = small(mean_lengths=[1, 2.5], num_periods=3, drift_frac=0.2, num_valid=500)
    first = write_synthetic(spec, tmp_path / "a")
    second = write_synthetic(spec, tmp_path / "b")
    spec.seed = 1
    third = write_synthetic(spec, tmp_path / "c")
    assert first.content_hash == second.content_hash != third.content_hash


def test_popularity_is_zipf_and_the_hot_rows_are_those_recorded(tmp_path):
    write_synthetic(small(zipf_exponent=1.2), tmp_path / "d")
    counts = np.bincount(rows_of(tmp_path / "d", "c0"), minlength=200)
    recorded = np.load(tmp_path / "d" / "popularity" / "t0.npy")[0][:20]
    share = np.arange(1, 200.0) ** -1.2
    expected = (share / share.sum() * counts.sum())[:20]
    # Four standard deviations of a count, for the first 20 of the ranks that are recorded.
    assert (np.abs(counts[recorded] - expected) < 4 * np.sqrt(expected)).all()
    assert counts[0] == 0
    # Both halves of the table serve lookups, so row-wise shards are balanced, unless asked.
    assert 4 <= (recorded < 100).sum() <= 16
    write_synthetic(small(rows_by_popularity=True), tmp_path / "b")
    assert [*np.load(tmp_path / "b" / "popularity" / "t0.npy")[0]] == [*range(1, 200)]


def test_periods_are_the_days_of_the_samples(tmp_path):
    spec = small(num_train=70, num_valid=20, num_test=10, num_periods=4)
    days = write_synthetic(spec, tmp_path / "d").content["source"]["days"]
    assert [(day["day"], day["train"], day["valid"], day["test"]) for day in days] == [
        ("period 0", 25, 0, 0), ("period 1", 25, 0, 0),
        ("period 2", 20, 5, 0), ("period 3", 0, 15, 10),
    ]  # fmt: skip


def test_drift_replaces_the_share_of_rows_that_was_asked_for(tmp_path):
    spec = small(num_rows=[1001], num_periods=3, drift_frac=0.2)
    write_synthetic(spec, tmp_path / "d")
    ranks = np.load(tmp_path / "d" / "popularity" / "t0.npy")
    assert (ranks[0] != ranks[1]).sum() == 200
    assert (ranks[1] != ranks[2]).sum() == 200
    assert all(sorted(period) == list(range(1, 1001)) for period in ranks)
    rows = rows_of(tmp_path / "d", "c0")
    for period in range(3):
        counts = np.bincount(rows[period * 10_000 : (period + 1) * 10_000], minlength=1001)
        assert np.argmax(counts) == ranks[period][0]


def test_lengths_of_bags_have_the_mean_that_was_asked_for(tmp_path):
    spec = small(mean_lengths=[1, 2.5])
    write_synthetic(spec, tmp_path / "d")
    dataset = Dataset.open(tmp_path / "d")
    assert [feature.is_multi_hot for feature in dataset.schema.features] == [False, True]
    bags = dataset.block("train", 0).features["c1"]
    assert isinstance(bags, Jagged)
    lengths = np.diff(bags.offsets)
    assert lengths.mean() == pytest.approx(2.5, abs=0.1)
    assert (lengths == 0).any()


def test_labels_have_the_click_rate_and_can_be_learned():
    log = SyntheticLog(small(signal=2.0))
    blocks = [block for _, block in log.blocks()]
    labels = np.concatenate([block.label for block in blocks])
    assert labels.mean() == pytest.approx(0.25, abs=0.04)
    # The best guess from each row's click rate alone must be far better than chance.
    rows = np.concatenate([block.features["c1"] for block in blocks])
    half = labels.size // 2
    clicks = np.bincount(rows[:half], labels[:half], minlength=50)
    rates = (clicks + 0.3) / (np.bincount(rows[:half], minlength=50) + 1)
    scores = rates[rows[half:]]
    clicked, ignored = scores[labels[half:] == 1], scores[labels[half:] == 0]
    rng = np.random.default_rng(0)
    pairs = rng.choice(clicked, 20_000) - rng.choice(ignored, 20_000)
    assert (pairs > 0).mean() + (pairs == 0).mean() / 2 > 0.65
