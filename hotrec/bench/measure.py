"""Measure cases in turn: timed blocks, then steps with counted bytes, then profiled steps."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from tqdm import tqdm

from hotrec.bench.blocks import Block, Stopwatch
from hotrec.bench.cases import Runner
from hotrec.bench.machine import interface_sent_bytes
from hotrec.runtime.ranks import Ranks
from hotrec.runtime.traffic import count_sent_bytes


def takes_part(round_number: int, num_rounds: int, own_rounds: int) -> bool:
    """Whether a case with ``own_rounds`` evenly spread rounds takes part in this one."""
    before = round_number * own_rounds // num_rounds
    return (round_number + 1) * own_rounds // num_rounds > before


def rotated(runners: Sequence[Runner], round_number: int) -> list[Runner]:
    """The cases in the order of a round, which rotates so that each comes first equally often."""
    shift = round_number % len(runners)
    return [*runners[shift:], *runners[:shift]]


def run_warmup(runners: Sequence[Runner], num_rounds: int) -> None:
    """Untimed steps; the first one ran when the case was built."""
    for runner in runners:
        for _ in range(num_rounds - 1):
            runner.step()
        runner.drain()


def run_timed(
    runners: Sequence[Runner],
    *,
    rounds: int,
    rounds_of: dict[str, int],
    block_steps: int,
    block_skip: int,
    ranks: Ranks,
) -> None:
    """Time the blocks of all cases, round by round."""
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
    """Time consecutive steps of one case, with no communication in flight before and after."""
    runner.drain()
    watch = Stopwatch(ranks.device)
    for number in range(num_steps):
        if number < num_skipped:
            runner.step()
        else:
            with runner.clock.step():
                runner.step()
        watch.lap()
    runner.drain()
    watch.lap()
    cpu_s, main_cpu_s = watch.cpu_seconds()
    *returned_s, ended_s = watch.seconds()
    return Block(returned_s, ended_s, num_skipped, cpu_s, main_cpu_s)


def run_counted(
    runners: Sequence[Runner], *, num_steps: int, interface: str | None, ranks: Ranks
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
                runner.counted.append(runner.num_steps)
                runner.step()
            runner.drain()
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
    """Collect garbage now and not in a timed block."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# The first match wins, tried on an event's name, then on its parent's, and so on.
STAGES: tuple[tuple[str, str], ...] = (
    (
        "waiting and exchange",
        r"All2All|all2all|AllGather|ReduceScatter|alltoall|^c10d::|^gloo:|nccl",
    ),
    ("waiting and exchange", r"^## wait_sparse_data_dist"),
    ("pooling", r"PoolRows"),
    ("row update", r"_ReadAndUpdateBackward"),
    ("row lookup", r"_ReadAndUpdate|IndexSelectBackward"),
    ("row lookup and fused update", r"^fbgemm::|[Ll]ookup.*unction|embedding_codegen|BoundsCheck"),
    ("optimizer step", r"^Optimizer\.step|^## optimizer"),
    ("routing", r"^## start_sparse_data_dist"),
    (
        "dense layers",
        r"[Aa]ddmm|[Bb]mm|[Mm]m[bB]ackward|^aten::(linear|bmm|addmm|mm)$|Relu|relu|Sigmoid"
        r"|binary_cross|BinaryCross|IndexBackward|^aten::index$|Threshold",
    ),
    # The hooks of the gradients' buckets run inside: copies, and the sums of the hot exchange.
    ("buckets of gradients, sums of the hot exchange", r"AccumulateGrad|torch::distributed::"),
)
OTHER = "other (Python, views, copies)"
STEP = "## step"  # marks each step and its thread
NAMES = (*dict.fromkeys(name for name, _ in STAGES), OTHER)


def stage_of(names: Iterable[str]) -> str:
    """The stage of an event, given its name, its parent's, and so on outwards."""
    for name in names:
        for stage, pattern in STAGES:
            if re.search(pattern, name):
                return stage
    return OTHER


def run_profiled(runner: Runner, num_steps: int) -> dict[str, float]:
    """Profile some steps of a case.

    Returns:
        Seconds per step by stage on this rank, including the profiler's overhead.
    """
    runner.drain()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(num_steps):
            with record_function(STEP):
                runner.step()
    runner.drain()
    totals = dict.fromkeys(NAMES, 0.0)
    events: Any = profiler.events()
    main_thread = next(event.thread for event in events if event.name == STEP)
    for event in events:
        if event.thread == main_thread:
            totals[stage_of(_names_outwards(event))] += event.self_cpu_time_total
    return {stage: total_us / 1e6 / num_steps for stage, total_us in totals.items()}


def _names_outwards(event: Any) -> Iterable[str]:
    while event is not None:
        yield event.name
        event = event.cpu_parent


def is_profilable(device: torch.device) -> bool:
    """Whether host time shows where a step's time goes; on CUDA it does not."""
    return device.type == "cpu"
