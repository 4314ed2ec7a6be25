"""``hotrec calibrate``: measure how long each part of a training step takes."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from hotrec.calibrate.fit import fit_from_run
from hotrec.calibrate.measure import costs_table, measure_costs
from hotrec.calibrate.workload import CalibrationTarget
from hotrec.cli.launch import BRIEF
from hotrec.cli.watched import watched_ranks
from hotrec.config.groups import LayeredConfig
from hotrec.config.roots import Config
from hotrec.cost_model.costs import Costs
from hotrec.cost_model.store import write_costs
from hotrec.data.chunks import Dataset
from hotrec.planning.unsharded import chosen_device
from hotrec.runtime.ranks import broadcast_object, same_verdict
from hotrec.types import Schema

logger = logging.getLogger(__name__)

# Used without a dataset: the columns of the Criteo logs, tables larger than the cache.
STAND_IN_TABLES, STAND_IN_ROWS, STAND_IN_DENSE = 26, 100_000, 13


def run(config: Config, run_dir: Path) -> dict[str, Any]:
    """Measure costs, or correct them by a run, and write them to paths.costs."""
    start_s = time.perf_counter()
    settings = config.calibrate
    target = Path(config.paths.costs)
    if settings.from_run is not None:
        costs = fit_from_run(Path(settings.from_run), config.paths.costs)
        write_costs(costs, target)
        return _figures(costs, target, start_s)
    device = chosen_device(config.trainer.device)
    with watched_ranks(run_dir, device=device, timeout_s=config.trainer.timeout_s) as ranks:
        table_rows, num_dense, schema = same_verdict(
            lambda: _read_sizes(config.paths.dataset, shows_warning=ranks.is_first)
        )
        dataset = Path(config.paths.dataset)
        # All ranks alike, whatever a file system shows each of them.
        is_there = broadcast_object(dataset.exists())
        subject = CalibrationTarget(
            table_rows=table_rows,
            model=config.model,
            optimizer=config.optimizer,
            num_dense=num_dense,
            batch_size=config.trainer.batch_size,
            cap_bytes=settings.cap_mib << 20,
            seed=config.trainer.seed,
            # Other models tell columns apart by no name.
            schema=None if isinstance(config.model, LayeredConfig) else schema,
        )
        costs = measure_costs(
            ranks,
            subject,
            name=settings.name,
            max_bytes=settings.max_bytes,
            repeats=settings.repeats,
            budget_s=settings.budget_s,
            dataset=dataset if is_there else None,
        )
        same_verdict(lambda: write_costs(costs, target) if ranks.is_first else None)
        if ranks.is_first and BRIEF not in os.environ:
            print(costs_table(costs), file=sys.stderr)
    return _figures(costs, target, start_s)


def _read_sizes(dataset: str, *, shows_warning: bool) -> tuple[list[int], int, Schema | None]:
    """The rows of each feature's table, the number of dense columns, and the columns."""
    if not Path(dataset).exists():
        if shows_warning:
            logger.warning(
                "paths.dataset %s does not exist: calibrating on %d tables of %d rows with one id "
                "a sample each and %d dense columns, without the loader. Calibrate again after "
                "prepare",
                *(dataset, STAND_IN_TABLES, STAND_IN_ROWS, STAND_IN_DENSE),
            )
        return [STAND_IN_ROWS] * STAND_IN_TABLES, STAND_IN_DENSE, None
    schema = Dataset.open(dataset).schema
    rows = {table.name: table.num_rows for table in schema.tables}
    return [rows[feature.table] for feature in schema.features], len(schema.dense), schema


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
        "ratio_interval": list(costs.ratio_interval),
        "is_trusted": costs.is_trusted,
        "doubts": list(costs.doubts),
        "intra_bytes_per_s": costs.intra.bytes_per_s,
        "inter_bytes_per_s": None if costs.inter is None else costs.inter.bytes_per_s,
        "elapsed_s": time.perf_counter() - start_s,
    }
