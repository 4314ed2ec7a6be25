"""Small streams of samples with known contents, demands of known counts, and slow oracles."""

from __future__ import annotations

import numpy as np

from hotrec.cost_model.blocks import Block
from hotrec.cost_model.costs import World
from hotrec.cost_model.demand import build_demand
from hotrec.cost_model.histogram import build_histogram
from hotrec.cost_model.step import BYTES_OF
from hotrec.types import Feature, PipelineKind, PipelineSpec, Schema, Table

SPARSE_DIST = PipelineSpec()
LOOK_AHEAD = PipelineSpec(PipelineKind.look_ahead)

# "query" and "item" read one table; "tags" is multi-hot.
SCHEMA = Schema(
    dense=(),
    features=(
        Feature("user", "users"),
        Feature("query", "words"),
        Feature("item", "words"),
        Feature("tags", "tags", is_multi_hot=True),
    ),
    tables=(Table("users", 50), Table("words", 20), Table("tags", 9)),
)


def make_demand(
    counts,
    name="t",
    *,
    dim=4,
    lookups=1.0,
    num_columns=1,
    batch_size=8,
    world_size=2,
    ranks_per_host=1,
    **options,
):
    """The demand of a table whose rows were looked up ``counts`` times."""
    return build_demand(
        name,
        build_histogram(np.asarray(counts)),
        **{"dim": dim, "row_bytes": 4 * dim + 4, **options},
        lookups_per_sample=lookups,
        num_columns=num_columns,
        batch_size=batch_size,
        world=World(world_size, ranks_per_host),
    )


def zipf(num_rows, exponent, num_lookups=10**9):
    """Counts by Zipf's law, so large that rounding does not matter, with their probabilities."""
    weights = np.arange(1, num_rows + 1) ** -float(exponent)
    counts = np.rint(num_lookups * weights / weights.sum()).astype(np.int64)
    return counts, counts / counts.sum()


def draw_steps(probs, num_draws, *, world_size, num_steps, seed=0):
    """Distinct rows of each rank of simulated steps of independent lookups."""
    rng = np.random.default_rng(seed)
    return [
        [np.unique(rng.choice(probs.size, num_draws, p=probs)) for _ in range(world_size)]
        for _ in range(num_steps)
    ]


def work_of(row_bytes=256, **items):
    """Quantities of a step: items, and the bytes of those that have any."""
    return items | {BYTES_OF[name]: n * row_bytes for name, n in items.items() if name in BYTES_OF}


def make_samples(num_samples: int, *, seed: int = 0, dtype: type = np.int32) -> Block:
    """Skewed ids, bags of 0 to 4 tags."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 5, num_samples)
    sizes = {feature.name: SCHEMA.table(feature.table).num_rows for feature in SCHEMA.features}
    rows = {}
    for name, size in sizes.items():
        num_ids = int(lengths.sum()) if name == "tags" else num_samples
        rows[name] = np.minimum(rng.geometric(0.15, num_ids) - 1, size - 1).astype(dtype)
    return Block(num_samples, rows, {"tags": lengths.astype(np.int32)})


def as_lists(block: Block) -> list[dict[str, list[int]]]:
    """One dict of id lists per sample, by a plain loop."""
    samples: list[dict[str, list[int]]] = [{} for _ in range(block.num_samples)]
    for name, values in block.rows.items():
        start = 0
        for i in range(block.num_samples):
            num_ids = int(block.lengths[name][i]) if name in block.lengths else 1
            samples[i][name] = [int(v) for v in values[start : start + num_ids]]
            start += num_ids
    return samples


def count_slowly(samples: list[dict[str, list[int]]]) -> dict[str, list[int]]:
    """Accesses per row, by a plain loop."""
    counts = {table.name: [0] * table.num_rows for table in SCHEMA.tables}
    for sample in samples:
        for feature in SCHEMA.features:
            for row in sample[feature.name]:
                counts[feature.table][row] += 1
    return counts
