"""Sums in two levels over pretended hosts, among real ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hotrec.bench.benchmark import measure
from hotrec.bench.job import make_benchmark
from hotrec.cli.store import build_config, compose_config
from hotrec.runtime.hosts import (
    RANKS_PER_HOST,
    TwoLevelWire,
    count_host_rows,
    gather_host_of_rank,
    gather_hosts,
)
from hotrec.runtime.traffic import count_sent_bytes
from hotrec.types import HotExchange, WireType
from tests.distributed.setups import assert_same_on_ranks, gather, this_rank
from tests.distributed.test_hot_reduce import SHAPES, SLOTS, check_case, make_reducer
from tests.helpers.ranks import run_ranks

SIZES = (0, 1, 2, 3, 7, 24, 1001)
# Of the sum of H terms in 16 bits: half of the last bit of each of H - 1 terms, and of the sum.
REL = {WireType.fp32: 1e-6, WireType.fp16: 2**-10, WireType.bf16: 2**-7}


def draw(num: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * num + rank)
    return torch.randn(num, generator=generator)


def check_sums(ranks_per_host: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    with mock.patch.dict("os.environ", {RANKS_PER_HOST: str(ranks_per_host)}):
        hosts = gather_hosts().hosts
    assert hosts is not None
    assert hosts.members[rank // ranks_per_host][rank % ranks_per_host] == rank
    for wire_type in WireType:
        wire = TwoLevelWire(hosts, wire_type, "test")
        for num in SIZES:
            found = draw(num, rank)
            wire.all_reduce(found)
            assert_same_on_ranks(found)
            expected = torch.stack([draw(num, peer) for peer in range(size)]).double().sum(0)
            largest = sum(draw(num, peer).abs() for peer in range(size))
            assert ((found.double() - expected).abs() <= REL[wire_type] * largest).all()
            again = draw(num, rank)
            wire.all_reduce(again)
            assert torch.equal(again, found)
        wire.close()


def check_hot_rows(ranks_per_host: int) -> None:
    with mock.patch.dict("os.environ", {RANKS_PER_HOST: str(ranks_per_host)}):
        hosts = gather_hosts().hosts
    assert hosts is not None
    for wire_type in WireType:
        wire = TwoLevelWire(hosts, wire_type, "test")
        for exchange in HotExchange:
            for shapes in (SHAPES, [(1, 1)], [(5, 3)]):
                reducer = make_reducer(shapes, exchange, wire_type, hosts=wire)
                for case in SLOTS:
                    check_case(reducer, shapes, case, wire_type)
        wire.close()


def bytes_between_hosts(ranks_per_host: int) -> int:
    """What this rank sends on its rail in a sum of 2,400 values in bf16."""
    with mock.patch.dict("os.environ", {RANKS_PER_HOST: str(ranks_per_host)}):
        hosts = gather_hosts().hosts
    assert hosts is not None
    wire = TwoLevelWire(hosts, WireType.bf16, "test")
    with count_sent_bytes([0, 0, 1, 1]) as whole:
        wire.all_reduce(draw(2400, dist.get_rank()))
    inside = 2 * 1200 * 4  # half of the values each way, in fp32
    wire.close()
    between = sum(whole.between_hosts_bytes.values())
    assert between == whole.total_bytes - inside
    return between


@pytest.mark.parametrize(("num_hosts", "ranks_per_host"), [(2, 2), (3, 2), (2, 3)])
def test_sums(num_hosts: int, ranks_per_host: int) -> None:
    run_ranks(check_sums, num_hosts * ranks_per_host, timeout_s=120, ranks_per_host=ranks_per_host)


@pytest.mark.parametrize(("num_hosts", "ranks_per_host"), [(2, 2), (2, 3)])
def test_means_of_hot_rows(num_hosts: int, ranks_per_host: int) -> None:
    size = num_hosts * ranks_per_host
    run_ranks(check_hot_rows, size, timeout_s=180, ranks_per_host=ranks_per_host)


def test_a_host_sends_each_value_once() -> None:
    """2 (H-1)/H n values of 2 bytes over both rails, as two ranks on two hosts would."""
    sent = run_ranks(bytes_between_hosts, 4, timeout_s=120, ranks_per_host=2)
    assert sent == [1200 * 2] * 4


def check_host_rows() -> None:
    """Ranks of unequal hosts that are not consecutive count each row of a host once."""
    hosts, rank = "abaa", dist.get_rank()
    rows = torch.randperm(60, generator=torch.Generator().manual_seed(rank))[: 20 + rank]
    parts = gather((rows.tolist(), count_host_rows(rows, hosts, rows.device)))
    for host in "ab":
        of_host = [part for part, name in zip(parts, hosts, strict=True) if name == host]
        expected = len({row for rows_U, _ in of_host for row in rows_U})
        assert sum(num for _, num in of_host) == expected
    assert gather_host_of_rank()[0] == gather_host_of_rank()[3]  # nobody pretends


def test_rows_of_a_host_count_once() -> None:
    run_ranks(check_host_rows, 4, timeout_s=120)


LEVELS = ("look_ahead", "two_levels", "sparse_dist_two_levels", "look_ahead_local")
WORDS = (
    *(f"cases=[{','.join(LEVELS)}]", "table_rows=[40,9000,20000,3]", "batch_size=512", "rounds=1"),
    *("block_steps=2", "block_skip=1", "warmup_rounds=1", "counted_steps=2", "device=cpu"),
)


def measure_levels(ranks_per_host: int) -> dict[str, Any]:
    words = ["bench=networks_b2048", *(f"bench.{word}" for word in WORDS)]
    with mock.patch.dict("os.environ", {RANKS_PER_HOST: str(ranks_per_host)}):
        benchmark = make_benchmark(build_config(compose_config("bench", words)), this_rank())
        return measure(benchmark, this_rank())


@pytest.mark.parametrize("ranks_per_host", [2, 4])
def test_two_levels_send_each_row_of_a_host_once(ranks_per_host: int) -> None:
    first, *others = run_ranks(measure_levels, 4, timeout_s=200, ranks_per_host=ranks_per_host)
    cases = first["cases"]
    assert first["losses_apart"] == []
    assert all(other["cases"] == cases for other in others)
    num_dense = first["data"]["num_dense_values"]
    all_to_all = {
        name: case["between_hosts_bytes_by_collective"]["all_to_all"]
        for name, case in cases.items()
    }
    assert all_to_all["look_ahead_local"] <= 0.9 * all_to_all["look_ahead"]
    for name, case in cases.items():
        sent, bound = case["between_hosts_bytes"], case["between_hosts_bound_bytes"]
        assert sum(case["between_hosts_bytes_by_collective"].values()) == sent
        if ranks_per_host == 4:
            assert (sent, bound, case["between_hosts_bound_with_dense_bytes"]) == (0, 0, 0), name
            continue
        with_dense = case["between_hosts_bound_with_dense_bytes"]
        assert with_dense == bound + 2 * 4 * num_dense // 4
        assert case["between_hosts_bytes_over_bound"] == sent / with_dense
        if name == "look_ahead":
            # Each rank for itself, from the owners on the other host.
            bound = case["bound_bytes"] * (2 / 4) / (3 / 4)
            assert bound > 1.15 * case["between_hosts_bound_bytes"]
        if name != "look_ahead_local":  # which draws fewer rows from others
            assert bound < all_to_all[name] < 1.05 * bound, (name, all_to_all[name] / bound)
