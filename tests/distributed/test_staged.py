"""The staged back end: its own collectives, and hotrec, TorchRec and DDP over it.

What a machine with one GPU runs on several ranks (tests/gpu/test_staged_parity.py), on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hotrec.runtime.wire import Wire
from hotrec.types import WireType
from tests.distributed import test_wire as wire
from tests.distributed.parity_cases import make_pipeline_cases, run_cases
from tests.helpers.checks import run_checks
from tests.helpers.ranks import run_ranks
from tests.helpers.staged import NAME, StagedProcessGroup, run_staged
from tests.stand_in.build import why_not
from tests.stand_in.ranks import run_on_device

NUM_CASES = 16  # of each world size
PIPELINES = {"sparse_dist", "base", "look_ahead"}


def world() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def values_of(rank: int, num: int = 4) -> torch.Tensor:
    return torch.arange(num, dtype=torch.float32) + 10 * (rank + 1)


def sum_over_ranks(num: int = 4) -> torch.Tensor:
    return torch.stack([values_of(rank, num) for rank in range(dist.get_world_size())]).sum(0)


def the_default_group_is_staged() -> None:
    assert dist.get_backend() == NAME
    assert dist.get_backend(dist.new_group()) == NAME


def what_is_added_up() -> None:
    rank, size = world()
    values = values_of(rank)
    work = dist.all_reduce(values, async_op=True)
    assert work is not None
    work.wait()
    assert torch.equal(values, sum_over_ranks())
    assert torch.equal(work.get_future().value()[0], sum_over_ranks())
    most = values_of(rank)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    assert torch.equal(most, values_of(size - 1))
    at_root = values_of(rank)
    dist.reduce(at_root, dst=size - 1)
    if rank == size - 1:
        assert torch.equal(at_root, sum_over_ranks())
    share = torch.empty(2)
    dist.reduce_scatter_tensor(share, values_of(rank, 2 * size))
    assert torch.equal(share, sum_over_ranks(2 * size).view(size, 2)[rank])
    sizes = [peer + 1 for peer in range(size)]
    share = torch.empty(sizes[rank])
    dist.reduce_scatter(share, list(values_of(rank, sum(sizes)).split(sizes)))
    assert torch.equal(share, sum_over_ranks(sum(sizes)).split(sizes)[rank])


def what_is_gathered() -> None:
    rank, size = world()
    everything = torch.empty(size, 4)
    dist.all_gather_into_tensor(everything, values_of(rank))
    assert torch.equal(everything, torch.stack([values_of(peer) for peer in range(size)]))
    for sizes in ([4] * size, [peer + 1 for peer in range(size)], [3, *[0] * (size - 1)]):
        parts = [torch.empty(num) for num in sizes]
        dist.all_gather(parts, values_of(rank, sizes[rank]))
        assert all(torch.equal(p, values_of(r, sizes[r])) for r, p in enumerate(parts))
    values = values_of(rank)
    dist.broadcast(values, src=size - 1)
    assert torch.equal(values, values_of(size - 1))
    parts = [torch.empty(4) for _ in range(size)]
    dist.gather(values_of(rank), parts if rank == 0 else None, dst=0)
    assert rank or all(torch.equal(part, values_of(peer)) for peer, part in enumerate(parts))
    part = torch.empty(4)
    dist.scatter(part, [values_of(peer) for peer in range(size)] if rank == 0 else None, src=0)
    assert torch.equal(part, values_of(rank))
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": peer} for peer in range(size)]
    holder = [f"of rank {rank}"]
    dist.broadcast_object_list(holder, src=size - 1)
    assert holder == [f"of rank {size - 1}"]


def what_goes_to_each() -> None:
    rank, size = world()
    for dtype in (torch.float32, torch.int64, torch.uint8):
        # Rank r sends r + p values to rank p.
        sizes_to = [rank + peer for peer in range(size)]
        parts = [torch.full((num,), rank + 3 * p, dtype=dtype) for p, num in enumerate(sizes_to)]
        expected = [
            torch.full((peer + rank,), peer + 3 * rank, dtype=dtype) for peer in range(size)
        ]
        found = [torch.empty_like(part) for part in expected]
        dist.all_to_all(found, parts)
        assert all(map(torch.equal, found, expected))
        joined = torch.empty_like(torch.cat(expected))
        sizes_from = [peer + rank for peer in range(size)]
        dist.all_to_all_single(joined, torch.cat(parts), sizes_from, sizes_to)
        assert torch.equal(joined, torch.cat(expected))
    rows = torch.full((size, 3), float(rank))
    arrived = torch.empty(size, 3)
    dist.all_to_all_single(arrived, rows)
    assert torch.equal(arrived, torch.arange(size).float().view(-1, 1).expand(-1, 3))


def messages_of_pairs() -> None:
    """Every rank sends to all before it receives: neither waits for the other."""
    rank, size = world()
    peers = [peer for peer in range(size) if peer != rank]
    sent = [dist.isend(values_of(rank, 1 << 16), peer) for peer in peers]
    found = [torch.empty(1 << 16) for _ in peers]
    received = [dist.irecv(part, peer) for part, peer in zip(found, peers, strict=True)]
    for work in (*sent, *received):
        assert work is not None
        work.wait()
    assert all(torch.equal(p, values_of(r, 1 << 16)) for p, r in zip(found, peers, strict=True))
    dist.barrier()


def what_is_in_flight_cannot_be_read() -> None:
    """A missing wait shows, as it does not on a fast loopback."""
    rank, size = world()
    if size == 1:
        return
    looked = dist.new_group()
    for dtype, spoilt in ((torch.float32, "nan"), (torch.int64, "-1")):
        values = torch.ones(3, dtype=dtype)
        if rank == 1:  # takes part only when the others have looked
            dist.barrier(looked)
        work = dist.all_reduce(values, async_op=True)
        if rank != 1:
            assert [str(value) for value in values.tolist()] == [spoilt] * 3
            dist.barrier(looked)
        assert work is not None
        work.wait()
        assert values.tolist() == [size] * 3


def wrong_sizes_are_refused() -> None:
    _, size = world()
    calls: Sequence[Callable[[], object]] = (
        lambda: dist.all_to_all_single(torch.empty(3), torch.empty(3), [1] * size, [2] * size),
        lambda: dist.all_reduce(torch.empty(4, 4).t()),
        lambda: dist.all_gather_into_tensor(torch.empty(3 * size + 1), torch.empty(3)),
        lambda: dist.reduce_scatter_tensor(torch.empty(3), torch.empty(3 * size + 1)),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"^staged \w+: expected contiguous tensors of sizes"):
            call()


def data_parallel_layers() -> None:
    rank, size = world()
    torch.manual_seed(rank)  # DDP has to copy rank 0's weights
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 1))
    )
    torch.manual_seed(0)
    alone = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 1))
    inputs = torch.randn(2 * size, 5)
    for network, batch in ((model, inputs[2 * rank : 2 * rank + 2]), (alone, inputs)):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            network(batch).square().mean().backward()
            optimizer.step()
    for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


def hot_rows_are_gathered_as_such() -> None:
    """By an all-gather, of equal and of other sizes, not by an all-to-all of W equal messages."""
    rank, size = world()
    assert dist.group.WORLD is not None
    exchange = Wire(dist.group.WORLD, WireType.fp16)
    others = ("alltoall", "alltoall_base", "all_to_all_single", "send", "recv")
    refused = {name: Mock(side_effect=AssertionError(name)) for name in others}
    with patch.multiple(StagedProcessGroup, **refused):
        for sizes in ([4] * size, [peer + 1 for peer in range(size)], [0] * size):
            found = exchange.all_gather_joined(values_of(rank, sizes[rank]), sizes).split(sizes)
            assert all(torch.equal(p, values_of(r, sizes[r])) for r, p in enumerate(found))


# hotrec's own exchanges take the way that they take under NCCL.
WIRE = [
    hot_rows_are_gathered_as_such,
    wire.all_to_all,
    wire.all_gather,
    wire.all_reduce,
    wire.a_matrix_is_reduced_in_place,
    wire.integers_are_not_rounded,
    wire.infinities_and_nans_arrive,
    wire.sent_bytes_are_counted,
    wire.works_from_a_thread_beside_other_groups,
    wire.ranks_of_a_part_of_the_world,
]
COLLECTIVES: list[Callable[[], None]] = [
    the_default_group_is_staged,
    what_is_added_up,
    what_is_gathered,
    what_goes_to_each,
    messages_of_pairs,
    what_is_in_flight_cannot_be_read,
    wrong_sizes_are_refused,
    data_parallel_layers,
]
CHECKS = [*COLLECTIVES, *WIRE]


def check_all(num_cases: int) -> tuple[dict[str, str | None], list[str]]:
    """All checks, then generated cases: one spawn of these ranks."""
    verdicts = run_checks(CHECKS)
    return verdicts, run_cases(make_pipeline_cases(num_cases, seed=40 + dist.get_world_size()))


Results = list[tuple[dict[str, str | None], list[str]]]


@pytest.fixture(scope="module", params=[1, 2, 3])
def results(request: pytest.FixtureRequest) -> Results:
    num_cases = NUM_CASES if request.param > 1 else 0
    return run_ranks(
        run_staged, request.param, timeout_s=300, action=check_all, num_cases=num_cases
    )


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_collectives(results: Results, check: str) -> None:
    assert results[0][0][check] is None, results[0][0][check]


@pytest.mark.parametrize("world_size", [2, 3])
def test_generated_cases_use_all_pipelines(world_size: int) -> None:
    cases = make_pipeline_cases(NUM_CASES, seed=40 + world_size)
    assert {case.pipeline for case in cases} == PIPELINES


def test_hot_cold_equals_unsplit_reference(results: Results) -> None:
    for _, failures in results:
        assert not failures, "\n".join(failures)


def check_on_cuda(checks: list[Callable[[], None]]) -> dict[str, str | None]:
    """The checks with the tensors that they make on CUDA."""
    torch.set_default_device("cuda")
    try:
        return run_checks(checks)
    finally:
        torch.set_default_device("cpu")


def on_stand_in(seed: int) -> list[str]:
    """What goes wrong on this rank with tensors of the stand-in for a CUDA device."""
    # The stand-in says "nccl" of every group.
    checks = [check for check in COLLECTIVES if check is not the_default_group_is_staged]
    found = run_staged(check_on_cuda, device="cuda", checks=checks)
    cases = [replace(case, device="cuda") for case in make_pipeline_cases(8, seed)]
    return [verdict for verdict in found.values() if verdict] + run_staged(
        run_cases, device="cuda", cases=cases
    )


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("world_size", [2, 3])
def test_on_the_stand_in_for_a_gpu(world_size: int) -> None:
    """Pinned memory, streams, and devices that must not mix, as far as they show without a GPU."""
    function = f"{__name__}:on_stand_in"
    for failures in run_on_device(function, world_size, timeout_s=240, seed=40 + world_size):
        assert not failures, "\n".join(failures)
