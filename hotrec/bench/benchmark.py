"""Run a benchmark: configuration -> samples and cases -> measurement -> one document."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hotrec.bench.cases import Case, build_runner
from hotrec.bench.figures import BASELINES, gather_measured, losses_apart, summarize
from hotrec.bench.machine import machine_facts
from hotrec.bench.measure import num_steps, run_cases
from hotrec.bench.samples import ZipfTables
from hotrec.config.groups import OrderAssign
from hotrec.config.roots import BenchConfig, BenchRootConfig
from hotrec.runtime.ranks import Ranks
from hotrec.types import Rows, WireType

logger = logging.getLogger(__name__)

# Keys of bench that the document repeats.
SETTINGS = (
    *("name", "network", "interface", "rounds", "block_steps", "block_skip", "warmup_rounds"),
    *("counted_steps", "loss_tolerance"),
)

CaseChooser = Callable[[BenchConfig, Mapping[str, Rows], int, str], list[Case]]


def measure(
    config: BenchRootConfig,
    ranks: Ranks,
    choose_cases: CaseChooser,
    baselines: Sequence[str] = BASELINES,
) -> dict[str, Any]:
    """Build the cases, time them in turn, and summarize them; collective.

    Args:
        config: A validated configuration.
        ranks: Ranks of the process group, which must exist.
        choose_cases: Chooses the cases, given the configuration, the lookups per row by table, the
            number of ranks and the device; ``hotrec.bench.cases.make_cases`` takes those of
            ``config``.
        baselines: Names of the cases that the others are compared with.

    Returns:
        The content of ``bench.json``, equal on every rank. ``losses_apart`` names the cases whose
        losses differ from those of the first exact one; their figures must not be used.

    Raises:
        ValueError: If a case cannot be placed on this machine, more rows than there are should be
            hot, or the network interface does not exist.
    """
    bench = config.bench
    machine = machine_facts()
    samples = ZipfTables(
        bench.table_rows,
        exponent=bench.zipf_exponent,
        num_dense=bench.num_dense,
        seed=bench.seed,
    )
    cases = choose_cases(
        bench, samples.count(bench.profile_samples), ranks.world_size, ranks.device.type
    )
    batches = samples.batches(
        num_steps(bench), batch_size=bench.batch_size, rank=ranks.rank, world_size=ranks.world_size
    )
    runners = []
    for case in cases:
        start_s = time.perf_counter()
        runners.append(build_runner(config, case, samples.schema, batches, ranks, samples))
        if ranks.is_first:
            logger.info("built %s in %.1f s", case.name, time.perf_counter() - start_s)
    operators_s = run_cases(runners, bench, ranks)
    measured = gather_measured(runners, ranks)
    figures = summarize(
        measured,
        global_batch_size=bench.batch_size * ranks.world_size,
        dim=config.model.embedding_dim,
        baselines=baselines,
    )
    machine["load_average_after"] = os.getloadavg()[0]
    return {
        **{name: getattr(bench, name) for name in SETTINGS},
        **{name: getattr(bench, name).name for name in ("pipeline", "routing", "hot_exchange")},
        "world_size": ranks.world_size,
        "num_hosts": ranks.num_hosts,
        "device": ranks.device.type,
        "optimizer": config.optimizer.kind.name,
        "data": {
            "num_tables": len(bench.table_rows),
            "num_rows": sum(bench.table_rows),
            "zipf_exponent": bench.zipf_exponent,
            "embedding_dim": config.model.embedding_dim,
            "batch_size": bench.batch_size,
            "num_dense_values": next(iter(measured.values()))[0].num_dense_values,
        },
        "partitions": _partition_facts(cases, config),
        "pipelines": {case.name: _describe_pipeline(case) for case in cases},
        "assigned": [c.name for c in cases if c.assign is OrderAssign.by_owner],
        "cases": figures,
        "losses_apart": losses_apart(figures, bench.loss_tolerance),
        "operators_s": operators_s,
        "machine": machine,
    }


def _partition_facts(cases: Sequence[Case], config: BenchRootConfig) -> dict[str, Any]:
    """Hot rows of each case that has any."""
    return {
        case.name: {
            "policy": case.partition.policy,
            "num_hot_rows": case.partition.total_hot,
            "hot_frac": case.partition.total_hot / case.partition.total_rows,
            "hot_bytes": 4 * config.model.embedding_dim * case.partition.total_hot,
        }
        for case in cases
        if case.partition is not None and case.partition.total_hot
    }


def _describe_pipeline(case: Case) -> str:
    pipeline = case.plan.pipeline
    words = [pipeline.kind.name]
    if pipeline.depth != 1:
        words.append(f"depth {pipeline.depth}")
    if pipeline.micro_batches:
        words.append("micro-batches")
    if pipeline.wire is not WireType.fp32:
        words.append(pipeline.wire.name)
    if case.assign is OrderAssign.by_owner:
        words.append("samples by owner")
    return " ".join(words)
