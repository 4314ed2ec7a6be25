"""Which rank ended first, by exit codes and whole seconds."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from hotrec.cli.ranks import ended_first
from hotrec.runtime.watchdog import EXIT_CODE

TERM, KILL = -signal.SIGTERM, -signal.SIGKILL


def failure(folder: Path, rank: int, exit_code: int, at_s: int) -> ProcessFailure:
    path = folder / f"error-{rank}.json"
    path.write_text(
        json.dumps({"message": {"message": "-", "extraInfo": {"timestamp": str(at_s)}}})
    )
    return ProcessFailure(local_rank=rank, pid=1, exitcode=exit_code, error_file=str(path))


@pytest.mark.parametrize(
    ("ends", "first"),
    [
        # The exit code and the second in which each rank ended.
        ([(1, 100)], 0),
        ([(EXIT_CODE, 100), (KILL, 100)], 1),
        ([(EXIT_CODE, 100), (KILL, 101)], 1),
        ([(KILL, 100), (EXIT_CODE, 100)], 0),
        # A rank that was stopped: what torchrun kills half a minute later did not end first.
        ([(EXIT_CODE, 100), (KILL, 130)], 0),
        ([(TERM, 100), (EXIT_CODE, 100)], 1),
        ([(TERM, 99), (EXIT_CODE, 100), (1, 100)], 2),
        # It had time to end in good order.
        ([(128 + signal.SIGTERM, 100), (1, 100)], 1),
        ([(EXIT_CODE, 100), (EXIT_CODE, 99), (TERM, 99)], 0),
        ([(TERM, 101), (TERM, 100)], 0),
        # Two that failed by themselves: nothing says more than the time.
        ([(1, 100), (2, 90)], 1),
    ],
)
def test_a_rank_that_failed_by_itself_goes_before_those_that_follow(
    tmp_path: Path, ends: list[tuple[int, int]], first: int
) -> None:
    failures = {rank: failure(tmp_path, rank, code, at_s) for rank, (code, at_s) in enumerate(ends)}
    assert ended_first(failures) == first
