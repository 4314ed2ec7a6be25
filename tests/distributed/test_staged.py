"""The staged back end: its own collectives, and hotrec, TorchRec and DDP over it.

What a machine with one GPU, and the stand-in for one, runs on several ranks
(tests/gpu/test_staged_parity.py), on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from hotrec.runtime.wire import Wire
from hotrec.types import WireType
from tests.distributed import test_wire as wire
from tests.exact.case import draw_cases
from tests.exact.training import run_cases
from tests.helpers.checks import run_checks
from tests.helpers.ranks import run_ranks
from tests.helpers.staged import NAME, StagedProcessGroup, run_staged

NUM_CASES = 16  # of each world size


def world() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def the_default_group_is_staged() -> None:
    assert dist.get_backend() == NAME
    assert dist.get_backend(dist.new_group()) == NAME


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


def hot_rows_are_gathered_as_such() -> None:
    """By an all-gather, of equal and of other sizes, not by an all-to-all of W equal messages."""
    rank, size = world()
    assert dist.group.WORLD is not None
    exchange = Wire(dist.group.WORLD, WireType.fp16)
    others = ("alltoall", "alltoall_base", "all_to_all_single", "send", "recv")
    refused = {name: Mock(side_effect=AssertionError(name)) for name in others}
    with patch.multiple(StagedProcessGroup, **refused):
        for sizes in ([4] * size, [peer + 1 for peer in range(size)], [0] * size):
            source = torch.full((sizes[rank],), float(rank))
            found = exchange.all_gather_joined(source, sizes).split(sizes)
            assert [part.tolist() for part in found] == [[r] * n for r, n in enumerate(sizes)]


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
    what_is_in_flight_cannot_be_read,
    wrong_sizes_are_refused,
]
CHECKS = [*COLLECTIVES, *WIRE]


def check_all(num_cases: int) -> tuple[dict[str, str | None], list[str]]:
    """All checks, then generated cases: one spawn of these ranks."""
    verdicts = run_checks(CHECKS)
    cases = draw_cases("0" * dist.get_world_size(), num_cases, seed=40)
    return verdicts, run_cases(cases).failures


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
