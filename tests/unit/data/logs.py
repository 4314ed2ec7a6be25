"""Small logs and datasets that several tests of the data package write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from hotrec.artifact import MANIFEST, commit_artifact, scratch_directory
from hotrec.config.data import (
    ColumnKind,
    ColumnSpec,
    SourceFormat,
    SourceSpec,
    SplitKind,
    SplitSpec,
    TableSpec,
)
from hotrec.data.batch import Batch
from hotrec.data.chunks import Block, ChunkWriter, Jagged, commit_dataset
from hotrec.data.loader import make_loader
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
    write_blocks(path, {split: [block] for split, block in blocks.items()}, rows_per_chunk, schema)
    return blocks


def write_blocks(
    path: Path, splits: dict[str, list[Block]], rows_per_chunk: int = 7, schema: Schema = SCHEMA
) -> None:
    """A dataset of these samples."""
    with scratch_directory(path, kind="dataset") as scratch:
        chunks = {}
        for split, blocks in splits.items():
            writer = ChunkWriter(scratch, split, schema, rows_per_chunk)
            for block in blocks:
                writer.write(block)
            chunks[split] = writer.close()
        commit_dataset(scratch, path, schema, chunks, {})


def write_bad_id(path: Path, feature: str, row: int, schema: Schema = SCHEMA) -> None:
    """20 samples in chunks of 8, with an id outside its table in sample 15."""
    block = random_block(20, schema)
    ids = block.features[feature]
    if isinstance(ids, Jagged):
        assert ids.offsets[16] > ids.offsets[15]
        ids.values[ids.offsets[15]] = row
    else:
        ids[15] = row
    write_blocks(path, {"train": [block]}, 8, schema)


def bag(ids: Any, sample: int) -> list[int]:
    """The ids of one sample of a feature."""
    if isinstance(ids, Jagged):
        return ids.values[ids.offsets[sample] : ids.offsets[sample + 1]].tolist()
    return [int(ids[sample])]


def loader(path: Path, split: str = "train", **settings: Any) -> Any:
    """A loader of one rank and one epoch, unless the settings say otherwise."""
    defaults = {"batch_size": 4, "rank": 0, "world_size": 1, "seed": 5, "epochs": 1}
    return make_loader(path, split, **{**defaults, **settings})


def samples_of(batch: Batch) -> list[int]:
    """The number that each sample carries in its first dense column; padding left out."""
    return [int(n) for n, w in zip(batch.dense[:, 0], batch.weights, strict=True) if w == 1]


def assert_holds(batch: Batch, block: Block, schema: Schema = SCHEMA) -> None:
    """The batch's samples, whichever they are, are those of the block."""
    samples = samples_of(batch)
    assert batch.labels.tolist() == block.label[samples].tolist()
    assert batch.dense.tolist() == block.dense[samples].tolist()
    assert batch.sparse.keys() == list(schema.feature_names)
    assert batch.sparse.stride() == len(samples)
    for name, jagged in batch.sparse.to_dict().items():
        found = [ids.tolist() for ids in jagged.to_dense()]
        assert found == [bag(block.features[name], sample) for sample in samples]


def recommit(path: Path) -> None:
    """Make the manifest agree with files that a test has altered."""
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
        "item": ColumnSpec(ColumnKind.categorical, table="videos"),
        "history": ColumnSpec(ColumnKind.categorical_list, table="videos"),
    }
    defaults: dict[str, object] = {
        "columns": columns,
        "separator": ",",
        "split": SplitSpec(valid_frac=0.0, test_frac=0.0),
    }
    return SourceSpec(
        SourceFormat.delimited, [str(file) for file in files], **{**defaults, **settings}
    )


DAY_MS = 86_400_000
HEADER = "click,price,user,item,history\n"


def criteo_line(label: str = "1", number: int = 0) -> str:
    """A line of a Criteo log with no missing values."""
    ids = [f"{number + column:08x}" for column in range(26)]
    return "\t".join([label, *(str(number + column) for column in range(13)), *ids]) + "\n"


def write_day(folder: Path, day: int, users: list[str], item: str = "i", history: str = "") -> str:
    """A file of one day of 1970, whose price is the time; its path."""
    path = folder / f"day_{day}.csv"
    times = [day * DAY_MS + number for number in range(len(users))]
    lines = [f"1,{time},{user},{item},{history}\n" for time, user in zip(times, users, strict=True)]
    path.write_text(HEADER + "".join(lines))
    return str(path)


def spec_by_day(file: str, valid_day: int = 99, user: TableSpec | None = None) -> SourceSpec:
    """What reads files of ``write_day``, in chunks of three samples."""
    split = SplitSpec(SplitKind.time, column="price", valid_from=valid_day * DAY_MS)
    tables = {} if user is None else {"user": user}
    return delimited_spec([Path(file)], split=split, tables=tables, rows_per_chunk=3)
