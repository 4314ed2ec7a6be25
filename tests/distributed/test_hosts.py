"""Sums in two levels over pretended hosts, among real ranks."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hotrec.runtime.hosts import RANKS_PER_HOST, TwoLevelWire, gather_hosts
from hotrec.runtime.traffic import count_sent_bytes
from hotrec.types import HotExchange, WireType
from tests.distributed.setups import assert_same_on_ranks
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
    with count_sent_bytes() as whole:
        wire.all_reduce(draw(2400, dist.get_rank()))
    inside = 2 * 1200 * 4  # half of the values each way, in fp32
    wire.close()
    return sum(whole.sent_bytes.values()) - inside


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
