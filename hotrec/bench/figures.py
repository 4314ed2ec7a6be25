"""Gather the measurements of all ranks and summarize them, equally on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hotrec.bench.cases import Runner
from hotrec.runtime.hosts import count_host_rows, gather_host_of_rank
from hotrec.runtime.ranks import Ranks, all_gather_object
from hotrec.runtime.stages import exposed_s
from hotrec.runtime.traffic import (
    lower_bound_between_hosts_bytes,
    lower_bound_bytes,
    number_rows,
)
from hotrec.train.dense_sync import count_dense_values
from hotrec.train.interleave import Block, step_seconds

BASELINES = ("planner", "hand_tuned")


@dataclass(frozen=True)
class Measured:
    """Measurements of one case on one rank."""

    is_exact: bool  # whether it must have the same losses as the other exact cases
    bytes_per_value: int  # of rows and gradients when sent, 4 or 2
    blocks: Mapping[int, Block]  # timed blocks by round
    stage_s: Mapping[str, np.ndarray]  # seconds of every timed step by stage, float64 (steps,)
    losses: Sequence[float]  # of every step on this rank
    sent_bytes: int  # sum over the counted steps
    wire_bytes: int | None  # of these on the network interface; None without one
    between_hosts_bytes: int  # of these to ranks of other hosts
    host: object  # of this rank
    num_distinct: Sequence[int]  # distinct rows in the batch of each counted step
    num_host_rows: Sequence[int]  # this rank's part of the host's in each counted step
    num_lookups: Sequence[int]  # ids in the batch of each counted step
    num_hot_lookups: Sequence[int]  # of these, ids of hot rows
    memory_bytes: int  # of the model and its first step
    num_dense_values: int  # parameters of the dense layers


def gather_measured(runners: Sequence[Runner], ranks: Ranks) -> dict[str, list[Measured]]:
    """All ranks' measurements by case, in rank order; collective."""
    hosts = gather_host_of_rank()
    mine = {runner.case.name: _measured(runner, ranks, hosts) for runner in runners}
    gathered = all_gather_object(mine)
    return {name: [measured[name] for measured in gathered] for name in mine}


def _measured(runner: Runner, ranks: Ranks, host_of_rank: Sequence[object]) -> Measured:
    case = runner.case
    counted = [ids_by_table(runner, number) for number in runner.counted]
    rows_of_steps = [
        number_rows([torch.from_numpy(np.unique(rows)) for rows in by_table.values()])
        for by_table in counted
    ]
    hot = {} if case.partition is None else case.partition.hot_rows
    return Measured(
        is_exact=case.is_exact,
        bytes_per_value=4 if case.is_exact else 2,
        blocks=dict(runner.blocks),
        stage_s=runner.clock.seconds(),
        losses=[float(loss) for loss in runner.losses],
        sent_bytes=runner.sent_bytes,
        wire_bytes=runner.wire_bytes,
        between_hosts_bytes=runner.between_hosts_bytes,
        host=host_of_rank[ranks.rank],
        num_distinct=[rows.numel() for rows in rows_of_steps],
        num_host_rows=[count_host_rows(rows, host_of_rank, ranks.device) for rows in rows_of_steps],
        num_lookups=[sum(r.size for r in rows.values()) for rows in counted],
        num_hot_lookups=[
            sum(int(np.isin(rows, hot.get(table, [])).sum()) for table, rows in by_table.items())
            for by_table in counted
        ],
        memory_bytes=runner.memory_bytes,
        num_dense_values=count_dense_values(runner.trainable.model),
    )


def ids_by_table(runner: Runner, number: int) -> dict[str, np.ndarray]:
    """The ids of a batch, of all features that read a table."""
    features, found = runner.unrouted[number].sparse.to_dict(), dict[str, list[torch.Tensor]]()
    for name, table in runner.table_of_feature.items():
        found.setdefault(table, []).append(features[name].values())
    return {table: torch.cat(ids).numpy() for table, ids in found.items()}


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
    reference = _losses(measured[reference_case(figures)])
    for name, of_ranks in measured.items():
        losses = _losses(of_ranks)
        num_common = min(len(losses), len(reference))
        differences = np.abs(losses[:num_common] - reference[:num_common])
        figures[name]["largest_loss_difference"] = float(differences.max())
        figures[name]["against"] = {
            baseline: {
                **_block_ratios(of_ranks, measured[baseline]),
                "bytes_ratio": _ratio(figures[name]["sent_bytes"], figures[baseline]["sent_bytes"]),
            }
            for baseline in baselines
            if baseline in measured and baseline != name
        }
    return figures


