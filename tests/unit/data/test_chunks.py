import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrec.artifact import ArtifactError, scratch_directory
from hotrec.data.chunks import Block, ChunkWriter, Dataset, commit_dataset
from hotrec.types import Feature, Schema, Table
from tests.unit.data.logs import SCHEMA, bag, random_block, recommit, write_dataset


def parts_of(block: Block) -> list[list[float]]:
    """Its samples' values, in an order."""
    ids = [[bag(of, sample) for of in block.features.values()] for sample in range(len(block))]
    return [*map(list, zip(block.label.tolist(), block.dense.tolist(), ids, strict=True))]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=6), st.integers(1, 15))
def test_round_trip_whatever_the_sizes_of_blocks_and_chunks(tmp_path_factory, sizes, per_chunk):
    path = tmp_path_factory.mktemp("round") / "dataset"
    blocks, first = [], 0
    for size in sizes:
        blocks.append(random_block(size, first_sample=first))
        first += size
    with scratch_directory(path, kind="dataset") as scratch:
        writer = ChunkWriter(scratch, "train", SCHEMA, per_chunk)
        for block in blocks:
            writer.write(block)
        commit_dataset(scratch, path, SCHEMA, {"train": writer.close()}, {})
    dataset = Dataset.open(path, verify="full")
    counts = [chunk.num_samples for chunk in dataset.chunks("train")]
    assert sum(counts) == sum(sizes) == dataset.num_samples("train")
    assert all(count == per_chunk for count in counts[:-1])
    found = [parts_of(dataset.block("train", index)) for index in range(len(counts))]
    assert sum(found, []) == sum(map(parts_of, blocks), [])


def test_blocks_are_views_of_the_mapped_file(tmp_path):
    write_dataset(tmp_path / "d", {"train": 5})
    before = pa.total_allocated_bytes()
    block = Dataset.open(tmp_path / "d").block("train", 0)
    assert not block.label.flags.owndata
    assert not block.features["bag"].values.flags.owndata
    assert pa.total_allocated_bytes() - before < 200


def test_large_tables_have_wide_ids(tmp_path):
    schema = Schema((), (Feature("a", "t"),), (Table("t", 2**31),))
    block = Block(np.ones(1, np.float32), np.empty((1, 0), np.float32), {"a": np.array([2**31])})
    with scratch_directory(tmp_path / "d", kind="dataset") as scratch:
        writer = ChunkWriter(scratch, "train", schema, 4)
        writer.write(block)
        commit_dataset(scratch, tmp_path / "d", schema, {"train": writer.close()}, {})
    found = Dataset.open(tmp_path / "d").block("train", 0)
    assert found.features["a"].tolist() == [2**31]
    assert found.dense.shape == (1, 0)


def test_an_edited_chunk_is_found_by_its_hash(tmp_path):
    write_dataset(tmp_path / "d", {"train": 20})
    chunk = tmp_path / "d" / "chunks" / "train-00000.arrow"
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 1
    chunk.write_bytes(data)
    dataset = Dataset.open(tmp_path / "d")
    with pytest.raises(ArtifactError, match="expected checksum"):
        dataset.chunk("train", 0)
    with pytest.raises(ArtifactError, match="changed after it was written"):
        Dataset.open(tmp_path / "d", verify="full")


def alter(path, change) -> Dataset:
    """Rewrite the first chunk and make the manifest agree, as a careless tool would."""
    write_dataset(path, {"train": 7})
    chunk = path / "chunks" / "train-00000.arrow"
    with pa.OSFile(str(chunk)) as source:
        table = change(pa.ipc.open_file(source).read_all())
    with pa.OSFile(str(chunk), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    recommit(path)
    return Dataset.open(path)


def break_offsets(table):
    offsets = pa.array([0, 2, 1, 3, 3, 3, 3, 3], pa.int32())
    bags = pa.ListArray.from_arrays(offsets, pa.array([1, 2, 3], pa.int32()))
    return table.set_column(4, "bag", [bags])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.slice(2), "7 samples, got 5"),
        (lambda table: table.drop_columns(["b"]), "column b .* got no such column"),
        (lambda table: table.set_column(2, "a", [pa.array([1.0] * 7)]), "column a .* got double"),
        (
            lambda table: table.set_column(2, "a", [pa.array([None] * 7, pa.int32())]),
            "column a .* got 7",
        ),
        (break_offsets, "feature bag: "),
    ],
)
def test_chunks_that_do_not_fit_the_manifest_are_refused(tmp_path, change, message):
    dataset = alter(tmp_path / "d", change)
    with pytest.raises(ArtifactError, match=f"expected .*{message}|{message}expected"):
        dataset.block("train", 0)


def test_a_chunk_that_no_split_has_is_refused(tmp_path):
    write_dataset(tmp_path / "d", {"train": 7})
    manifest = tmp_path / "d" / "manifest.json"
    document = json.loads(manifest.read_text())
    document["content"]["splits"]["train"].pop()
    manifest.write_text(json.dumps(document))
    recommit(tmp_path / "d")
    with pytest.raises(ArtifactError, match="chunks/train-00000.arrow in no split"):
        Dataset.open(tmp_path / "d")
