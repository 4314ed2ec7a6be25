"""Replicas of hot rows that differ are seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hotrec.embedding.hot_rows import HotReplicas

NUM_ROWS = [7, 1, 5]
DIM = 8

pytestmark = pytest.mark.usefixtures("one_rank")


def make_replicas() -> HotReplicas:
    values = torch.randn(sum(NUM_ROWS) * DIM, generator=torch.Generator().manual_seed(0))
    return HotReplicas(nn.Parameter(values), NUM_ROWS, DIM, dist.group.WORLD)


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda rows: rows[3, 2].add_(1e-6),
        lambda rows: rows.copy_(rows.flip(0)),
        lambda rows: rows[[0, 1]].copy_(rows[[1, 0]]),
        lambda rows: rows[0].neg_(),
        lambda rows: rows[5].fill_(float("nan")),
    ],
)
def test_checksum_sees_a_change(corrupt: Callable[[torch.Tensor], torch.Tensor]) -> None:
    replicas = make_replicas()
    before = replicas.checksum()
    assert replicas.checksum() == before
    changed = replicas.rows.clone()
    corrupt(changed)
    is_changed = not torch.equal(changed, replicas.rows)
    replicas.rows.copy_(changed)
    assert (replicas.checksum() != before) == is_changed


@pytest.mark.parametrize("differing", [[], [2], [1, 2]])
def test_a_rank_whose_replica_differs_ends_the_run(
    differing: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas = make_replicas()
    replicas._world_size = 3

    def gather(sums: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup) -> None:
        sums.copy_(mine.expand(3))
        sums[differing] += 1

    monkeypatch.setattr(dist, "all_gather_into_tensor", gather)
    if not differing:
        replicas.check_equal()
        return
    with pytest.raises(RuntimeError, match=f"hot replicas of dimension {DIM}: expected equal"):
        replicas.check_equal()
