"""Runs in which a rank goes wrong: by a signal from outside, or by a patch inside.

``python -m tests.helpers.faults WORDS`` is what ``python -m hotrec WORDS`` is for a rank, with the
fault that HOTREC_TEST_FAULT names put into one rank's steps. The program itself has no hook for it.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults import rank_processes

FAULT = "HOTREC_TEST_FAULT"


@dataclass(frozen=True)
class Fault:
    """What one rank does wrong.

    Args:
        kind: "slow" (before every step), "raise" (in the model's forward), "loader" (raise in the
            loader), "hang" (in the model's forward, alive), "disk" or "full disk" (hangs, or
            raises, in checkpoints).
        step: in which it does so, counted from 1 of this start; of "slow", the last one, of disks
            the first one.
        seconds: how long a slow step takes more.
    """

    kind: str
    rank: int
    step: int = 1
    seconds: float = 0.0


@contextmanager
def run_of_ranks(
    words: Sequence[str],
    *,
    num_ranks: int,
    cwd: Path,
    environment: Mapping[str, str],
    fault: Fault | None = None,
    max_restarts: int = 0,
) -> Iterator[subprocess.Popen[str]]:
    """Start ``hotrec WORDS`` on ranks under torchrun, as ``launch.num_ranks`` does."""
    module = "hotrec" if fault is None else "tests.helpers.faults"
    launcher = [sys.executable, "-m", "hotrec.cli.ranks", "--standalone"]
    launcher += ["--local-addr", "localhost", "--nproc-per-node", str(num_ranks)]
    launcher += ["--max-restarts", str(max_restarts)]
    variables = dict(environment)
    if fault is not None:
        variables[FAULT] = json.dumps(vars(fault))
    running = subprocess.Popen(
        [*launcher, "-m", module, *words],
        cwd=cwd,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield running
    finally:
        for pid in rank_processes(running.pid).values():
            os.kill(pid, 9)
        running.kill()
        running.communicate()


def wait_for_step(run_dir: Path, step: int, running: subprocess.Popen[str]) -> None:
    """Wait until a run that logs every step has logged ``step``.

    Raises:
        AssertionError: if it ends before, or takes more than two minutes.
    """
    metrics = run_dir / "metrics.jsonl"
    until_s = time.monotonic() + 120
    while not metrics.exists() or len(metrics.read_text().splitlines()) < step:
        assert running.poll() is None, running.communicate()[1]
        assert time.monotonic() < until_s, f"no step {step} in two minutes"
        time.sleep(0.02)


def put_in(fault: Fault) -> None:
    """Patch the pipelines of this process, if it is the rank of the fault."""
    if fault.rank != int(os.environ["RANK"]):
        return
    import torch

    from hotrec.train import checkpoint
    from hotrec.train.pipelines import LookAheadPipeline, Pipeline, TorchRecPipeline

    progress_of = {kind: kind.progress for kind in (LookAheadPipeline, TorchRecPipeline)}
    num_steps, write = 0, checkpoint.write_tensors

    def faulty_write(*given: Any) -> Any:
        if num_steps >= fault.step and fault.kind == "disk":
            time.sleep(1000)
        if num_steps >= fault.step and fault.kind == "full disk":
            raise OSError(28, "No space left on device")
        return write(*given)

    checkpoint.write_tensors = faulty_write

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
            if fault.kind == "loader":
                batches = _broken_loader()
            else:
                self.model.register_forward_pre_hook(faulty_forward)
        return progress_of[type(self)](self, batches)

    for kind in progress_of:
        kind.progress = faulty_progress  # type: ignore[method-assign]


def _broken_loader() -> Iterator[Any]:
    raise OSError("chunk 7: unreadable")
    yield


def main() -> None:
    """Run hotrec on this rank, with the fault if it is this rank's."""
    put_in(Fault(**json.loads(os.environ[FAULT])))
    runpy.run_module("hotrec", run_name="__main__")


if __name__ == "__main__":
    main()
