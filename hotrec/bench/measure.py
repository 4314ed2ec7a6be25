"""Measure interleaved cases: timed blocks, then steps with counted bytes, then profiled steps."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch.profiler import ProfilerActivity, profile

from hotrec.bench.cases import Runner
from hotrec.bench.machine import interface_sent_bytes
from hotrec.runtime.hosts import gather_host_of_rank
from hotrec.runtime.progress import Progress
from hotrec.runtime.ranks import Ranks
from hotrec.runtime.traffic import count_sent_bytes
from hotrec.train.interleave import in_turn, run_block

# Extra batches for those that a pipeline holds besides the one that it computes.
NUM_AHEAD = 8
MAX_OPERATORS = 12


@dataclass(frozen=True)
class Turns:
    """The schedule of interleaved cases.

    Args:
        rounds: Number of rounds of timed blocks.
        block_steps: Steps of a block.
        block_skip: First steps of a block that are not timed.
        warmup_steps: Steps of each case before its first block.
        counted_steps: Untimed steps after the blocks whose bytes are counted.
        rounds_of: Number of blocks of single cases, if fewer than rounds, by name.
        interface: Network interface whose sent bytes are also read; None for none.
        profile_steps: Steps of each case to profile at the end; 0 for none.
    """

    rounds: int
    block_steps: int
    block_skip: int
    warmup_steps: int
    counted_steps: int
    rounds_of: Mapping[str, int] = field(default_factory=dict)
    interface: str | None = None
    profile_steps: int = 0

    @property
    def num_batches(self) -> int:
        """Batches that a case needs, with those that its pipeline holds ahead."""
        timed = self.warmup_steps + self.rounds * self.block_steps + self.counted_steps
        return timed + self.profile_steps + NUM_AHEAD


def takes_part(round_number: int, num_rounds: int, own_rounds: int) -> bool:
    """Whether a case with ``own_rounds`` evenly spread rounds takes part in this one."""
    before = round_number * own_rounds // num_rounds
    return (round_number + 1) * own_rounds // num_rounds > before


def run_cases(runners: Sequence[Runner], turns: Turns, ranks: Ranks) -> dict[str, dict[str, float]]:
    """Warm up, time interleaved blocks of all cases, count bytes, profile, close; collective.

    Returns:
        Seconds per step by operator by case, with the profiler's overhead; empty if not profiled.
    """
    for runner in runners:
        for _ in range(turns.warmup_steps - 1):  # the first step ran when the case was built
            runner.step()
        runner.drain()
    _run_timed(runners, turns, ranks)
    _run_counted(runners, turns.counted_steps, turns.interface, ranks)
    operators_s = {}
    # On CUDA the host's time is not that of the operators.
    if turns.profile_steps and ranks.device.type == "cpu":
        operators_s = {r.case.name: _run_profiled(r, turns.profile_steps) for r in runners}
    for runner in runners:
        runner.pipeline.close()
    return operators_s


def _run_timed(runners: Sequence[Runner], turns: Turns, ranks: Ranks) -> None:
    """Time the blocks round by round."""
    blocks = [
        (number, runner)
        for number in range(turns.rounds)
        for runner in in_turn(runners, number)
        if takes_part(number, turns.rounds, turns.rounds_of.get(runner.case.name, turns.rounds))
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
    """Count the bytes sent in untimed steps, by collective and on the network interface.

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
        runner.sent_bytes = dict(traffic.sent_bytes)
        runner.between_hosts_bytes = dict(traffic.between_hosts_bytes)
        if interface:
            runner.wire_bytes = interface_sent_bytes(interface) - before


def _progress(
    steps: Sequence[tuple[int, Runner]], what: str, ranks: Ranks
) -> Iterator[tuple[int, Runner]]:
    with Progress(what, len(steps), unit="steps", is_shown=ranks.is_first) as bar:
        for step in steps:
            yield step
            bar.update()


def _run_profiled(runner: Runner, num_steps: int) -> dict[str, float]:
    """Seconds per step of the slowest operators: self time over all threads of this rank."""
    runner.drain()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(num_steps):
            runner.step()
        runner.drain()
    seconds = {e.key: e.self_cpu_time_total / 1e6 / num_steps for e in profiler.key_averages()}
    return dict(sorted(seconds.items(), key=lambda item: -item[1])[:MAX_OPERATORS])
