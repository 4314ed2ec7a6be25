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
from hotrec.types import OptimizerKind

NUM_ROWS = [7, 1, 5]
NUM_HOT = sum(NUM_ROWS)
DIM = 8

pytestmark = pytest.mark.usefixtures("one_rank")
every_kind = pytest.mark.parametrize("kind", list(OptimizerKind))


def bucket(tensor: torch.Tensor) -> Any:
    """What the hook needs of ``dist.GradBucket``."""
    return SimpleNamespace(buffer=lambda: tensor, index=lambda: 0)


def make_replicas(device: str = "cpu") -> HotReplicas:
    values = torch.randn(NUM_HOT * DIM, generator=torch.Generator().manual_seed(0))
    weight = nn.Parameter(values.to(device))
    return HotReplicas(weight, NUM_ROWS, DIM, dist.group.WORLD)


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


def test_nothing_updated_is_on_the_device_of_the_rows() -> None:
    """Else clearing the gradient of a replica on CUDA mixes devices in the second step."""
    replicas = make_replicas(device="meta")
    replicas.weight.grad = torch.zeros_like(replicas.weight)
    assert replicas.take_updated().device == replicas.weight.device
    replicas.drop_gradient()


def test_lookup_and_gradient_equal_autograd() -> None:
    replicas = make_replicas()
    plain = nn.Parameter(replicas.rows.clone())
    rows = replicas(ids_of([6, 0, 3], [0], [4]))
    expected = plain[torch.tensor([6, 0, 3, 7, 12])]
    assert torch.equal(rows, expected)
    grad = torch.randn(rows.shape, generator=torch.Generator().manual_seed(5))
    for _ in range(2):  # gradients add up, as autograd's do
        rows.backward(grad, retain_graph=True)
        expected.backward(grad, retain_graph=True)
        assert replicas.weight.grad is not None
        assert torch.equal(replicas.weight.grad.view(-1, DIM), plain.grad)  # type: ignore[arg-type]


def test_touched_rows_are_reported_once() -> None:
    replicas = make_replicas()
    backward(replicas, [6, 0], [0], [4])
    assert replicas.take_updated().sort().values.tolist() == [0, 6, 7, 12]
    assert replicas.take_updated().tolist() == []
    with torch.no_grad():
        replicas(ids_of([1], [], []))  # an evaluation pass touches nothing
    backward(replicas, [], [], [])
    assert replicas.take_updated().tolist() == []
    backward(replicas, [6, 0], [], [])  # two backward passes before a step
    backward(replicas, [0, 2], [], [1])
    assert replicas.take_updated().sort().values.tolist() == [0, 2, 6, 9]


def test_a_bucket_of_another_size_is_refused() -> None:
    replicas = make_replicas()
    replicas(ids_of([0], [], []))
    with pytest.raises(RuntimeError, match=r"^hot exchange bucket 0: expected the 104 values"):
        replicas.reduce_gradient(None, bucket(torch.zeros(3)))


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


@every_kind
def test_step_moves_touched_rows_and_leaves_a_zero_gradient(kind: OptimizerKind) -> None:
    replicas = make_replicas()
    optimizer = make_optimizer(kind, replicas)
    before = replicas.rows.clone()
    backward(replicas, [6, 0], [0], [4])
    optimizer.step()
    moved = (replicas.rows != before).any(1).nonzero().view(-1).tolist()
    assert moved == [0, 6, 7, 12]
    assert not replicas.weight.grad.any()  # type: ignore[union-attr]
    after = replicas.rows.clone()
    optimizer.step()  # nothing has arrived: momentum alone moves no row
    assert torch.equal(replicas.rows, after)


@every_kind
def test_a_pass_without_backward_moves_nothing(kind: OptimizerKind) -> None:
    """An evaluation outside ``no_grad``, say: rows it reads are not touched by the next step."""
    plain, disturbed = make_replicas(), make_replicas()
    for replicas in (plain, disturbed):
        optimizer = make_optimizer(kind, replicas)
        backward(replicas, [5, 6], [0], [4])
        optimizer.step()
        if replicas is disturbed:
            replicas(ids_of([1, 5], [], [3]))
        backward(replicas, [6], [], [])
        optimizer.step()
    assert torch.equal(plain.rows, disturbed.rows)


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


@every_kind
def test_state_dict_goes_on_bitwise(kind: OptimizerKind) -> None:
    first, second = make_replicas(), make_replicas()
    optimizers = [make_optimizer(kind, replicas) for replicas in (first, second)]
    for step in range(3):
        backward(first, [6, step], [0], [4])
        optimizers[0].step()
    second.rows.copy_(first.rows)
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    for replicas, optimizer in zip((first, second), optimizers, strict=True):
        backward(replicas, [1, 6, 0], [0], [2])
        optimizer.step()
    assert torch.equal(first.rows, second.rows)


@every_kind
def test_a_reduced_gradient_needs_no_dense_one(kind: OptimizerKind) -> None:
    """The same update as by the hook, bit for bit, with no gradient of all rows."""
    hooked, direct = make_replicas(), make_replicas()
    optimizers = [make_optimizer(kind, replicas) for replicas in (hooked, direct)]
    for step in range(3):
        grad = backward(hooked, [1, 6], [], [step])
        direct.set_reduced(torch.tensor([1, 6, 8 + step]), grad.clone())
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(hooked.rows, direct.rows)
    assert direct.weight.grad is None
    before = direct.rows.clone()
    optimizers[1].step()  # a gradient is used once
    direct.set_reduced(torch.tensor([], dtype=torch.int64), torch.zeros(0, DIM))
    optimizers[1].step()  # and may be of no row
    assert torch.equal(direct.rows, before)


def test_zero_grad_drops_a_reduced_gradient() -> None:
    replicas = make_replicas()
    optimizer, before = make_optimizer(OptimizerKind.sgd, replicas), replicas.rows.clone()
    replicas.set_reduced(torch.tensor([3]), torch.ones(1, DIM))
    with pytest.raises(RuntimeError, match="dimension 8: expected an optimizer step before"):
        replicas.set_reduced(torch.tensor([3]), torch.ones(1, DIM))
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(replicas.rows, before)
