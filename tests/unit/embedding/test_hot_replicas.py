"""The replica of one rank alone: lookup, gradient, what was touched, and its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.embedding.hot_exchange import HotReplicas
from hotrec.embedding.optimizers import HotOptimizer
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.runtime.ranks import Ranks
from hotrec.types import HotExchange, OptimizerKind

NUM_ROWS = [7, 1, 5]
NUM_HOT = sum(NUM_ROWS)
DIM = 8


@dataclass
class Bucket:
    """What the hook needs of ``dist.GradBucket``."""

    tensor: torch.Tensor

    def buffer(self) -> torch.Tensor:
        return self.tensor

    def index(self) -> int:
        return 0


def make_replicas(exchange: HotExchange = HotExchange.touched_rows) -> HotReplicas:
    weight = nn.Parameter(torch.randn(NUM_HOT * DIM, generator=torch.Generator().manual_seed(0)))
    return HotReplicas(weight, NUM_ROWS, DIM, dist.group.WORLD, exchange)


def ids_of(*slots: list[int]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=["a", "b", "c"],
        values=torch.tensor([slot for table in slots for slot in table], dtype=torch.int64),
        lengths=torch.tensor([len(table) for table in slots]),
    )


def backward(replicas: HotReplicas, ids: KeyedJaggedTensor) -> torch.Tensor:
    """Forward, backward, and the hook that DDP would call; returns the rows' gradient."""
    rows = replicas(ids)
    grad = torch.randn(rows.shape, generator=torch.Generator().manual_seed(ids.values().numel()))
    rows.backward(grad)
    assert replicas.weight.grad is not None
    replicas.reduce_gradient(None, Bucket(replicas.weight.grad))  # type: ignore[arg-type]
    return grad


def test_nothing_updated_is_on_the_device_of_the_rows(one_rank: Ranks) -> None:
    """Else clearing the gradient of a replica on CUDA mixes devices in the second step."""
    weight = nn.Parameter(torch.empty(NUM_HOT * DIM, device="meta"))
    replicas = HotReplicas(weight, NUM_ROWS, DIM, dist.group.WORLD, HotExchange.touched_rows)
    weight.grad = torch.zeros_like(weight)
    assert replicas.take_updated().device == weight.device
    replicas.drop_gradient()


