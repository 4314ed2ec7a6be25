"""A sharded model for the tests of real ranks, and what ranks say to one another."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel

from hotrec.assemble.torchrec_plan import make_plan
from hotrec.embedding.convert import shard
from hotrec.embedding.initialize import initialize_embeddings
from hotrec.planner.machine import Machine
from hotrec.runtime.ranks import Ranks, broadcast_object


def this_rank() -> Ranks:
    rank, size = dist.get_rank(), dist.get_world_size()
    return Ranks(rank, size, rank, size, torch.device("cpu"))


def pretend_hosts(hosts: str) -> None:
    """Set what torchrun would set on this rank, a process of its own, given each rank's host."""
    host = hosts[dist.get_rank()]
    os.environ |= {"GROUP_RANK": host, "LOCAL_WORLD_SIZE": str(hosts.count(host))}


def gather(value: Any) -> list[Any]:
    """The value of every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def assert_same_on_ranks(value: torch.Tensor) -> None:
    """Bit for bit; all ranks reach the same verdict, or the next collective would hang."""
    assert len(set(gather(value.detach().contiguous().numpy().tobytes()))) == 1


def shard_task(
    task: nn.Module,
    sharder: Any,
    constraints: Any,
    *,
    device: str = "cpu",
    data_parallel: bool = True,
    seed: int | None = None,
) -> DistributedModelParallel:
    """Plan, shard and initialize a model on the ranks of the default group."""
    size, target = dist.get_world_size(), torch.device(device)
    # TorchRec gives each rank of a host a device of its own; ranks of tests may share one.
    is_cuda = target.type == "cuda"
    local_size = len(set(gather(torch.cuda.current_device()))) if is_cuda else size
    machine = Machine(size, local_size, target.type, 1 << 30, 1 << 33, 8)
    # Every rank would compute the same, as those of a program do (test_program).
    plan = broadcast_object(
        make_plan(task, [sharder], machine, constraints) if dist.get_rank() == 0 else None
    )
    model = shard(task, plan, [sharder], target, data_parallel=data_parallel)
    if seed is not None:
        initialize_embeddings(model, seed)
    return model
