"""``hotrec cache``: hits and traffic of simulated caches of host rows, by size and policy."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from hotrec.artifact import check_made_from
from hotrec.assemble.job import optimizer_specs, order_of, pipeline_spec
from hotrec.assemble.replay import (
    LOOK_AHEAD,
    POLICIES,
    SlotReplay,
    number_popular,
    read_stream,
    replay,
    sample_rows,
    sampling_step,
)
from hotrec.config.roots import Config
from hotrec.cost_model.profile import read_profile
from hotrec.data.chunks import Dataset
from hotrec.planner.policies import choose_popular_rows
from hotrec.planner.request import Replayed
from hotrec.report.pictures import draw_caches
from hotrec.report.style import write_png
from hotrec.types import Partition, WireType

logger = logging.getLogger(__name__)

# Landmarks: the minimum number of slots for this hit rate of lookups.
HIT_FRACS = (0.9, 0.99)


def run(config: Config, run_dir: Path) -> dict[str, Any]:
    """Write cache.json and cache.png into the run directory."""
    dataset = Dataset.open(config.paths.dataset, config.paths.verify)
    profile, artifact = read_profile(Path(config.paths.profile))
    check_made_from(artifact, dataset.artifact)
    cache = config.cache
    pipeline = pipeline_spec(config)
    settings = {"depth": pipeline.batches_in_slots - 1, "window": pipeline.batches_foreseen}
    order = order_of(config).on_one_rank(config.plan.world_size)
    stream = read_stream(order, dataset, profile.counts, num_batches=cache.num_batches)
    num_ids = sum(int(lookups.sum()) for lookups in stream.lookups)
    num_skipped = int(cache.skip_frac * len(stream.rows))
    partition = Partition({table.name: table.num_rows for table in dataset.schema.tables})
    found: list[Replayed] = []
    predicted: list[Replayed] = []
    for load_frac in tqdm(cache.load_fracs, desc="cache", unit=" sizes", disable=None):
        size = math.ceil(load_frac * stream.counts.size)
        popular = choose_popular_rows(
            partition,
            profile,
            load_frac=load_frac,
            global_batch_size=order.batch_size,
            world_size=1,
        )
        of_all = number_popular(popular, profile.counts)
        by_policy = {
            policy: replay(stream, policy, size, num_skipped, popular=of_all, **settings)
            for policy in POLICIES
        }
        found += [one for one in by_policy.values() if one is not None]
        if by_policy[LOOK_AHEAD] is not None:
            every = sampling_step(num_ids, size)
            numbers = sample_rows(stream.counts, every)
            sampled = SlotReplay(
                profile.counts, numbers, stream.sample(numbers, every), pipeline, cache.skip_frac
            )
            planned = sampled.predict(load_frac, popular)
            assert planned is not None
            predicted.append(planned)
    if not found:
        most = math.ceil(max(cache.load_fracs) * stream.counts.size)
        raise ValueError(
            f"cache.load_fracs: expected slots for the {max(map(len, stream.rows))} rows of a "
            f"batch, got {most}. Add a larger fraction."
        )
    bytes_of_row = optimizer_specs(config.optimizer)[0].bytes_per_row(config.model.embedding_dim)
    if getattr(config.placement, "cold_rows", WireType.fp32) is not WireType.fp32:
        bytes_of_row -= 2 * config.model.embedding_dim
    document = {
        "num_rows": stream.counts.size,
        "row_bytes": bytes_of_row,
        "num_batches": len(stream.rows) - num_skipped,
        "distinct_rows": float(np.mean([rows.size for rows in stream.rows[num_skipped:]])),
        **settings,
        "replayed": [_entry(one, bytes_of_row) for one in found],
        "predicted": [_entry(one, bytes_of_row) for one in predicted],
        "least_slots": _min_slots(found),
    }
    (run_dir / "cache.json").write_text(json.dumps(document, indent=2) + "\n")
    picture = run_dir / "cache.png"
    write_png(draw_caches(document), picture)
    return {"command": "cache", "picture": picture, "document": run_dir / "cache.json", **document}


def _entry(one: Replayed, row_bytes: int) -> dict[str, Any]:
    read, written = one.num_in * row_bytes, one.num_out * row_bytes
    return {**asdict(one), "read_bytes": read, "written_bytes": written}


def _min_slots(found: list[Replayed]) -> dict[str, dict[str, int | None]]:
    """By policy and landmark, among the replayed sizes; None if none suffices."""
    return {
        policy: {
            str(frac): min(
                (
                    one.num_slots
                    for one in found
                    if one.policy == policy and one.lookup_hit_frac >= frac
                ),
                default=None,
            )
            for frac in HIT_FRACS
        }
        for policy in POLICIES
    }