def _summarize_case(
    of_ranks: Sequence[Measured], *, global_batch_size: int, dim: int
) -> dict[str, Any]:
    first, world_size = of_ranks[0], len(of_ranks)
    by_round = _by_round(of_ranks)
    step_s = np.concatenate([step_seconds(blocks) for blocks in by_round.values()])
    p10, p50, p90 = np.percentile(step_s, [10, 50, 90])
    num_counted = len(first.num_distinct)
    num_distinct = float(np.mean([rank.num_distinct for rank in of_ranks]))
    bound = lower_bound_bytes(
        {dim: round(num_distinct)}, world_size, num_dense_values=first.num_dense_values
    )
    sent, between = (
        float(np.mean([getattr(rank, of) for rank in of_ranks])) / num_counted
        for of in ("sent_bytes", "between_hosts_bytes")
    )
    between_bound = _bound_between_hosts(of_ranks, dim, first.num_dense_values)
    wire = [rank.wire_bytes for rank in of_ranks if rank.wire_bytes is not None]
    num_hot = np.sum([rank.num_hot_lookups for rank in of_ranks])
    return {
        "is_exact": first.is_exact,
        "num_blocks": len(first.blocks),
        "num_timed_steps": step_s.size,
        "step_p10_s": float(p10),
        "step_p50_s": float(p50),
        "step_p90_s": float(p90),
        "whole_step_s": float(np.median([_whole_step(blocks) for blocks in by_round.values()])),
        "cpu_s": _per_step(of_ranks, "cpu_s"),
        "main_cpu_s": _per_step(of_ranks, "main_cpu_s"),
        "samples_per_s": global_batch_size / float(p50),
        "sent_bytes": sent,
        "bound_bytes": bound,
        "bytes_over_bound": _ratio(sent, bound),
        "between_hosts_bytes": between,
        "between_hosts_bound_bytes": between_bound,
        "wire_bytes": float(np.mean(wire)) / num_counted if wire else None,
        "num_distinct_rows": num_distinct,
        "hot_lookups_frac": float(num_hot / np.sum([rank.num_lookups for rank in of_ranks])),
        "memory_bytes": max(rank.memory_bytes for rank in of_ranks),
        "num_steps": len(first.losses),
        "final_loss": float(_losses(of_ranks)[-1]),
        **_stage_figures(of_ranks),
    }


def _bound_between_hosts(of_ranks: Sequence[Measured], dim: int, num_dense_values: int) -> float:
    """The lower bound of the bytes between hosts, mean over the ranks."""
    hosts = [rank.host for rank in of_ranks]
    bounds = [
        lower_bound_between_hosts_bytes(
            {dim: round(float(np.mean(of_rank.num_host_rows)))},
            hosts,
            rank,
            num_dense_values=num_dense_values,
        )
        for rank, of_rank in enumerate(of_ranks)
    ]
    return float(np.mean(bounds))


def _per_step(of_ranks: Sequence[Measured], name: str) -> float:
    """Time of threads per step, mean over the ranks.

    Measured over whole blocks, because threads may still work for a step after it has returned.
    """
    blocks = [block for rank in of_ranks for block in rank.blocks.values()]
    num_steps = sum(len(block.returned_s) for block in blocks)
    return float(sum(getattr(block, name) for block in blocks) / num_steps)


def _stage_figures(of_ranks: Sequence[Measured]) -> dict[str, Any]:
    """Stage times and exposed communication of the main thread; None without timed stages."""
    if not next(iter(of_ranks[0].stage_s.values())).size:
        return {"stage_s": None, "exposed_s": None, "exposed_frac": None, "exposed_frac_most": None}
    exposed = [exposed_s(rank.stage_s) for rank in of_ranks]
    # Seconds from return to return on this rank.
    own_step_s = [
        np.concatenate([step_seconds([block]) for block in rank.blocks.values()])
        for rank in of_ranks
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


def _whole_step(of_ranks: Sequence[Block]) -> float:
    """Time of the block divided by its steps, including first steps and last traffic."""
    return max(block.ended_s for block in of_ranks) / len(of_ranks[0].returned_s)


def _block_ratios(mine: Sequence[Measured], baseline: Sequence[Measured]) -> dict[str, float]:
    """Median and quartiles of the ratios of two cases' steps, over the rounds."""
    other = _by_round(baseline)
    pairs = [(blocks, other[number]) for number, blocks in _by_round(mine).items()]
    ratios = [np.median(step_seconds(a)) / np.median(step_seconds(b)) for a, b in pairs]
    low, middle, high = np.percentile(ratios, [25, 50, 75])
    return {
        "step_ratio": float(middle),
        "step_ratio_p25": float(low),
        "step_ratio_p75": float(high),
        "whole_step_ratio": float(np.median([_whole_step(a) / _whole_step(b) for a, b in pairs])),
    }


def _ratio(value: float, baseline: float) -> float | None:
    return value / baseline if baseline else None


def reference_case(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """The reference case for comparing losses: the first exact one, if any."""
    exact = [name for name, case in figures.items() if case["is_exact"]]
    return [*exact, *figures][0]


def losses_apart(figures: Mapping[str, Mapping[str, Any]], tolerance: float) -> list[str]:
    """The exact cases whose loss is NaN or differs from the first's by more than the tolerance."""
    return [
        name
        for name, case in figures.items()
        if case["is_exact"] and not case["largest_loss_difference"] <= tolerance
    ]