def test_lookup_and_gradient_equal_autograd(one_rank: Ranks) -> None:
    replicas = make_replicas()
    plain = nn.Parameter(replicas.rows.clone())
    ids = ids_of([6, 0, 3], [0], [4])
    rows, expected = replicas(ids), plain[torch.tensor([6, 0, 3, 7, 12])]
    assert torch.equal(rows, expected)
    grad = torch.randn(rows.shape, generator=torch.Generator().manual_seed(5))
    for _ in range(2):  # gradients add up, as autograd's do
        rows.backward(grad, retain_graph=True)
        expected.backward(grad, retain_graph=True)
        assert replicas.weight.grad is not None
        assert torch.equal(replicas.weight.grad.view(-1, DIM), plain.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("exchange", list(HotExchange))
def test_what_was_touched_is_told_once(one_rank: Ranks, exchange: HotExchange) -> None:
    replicas = make_replicas(exchange)
    backward(replicas, ids_of([6, 0], [0], [4]))
    assert replicas.take_updated().sort().values.tolist() == [0, 6, 7, 12]
    assert replicas.take_updated().tolist() == []
    with torch.no_grad():
        replicas(ids_of([1], [], []))  # an evaluation pass touches nothing
    backward(replicas, ids_of([], [], []))
    assert replicas.take_updated().tolist() == []


@pytest.mark.parametrize("kind", list(OptimizerKind))
def test_a_pass_without_backward_moves_nothing(one_rank: Ranks, kind: OptimizerKind) -> None:
    """An evaluation outside ``no_grad``, say: rows it reads are not touched by the next step."""
    plain, disturbed = make_replicas(), make_replicas()
    for replicas in (plain, disturbed):
        optimizer = make_optimizer(kind, replicas)
        backward(replicas, ids_of([5, 6], [0], [4]))
        optimizer.step()
        if replicas is disturbed:
            replicas(ids_of([1, 5], [], [3]))
        backward(replicas, ids_of([6], [], []))
        optimizer.step()
    assert torch.equal(plain.rows, disturbed.rows)


def test_two_backwards_before_a_step_are_both_told(one_rank: Ranks) -> None:
    replicas = make_replicas()
    backward(replicas, ids_of([6, 0], [], []))
    backward(replicas, ids_of([0, 2], [], [1]))
    assert replicas.take_updated().sort().values.tolist() == [0, 2, 6, 9]


def test_a_bucket_of_another_size_is_refused(one_rank: Ranks) -> None:
    replicas = make_replicas()
    replicas(ids_of([0], [], []))
    with pytest.raises(RuntimeError, match=r"^hot exchange bucket 0: expected the 104 values"):
        replicas.reduce_gradient(None, Bucket(torch.zeros(3)))  # type: ignore[arg-type]


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
def test_checksum_sees_a_change(
    one_rank: Ranks, corrupt: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    replicas = make_replicas()
    before = replicas.checksum()
    assert replicas.checksum() == before
    changed = replicas.rows.clone()
    corrupt(changed)
    is_changed = not torch.equal(changed, replicas.rows)
    replicas.rows.copy_(changed)
    assert (replicas.checksum() != before) == is_changed


def make_optimizer(kind: OptimizerKind, replicas: HotReplicas) -> HotOptimizer:
    names = [f"e.{table}.weight" for table in ("a", "b", "c")]
    return HotOptimizer({"e.": replicas}, {"e.": names}, OptimizerSpec(kind, 0.1, eps=1e-3))


@pytest.mark.parametrize("kind", list(OptimizerKind))
def test_step_moves_touched_rows_and_leaves_a_zero_gradient(
    one_rank: Ranks, kind: OptimizerKind
) -> None:
    replicas = make_replicas()
    optimizer = make_optimizer(kind, replicas)
    before = replicas.rows.clone()
    backward(replicas, ids_of([6, 0], [0], [4]))
    optimizer.step()
    moved = (replicas.rows != before).any(1).nonzero().view(-1).tolist()
    assert moved == [0, 6, 7, 12]
    assert not replicas.weight.grad.any()  # type: ignore[union-attr]
    after = replicas.rows.clone()
    optimizer.step()  # nothing has arrived: momentum alone moves no row
    assert torch.equal(replicas.rows, after)


def test_zero_grad_drops_a_step_that_was_skipped(one_rank: Ranks) -> None:
    """As torch's optimizers do: backward, see a NaN, zero_grad, go on."""
    replicas, reference = make_replicas(), make_replicas()
    optimizer = make_optimizer(OptimizerKind.sgd, replicas)
    rows = replicas(ids_of([6, 0], [], []))
    (rows * float("nan")).sum().backward()
    replicas.reduce_gradient(None, Bucket(replicas.weight.grad))  # type: ignore[arg-type]
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(replicas.rows, reference.rows)
    backward(replicas, ids_of([0, 2], [], []))
    optimizer.step()
    other = make_optimizer(OptimizerKind.sgd, reference)
    backward(reference, ids_of([0, 2], [], []))
    other.step()
    assert torch.equal(replicas.rows, reference.rows)


@pytest.mark.parametrize("kind", list(OptimizerKind))
def test_state_dict_goes_on_bitwise(one_rank: Ranks, kind: OptimizerKind) -> None:
    first = make_replicas()
    optimizer = make_optimizer(kind, first)
    for step in range(3):
        backward(first, ids_of([6, step], [0], [4]))
        optimizer.step()
    second = make_replicas()
    second.rows.copy_(first.rows)
    other = make_optimizer(kind, second)
    other.load_state_dict(optimizer.state_dict())
    for replicas, either in ((first, optimizer), (second, other)):
        backward(replicas, ids_of([1, 6, 0], [0], [2]))
        either.step()
    assert torch.equal(first.rows, second.rows)


def test_state_is_per_table_and_shared_with_the_flat_update(one_rank: Ranks) -> None:
    replicas = make_replicas()
    optimizer = make_optimizer(OptimizerKind.rowwise_adagrad, replicas)
    backward(replicas, ids_of([6], [0], []))
    optimizer.step()
    state = optimizer.state_dict()["state"]
    touched = {
        name: values["momentum1"].nonzero().view(-1).tolist() for name, values in state.items()
    }
    assert touched == {"e.a.weight": [6], "e.b.weight": [0], "e.c.weight": []}


@pytest.mark.parametrize("kind", list(OptimizerKind))
def test_a_reduced_gradient_needs_no_dense_one(one_rank: Ranks, kind: OptimizerKind) -> None:
    """The same update as by the hook, bit for bit, with no gradient of all rows."""
    hooked, direct = make_replicas(), make_replicas()
    optimizers = [make_optimizer(kind, replicas) for replicas in (hooked, direct)]
    for step in range(3):
        grad = backward(hooked, ids_of([1, 6], [], [step]))
        direct.set_reduced(torch.tensor([1, 6, 8 + step]), grad.clone())
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(hooked.rows, direct.rows)
    assert direct.weight.grad is None
    before = direct.rows.clone()
    optimizers[1].step()  # a gradient is used once
    assert torch.equal(direct.rows, before)


def test_a_reduced_gradient_may_be_of_no_row(one_rank: Ranks) -> None:
    replicas = make_replicas()
    optimizer, before = make_optimizer(OptimizerKind.adam, replicas), replicas.rows.clone()
    replicas.set_reduced(torch.tensor([], dtype=torch.int64), torch.zeros(0, DIM))
    optimizer.step()
    assert torch.equal(replicas.rows, before)


def test_zero_grad_drops_a_reduced_gradient(one_rank: Ranks) -> None:
    replicas = make_replicas()
    optimizer, before = make_optimizer(OptimizerKind.sgd, replicas), replicas.rows.clone()
    replicas.set_reduced(torch.tensor([3]), torch.ones(1, DIM))
    with pytest.raises(RuntimeError, match="expected the last one to be used, got another"):
        replicas.set_reduced(torch.tensor([3]), torch.ones(1, DIM))
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(replicas.rows, before)
