"""``hotrec calibrate``: measure what the machine takes for the parts of a training step."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from hotrec.build import chosen_device
from hotrec.calibrate.clock import Effort
from hotrec.calibrate.collectives import (
    Network,
    measure_network,
    measure_overlap,
    num_network_points,
)
from hotrec.calibrate.fit import StageTimes, fit_corrections
from hotrec.calibrate.kernels import Point, fit_line, largest_error, measure_probe
from hotrec.calibrate.memory import measure_memory, settle_memory
from hotrec.calibrate.probes import Bench, Subject, all_probes, group_alone
from hotrec.calibrate.steps import correct_by_steps, num_step_points
from hotrec.config.roots import Config
from hotrec.cost_model.costs import KERNELS, Costs, CostsError, Line, Link, World
from hotrec.cost_model.store import find_costs, write_costs
from hotrec.data.chunks import Dataset
from hotrec.runtime.fingerprint import read_fingerprint
from hotrec.runtime.ranks import (
    Ranks,
    all_gather_object,
    broadcast_object,
    process_group,
    same_verdict,
)

logger = logging.getLogger(__name__)

# Without a dataset: columns as of the Criteo logs, tables beyond the processor's cache.
STAND_IN_TABLES, STAND_IN_ROWS, STAND_IN_DENSE = 26, 100_000, 13
SUMMARY, PREDICTION = "summary.json", "prediction.json"


def run(config: Config, run_dir: Path) -> dict[str, Any]:
    """Measure, or correct costs by a run; write them to paths.costs; the figures for the caller."""
    start_s = time.perf_counter()
    wanted = config.calibrate
    target = Path(config.paths.costs)
    if wanted.from_run is not None:
        costs = fit_from_run(Path(wanted.from_run), config.paths.costs)
        write_costs(costs, target)
        return _figures(costs, target, start_s)
    device = chosen_device(config.trainer.device)
    with process_group(device=device, timeout_s=config.trainer.timeout_s) as ranks:
        table_rows, num_dense = same_verdict(
            lambda: _read_sizes(config.paths.dataset, is_told=ranks.is_first)
        )
        subject = Subject(
            table_rows=table_rows,
            model=config.model,
            optimizer=config.optimizer,
            num_dense=num_dense,
            batch_size=config.trainer.batch_size,
            cap_bytes=wanted.cap_mib << 20,
            seed=config.trainer.seed,
        )
        costs = measure_costs(
            ranks,
            subject,
            name=wanted.name,
            max_bytes=wanted.max_bytes,
            repeats=wanted.repeats,
        )
        same_verdict(lambda: write_costs(costs, target) if ranks.is_first else None)
        if ranks.is_first:
            print(costs_table(costs), file=sys.stderr)
    return _figures(costs, target, start_s)


def _read_sizes(dataset: str, *, is_told: bool) -> tuple[list[int], int]:
    """Rows of the table that each feature reads, and dense columns; a stand-in without dataset."""
    if not Path(dataset).exists():
        if is_told:
            logger.warning(
                "paths.dataset %s is not there: calibrating on %d tables of %d rows",
                dataset,
                STAND_IN_TABLES,
                STAND_IN_ROWS,
            )
        return [STAND_IN_ROWS] * STAND_IN_TABLES, STAND_IN_DENSE
    schema = Dataset.open(dataset).schema
    rows = {table.name: table.num_rows for table in schema.tables}
    return [rows[feature.table] for feature in schema.features], len(schema.dense)


def _figures(costs: Costs, target: Path, start_s: float) -> dict[str, Any]:
    return {
        "command": "calibrate",
        "costs": target,
        "name": costs.name,
        "origin": costs.origin,
        "device": costs.device,
        "overlap": costs.overlap,
        "overhead_s": costs.overhead_s,
        "corrections": dict(costs.corrections),
        "intra_bytes_per_s": costs.intra.bytes_per_s,
        "inter_bytes_per_s": None if costs.inter is None else costs.inter.bytes_per_s,
        "elapsed_s": time.perf_counter() - start_s,
    }


def measure_costs(
    ranks: Ranks,
    subject: Subject,
    *,
    name: str | None = None,
    max_bytes: float = float(16 << 20),
    repeats: int = 7,
    budget_s: float = 0.5,
) -> Costs:
    """Measure all kernels and collectives, on all ranks at the same time; collective.

    Args:
        ranks: of the process group, which exists already.
        subject: tables, model and optimizer to measure with.
        name: of the costs; None: device and processor or GPU.
        max_bytes: largest message of a rank.
        repeats: of each size, fewer if they would take longer than ``budget_s``.
        budget_s: for the repeats of one size.

    Returns:
        The same costs on every rank.
    """
    start_s = time.perf_counter()
    World(ranks.world_size, ranks.local_world_size)  # refuses uneven hosts before any work
    effort = Effort(repeats, budget_s)
    settle_memory(ranks.device, subject.cap_bytes)
    bench = Bench(subject, ranks, group_alone(ranks))
    probes = all_probes(bench)
    num_points = sum(len(probe.sizes) for probe in probes)
    num_points += num_network_points(ranks, max_bytes)
    lines: dict[str, Line] = {}
    points: dict[str, list[Point]] = {}
    with _progress(ranks, num_points) as bar:
        advance: Callable[[], object] = bar.update
        network = measure_network(ranks, max_bytes=max_bytes, effort=effort, advance=advance)
        overlap = measure_overlap(ranks, max_bytes=max_bytes, effort=effort)
        for probe in probes:
            bar.set_postfix_str(probe.name)
            found = measure_probe(probe, ranks.device, effort, advance)
            points[probe.name] = found
            lines[probe.name] = fit_line(
                found,
                is_by_items=probe.is_by_items,
                is_by_bytes=probe.is_by_bytes,
                is_growing=probe.is_by_items or probe.is_by_bytes,
            )
    device_bytes, host_bytes = measure_memory(ranks.device)
    fingerprints = all_gather_object(read_fingerprint(ranks.device.type))
    intra, inter = _links(network, lines["copy"])
    host = fingerprints[0]
    costs = Costs(
        name=name or f"{ranks.device.type} {host['gpu'] or host['processor']}",
        origin="measured",
        device=ranks.device.type,
        kernels=lines,
        intra=intra,
        inter=inter,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        curves=network.curves,
        overlap=overlap,
        host=host,
        facts={
            "num_ranks": ranks.world_size,
            "ranks_per_host": ranks.local_world_size,
            "threads_per_rank": torch.get_num_threads(),
            "batch_size": subject.batch_size,
            "embedding_dim": bench.dim,
            "optimizer": subject.optimizer.kind.name,
            "zipf_exponent": subject.zipf_exponent,
            "hosts_differ": any(other != host for other in fingerprints),
            "elapsed_s": time.perf_counter() - start_s,
            "largest_fit_error": {n: largest_error(lines[n], points[n]) for n in lines},
            "points": {
                n: [[p.num_items, p.num_bytes, p.seconds, p.spread] for p in found]
                for n, found in points.items()
            },
        },
    )
    costs = _corrected(bench, costs, ranks)
    # Each rank has fitted the same figures; rank 0's make sure that they are the same to the bit.
    return Costs.from_json(broadcast_object(costs.to_json()))


def _corrected(bench: Bench, costs: Costs, ranks: Ranks) -> Costs:
    with _progress(ranks, num_step_points(bench)) as bar:
        bar.set_postfix_str("whole steps")
        corrected, anchors = correct_by_steps(bench, costs, bar.update)
    return replace(corrected, facts={**costs.facts, "steps": [asdict(a) for a in anchors]})


def _progress(ranks: Ranks, num_points: int) -> tqdm[Any]:
    # disable=None: shown on a terminal only.
    disable = None if ranks.is_first else True
    return tqdm(total=num_points, desc="calibrate", unit="size", disable=disable)


def _links(network: Network, copy: Line) -> tuple[Link, Link | None]:
    """The links; one inside a host where no two ranks share one is a copy in memory."""
    if network.intra is not None:
        return network.intra, network.inter
    rate = 1 / copy.per_byte_s if copy.per_byte_s > 0 else 1 / copy.seconds(0, 1)
    source = (
        "assumed: a copy in memory; no host had two ranks. Calibrate with as many ranks on a host "
        "as will train"
    )
    return Link(copy.fixed_s, rate, source), network.inter


def costs_table(costs: Costs) -> str:
    """The lines and links for people."""
    width = max(len(name) for name in costs.kernels)
    header = f"{'kernel':<{width}}  {'per item':>10}  {'per byte':>10}  {'fixed':>10}  spread"
    rows = [f"costs {costs.name} ({costs.origin}, {costs.device})", header]
    for name in KERNELS:
        line = costs.kernels.get(name)
        if line is not None:
            rows.append(
                f"{name:<{width}}  {_time_text(line.per_item_s)}  {_time_text(line.per_byte_s)}  "
                f"{_time_text(line.fixed_s)}  {line.spread:5.0%}"
            )
    for curve in costs.curves:
        line = curve.line()
        kind = f"{curve.kind} {curve.world.num_ranks}r/{curve.world.num_hosts}h"
        rows.append(
            f"{kind:<{width}}  {'':>10}  {_time_text(line.per_byte_s)}  "
            f"{_time_text(line.fixed_s)}  {line.spread:5.0%}"
        )
    for level, link in (("inside a host", costs.intra), ("between hosts", costs.inter)):
        if link is not None:
            rate = f"{link.bytes_per_s / 1e6:,.0f} MB/s"
            rows.append(f"link {level}: {rate}, latency {_time_text(link.latency_s).strip()}")
    rows.append(f"overlap {costs.overlap:.2f}, overhead {_time_text(costs.overhead_s).strip()}")
    ahead = costs.look_ahead
    rows.append(
        f"look-ahead ({ahead.source}): {_time_text(ahead.fixed_s).strip()} a step and "
        f"{_time_text(1e6 * ahead.per_byte_s).strip()} a megabyte of cold rows, beside its stages"
    )
    return "\n".join(rows)


def _time_text(seconds: float) -> str:
    for factor, unit in ((1e3, "ms"), (1e6, "us"), (1e9, "ns")):
        if seconds * factor >= 1:
            return f"{seconds * factor:7.3g} {unit}"
    return f"{seconds * 1e12:7.3g} ps"


def fit_from_run(run_dir: Path, where: str) -> Costs:
    """Correct the costs that a run was planned with by what its stages took.

    Args:
        run_dir: of a training run that predicted and measured its stages.
        where: the costs that it was planned with, a directory or the name of a built-in set.

    Raises:
        CostsError: if the run lacks either, looked ahead, or was planned with other costs.
    """
    summary = _read_document(run_dir / SUMMARY)
    if summary.get("pipeline") == "look_ahead":
        raise CostsError(
            f"{run_dir / SUMMARY} pipeline: expected sparse_dist or base, whose stages are all on "
            "the main thread, got look_ahead. Take a run with pipeline=sparse_dist."
        )
    times = []
    for key in ("predicted_stage_s", "measured_stage_s"):
        found = summary.get(key)
        if not isinstance(found, Mapping) or not found:
            raise CostsError(
                f"{run_dir / SUMMARY} {key}: expected seconds by stage, got {found!r}. Take a run "
                "that was planned with costs and made more than 50 steps."
            )
        times.append({str(stage): seconds for stage, seconds in found.items()})
    costs = find_costs(where)
    planned = _read_document(run_dir / PREDICTION).get("costs", {}).get("name")
    if planned != costs.name:
        raise CostsError(
            f"{run_dir / PREDICTION}: expected a run planned with the costs {costs.name!r} of "
            f"{where}, got one planned with {planned!r}. Set paths.costs to those."
        )
    return fit_corrections(costs, [StageTimes(*times)], {"fitted_from": str(run_dir)})


def _read_document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CostsError(
            f"{path}: expected what `hotrec train` writes, got {error!r}. Correct "
            "calibrate.from_run."
        ) from error
    if not isinstance(document, dict):
        raise CostsError(f"{path}: expected a JSON object, got {type(document).__name__}.")
    return document
