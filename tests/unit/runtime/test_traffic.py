from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.runtime.traffic import (
    _measure,
    count_distinct_rows,
    count_sent_bytes,
    lower_bound_bytes,
)
from tests.helpers.ranks import run_ranks


def expect_collectives() -> None:
    """Every collective of torch.distributed that gloo has, against its formula, on 3 ranks."""
    rank = dist.get_rank()
    values = torch.zeros(30)  # 120 bytes
    parts = [torch.zeros(30) for _ in range(3)]
    first = rank == 0
    # Rows of 5 floats; rank r keeps r of the 6 rows and sends the others away.
    sent = [2, 2, 2]
    sent[rank], sent[(rank + 1) % 3] = rank, 4 - rank
    dist.all_to_all_single(received := torch.zeros(3, dtype=torch.int64), torch.tensor(sent))
    rows = torch.zeros(int(received.sum()), 5)
    pair = dist.new_group([0, 1])
    for action, collective, num_bytes in (
        (lambda: dist.all_reduce(values), "all_reduce", 160),
        (lambda: dist.all_reduce(values.half(), async_op=True).wait(), "all_reduce", 80),
        (lambda: dist.broadcast(values, src=1), "broadcast", 80),
        (lambda: dist.all_gather(parts, values), "all_gather", 240),
        (lambda: dist.all_gather_into_tensor(torch.zeros(90), values), "all_gather", 240),
        (lambda: dist.reduce_scatter_tensor(torch.zeros(10), values), "reduce_scatter", 80),
        (lambda: dist.all_to_all_single(torch.zeros(30), values), "all_to_all", 80),
        (
            lambda: dist.all_to_all_single(rows, torch.zeros(6, 5), received.tolist(), sent),
            "all_to_all",
            (6 - rank) * 5 * 4,
        ),
        (dist.barrier, "other", 0),
        (lambda: rank < 2 and dist.all_reduce(values, group=pair), "all_reduce", 120 * (rank < 2)),
        (lambda: dist.gather(values, parts if first else None, dst=0), "other", 80),
    ):
        with count_sent_bytes() as traffic:
            action()
        assert traffic.sent_bytes[collective] == traffic.total_bytes == num_bytes, collective


def test_each_collective_has_the_bytes_of_its_formula() -> None:
    run_ranks(expect_collectives, world_size=3)


def test_collective_that_is_not_known_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="got 'teleport_'"):
        _measure("teleport_", ())


def test_functional_collectives_are_refused() -> None:
    with pytest.raises(RuntimeError, match="functional .*all_reduce"), count_sent_bytes():
        torch.ops._c10d_functional.all_reduce(torch.zeros(1), "sum", "0")


def test_rows_of_a_shared_table_count_once() -> None:
    sparse = KeyedJaggedTensor(
        keys=["clicked", "watched", "user"],
        values=torch.tensor([1, 2, 2, 3, 3, 4, 7, 7]),
        lengths=torch.tensor([2, 1, 0, 3, 1, 1]),
    )
    tables = {"clicked": ("video", 8), "watched": ("video", 8), "user": ("user", 16)}
    assert count_distinct_rows(sparse, tables) == {8: 4, 16: 1}


def test_lower_bound() -> None:
    # design: 2 x U x D x 4 x (W - 1) / W
    assert lower_bound_bytes({64: 1000}, 2) == 2 * 1000 * 64 * 4 // 2
    assert lower_bound_bytes({64: 1000}, 1) == 0
    assert lower_bound_bytes({8: 3}, 4, num_dense_values=100) == 2 * (24 + 100) * 4 * 3 // 4


def test_compiled_layers_run_while_bytes_are_counted() -> None:
    compiled = torch.compile(
        lambda x: (2 * x).relu().sum(), backend="aot_eager", fullgraph=True, dynamic=True
    )
    for size in (5, 7):
        inputs = torch.ones(size, 3, requires_grad=True)
        with count_sent_bytes() as traffic:
            compiled(inputs).backward()
        assert inputs.grad is not None
        assert torch.equal(inputs.grad, torch.full((size, 3), 2.0))
        assert traffic.total_bytes == 0
