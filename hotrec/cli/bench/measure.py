"""The measurement: cases in turn, block by block, then steps whose bytes are counted.

Within a block nothing is between two steps but a clock: losses stay tensors until the end.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tqdm import tqdm

from hotrec.cli.bench.blocks import Block, Stopwatch
from hotrec.cli.bench.cases import Runner
from hotrec.cli.bench.machine import interface_sent_bytes
from hotrec.distributed import Ranks
from hotrec.traffic import count_sent_bytes


def takes_part(round_number: int, num_rounds: int, own_rounds: int) -> bool:
    """Whether a case that makes ``own_rounds`` of ``num_rounds`` blocks has one in this round.

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
    for runner in runners:
        for _ in range(num_rounds - 1):
            runner.step()
        runner.settle()


def run_timed(
    runners: Sequence[Runner],
    *,
    rounds: int,
    rounds_of: dict[str, int],
    block_steps: int,
    block_skip: int,
    ranks: Ranks,
) -> None:
    """The timed blocks."""
    turns = [
        (round_number, runner)
        for round_number in range(rounds)
        for runner in rotated(runners, round_number)
        if takes_part(round_number, rounds, min(rounds_of.get(runner.case.name, rounds), rounds))
    ]
    with _no_collection():
        for round_number, runner in _progress(turns, "timed blocks", ranks):
            runner.blocks[round_number] = run_block(runner, block_steps, block_skip, ranks)


def run_block(runner: Runner, num_steps: int, num_skipped: int, ranks: Ranks) -> Block:
    """Consecutive steps of one case, from when nothing is under way to when nothing is."""
    runner.settle()
    watch = Stopwatch(ranks.device)
    for number in range(num_steps):
        if number < num_skipped:
            runner.step()
        else:
            with runner.clock.step():
                runner.step()
        watch.lap()
    runner.settle()
    watch.lap()
    cpu_s, main_cpu_s = watch.cpu_seconds()
    *returned_s, ended_s = watch.seconds()
    return Block(returned_s, ended_s, num_skipped, cpu_s, main_cpu_s)


def run_counted(
    runners: Sequence[Runner], *, num_steps: int, interface: str | None, ranks: Ranks
) -> None:
    """Untimed steps whose sent bytes are counted, by collective and by the network interface.

    Nothing is under way before and after them. The interface also counts the barriers around them,
    a few hundred bytes, and the acknowledgements of received data.
    """
    for _, runner in _progress(list(enumerate(runners)), "counted steps", ranks):
        runner.settle()
        before = interface_sent_bytes(interface) if interface else 0
        with count_sent_bytes() as traffic:
            for _ in range(num_steps):
                runner.counted.append(runner.num_steps)
                runner.step()
            runner.settle()
        runner.sent_bytes = dict(traffic.sent_bytes)
        if interface:
            runner.wire_bytes = interface_sent_bytes(interface) - before


def _progress(
    steps: Sequence[tuple[int, Runner]], what: str, ranks: Ranks
) -> Iterator[tuple[int, Runner]]:
    # disable=None: shown on a terminal only.
    yield from tqdm(steps, desc=what, unit="step", disable=None if ranks.is_first else True)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python's garbage is collected before the clock, not at some case's expense."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
