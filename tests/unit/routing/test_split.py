"""Parts of a routed batch, pooled, are the batch's bags."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.embedding.pooling import pool_rows
from hotrec.routing.features import Column
from hotrec.routing.router import Router
from hotrec.routing.split import select_samples
from hotrec.types import Partition

COLUMNS = {
    4: [Column("f0", "f0", "a", False), Column("f1", "f1", "a", True), Column("g", "g", "b", False)]
}
PARTITION = Partition({"a": 6, "b": 3}, {"a": np.array([4, 1]), "b": np.array([0])})


def _features(rng: np.random.Generator, batch_size: int, *, weighted: bool) -> KeyedJaggedTensor:
    lengths = rng.integers(0, 4, 3 * batch_size)
    limits = np.repeat([6, 6, 3], batch_size)
    ids = [rng.integers(0, limit, n) for n, limit in zip(lengths, limits, strict=True)]
    values = np.concatenate([*ids, np.empty(0, np.int64)]).astype(np.int64)
    return KeyedJaggedTensor(
        keys=["f0", "f1", "g"],
        values=torch.from_numpy(values),
        lengths=torch.from_numpy(lengths.astype(np.int32)),
        weights=torch.from_numpy(rng.uniform(0.5, 2, values.size)) if weighted else None,
    )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("batch_size", [1, 9])
def test_parts_pool_as_the_whole_does_both_ways(batch_size: int, weighted: bool) -> None:
    rng = np.random.default_rng(batch_size)
    for _ in range(20):
        routed = Router(COLUMNS, PARTITION)(_features(rng, batch_size, weighted=weighted))
        num_rows = routed.groups[0].rows.values().numel()
        rows = torch.randn(num_rows, 4, requires_grad=True)
        whole = pool_rows(rows, routed.groups[0], 3)
        upstream = torch.randn_like(whole)
        (expected,) = torch.autograd.grad(whole, rows, upstream)
        is_first = torch.from_numpy(rng.integers(0, 2, batch_size).astype(bool))
        total = torch.zeros_like(rows)
        for chosen in (is_first, ~is_first):
            samples = chosen.nonzero()[:, 0]
            part = select_samples(routed, samples, [3])
            assert part.batch_size == samples.numel()
            pooled = pool_rows(rows, part.groups[0], 3)
            assert torch.equal(pooled, whole[samples])
            total += torch.autograd.grad(pooled, rows, upstream[samples])[0]
        torch.testing.assert_close(total, expected)
