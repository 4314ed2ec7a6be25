"""``hotrec calibrate``: measure how long each part of a training step takes."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hotrec.assemble.job import chosen_device
from hotrec.bench.job import make_subject
from hotrec.bench.samples import table_per_feature
from hotrec.calibrate.fit import fit_from_run
from hotrec.calibrate.loader import SPLIT
from hotrec.calibrate.measure import costs_table, measure_costs
from hotrec.calibrate.workload import CalibrationTarget
from hotrec.cli.launch import BRIEF
from hotrec.cli.watched import watched_ranks
from hotrec.config.roots import Config
from hotrec.cost_model.costs import Costs
from hotrec.cost_model.skew import fit_zipf_exponent
from hotrec.cost_model.store import write_costs
from hotrec.data.chunks import Dataset, Integers, Jagged
from hotrec.runtime.ranks import broadcast_object, same_verdict
from hotrec.types import Rows, Schema

logger = logging.getLogger(__name__)

# Used without a dataset: the columns of the Criteo logs, tables larger than the cache.
STAND_IN_TABLES, STAND_IN_ROWS, STAND_IN_DENSE = 26, 100_000, 13
# First bags of each feature, to estimate their lengths and how often ids repeat.
NUM_BAGS, MAX_LOOKUPS = 16_384, 1 << 18


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
        sizes = same_verdict(lambda: _read_sizes(config) if ranks.is_first else None)
        sizes = broadcast_object(sizes)
        assert sizes is not None
        table_rows, num_dense, schema, exponents, bag_lengths = sizes
        dataset = Path(config.paths.dataset)
        # All ranks alike, whatever a file system shows each of them.
        is_there = broadcast_object(dataset.exists())
        columns = schema if config.model.names_columns else None
        subject = make_subject(
            config.model,
            config.optimizer,
            table_per_feature(table_rows, num_dense, columns),
            batch_size=config.trainer.batch_size,
            seed=config.trainer.seed,
            columns=columns,
        )
        costs = measure_costs(
            ranks,
            CalibrationTarget(subject, settings.cap_mib << 20, exponents, bag_lengths),
            max_bytes=settings.max_bytes,
            repeats=settings.repeats,
            budget_s=settings.budget_s,
            dataset=dataset if is_there else None,
        )
        same_verdict(lambda: write_costs(costs, target) if ranks.is_first else None)
        if ranks.is_first and BRIEF not in os.environ:
            print(costs_table(costs), file=sys.stderr)
    return _figures(costs, target, start_s)


class Sizes(NamedTuple):
    """What is measured with, by feature."""

    table_rows: list[int]
    num_dense: int
    schema: Schema | None
    zipf_exponents: list[float] | None
    bag_lengths: list[Rows] | None  # None if each has one id


def _read_sizes(config: Config) -> Sizes:
    path = config.paths.dataset
    if not Path(path).exists():
        is_named = config.dataset_name is not None
        logger.warning(
            "%s: calibrating on %d tables of %d rows with one id a sample each and %d dense "
            "columns, without the loader. Calibrate again %s",
            f"paths.dataset {path} does not exist" if is_named else "no data= was given",
            *(STAND_IN_TABLES, STAND_IN_ROWS, STAND_IN_DENSE),
            "after prepare" if is_named else "with it for a plan of that dataset",
        )
        return Sizes([STAND_IN_ROWS] * STAND_IN_TABLES, STAND_IN_DENSE, None, None, None)
    dataset = Dataset.open(path)
    schema = dataset.schema
    rows = {table.name: table.num_rows for table in schema.tables}
    table_rows = [rows[feature.table] for feature in schema.features]
    exponents, lengths = None, None
    if dataset.num_samples(SPLIT) > 0:
        block = dataset.block(SPLIT, 0)
        features = [block.features[feature.name] for feature in schema.features]
        exponents = [*map(_zipf_exponent, features, table_rows)]
        if any(isinstance(ids, Jagged) for ids in features):
            lengths = [*map(_bag_lengths, features)]
    return Sizes(table_rows, len(schema.dense), schema, exponents, lengths)


def _zipf_exponent(ids: Integers | Jagged, num_rows: int) -> float:
    if isinstance(ids, Jagged):
        ids = ids.values[: ids.offsets[: NUM_BAGS + 1][-1]]
    return fit_zipf_exponent(ids[:MAX_LOOKUPS].astype(np.int64), num_rows)


def _bag_lengths(ids: Integers | Jagged) -> Rows:
    """Lengths of the first bags of a feature."""
    if not isinstance(ids, Jagged):
        return np.ones(1, np.int64)
    return np.diff(ids.offsets[: NUM_BAGS + 1]).astype(np.int64)


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
