from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.runtime.traffic import (
    count_sent_bytes,
    find_distinct_rows,
    lower_bound_between_hosts_bytes,
    lower_bound_bytes,
)
from hotrec.runtime.wire import Wire
from tests.helpers.ranks import run_ranks


def exchange_with_next(rank: int) -> None:
    received = dist.irecv(torch.zeros(30), (rank - 1) % 3)
    dist.send(torch.zeros(30), (rank + 1) % 3)
    assert received is not None
    received.wait()


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
        (lambda: dist.scatter(torch.zeros(30), parts if first else None, src=0), "other", 80),
        (lambda: dist.reduce(values.clone(), dst=2), "other", 80),
        (lambda: exchange_with_next(rank), "other", 120),
    ):
        with count_sent_bytes() as traffic:
            action()
        assert traffic.sent_bytes[collective] == traffic.total_bytes == num_bytes, collective


@pytest.mark.slow
def test_each_collective_has_the_bytes_of_its_formula() -> None:
    run_ranks(expect_collectives, world_size=3)


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
    found = find_distinct_rows(sparse, tables)
    assert {dim: rows.tolist() for dim, rows in found.items()} == {8: [1, 2, 3, 4], 16: [7]}
    tables = {**tables, "user": ("user", 8)}
    assert find_distinct_rows(sparse, tables)[8].tolist() == [2, 4, 6, 8, 15]


def test_lower_bound() -> None:
    # design: 2 x U x D x 4 x (W - 1) / W
    assert lower_bound_bytes({64: 1000}, 2) == 2 * 1000 * 64 * 4 // 2
    assert lower_bound_bytes({64: 1000}, 1) == 0
    assert lower_bound_bytes({8: 3}, 4, num_dense_values=100) == 2 * (24 + 100) * 4 * 3 // 4


def test_lower_bound_between_hosts() -> None:
    # One host sends nothing to others; hosts of one rank have the bound of ranks.
    assert lower_bound_between_hosts_bytes({8: 30}, "aaaa", 0, num_dense_values=100) == 0
    of_ranks = lower_bound_bytes({8: 30}, 4, num_dense_values=100)
    assert lower_bound_between_hosts_bytes({8: 30}, "abcd", 3, num_dense_values=100) == of_ranks
    # Half of the rows come from the other host, the two ranks share the sum of the dense ones.
    found = lower_bound_between_hosts_bytes({8: 30, 4: 5}, "aabb", 1, num_dense_values=100)
    assert found == 2 * 4 * 260 // 2 + 2 * 4 * 100 // 2 // 2
    unequal = [lower_bound_between_hosts_bytes({1: 40}, "abaa", rank) for rank in range(4)]
    assert unequal == [2 * 4 * 40 // 4, 2 * 4 * 40 * 3 // 4, *[2 * 4 * 40 // 4] * 2]


def expect_between_hosts() -> None:
    """Ranks of unequal hosts that are not consecutive, a b a a, against the borders by hand."""
    rank = dist.get_rank()
    hosts = "abaa"
    values = torch.zeros(24)  # 96 bytes
    sent = torch.zeros(10)
    splits = [1, 2, 3, 4]
    received = [splits[rank]] * 4
    wire = Wire(dist.new_group([0, 1, 2, 3]))
    pair, of_a = dist.new_group([1, 2]), dist.new_group([0, 2, 3])
    to_b = 4 * splits[1]
    for action, num_bytes in (
        # Two of the four steps of the ring lead to another host: from 0 to 1 and from 1 to 2.
        (lambda: dist.all_reduce(values), 2 * 96 * 3 // 4 // 2),
        (lambda: dist.all_gather_into_tensor(torch.zeros(96), values), 96 * 3 // 2),
        (lambda: wire.all_reduce(values), 2 * 96 * 3 // 4 // 2),
        (
            lambda: dist.all_to_all_single(torch.zeros(sum(received)), sent, received, splits),
            4 * (10 - 2) if rank == 1 else to_b,
        ),
        (lambda: wire.all_to_all(sent, splits, received), 4 * (10 - 2) if rank == 1 else to_b),
        (lambda: wire.all_gather_joined(sent, [10] * 4), 3 * 40 if rank == 1 else 40),
        (lambda: rank in (1, 2) and dist.all_reduce(values, group=pair), 96 * (rank in (1, 2))),
        (lambda: rank != 1 and dist.all_reduce(values, group=of_a), 0),
        (
            lambda: dist.gather(values, [values] * 4 if rank == 0 else None, dst=0),
            24 + 48 * (rank == 1),
        ),
        (dist.barrier, 0),
    ):
        with count_sent_bytes(hosts) as traffic:
            action()
        assert sum(traffic.between_hosts_bytes.values()) == num_bytes
        with count_sent_bytes("aaaa") as traffic, count_sent_bytes() as no_hosts:
            action()
        assert sum(traffic.between_hosts_bytes.values()) == 0
        assert no_hosts.between_hosts_bytes == traffic.between_hosts_bytes


def test_bytes_between_hosts() -> None:
    run_ranks(expect_between_hosts, world_size=4)
