"""Where the time of a step goes: torch's profile, added up by stage.

Every event of the main thread counts with its self time for the stage of the nearest event, itself
or one around it, that a rule names. Autograd names a backward node after its forward. Waiting for
another rank is counted where it happens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from hotrec.cli.bench.cases import Runner

# First match wins, tried on an event's name, then on its parent's, and so on.
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
STEP = "## step"  # around each step, to know the thread that makes it
NAMES = (*dict.fromkeys(name for name, _ in STAGES), OTHER)


def stage_of(names: Iterable[str]) -> str:
    """The stage of an event.

    Args:
        names: of the event, of the one around it, and so on outwards.
    """
    for name in names:
        for stage, pattern in STAGES:
            if re.search(pattern, name):
                return stage
    return OTHER


def run_profiled(runner: Runner, num_steps: int) -> dict[str, float]:
    """Profile some steps of a case.

    Returns:
        Seconds of one step by stage, on this rank; the profiler's own cost is in them.
    """
    runner.settle()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(num_steps):
            with record_function(STEP):
                runner.step()
    runner.settle()
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
    """Whether host time says where a step's time goes; on CUDA it does not."""
    return device.type == "cpu"
