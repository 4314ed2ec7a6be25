"""What ranks send one another: right sums in the bytes that are counted, and no more of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hotrec.embedding.convert import check_replicas
from hotrec.embedding.hot_reduce import HotReducer
from hotrec.embedding.optimizers import hot_replicas
from hotrec.runtime.hosts import (
    TwoLevelWire,
    count_host_rows,
    find_hosts,
    gather_host_of_rank,
    gather_hosts,
    make_two_levels,
)
from hotrec.runtime.traffic import count_sent_bytes, lower_bound_between_hosts_bytes
from hotrec.types import RowShares, WireType
from tests.distributed.setups import assert_same_on_ranks, gather, pretend_hosts
from tests.exact.case import Case, Samples
from tests.exact.messages import (
    HOT,
    MESSAGES,
    SHAPES,
    WIRES,
    check_means,
    check_sum,
    draw,
    make_reducer,
)
from tests.exact.training import Training
from tests.helpers.checks import run_checks
from tests.helpers.ranks import run_ranks
from tests.helpers.samples import only_whole

CASE = Case(hosts="00", seed=1, partition="half", optimizer="sgd", batches="same_rows")
PLACES = (
    {"partition": "all_cold"},
    {"pipeline": "look_ahead"},
    {"placement": "mixed"},
    {"partition": "all_cold", "placement": "torchrec planner"},
)


def bytes_of(case: Case) -> dict[str, int]:
    """What all ranks send in a step, by collective."""
    with Training(case) as training:
        training.train()  # the first steps set up what is sent
        with count_sent_bytes() as traffic:
            training.train(replace(case, first=6, steps=1))
    total = torch.tensor([traffic.sent_bytes[name] for name in sorted(traffic.sent_bytes)])
    dist.all_reduce(total)
    return dict(zip(sorted(traffic.sent_bytes), total.tolist(), strict=True))


def bf16_halves_the_bytes() -> None:
    """Of all but ids: of rows and pooled vectors, and of the gradients of the dense layers."""
    for place in PLACES:
        case = replace(CASE, hosts="0" * dist.get_world_size(), batches="drawn", **place)
        fp32, bf16 = (bytes_of(replace(case, wire=wire)) for wire in ("fp32", "bf16"))
        assert sum(bf16.values()) < 0.55 * sum(fp32.values()), place
        if "pipeline" not in place:  # in line dense gradients travel by other collectives
            assert bf16["all_to_all"] < 0.75 * fp32["all_to_all"], place


def samples_with_the_owners_of_their_rows_send_less() -> None:
    hosts = "0" * dist.get_world_size()
    case = replace(CASE, hosts=hosts, seed=3, batches="drawn", partition="all_cold")
    as_read, by_owner = (bytes_of(replace(case, order=order)) for order in ("as_read", "by_owner"))
    assert 0 < by_owner["all_to_all"] < 0.95 * as_read["all_to_all"], (by_owner, as_read)


def a_replica_that_differs_is_found_on_all_ranks() -> None:
    case = replace(CASE, hosts="0" * dist.get_world_size(), is_uniform_dim=False)
    with Training(case) as training:
        training.train()
        for replica in hot_replicas(training.model).values():
            if dist.get_rank() == 1:
                replica.rows[-1, -1] += 1e-6
            with pytest.raises(RuntimeError, match=rf"of dimension {replica.dim}: expected equal"):
                check_replicas(training.model)
            replica.broadcast()
            check_replicas(training.model)


def backward_raises_what_the_reduction_raised() -> None:
    training = Training(replace(CASE, hosts="0" * dist.get_world_size()))
    with (
        mock.patch.object(HotReducer, "reduce", side_effect=ValueError("not these rows")),
        pytest.raises(Exception, match="not these rows"),
    ):
        training.train()


CHECKS: dict[int, list[Callable[[], None]]] = {
    1: MESSAGES,
    2: [
        *(MESSAGES + HOT[2:]),
        bf16_halves_the_bytes,
        samples_with_the_owners_of_their_rows_send_less,
        a_replica_that_differs_is_found_on_all_ranks,
        backward_raises_what_the_reduction_raised,  # last: DDP is of no more use
    ],
    3: MESSAGES + HOT,
}


@pytest.mark.parametrize("world_size", CHECKS)
def test_messages_and_sums(world_size: int, record_property: Callable[[str, object], None]) -> None:
    verdicts = run_ranks(run_checks, world_size, timeout_s=180, checks=CHECKS[world_size])[0]
    assert verdicts == dict.fromkeys(verdicts), "\n".join(filter(None, verdicts.values()))
    text = f"messages: {len(verdicts)} checks of sums and of counted bytes on {world_size} ranks"
    record_property("proved", text)


def check_two_levels(hosts: str) -> None:
    """Sums over all ranks, and means of hot rows; of a host's values each crosses once."""
    pretend_hosts(hosts)
    rank, found = dist.get_rank(), gather_hosts().hosts
    assert found is not None
    for wire_type in WIRES:
        wire = TwoLevelWire(found, wire_type, "test")
        for num in (0, 1, 2, 7, 1001):
            summed = draw(num, rank)
            wire.all_reduce(summed)
            shares = [draw(num, peer) for peer in range(len(hosts))]
            check_sum(summed, shares, wire_type, found.num_hosts)
            assert_same_on_ranks(summed)
        for shapes in (SHAPES, [(1, 1)]):
            check_means(make_reducer(shapes, wire_type, wire), shapes, wire_type)
        with count_sent_bytes(hosts) as traffic:
            wire.all_reduce(draw(2400, rank))
        of_host = 2 * 2400 * WIRES[wire_type][1] * (found.num_hosts - 1) // found.num_hosts
        between = sum(traffic.between_hosts_bytes.values())
        assert between == of_host // hosts.count(hosts[rank])
        wire.close()


