"""Gather the measurements of all ranks and summarize them, equally on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torchrec.distributed.types import ShardingPlan

from hotrec.bench.blocks import Block, cpu_seconds, step_seconds, whole_step_seconds
from hotrec.bench.cases import Case, Runner
from hotrec.data.batch import Batch
from hotrec.planning.torchrec_plan import plan_document
from hotrec.runtime.ranks import Ranks, all_gather_object
from hotrec.runtime.stages import exposed_s
from hotrec.runtime.traffic import (
    BYTES_PER_VALUE,
    COLLECTIVES,
    lower_bound_bytes,
)
from hotrec.train.dense_sync import count_dense_values
from hotrec.types import WireType


def served_values(
    plan: ShardingPlan, rows_by_table: Mapping[str, Sequence[np.ndarray]], world_size: int
) -> list[int]:
    """Floats that each rank looks up for others and itself in one step.

    Args:
        plan: Plan of the case.
        rows_by_table: Requested rows by sharded table, an int64 array per requesting rank. For
            unsplit (pooled) tables these are all ids, with repetition.
        world_size: Number of ranks.

    Returns:
        One number per rank; replicated tables are not served.
    """
    served = [0] * world_size
    for tables in plan_document(plan).values():
        for table, facts in tables.items():
            for shard in facts["shards"]:
                (first_row, _), (num_rows, num_columns) = shard["offsets"], shard["sizes"]
                rank = _rank(shard["placement"])
                for rows in rows_by_table.get(table, ()):
                    is_here = (rows >= first_row) & (rows < first_row + num_rows)
                    served[rank] += int(is_here.sum()) * num_columns
    return served


def _rank(placement: str) -> int:
    """``rank:1/cpu`` -> 1."""
    return int(placement.split("/")[0].removeprefix("rank:"))


def imbalance(served: Sequence[int]) -> float | None:
    """Largest over mean; 1 is even; None where nothing is served."""
    mean = sum(served) / len(served)
    return max(served) / mean if mean else None


BASELINES = ("planner", "hand_tuned")


@dataclass(frozen=True)
class Measured:
    """Measurements of one case on one rank.

    Args:
        is_exact: Whether the case must have the same losses as the other exact cases.
        bytes_per_value: Bytes per value of rows and gradients when sent, 4 or 2.
        blocks: Timed blocks by round.
        stage_s: Seconds of every timed step by stage, float64 (steps,).
        losses: Loss of every step on this rank.
        sent_bytes: Sum over the counted steps, by collective.
        wire_bytes: Bytes of the counted steps on the network interface; None without one.
        num_distinct: Distinct rows in the batch of each counted step.
        num_lookups: Ids in the batch of each counted step.
        num_hot_lookups: Ids of hot rows in the batch of each counted step.
        served: Floats that each rank sends to this one in the first counted step.
        memory_bytes: Memory of the model and its first step.
        num_dense_values: Number of parameters of the dense layers.
    """

    is_exact: bool
    bytes_per_value: int
    blocks: Mapping[int, Block]
    stage_s: Mapping[str, np.ndarray]
    losses: Sequence[float]
    sent_bytes: Mapping[str, int]
    wire_bytes: int | None
    num_distinct: Sequence[int]
    num_lookups: Sequence[int]
    num_hot_lookups: Sequence[int]
    served: Sequence[int]
    memory_bytes: int
    num_dense_values: int


def gather_measured(runners: Sequence[Runner], ranks: Ranks) -> dict[str, list[Measured]]:
    """All ranks' measurements by case, in rank order; collective."""
    mine = {runner.case.name: _measured(runner, ranks) for runner in runners}
    gathered = all_gather_object(mine)
    return {name: [measured[name] for measured in gathered] for name in mine}


def _measured(runner: Runner, ranks: Ranks) -> Measured:
    counted = [_rows_by_table(runner.unrouted[number]) for number in runner.counted]
    requested = _requested_rows(runner.case, counted[0])
    return Measured(
        is_exact=runner.case.is_exact,
        bytes_per_value=4 if runner.case.wire is WireType.fp32 else 2,
        blocks=dict(runner.blocks),
        stage_s=runner.clock.seconds(),
        losses=[float(loss) for loss in runner.losses],
        sent_bytes=runner.sent_bytes,
        wire_bytes=runner.wire_bytes,
        num_distinct=[sum(np.unique(r).size for r in rows.values()) for rows in counted],
        num_lookups=[sum(r.size for r in rows.values()) for rows in counted],
        num_hot_lookups=[_num_hot_lookups(runner.case, rows) for rows in counted],
        served=served_values(runner.sharded.plan, requested, ranks.world_size),
        memory_bytes=runner.memory_bytes,
        num_dense_values=count_dense_values(runner.sharded.model),
    )


