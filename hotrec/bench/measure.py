"""Measure interleaved cases: timed blocks, then steps with counted bytes."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hotrec.bench.cases import Runner
from hotrec.bench.machine import interface_sent_bytes
from hotrec.runtime.hosts import gather_host_of_rank
from hotrec.runtime.progress import Progress
from hotrec.runtime.ranks import Ranks
from hotrec.runtime.traffic import count_sent_bytes
from hotrec.train.interleave import in_turn, run_block

# Extra batches for those that a pipeline holds besides the one that it computes.
NUM_AHEAD = 8


@dataclass(frozen=True)
class Turns:
    """The schedule of interleaved cases.

    Args:
        rounds: Number of rounds of timed blocks.
        block_steps: Steps of a block.
        block_skip: First steps of a block that are not timed.
        warmup_steps: Steps of each case before its first block.
        counted_steps: Untimed steps after the blocks whose bytes are counted.
        interface: Network interface whose sent bytes are also read; None for none.
    """

    rounds: int
    block_steps: int
    block_skip: int
    warmup_steps: int
    counted_steps: int
    interface: str | None = None

    @property
    def num_batches(self) -> int:
        """Batches that a case needs, with those that its pipeline holds ahead."""
        timed = self.warmup_steps + self.rounds * self.block_steps
        return timed + self.counted_steps + NUM_AHEAD


def run_cases(runners: Sequence[Runner], turns: Turns, ranks: Ranks) -> None:
    """Warm up, time interleaved blocks of all cases, count bytes, close; collective."""
    for runner in runners:
        for _ in range(turns.warmup_steps - 1):  # the first step ran when the case was built
            runner.step()
        runner.drain()
    _run_timed(runners, turns, ranks)
    _run_counted(runners, turns.counted_steps, turns.interface, ranks)
    for runner in runners:
        runner.pipeline.close()


def _run_timed(runners: Sequence[Runner], turns: Turns, ranks: Ranks) -> None:
    """Time the blocks round by round."""
    blocks = [
        (number, runner) for number in range(turns.rounds) for runner in in_turn(runners, number)
    ]
    gc.collect()
    gc.disable()  # not in a timed block
    try:
        for number, runner in _progress(blocks, "timed blocks", ranks):
            runner.drain()  # so that the ranks begin together
            runner.blocks[number] = run_block(
                runner, turns.block_steps, turns.block_skip, ranks.device, clock=runner.clock
            )
    finally:
        gc.enable()


def _run_counted(
    runners: Sequence[Runner], num_steps: int, interface: str | None, ranks: Ranks
) -> None:
    """Count the bytes sent in untimed steps, also on the network interface.

    The interface also counts the barriers around the steps, a few hundred bytes, and the
    acknowledgements of received data.
    """
    host_of_rank = gather_host_of_rank()
    for _, runner in _progress(list(enumerate(runners)), "counted steps", ranks):
        runner.drain()
        before = interface_sent_bytes(interface) if interface else 0
        with count_sent_bytes(host_of_rank) as traffic:
            for _ in range(num_steps):
                runner.counted.append(len(runner.losses))
                runner.step()
            runner.drain()
        runner.sent_bytes = sum(traffic.sent_bytes.values())
        runner.between_hosts_bytes = sum(traffic.between_hosts_bytes.values())
        if interface:
            runner.wire_bytes = interface_sent_bytes(interface) - before


def _progress(
    steps: Sequence[tuple[int, Runner]], what: str, ranks: Ranks
) -> Iterator[tuple[int, Runner]]:
    with Progress(what, len(steps), unit="steps", is_shown=ranks.is_first) as bar:
        for step in steps:
            yield step
            bar.update()
