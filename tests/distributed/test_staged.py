"""The staged back end: its own collectives, and hotrec, TorchRec and DDP over it.

What a machine with one GPU, and the stand-in for one, runs on several ranks
(tests/gpu/test_staged_parity.py), on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.exact.case import draw_cases
from tests.exact.messages import MESSAGES
from tests.exact.training import run_cases
from tests.helpers.checks import run_checks
from tests.helpers.ranks import run_ranks
from tests.helpers.staged import NAME, run_staged


def the_default_group_is_staged() -> None:
    assert dist.get_backend() == NAME
    assert dist.get_backend(dist.new_group()) == NAME


def what_is_in_flight_cannot_be_read() -> None:
    """A missing wait shows, as it does not on a fast loopback."""
    looked = dist.new_group()
    for dtype, spoilt in ((torch.float32, "nan"), (torch.int64, "-1")):
        values = torch.ones(3, dtype=dtype)
        if dist.get_rank() == 1:  # takes part only when the others have looked
            dist.barrier(looked)
        work = dist.all_reduce(values, async_op=True)
        if dist.get_rank() != 1:
            assert [str(value) for value in values.tolist()] == [spoilt] * 3
            dist.barrier(looked)
        assert work is not None
        work.wait()
        assert values.tolist() == [dist.get_world_size()] * 3


COLLECTIVES: list[Callable[[], None]] = [
    the_default_group_is_staged,
    what_is_in_flight_cannot_be_read,
]
Results = list[tuple[dict[str, str | None], list[str]]]


def check_all() -> tuple[dict[str, str | None], list[str]]:
    """All checks, then generated cases: one spawn of these ranks."""
    verdicts = run_checks([*COLLECTIVES, *MESSAGES])
    return verdicts, run_cases(draw_cases("0" * dist.get_world_size(), 16, seed=40)).failures


@pytest.mark.parametrize("world_size", [2, 3])
def test_staged_ranks_train_the_unsplit_model(world_size: int) -> None:
    found = run_ranks(run_staged, world_size, timeout_s=300, action=check_all)
    for verdicts, failures in found:
        assert verdicts == dict.fromkeys(verdicts), "\n".join(filter(None, verdicts.values()))
        assert not failures, "\n".join(failures)


def check_on_cuda(checks: list[Callable[[], None]]) -> dict[str, str | None]:
    """The checks with the tensors that they make on CUDA."""
    torch.set_default_device("cuda")
    try:
        return run_checks(checks)
    finally:
        torch.set_default_device("cpu")
