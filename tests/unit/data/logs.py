"""Small logs and datasets that several tests of the data package write."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hotrec.artifact import scratch_directory
from hotrec.config.data import ColumnKind, ColumnSpec, SourceFormat, SourceSpec, SplitSpec
from hotrec.data.chunks import Block, ChunkWriter, Jagged, commit_dataset
from hotrec.types import Feature, Schema, Table

SCHEMA = Schema(
    dense=("d0", "d1"),
    features=(Feature("a", "t_a"), Feature("b", "t_b"), Feature("bag", "t_b", True)),
    tables=(Table("t_a", 10), Table("t_b", 1000)),
)
ONE_HOT_SCHEMA = Schema(
    dense=("d0",),
    features=(Feature("a", "t_a"), Feature("b", "t_b")),
    tables=(Table("t_a", 10), Table("t_b", 1000)),
)


def random_block(
    num_samples: int, schema: Schema = SCHEMA, first_sample: int = 0, seed: int = 0
) -> Block:
    """Samples whose first dense column is their number, so that each can be recognised."""
    rng = np.random.default_rng([seed, first_sample])
    dense = rng.standard_normal((num_samples, len(schema.dense))).astype(np.float32)
    dense[:, 0] = np.arange(first_sample, first_sample + num_samples)
    features = {}
    for feature in schema.features:
        num_rows = schema.table(feature.table).num_rows
        if feature.is_multi_hot:
            lengths = rng.integers(0, 4, num_samples)
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            features[feature.name] = Jagged(rng.integers(0, num_rows, offsets[-1]), offsets)
        else:
            features[feature.name] = rng.integers(0, num_rows, num_samples)
    return Block(rng.integers(0, 2, num_samples).astype(np.float32), dense, features)


def write_dataset(
    path: Path, sizes: dict[str, int], rows_per_chunk: int = 7, schema: Schema = SCHEMA
) -> dict[str, Block]:
    """A dataset of random samples; what it holds, by split."""
    blocks = {split: random_block(size, schema, seed=size) for split, size in sizes.items()}
    with scratch_directory(path, kind="dataset") as scratch:
        chunks = {}
        for split, block in blocks.items():
            writer = ChunkWriter(scratch, split, schema, rows_per_chunk)
            if len(block):
                writer.write(block)
            chunks[split] = writer.close()
        commit_dataset(scratch, path, schema, chunks, {})
    return blocks


def recommit(path: Path) -> None:
    """Make the manifest agree with files that a test has altered."""
    import json

    from hotrec.artifact import MANIFEST, commit_artifact

    content = json.loads((path / MANIFEST).read_text())["content"]
    (path / MANIFEST).unlink()
    moved = path.parent / "altered"
    path.rename(moved)
    commit_artifact(moved, path, kind="dataset", content=content)


def delimited_spec(files: list[Path], **settings: object) -> SourceSpec:
    """label, price, user, item and a history of items, separated by commas."""
    columns = {
        "label": ColumnSpec(ColumnKind.label, source="click"),
        "price": ColumnSpec(ColumnKind.dense),
        "user": ColumnSpec(ColumnKind.categorical),
        "item": ColumnSpec(ColumnKind.categorical, table="items"),
        "history": ColumnSpec(ColumnKind.categorical_list, table="items"),
    }
    defaults: dict[str, object] = {
        "columns": columns,
        "separator": ",",
        "split": SplitSpec(valid_frac=0.0, test_frac=0.0),
    }
    return SourceSpec(
        SourceFormat.delimited, [str(file) for file in files], **{**defaults, **settings}
    )


HEADER = "click,price,user,item,history\n"


def criteo_line(label: str = "1", number: int = 0) -> str:
    """A line of a Criteo log with no missing values."""
    ids = [f"{number + column:08x}" for column in range(26)]
    return "\t".join([label, *(str(number + column) for column in range(13)), *ids]) + "\n"
