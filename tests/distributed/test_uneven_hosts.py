"""Hosts between which rows travel in one level, by rule, on ranks that pretend these hosts."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.assemble.constraints import placement_constraints
from hotrec.embedding.collection import HotColdEmbeddingBagCollection
from hotrec.embedding.sharding import HotColdSharder
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.runtime.hosts import (
    count_host_rows,
    find_hosts,
    gather_host_of_rank,
    gather_hosts,
    make_two_levels,
)
from hotrec.runtime.traffic import count_sent_bytes, lower_bound_between_hosts_bytes
from hotrec.types import Levels, OptimizerKind, Partition, Placement, WireType
from tests.distributed.setups import gather, pretend_hosts, shard_task
from tests.exact.case import Case
from tests.exact.training import Training
from tests.helpers.ranks import run_ranks

# By the host of each rank, the rule.
SHAPES = {
    "001": "in one level, since hosts have 1 to 2 ranks",
    "0101": "in one level, since the ranks of a host are not consecutive",
    "0000": "in one level, since all ranks are on one host",
    "0001": "in one level, since hosts have 1 to 3 ranks",
}


class Kept(logging.Handler):
    """Keeps the texts of a logger."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def check_rule(hosts: str) -> None:
    """Every rank finds the rule, the first one logs it, and none makes groups of two levels."""
    pretend_hosts(hosts)
    rule = SHAPES[hosts]
    assert gather((gather_hosts().why, gather_hosts().hosts)) == [(rule, None)] * len(hosts)
    assert gather(make_two_levels(WireType.bf16, "test")) == [None] * len(hosts)
    logger, kept = logging.getLogger("hotrec.embedding.sharding"), Kept()
    logger.addHandler(kept)
    logger.setLevel(logging.INFO)
    case = Case(hosts=hosts, seed=1, partition="half", optimizer="sgd")
    for levels in ("one", "two"):
        Training(replace(case, levels=levels))
    expected = [f"pipeline.levels=two: rows travel {rule}"]
    assert gather(kept.texts) == [expected, *[[]] * (len(hosts) - 1)]


@pytest.mark.parametrize("hosts", list(SHAPES))
def test_the_rule_is_named_once(hosts: str) -> None:
    run_ranks(check_rule, len(hosts), timeout_s=120, hosts=hosts)


NUM_ROWS, DIM = 60, 8


class Sum(nn.Module):
    """Reads a table."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings

    def forward(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        found: torch.Tensor = self.embeddings(sparse).values().sum()
        return found


def check_bytes(hosts: str) -> None:
    """The ranks of every host read all rows, each of them one part, in one step."""
    pretend_hosts(hosts)
    rank, num_ranks = dist.get_rank(), len(hosts)
    host_of_rank = gather_host_of_rank()
    own = [at for at in range(num_ranks) if hosts[at] == hosts[rank]]
    mine = torch.arange(NUM_ROWS)[own.index(rank) :: len(own)]
    tables = [
        EmbeddingBagConfig(
            name="t", num_embeddings=NUM_ROWS, embedding_dim=DIM, feature_names=["f"]
        )
    ]
    placement = Placement.alike(Partition({"t": NUM_ROWS}))
    embeddings = HotColdEmbeddingBagCollection(tables, placement, device=torch.device("meta"))
    sharder = HotColdSharder(OptimizerSpec(OptimizerKind.sgd, 0.1), levels=Levels.two)
    model = shard_task(
        Sum(embeddings), sharder, placement_constraints(placement), data_parallel=False, seed=1
    )
    with count_sent_bytes(host_of_rank) as traffic:
        model(KeyedJaggedTensor(["f"], mine, lengths=torch.ones_like(mine))).backward()

    block, num_hosts = NUM_ROWS // num_ranks, len(set(hosts))
    is_even = find_hosts(host_of_rank).hosts is not None
    if is_even:  # the relay has the rows of its rail, one block of each other host
        asked, num_counts = block * (num_hosts - 1), num_hosts - 1
    else:
        asked = sum(hosts[row // block] != hosts[rank] for row in mine.tolist())
        num_counts = num_ranks - len(own)
    served = block * (num_hosts - 1)  # each host asks for every row once
    ids, counts = 4 * asked, 8 * num_counts
    found = traffic.between_hosts_bytes["all_to_all"] - ids - counts
    assert found == 4 * DIM * (asked + served), (found, asked, served)
    assert sum(traffic.between_hosts_bytes.values()) == found + ids + counts

    # The bound is what all ranks send together, shared among the ranks of the hosts that receive.
    part = count_host_rows(mine, host_of_rank, torch.device("cpu"))
    bound = lower_bound_between_hosts_bytes({DIM: part}, host_of_rank, rank)
    parts, bounds, sent = zip(*gather((part, bound, found)), strict=True)
    assert sum(parts) == num_hosts * NUM_ROWS
    assert sum(bounds) == sum(sent)
    assert bound == 2 * 4 * DIM * part * (num_ranks - len(own)) // num_ranks


@pytest.mark.parametrize("hosts", ["0011", "001122", *SHAPES])
def test_bytes_between_hosts_by_hand(hosts: str) -> None:
    run_ranks(check_bytes, len(hosts), timeout_s=120, hosts=hosts)