def _rows_by_table(batch: Batch) -> dict[str, np.ndarray]:
    """Ids by table; a benchmark's feature and table have one name."""
    return {name: jagged.values().numpy() for name, jagged in batch.sparse.to_dict().items()}


def _requested_rows(case: Case, rows: Mapping[str, np.ndarray]) -> dict[str, list[np.ndarray]]:
    """Rows requested from their owners: distinct cold rows, or all ids where owners pool."""
    if case.partition is None:
        return {table: [ids] for table, ids in rows.items()}
    requested = {}
    for table, ids in rows.items():
        distinct = np.unique(ids)
        is_hot = np.isin(distinct, case.partition.hot(table))
        requested[table] = [distinct[~is_hot]]
    return requested


def _num_hot_lookups(case: Case, rows: Mapping[str, np.ndarray]) -> int:
    if case.partition is None:
        return 0
    return sum(int(np.isin(ids, case.partition.hot(t)).sum()) for t, ids in rows.items())


def summarize(
    measured: Mapping[str, Sequence[Measured]],
    *,
    global_batch_size: int,
    dim: int,
    baselines: Sequence[str] = BASELINES,
) -> dict[str, dict[str, Any]]:
    """The figures of every case.

    Args:
        measured: Measurements by case, one per rank.
        global_batch_size: Samples per step over all ranks.
        dim: Embedding dimension.
        baselines: Cases that the others are compared with, if they were measured.
    """
    figures = {
        name: _summarize_case(of_ranks, global_batch_size=global_batch_size, dim=dim)
        for name, of_ranks in measured.items()
    }
    first = reference_case(figures)
    for name, of_ranks in measured.items():
        differences = np.abs(
            _losses(of_ranks)[: len(_losses(measured[first]))]
            - _losses(measured[first])[: len(_losses(of_ranks))]
        )
        figures[name]["largest_loss_difference"] = float(differences.max())
        figures[name]["against"] = {
            baseline: {
                **step_ratio(_medians(of_ranks), _medians(measured[baseline])),
                **_whole_ratio(of_ranks, measured[baseline]),
                "bytes_ratio": _ratio(figures[name]["sent_bytes"], figures[baseline]["sent_bytes"]),
            }
            for baseline in baselines
            if baseline in measured and baseline != name
        }
    return figures


def _summarize_case(
    of_ranks: Sequence[Measured], *, global_batch_size: int, dim: int
) -> dict[str, Any]:
    world_size = len(of_ranks)
    step_s = np.concatenate(list(_steps(of_ranks).values()))
    p10, p50, p90 = np.percentile(step_s, [10, 50, 90])
    num_counted = len(of_ranks[0].num_distinct)
    by_rank = [sum(rank.sent_bytes.values()) / num_counted for rank in of_ranks]
    num_distinct = float(np.mean([rank.num_distinct for rank in of_ranks]))
    num_dense = of_ranks[0].num_dense_values
    rows = {dim: round(num_distinct)}
    bound = lower_bound_bytes(rows, world_size)
    bound_with_dense = lower_bound_bytes(rows, world_size, num_dense_values=num_dense)
    sent = float(np.mean(by_rank))
    sent_dense = (bound_with_dense - bound) * of_ranks[0].bytes_per_value / BYTES_PER_VALUE
    wire = [rank.wire_bytes for rank in of_ranks if rank.wire_bytes is not None]
    num_lookups = np.sum([rank.num_lookups for rank in of_ranks])
    served = np.sum([rank.served for rank in of_ranks], axis=0).tolist()
    cpu = [cpu_seconds(list(rank.blocks.values())) for rank in of_ranks]
    return {
        "is_exact": of_ranks[0].is_exact,
        "num_blocks": len(of_ranks[0].blocks),
        "num_timed_steps": step_s.size,
        "step_p10_s": float(p10),
        "step_p50_s": float(p50),
        "step_p90_s": float(p90),
        "whole_step_s": float(np.median(list(_whole_steps(of_ranks).values()))),
        "cpu_s": float(np.mean([whole for whole, _ in cpu])),
        "main_cpu_s": float(np.mean([main for _, main in cpu])),
        "samples_per_s": global_batch_size / float(p50),
        "sent_bytes": sent,
        "sent_bytes_most": float(max(by_rank)),
        "sent_bytes_by_collective": {
            name: float(np.mean([rank.sent_bytes[name] for rank in of_ranks])) / num_counted
            for name in COLLECTIVES
        },
        "wire_bytes": float(np.mean(wire)) / num_counted if wire else None,
        "bound_bytes": bound,
        "bound_with_dense_bytes": bound_with_dense,
        "bytes_over_bound": _ratio(sent, bound_with_dense),
        "embedding_bytes_over_bound": _ratio(sent - sent_dense, bound),
        "num_distinct_rows": num_distinct,
        "hot_lookups_frac": float(
            np.sum([rank.num_hot_lookups for rank in of_ranks]) / num_lookups
        ),
        "served_most_over_mean": imbalance(served),
        "memory_bytes": max(rank.memory_bytes for rank in of_ranks),
        "num_steps": len(of_ranks[0].losses),
        "final_loss": float(_losses(of_ranks)[-1]),
        **_stage_figures(of_ranks),
    }


