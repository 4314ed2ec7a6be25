"""What ``auto`` takes for models whose features cannot be read ahead, and what checks a batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hotrec
from hotrec.program.feed import factor_of
from hotrec.runtime.ranks import Ranks
from hotrec.types import Partition, PipelineKind
from tests.distributed.programs import ROWS, Model, make_batch
from tests.distributed.test_program_forms import Computing, Guarded, Twice

RULE = partial(torch.optim.SGD, lr=0.1)
SOME = Partition(ROWS, {"user": np.arange(5)})


def chosen(make: Callable[[], nn.Module], hot: Any, rule: Any = RULE, **of: Any) -> hotrec.Choice:
    model, _ = hotrec.parallelize(make(), hot, embedding_optimizer=rule, dense_optimizer=RULE, **of)
    return hotrec.choice_of(model)


@pytest.mark.parametrize("make", [Guarded, Computing, Twice])
def test_auto_takes_base_where_features_cannot_be_read_ahead(
    one_rank: Ranks, make: Callable[[], nn.Module]
) -> None:
    counted = hotrec.profile([make_batch(0)], make())
    for batch_size in (24, 1 << 14):
        assert chosen(make, SOME, batch_size=batch_size).pipeline is PipelineKind.base
        for may_decline in (True, False):
            choice = chosen(make, counted, batch_size=batch_size, may_decline=may_decline)
            assert choice.pipeline is PipelineKind.base


def test_auto_reads_features_ahead_for_torchrecs_plans(one_rank: Ranks) -> None:
    counted = hotrec.profile([make_batch(0)], Model())
    choice = chosen(Model, counted, batch_size=24)
    in_line = PipelineKind.base if choice.plan.is_hotrec else PipelineKind.sparse_dist
    assert choice.pipeline is in_line


@pytest.mark.parametrize("pipeline", ["auto", "base", "sparse_dist"])
def test_auto_splits_tables_for_adam_on_a_cpu(one_rank: Ranks, pipeline: str) -> None:
    """FBGEMM, which updates tables that TorchRec shards, has no Adam there."""
    counted, adam = hotrec.profile([make_batch(0)], Model()), partial(torch.optim.Adam, lr=0.1)
    assert chosen(Model, counted, adam, pipeline=pipeline).plan.is_hotrec


def test_the_mean_of_weighted_means_is_that_of_all_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes, values = [3, 0, 7], np.arange(10.0)
    means = [values[:3].mean(), 0.0, values[3:].mean()]
    factors = []
    for rank in range(3):
        monkeypatch.setattr("hotrec.program.feed.rank", lambda rank=rank: rank)
        factors.append(factor_of(sizes, [3 * size for size in sizes]))
        assert factor_of([5, 5, 5], [2, 2, 2]) == factor_of([0, 0, 0]) == 1.0
        assert factor_of([5, -1, 7], [9, -1, 7]) is None
        with pytest.raises(ValueError, match=r"\[3, 0, 7\] .* \[5, 5, 5\]"):
            factor_of(sizes, [5, 5, 5])
    assert np.mean(np.multiply(factors, means)) == pytest.approx(values.mean())
