"""From what each rank measured to the figures of the run, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotrec.batch import Batch
from hotrec.cli.bench.balance import imbalance, served_values
from hotrec.cli.bench.cases import Case, Runner
from hotrec.distributed import Ranks, all_gather_object
from hotrec.traffic import COLLECTIVES, count_dense_values, lower_bound_bytes

BASELINES = ("planner", "hand_tuned")


@dataclass(frozen=True)
class Measured:
    """What one rank measured of one case.

    Args:
        step_s: by round.
        losses: this rank's, of every step.
        sent_bytes: of every counted step, by collective.
        wire_bytes: of every counted step; empty without an interface.
        num_distinct: distinct rows in each counted step's batch.
        num_lookups: ids in each counted step's batch.
        num_hot_lookups: of these, ids of hot rows.
        served: floats that each rank serves this one, in the first counted step.
        memory_bytes: of the model and its first step.
        num_dense_values: parameters of the dense layers.
    """

    step_s: Mapping[int, float]
    losses: Sequence[float]
    sent_bytes: Sequence[Mapping[str, int]]
    wire_bytes: Sequence[int]
    num_distinct: Sequence[int]
    num_lookups: Sequence[int]
    num_hot_lookups: Sequence[int]
    served: Sequence[int]
    memory_bytes: int
    num_dense_values: int


def gather_measured(
    runners: Sequence[Runner], batches: Sequence[Batch], ranks: Ranks
) -> dict[str, list[Measured]]:
    """All ranks' measurements by case, in rank order; collective."""
    mine = {runner.case.name: _measured(runner, batches, ranks) for runner in runners}
    gathered = all_gather_object(mine)
    return {name: [measured[name] for measured in gathered] for name in mine}


def _measured(runner: Runner, batches: Sequence[Batch], ranks: Ranks) -> Measured:
    counted = [_rows_by_table(batches[number]) for number in runner.counted]
    asked = _asked_rows(runner.case, counted[0])
    return Measured(
        step_s=dict(runner.step_s),
        losses=[float(loss) for loss in runner.losses],
        sent_bytes=runner.sent_bytes,
        wire_bytes=runner.wire_bytes,
        num_distinct=[sum(np.unique(r).size for r in rows.values()) for rows in counted],
        num_lookups=[sum(r.size for r in rows.values()) for rows in counted],
        num_hot_lookups=[_num_hot_lookups(runner.case, rows) for rows in counted],
        served=served_values(runner.sharded.plan, asked, ranks.world_size),
        memory_bytes=runner.memory_bytes,
        num_dense_values=count_dense_values(runner.sharded.model),
    )


def _rows_by_table(batch: Batch) -> dict[str, np.ndarray]:
    """Ids by table; a benchmark's feature and table have one name."""
    return {name: jagged.values().numpy() for name, jagged in batch.sparse.to_dict().items()}


def _asked_rows(case: Case, rows: Mapping[str, np.ndarray]) -> dict[str, list[np.ndarray]]:
    """What a rank asks the owners for: distinct cold rows, or all ids where owners pool."""
    if case.partition is None:
        return {table: [ids] for table, ids in rows.items()}
    asked = {}
    for table, ids in rows.items():
        distinct = np.unique(ids)
        is_hot = np.isin(distinct, case.partition.hot(table))
        asked[table] = [distinct[~is_hot]]
    return asked


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
        measured: by case, one per rank.
        global_batch_size: samples of a step, over all ranks.
        dim: D.
        baselines: cases that the others are compared with, where they were measured.
    """
    figures = {
        name: _summarize_case(of_ranks, global_batch_size=global_batch_size, dim=dim)
        for name, of_ranks in measured.items()
    }
    first = next(iter(measured))
    for name, of_ranks in measured.items():
        differences = np.abs(
            _losses(of_ranks)[: len(_losses(measured[first]))]
            - _losses(measured[first])[: len(_losses(of_ranks))]
        )
        figures[name]["largest_loss_difference"] = float(differences.max())
        figures[name]["against"] = {
            baseline: {
                **step_ratio(_slowest(of_ranks), _slowest(measured[baseline])),
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
    step_s = np.array(list(_slowest(of_ranks).values()))
    p10, p50, p90 = np.percentile(step_s, [10, 50, 90])
    by_rank = [np.mean([sum(s.values()) for s in rank.sent_bytes]) for rank in of_ranks]
    num_distinct = float(np.mean([rank.num_distinct for rank in of_ranks]))
    num_dense = of_ranks[0].num_dense_values
    pairs = [(dim, round(num_distinct))]
    bound = lower_bound_bytes(pairs, world_size)
    bound_with_dense = lower_bound_bytes(pairs, world_size, num_dense_values=num_dense)
    sent = float(np.mean(by_rank))
    wire = [n for rank in of_ranks for n in rank.wire_bytes]
    num_lookups = np.sum([rank.num_lookups for rank in of_ranks])
    served = np.sum([rank.served for rank in of_ranks], axis=0).tolist()
    return {
        "num_timed_steps": step_s.size,
        "step_p10_s": float(p10),
        "step_p50_s": float(p50),
        "step_p90_s": float(p90),
        "samples_per_s": global_batch_size / float(p50),
        "sent_bytes": sent,
        "sent_bytes_most": float(max(by_rank)),
        "sent_bytes_by_collective": {
            name: float(np.mean([[s[name] for s in rank.sent_bytes] for rank in of_ranks]))
            for name in COLLECTIVES
        },
        "wire_bytes": float(np.mean(wire)) if wire else None,
        "bound_bytes": bound,
        "bound_with_dense_bytes": bound_with_dense,
        "bytes_over_bound": _ratio(sent, bound_with_dense),
        "embedding_bytes_over_bound": _ratio(sent - (bound_with_dense - bound), bound),
        "num_distinct_rows": num_distinct,
        "hot_lookups_frac": float(
            np.sum([rank.num_hot_lookups for rank in of_ranks]) / num_lookups
        ),
        "served_most_over_mean": imbalance(served),
        "memory_bytes": max(rank.memory_bytes for rank in of_ranks),
        "num_steps": len(of_ranks[0].losses),
        "final_loss": float(_losses(of_ranks)[-1]),
    }


def _losses(of_ranks: Sequence[Measured]) -> np.ndarray:
    """The loss of every step over all samples: the mean over the ranks."""
    losses: np.ndarray = np.mean([rank.losses for rank in of_ranks], axis=0)
    return losses


def _slowest(of_ranks: Sequence[Measured]) -> dict[int, float]:
    """By round, the time of the slowest rank."""
    return {number: max(rank.step_s[number] for rank in of_ranks) for number in of_ranks[0].step_s}


def step_ratio(mine: Mapping[int, float], baseline: Mapping[int, float]) -> dict[str, float]:
    """Median and quartiles of the ratios of two cases' steps of the same round."""
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


def losses_apart(figures: Mapping[str, Mapping[str, Any]], tolerance: float) -> list[str]:
    """The cases whose loss is no number, or further from the first case's than the tolerance."""
    return [
        name for name, case in figures.items() if not case["largest_loss_difference"] <= tolerance
    ]