def _stage_figures(of_ranks: Sequence[Measured]) -> dict[str, Any]:
    """Stage times and exposed communication of the main thread; None without timed stages."""
    if not next(iter(of_ranks[0].stage_s.values())).size:
        return {"stage_s": None, "exposed_s": None, "exposed_frac": None, "exposed_frac_most": None}
    exposed = [exposed_s(rank.stage_s) for rank in of_ranks]
    own_step_s = [
        np.concatenate([block.own_step_s() for block in rank.blocks.values()]) for rank in of_ranks
    ]
    fracs = [float(np.median(e / s)) for e, s in zip(exposed, own_step_s, strict=True)]
    return {
        "stage_s": {
            stage: float(np.mean([np.median(rank.stage_s[stage]) for rank in of_ranks]))
            for stage in of_ranks[0].stage_s
        },
        "exposed_s": float(np.mean([np.median(e) for e in exposed])),
        "exposed_frac": float(np.mean(fracs)),
        "exposed_frac_most": max(fracs),
    }


def _losses(of_ranks: Sequence[Measured]) -> np.ndarray:
    """The loss of every step over all samples: the mean over the ranks."""
    losses: np.ndarray = np.mean([rank.losses for rank in of_ranks], axis=0)
    return losses


def _by_round(of_ranks: Sequence[Measured]) -> dict[int, list[Block]]:
    return {number: [rank.blocks[number] for rank in of_ranks] for number in of_ranks[0].blocks}


def _steps(of_ranks: Sequence[Measured]) -> dict[int, np.ndarray]:
    return {number: step_seconds(blocks) for number, blocks in _by_round(of_ranks).items()}


def _medians(of_ranks: Sequence[Measured]) -> dict[int, float]:
    return {number: float(np.median(steps)) for number, steps in _steps(of_ranks).items()}


def _whole_steps(of_ranks: Sequence[Measured]) -> dict[int, float]:
    return {number: whole_step_seconds(blocks) for number, blocks in _by_round(of_ranks).items()}


def _whole_ratio(mine: Sequence[Measured], baseline: Sequence[Measured]) -> dict[str, float]:
    ratio = step_ratio(_whole_steps(mine), _whole_steps(baseline))
    return {"whole_step_ratio": ratio["step_ratio"]} if ratio else {}


def step_ratio(mine: Mapping[int, float], baseline: Mapping[int, float]) -> dict[str, float]:
    """Median and quartiles over the rounds of the ratio of two cases' steps."""
    ratios = [mine[number] / baseline[number] for number in mine if number in baseline]
    if not ratios:
        return {}
    low, middle, high = np.percentile(ratios, [25, 50, 75])
    return {
        "step_ratio": float(middle),
        "step_ratio_p25": float(low),
        "step_ratio_p75": float(high),
    }


def _ratio(value: float, baseline: float) -> float | None:
    return value / baseline if baseline else None


def reference_case(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """The case whose losses the others' are compared with: the first exact one, if any."""
    exact = [name for name, case in figures.items() if case["is_exact"]]
    return [*exact, *figures][0]


def losses_apart(figures: Mapping[str, Mapping[str, Any]], tolerance: float) -> list[str]:
    """The exact cases whose loss is NaN or differs from the first's by more than the tolerance."""
    return [
        name
        for name, case in figures.items()
        if case["is_exact"] and not case["largest_loss_difference"] <= tolerance
    ]