@pytest.mark.parametrize("hosts", ["0011", *only_whole("001122", "000111")])
def test_sums_in_two_levels(hosts: str) -> None:
    run_ranks(check_two_levels, len(hosts), timeout_s=180, hosts=hosts)


# By the host of each rank, why rows travel in one level, or "".
WHY = {
    "0011": "",
    "001": "hosts have 1 to 2 ranks",
    "0101": "the ranks of a host are not consecutive",
    "0000": "all ranks are on one host",
}


def check_rule(hosts: str) -> None:
    """Every rank finds the rule, the first one logs it, and none makes groups of two levels."""
    pretend_hosts(hosts)
    texts: list[str] = []
    with mock.patch.object(
        logging.getLogger("hotrec.embedding.sharding"), "info", lambda *said: texts.append(said[-1])
    ):
        for levels in ("one", "two"):
            Training(replace(CASE, hosts=hosts, levels=levels))
    first, *others = gather(texts)
    assert len(first) == 1
    assert WHY[hosts] in first[0]
    assert others == [[]] * (len(hosts) - 1)
    if WHY[hosts]:
        assert gather(make_two_levels(WireType.bf16, "test")) == [None] * len(hosts)


def check_bytes_between_hosts(hosts: str) -> None:
    """The ranks of every host read all rows, each of them one part, in one step: by hand."""
    rank, num_ranks, num_hosts = dist.get_rank(), len(hosts), len(set(hosts))
    num_rows, dim, host_of_rank = 60, 8, gather_host_of_rank()
    own = [at for at in range(num_ranks) if hosts[at] == hosts[rank]]
    mine = torch.arange(num_rows)[own.index(rank) :: len(own)]
    # This seed draws one table with one feature.
    case = Case(
        hosts=hosts, seed=14, partition="all_cold", optimizer="sgd", levels="two",
        more_rows=num_rows - 40,
    )  # fmt: skip
    [table] = case.tables()
    [name] = table.features
    training, none = Training(case), torch.zeros(len(mine))
    samples = Samples(none, none, {name: [*mine.view(-1, 1).numpy()]}, None, none)
    with count_sent_bytes(host_of_rank) as traffic:
        training.model.module.model.embeddings(samples.features()).values().sum().backward()

    num_own = num_rows // num_ranks
    if find_hosts(host_of_rank).hosts is not None:
        # The relay has the rows of its rail, of one rank of each other host.
        asked, num_counts = num_own * (num_hosts - 1), num_hosts - 1
    else:
        owners = RowShares(table.name, num_ranks).owners(mine).tolist()
        asked = sum(hosts[owner] != hosts[rank] for owner in owners)
        num_counts = num_ranks - len(own)
    served = num_own * (num_hosts - 1)  # each host asks for every row once
    ids, counts = 4 * asked, 8 * num_counts
    sent = traffic.between_hosts_bytes["all_to_all"] - ids - counts
    assert sent == 4 * dim * (asked + served), (sent, asked, served)
    assert sum(traffic.between_hosts_bytes.values()) == sent + ids + counts

    # The bound is what all ranks send together, shared among the ranks of the hosts that receive.
    part = count_host_rows(mine, host_of_rank, torch.device("cpu"))
    bound = lower_bound_between_hosts_bytes({dim: part}, host_of_rank, rank)
    parts, bounds, of_ranks = zip(*gather((part, bound, sent)), strict=True)
    assert sum(parts) == num_hosts * num_rows
    assert sum(bounds) == sum(of_ranks)
    # Rows that several ranks of a host read count once.
    twice = torch.randperm(num_rows)[: 20 + rank]
    parts = gather((hosts[rank], twice.tolist(), count_host_rows(twice, hosts, twice.device)))
    for host in set(hosts):
        _, rows, counted = zip(*(part for part in parts if part[0] == host), strict=True)
        assert sum(counted) == len(set(sum(rows, [])))


def check_hosts(hosts: str) -> None:
    check_rule(hosts)
    check_bytes_between_hosts(hosts)


@pytest.mark.parametrize("hosts", WHY)
def test_each_row_crosses_between_hosts_once(hosts: str) -> None:
    run_ranks(check_hosts, len(hosts), timeout_s=120, hosts=hosts)
