"""Run a benchmark: samples and cases -> measurement -> one document."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hotrec.bench.cases import Case, Subject, build_runner
from hotrec.bench.figures import BASELINES, gather_measured, losses_apart, summarize
from hotrec.bench.machine import machine_facts
from hotrec.bench.measure import Turns, run_cases
from hotrec.bench.samples import ZipfTables
from hotrec.bench.stored import StoredSamples
from hotrec.runtime.ranks import Ranks
from hotrec.types import WireType

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Benchmark:
    """The inputs of a benchmark.

    Args:
        subject: The model that all cases train.
        samples: The training samples, with the tables of the subject.
        cases: The cases to compare.
        turns: The schedule of the interleaved cases.
        loss_tolerance: Maximum difference of losses between exact cases.
        settings: Settings that are copied to the document, by name.
    """

    subject: Subject
    samples: ZipfTables | StoredSamples
    cases: Sequence[Case]
    turns: Turns
    loss_tolerance: float
    settings: Mapping[str, Any]


def measure(
    benchmark: Benchmark, ranks: Ranks, baselines: Sequence[str] = BASELINES
) -> dict[str, Any]:
    """Build the cases, time them in interleaved blocks, and summarize them; collective.

    Args:
        benchmark: Its inputs; ``hotrec.bench.job.make_benchmark`` makes them from a
            configuration.
        ranks: Ranks of the process group, which must exist.
        baselines: Names of the cases that the others are compared with.

    Returns:
        The content of ``compare.json``, equal on every rank. ``losses_apart`` names the cases whose
        losses differ from those of the first exact one; their figures must not be used.

    Raises:
        ValueError: If a case cannot be placed on this machine, or the network interface does not
            exist.
    """
    machine = machine_facts()
    subject, samples, cases = benchmark.subject, benchmark.samples, benchmark.cases
    dim = subject.spec.architecture.embedding_dim
    batches = samples.batches(
        benchmark.turns.num_batches,
        batch_size=subject.batch_size,
        rank=ranks.rank,
        world_size=ranks.world_size,
    )
    runners = []
    for case in cases:
        start_s = time.perf_counter()
        runners.append(build_runner(subject, case, batches, ranks, samples))
        if ranks.is_first:
            logger.info("built %s in %.1f s", case.name, time.perf_counter() - start_s)
    run_cases(runners, benchmark.turns, ranks)
    measured = gather_measured(runners, ranks)
    figures = summarize(
        measured,
        global_batch_size=subject.batch_size * ranks.world_size,
        dim=dim,
        baselines=baselines,
    )
    machine["load_average_after"] = os.getloadavg()[0]
    num_rows = [table.num_rows for table in subject.spec.schema.tables]
    return {
        **benchmark.settings,
        "world_size": ranks.world_size,
        "num_hosts": ranks.num_hosts,
        "device": ranks.device.type,
        "optimizer": subject.spec.embedding.kind.name,
        "data": {
            "num_tables": len(num_rows),
            "num_rows": sum(num_rows),
            "zipf_exponent": samples.exponent,
            "embedding_dim": dim,
            "batch_size": subject.batch_size,
            "num_dense_values": next(iter(measured.values()))[0].num_dense_values,
        },
        "partitions": _partition_facts(cases, dim),
        "pipelines": {case.name: _describe_pipeline(case) for case in cases},
        "assigned": [case.name for case in cases if case.is_by_owner],
        "cases": figures,
        "losses_apart": losses_apart(figures, benchmark.loss_tolerance),
        "machine": machine,
    }


def _partition_facts(cases: Sequence[Case], dim: int) -> dict[str, Any]:
    """Hot rows of each case that has any."""
    return {
        case.name: {
            "policy": case.partition.policy,
            "num_hot_rows": case.partition.total_hot,
            "hot_frac": case.partition.total_hot / case.partition.total_rows,
            "hot_bytes": 4 * dim * case.partition.total_hot,
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
    if case.is_by_owner:
        words.append("samples by owner")
    return " ".join(words)
