"""Measure cases in turn: timed blocks, then steps with counted bytes, then profiled steps."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from hotrec.bench.cases import Block, Runner
from hotrec.bench.machine import interface_sent_bytes
from hotrec.config.roots import BenchConfig
from hotrec.runtime.progress import Progress
from hotrec.runtime.ranks import Ranks
from hotrec.runtime.traffic import count_sent_bytes

# Extra batches for those that a pipeline holds beside the one it computes.
NUM_AHEAD = 8
MAX_OPERATORS = 12


def num_steps(bench: BenchConfig) -> int:
    """The number of batches that ``run_cases`` needs, with those that pipelines hold ahead."""
    timed = bench.warmup_rounds + bench.rounds * bench.block_steps + bench.counted_steps
    return timed + (bench.profile_steps if bench.profile else 0) + NUM_AHEAD


def takes_part(round_number: int, num_rounds: int, own_rounds: int) -> bool:
    """Whether a case with ``own_rounds`` evenly spread rounds takes part in this one."""
    before = round_number * own_rounds // num_rounds
    return (round_number + 1) * own_rounds // num_rounds > before


def run_cases(
    runners: Sequence[Runner], bench: BenchConfig, ranks: Ranks
) -> dict[str, dict[str, float]]:
    """Warm up, time blocks of all cases in turn, count bytes, profile, close; collective.

    Returns:
        Seconds per step by operator by case, with the profiler's overhead; empty if not profiled.
    """
    for runner in runners:
        for _ in range(bench.warmup_rounds - 1):  # the first step ran when the case was built
            runner.step()
        runner.drain()
    _run_timed(runners, bench, ranks)
    _run_counted(runners, bench.counted_steps, bench.interface, ranks)
    operators_s = {}
    if bench.profile and ranks.device.type == "cpu":  # on CUDA host time does not say where it goes
        operators_s = {r.case.name: _run_profiled(r, bench.profile_steps) for r in runners}
    for runner in runners:
        runner.pipeline.close()
    return operators_s


def _run_timed(runners: Sequence[Runner], bench: BenchConfig, ranks: Ranks) -> None:
    """Time the blocks round by round; each case comes first equally often."""
    turns = []
    for number in range(bench.rounds):
        shift = number % len(runners)
        for runner in (*runners[shift:], *runners[:shift]):
            own = min(bench.rounds_of.get(runner.case.name, bench.rounds), bench.rounds)
            turns += [(number, runner)] if takes_part(number, bench.rounds, own) else []
    gc.collect()
    gc.disable()  # not in a timed block
    try:
        for number, runner in _progress(turns, "timed blocks", ranks):
            block = run_block(runner, bench.block_steps, bench.block_skip, ranks)
            runner.blocks[number] = block
    finally:
        gc.enable()


def run_block(runner: Runner, num_steps: int, num_skipped: int, ranks: Ranks) -> Block:
    """Time consecutive steps of one case, with no communication in flight before and after."""
    is_cuda = ranks.device.type == "cuda"

    def now() -> Any:
        # On CUDA an event, since synchronizing in each step would end the overlap.
        if not is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    runner.drain()
    cpu_s, main_cpu_s, start = time.process_time(), time.thread_time(), now()
    times = []
    for number in range(num_steps):
        with nullcontext() if number < num_skipped else runner.clock.step():
            runner.step()
        times.append(now())
    runner.drain()
    times.append(now())
    cpu_s, main_cpu_s = time.process_time() - cpu_s, time.thread_time() - main_cpu_s
    if is_cuda:
        torch.cuda.synchronize()
    *returned_s, ended_s = (start.elapsed_time(t) / 1e3 if is_cuda else t - start for t in times)
    return Block(returned_s, ended_s, num_skipped, cpu_s, main_cpu_s)


def _run_counted(
    runners: Sequence[Runner], num_steps: int, interface: str | None, ranks: Ranks
) -> None:
    """Count the bytes sent in untimed steps, by collective and on the network interface.

    The interface also counts the barriers around the steps, a few hundred bytes, and the
    acknowledgements of received data.
    """
    for _, runner in _progress(list(enumerate(runners)), "counted steps", ranks):
        runner.drain()
        before = interface_sent_bytes(interface) if interface else 0
        with count_sent_bytes() as traffic:
            for _ in range(num_steps):
                runner.counted.append(len(runner.losses))
                runner.step()
            runner.drain()
        runner.sent_bytes = dict(traffic.sent_bytes)
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
    """Seconds per step in the operators that take most, self time of all threads of this rank."""
    runner.drain()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(num_steps):
            runner.step()
        runner.drain()
    seconds = {e.key: e.self_cpu_time_total / 1e6 / num_steps for e in profiler.key_averages()}
    return dict(sorted(seconds.items(), key=lambda item: -item[1])[:MAX_OPERATORS])
