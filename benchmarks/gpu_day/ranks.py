"""Stage 7: checks that two and three ranks on one GPU train the same model as one unsplit model.

NCCL refuses two ranks on a device, so they use a process group of the tests that stages tensors
through pinned memory. First its own collectives are checked, then every pipeline with every tier.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from benchmarks.gpu_day.record import OK, Parts, Summary, Table
from benchmarks.gpu_day.stage import Day, main
from tests.distributed.test_staged import COLLECTIVES, check_on_cuda
from tests.exact.case import CUDA_TIERS, Case, draw_cases
from tests.exact.training import run_cases
from tests.helpers.ranks import run_ranks
from tests.helpers.staged import run_staged


def check_all(cases: list[Case]) -> tuple[dict[str, str | None], list[str]]:
    """On a rank: what each collective came to, and the cases that differ from the reference."""
    return check_on_cuda(COLLECTIVES), run_cases(cases).failures


def measure(world_size: int, num_cases: int) -> dict[str, Any]:
    """Start the ranks and run the checks.

    Raises:
        RuntimeError: if a check fails on a rank.
    """
    hosts, seed = "0" * world_size, 40 + world_size
    cases = draw_cases(hosts, num_cases, seed, tiers=CUDA_TIERS, device="cuda")
    results = run_ranks(
        run_staged,
        world_size,
        timeout_s=170,
        # A process that was forked from one with libraries of CUDA may not be able to start it.
        start_method="spawn",
        action=check_all,
        device="cuda",
        cases=cases,
    )
    verdicts = results[0][0]
    wrong = [f"{name}: {verdict}" for name, verdict in verdicts.items() if verdict is not None]
    wrong += [f"rank {rank}: {case}" for rank, (_, of) in enumerate(results) for case in of]
    if wrong:
        raise RuntimeError("\n".join(wrong))
    return {"num_collectives": len(verdicts), "num_cases": len(cases)}


def summarize(parts: Parts) -> Summary:
    done = {name: part for name, part in parts.items() if part["status"] == OK}
    rows = [[n, str(p["num_collectives"]), str(p["num_cases"])] for n, p in done.items()]
    said = ", ".join(done) or "no ranks"
    return Summary(
        f"On one GPU {said} train what an unsplit model trains.",
        [Table("Passed", ["ranks", "checks of collectives", "training cases"], rows)] * bool(rows),
    )


def run(day: Day) -> None:
    # Several ranks would load every kernel at once: hundreds of megabytes in each, and a wheel that
    # was cut down for one architecture holds kernels that cannot be loaded. No exchange waits for
    # one here, as NCCL's would.
    os.environ["CUDA_MODULE_LOADING"] = "LAZY"
    for world_size, num_cases in day.pick({2: 24, 3: 12}, {2: 3}).items():
        day.record.part(f"{world_size} ranks", lambda w=world_size, n=num_cases: measure(w, n))


if __name__ == "__main__":
    sys.exit(main(run, summarize))
