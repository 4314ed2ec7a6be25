"""Run a benchmark: configuration -> samples and cases -> measurement -> one document."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hotrec.bench.cases import Case, build_runner
from hotrec.bench.figures import BASELINES, gather_measured, losses_apart, summarize
from hotrec.bench.machine import load_average, machine_facts
from hotrec.bench.measure import is_profilable, run_counted, run_profiled, run_timed, run_warmup
from hotrec.bench.samples import ZipfTables
from hotrec.config.groups import OrderAssign
from hotrec.config.roots import BenchConfig, BenchRootConfig
from hotrec.runtime.ranks import Ranks
from hotrec.types import Rows, WireType

# Extra batches for those that a pipeline holds beside the one it computes.
NUM_AHEAD = 8


CaseChooser = Callable[[BenchConfig, Mapping[str, Rows], int], list[Case]]


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
        choose_cases: Chooses the cases, given the configuration, the lookups per row by table, and
            the number of ranks; ``hotrec.bench.cases.make_cases`` takes those of ``config``.
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
    cases = choose_cases(bench, samples.count(bench.profile_samples), ranks.world_size)
    num_profiled = bench.profile_steps if bench.profile and is_profilable(ranks.device) else 0
    num_timed = bench.rounds * bench.block_steps
    batches = samples.batches(
        bench.warmup_rounds + num_timed + bench.counted_steps + num_profiled + NUM_AHEAD,
        batch_size=bench.batch_size,
        rank=ranks.rank,
        world_size=ranks.world_size,
    )
    runners = [
        build_runner(config, case, samples.schema, batches, ranks, samples) for case in cases
    ]
    run_warmup(runners, bench.warmup_rounds)
    run_timed(
        runners,
        rounds=bench.rounds,
        rounds_of=bench.rounds_of,
        block_steps=bench.block_steps,
        block_skip=bench.block_skip,
        ranks=ranks,
    )
    run_counted(runners, num_steps=bench.counted_steps, interface=bench.interface, ranks=ranks)
    stages_s = {}
    if num_profiled:
        stages_s = {r.case.name: run_profiled(r, num_profiled) for r in runners}
    for runner in runners:
        runner.pipeline.close()
    measured = gather_measured(runners, ranks)
    figures = summarize(
        measured,
        global_batch_size=bench.batch_size * ranks.world_size,
        dim=config.model.embedding_dim,
        baselines=baselines,
    )
    machine["load_average_after"] = load_average()
    return {
        **_settings(config, ranks),
        "data": _data_facts(config, next(iter(measured.values()))[0].num_dense_values),
        "partitions": _partition_facts(cases, config),
        "pipelines": {case.name: _describe_pipeline(case, bench) for case in cases},
        "assigned": [c.name for c in cases if c.assign is OrderAssign.by_owner],
        "cases": figures,
        "losses_apart": losses_apart(figures, bench.loss_tolerance),
        "stages_s": stages_s,
        "machine": machine,
    }


def _settings(config: BenchRootConfig, ranks: Ranks) -> dict[str, Any]:
    bench = config.bench
    return {
        "name": bench.name,
        "world_size": ranks.world_size,
        "num_hosts": ranks.num_hosts,
        "network": bench.network,
        "interface": bench.interface,
        "device": ranks.device.type,
        "optimizer": config.optimizer.kind.name,
        "pipeline": bench.pipeline.name,
        "routing": bench.routing.name,
        "hot_exchange": bench.hot_exchange.name,
        "rounds": bench.rounds,
        "block_steps": bench.block_steps,
        "block_skip": bench.block_skip,
        "warmup_rounds": bench.warmup_rounds,
        "counted_steps": bench.counted_steps,
        "loss_tolerance": bench.loss_tolerance,
    }


def _data_facts(config: BenchRootConfig, num_dense_values: int) -> dict[str, Any]:
    bench = config.bench
    return {
        "num_tables": len(bench.table_rows),
        "num_rows": sum(bench.table_rows),
        "zipf_exponent": bench.zipf_exponent,
        "embedding_dim": config.model.embedding_dim,
        "batch_size": bench.batch_size,
        "num_dense_values": num_dense_values,
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


def _describe_pipeline(case: Case, bench: BenchConfig) -> str:
    words = [(case.pipeline or bench.pipeline).name]
    if case.depth != 1:
        words.append(f"depth {case.depth}")
    if case.micro_batches:
        words.append("micro-batches")
    if case.wire is not WireType.fp32:
        words.append(case.wire.name)
    return " ".join(words)
