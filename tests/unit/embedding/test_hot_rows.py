"""The replica of one rank alone: lookup, gradient, touched rows, and its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.embedding.hot_rows import HotReplicas
from hotrec.embedding.optimizers import HotOptimizer
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.types import HotExchange, OptimizerKind

NUM_ROWS = [7, 1, 5]
NUM_HOT = sum(NUM_ROWS)
DIM = 8

pytestmark = pytest.mark.usefixtures("one_rank")


def bucket(tensor: torch.Tensor) -> Any:
    """What the hook needs of ``dist.GradBucket``."""
    return SimpleNamespace(buffer=lambda: tensor, index=lambda: 0)


def make_replicas(
    exchange: HotExchange = HotExchange.touched_rows, device: str = "cpu"
) -> HotReplicas:
    values = torch.randn(NUM_HOT * DIM, generator=torch.Generator().manual_seed(0))
    weight = nn.Parameter(values.to(device))
    return HotReplicas(weight, NUM_ROWS, DIM, dist.group.WORLD, exchange)


def make_optimizer(kind: OptimizerKind, replicas: HotReplicas) -> HotOptimizer:
    names = [f"e.{table}.weight" for table in ("a", "b", "c")]
    return HotOptimizer({"e.": replicas}, {"e.": names}, OptimizerSpec(kind, 0.1, eps=1e-3))


def ids_of(*slots: list[int]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=["a", "b", "c"],
        values=torch.tensor([slot for table in slots for slot in table], dtype=torch.int64),
        lengths=torch.tensor([len(table) for table in slots]),
    )


def backward(replicas: HotReplicas, *slots: list[int], factor: float = 1.0) -> torch.Tensor:
    """Forward, backward, and the hook that DDP would call; returns the rows' gradient."""
    rows = replicas(ids_of(*slots))
    grad = torch.randn(rows.shape, generator=torch.Generator().manual_seed(len(rows))) * factor
    rows.backward(grad)
    assert replicas.weight.grad is not None
    replicas.reduce_gradient(None, bucket(replicas.weight.grad))
    return grad


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


def test_zero_grad_drops_a_step_that_was_skipped() -> None:
    """As torch's optimizers do: backward, see a NaN, zero_grad, go on."""
    skipped, plain = make_replicas(), make_replicas()
    optimizers = [make_optimizer(OptimizerKind.sgd, replicas) for replicas in (skipped, plain)]
    backward(skipped, [6, 0], [], [], factor=float("nan"))
    optimizers[0].zero_grad()
    optimizers[0].step()
    assert torch.equal(skipped.rows, plain.rows)
    for replicas, optimizer in zip((skipped, plain), optimizers, strict=True):
        backward(replicas, [0, 2], [], [])
        optimizer.step()
    assert torch.equal(skipped.rows, plain.rows)


def test_zero_grad_drops_a_reduced_gradient() -> None:
    replicas = make_replicas()
    optimizer, before = make_optimizer(OptimizerKind.sgd, replicas), replicas.rows.clone()
    replicas.set_reduced(torch.tensor([3]), torch.ones(1, DIM))
    with pytest.raises(RuntimeError, match="dimension 8: expected an optimizer step before"):
        replicas.set_reduced(torch.tensor([3]), torch.ones(1, DIM))
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(replicas.rows, before)
