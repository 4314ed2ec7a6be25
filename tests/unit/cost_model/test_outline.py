"""A profile drawn from an outline: its schema and its counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hotrec.config.data import OutlineSpec, OutlineTableSpec
from hotrec.cost_model.outline import write_outline
from hotrec.cost_model.profile import Sampling, read_profile
from hotrec.data.chunks import Dataset

NUM_TRAIN = 400_000
SKEWED, UNIFORM, ONE_ROW = (1000, 1.2), (50, 0.0), (1, 1.0)
SAMPLED = Sampling(frac=0.25, seed=3, min_count=2)


def outline(**tables: tuple[int, float]) -> OutlineSpec:
    return OutlineSpec("a test", NUM_TRAIN, 2, {n: OutlineTableSpec(*t) for n, t in tables.items()})


def test_counts_are_those_of_so_many_samples(tmp_path: Path) -> None:
    spec = outline(skewed=SKEWED, uniform=UNIFORM, single=ONE_ROW)
    write_outline(spec, tmp_path / "dataset", tmp_path / "profile", SAMPLED)
    dataset = Dataset.open(tmp_path / "dataset")
    profile, artifact = read_profile(tmp_path / "profile")
    assert artifact.made_from == {"dataset": dataset.artifact.content_hash}
    assert dataset.schema.dense == ("I1", "I2")
    assert dataset.schema.feature_names == ("skewed", "uniform", "single")
    assert dataset.num_samples("train") == 0
    drawn = NUM_TRAIN // 4
    assert (profile.num_samples, profile.num_total_samples) == (drawn, NUM_TRAIN)
    assert profile.sampling == SAMPLED
    for counts in profile.counts.values():
        assert counts.sum() == pytest.approx(drawn, rel=0.02)
    weights = np.arange(1, SKEWED[0] + 1) ** -SKEWED[1]
    by_rank = np.sort(profile.counts["skewed"])[::-1]
    assert by_rank[:10] == pytest.approx(drawn * weights[:10] / weights.sum(), rel=0.1)
    assert profile.counts["uniform"] == pytest.approx(drawn / 50, rel=0.15)
