"""The measurement: cases in turn, step by step, then steps whose bytes are counted.

A step is timed on every rank between a barrier and the return of the pipeline; the slowest rank's
time is the step's. Nothing else happens in between: losses stay tensors until the end.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from tqdm import tqdm

from hotrec.cli.bench.cases import Runner
from hotrec.cli.bench.machine import interface_sent_bytes
from hotrec.distributed import Ranks, barrier
from hotrec.traffic import count_sent_bytes


def takes_part(round_number: int, num_rounds: int, own_rounds: int) -> bool:
    """Whether a case that makes ``own_rounds`` of ``num_rounds`` steps has one in this round.

    They are spread evenly over the rounds.
    """
    before = round_number * own_rounds // num_rounds
    return (round_number + 1) * own_rounds // num_rounds > before


def rotated(runners: Sequence[Runner], round_number: int) -> list[Runner]:
    """The order of a round: each case comes first, and after each other one, as often."""
    shift = round_number % len(runners)
    return [*runners[shift:], *runners[:shift]]


def run_warmup(runners: Sequence[Runner], num_rounds: int) -> None:
    """Steps before the clock; building a case has made the first."""
    for round_number in range(num_rounds - 1):
        for runner in rotated(runners, round_number):
            runner.step()


def run_timed(
    runners: Sequence[Runner], *, rounds: int, rounds_of: dict[str, int], ranks: Ranks
) -> None:
    """The timed steps."""
    steps = [
        (round_number, runner)
        for round_number in range(rounds)
        for runner in rotated(runners, round_number)
        if takes_part(round_number, rounds, min(rounds_of.get(runner.case.name, rounds), rounds))
    ]
    with _no_collection():
        for round_number, runner in _progress(steps, "timed steps", ranks):
            runner.step_s[round_number] = _timed(runner.step, ranks.device)


def _timed(step: Callable[[], None], device: torch.device) -> float:
    barrier()
    _synchronize(device)
    start = time.perf_counter()
    step()
    _synchronize(device)
    return time.perf_counter() - start


def run_counted(
    runners: Sequence[Runner], *, num_steps: int, interface: str | None, ranks: Ranks
) -> None:
    """Untimed steps whose sent bytes are counted, by collective and by the network interface.

    The interface also counts what surrounds them: the barriers, a few hundred bytes, and the
    acknowledgements of received data.
    """
    steps = [(number, runner) for number in range(num_steps) for runner in runners]
    for _, runner in _progress(steps, "counted steps", ranks):
        barrier()
        runner.counted.append(runner.num_steps)
        before = interface_sent_bytes(interface) if interface else 0
        with count_sent_bytes() as traffic:
            runner.step()
        _synchronize(ranks.device)
        barrier()
        runner.sent_bytes.append(dict(traffic.sent_bytes))
        if interface:
            runner.wire_bytes.append(interface_sent_bytes(interface) - before)


def _progress(
    steps: Sequence[tuple[int, Runner]], what: str, ranks: Ranks
) -> Iterator[tuple[int, Runner]]:
    # disable=None: shown on a terminal only.
    yield from tqdm(steps, desc=what, unit="step", disable=None if ranks.is_first else True)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python's garbage is collected before the clock, not at some case's expense."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
