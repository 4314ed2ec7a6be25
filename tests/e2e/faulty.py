"""Runs in which a rank goes wrong at a named step, by a patch of its pipelines.

``python -m tests.e2e.faulty WORDS`` is ``python -m hotrec WORDS`` for a rank, with the fault that
HOTREC_TEST_FAULT names. The program itself has no hook for it.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

FAULT = "HOTREC_TEST_FAULT"


@dataclass(frozen=True)
class Fault:
    """What one rank does wrong.

    Args:
        kind: "slow" (before every step), "raise" or "hang" (in the model's forward), "kill" or
            "stop" (before a step, by a signal to itself).
        step: in which it does so, counted from 1 of this start; of "slow", the last one.
        seconds: how long a slow step takes more.
    """

    kind: str
    rank: int
    step: int
    seconds: float = 0.0


def put_in(fault: Fault) -> None:
    """Patch the pipelines of this process, if it is the rank of the fault and has not restarted."""
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if (fault.rank, "0") != (int(os.environ["RANK"]), restarts):
        return
    import torch

    from hotrec.train.pipelines import LookAheadPipeline, Pipeline, TorchRecPipeline

    progress_of = {kind: kind.progress for kind in (LookAheadPipeline, TorchRecPipeline)}
    num_steps = 0

    def faulty_forward(*_: Any) -> None:
        if fault.kind == "raise" and torch.is_grad_enabled():
            raise ArithmeticError("the model has had enough")
        if fault.kind == "hang":
            time.sleep(1000)

    def faulty_progress(self: Pipeline, batches: Iterator[Any]) -> Any:
        nonlocal num_steps
        num_steps += 1
        if fault.kind == "slow" and num_steps <= fault.step:
            time.sleep(fault.seconds)
        if num_steps == fault.step:
            print(f"rank {fault.rank}: {fault.kind} in step {num_steps}", flush=True)
            if fault.kind in ("kill", "stop"):
                os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
            self.model.register_forward_pre_hook(faulty_forward)
        return progress_of[type(self)](self, batches)

    for kind in progress_of:
        kind.progress = faulty_progress  # type: ignore[method-assign]


if __name__ == "__main__":
    put_in(Fault(**json.loads(os.environ[FAULT])))
    runpy.run_module("hotrec", run_name="__main__")
