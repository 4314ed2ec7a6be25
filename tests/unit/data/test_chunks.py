import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrec.artifact import ArtifactError, scratch_directory
from hotrec.data.chunks import Block, ChunkWriter, Dataset, Jagged, arrow_schema, commit_dataset
from hotrec.types import Feature, Schema, Table
from tests.unit.data.logs import SCHEMA, random_block, recommit, write_dataset


def assert_same(found: Block, expected: Block) -> None:
    np.testing.assert_array_equal(found.label, expected.label)
    np.testing.assert_array_equal(found.dense, expected.dense)
    for name, ids in expected.features.items():
        if isinstance(ids, Jagged):
            np.testing.assert_array_equal(found.features[name].values, ids.values)
            np.testing.assert_array_equal(found.features[name].offsets, ids.offsets)
        else:
            np.testing.assert_array_equal(found.features[name], ids)


def joined(blocks: list[Block]) -> Block:
    features = {}
    for name, first in blocks[0].features.items():
        parts = [block.features[name] for block in blocks]
        if isinstance(first, Jagged):
            lengths = np.concatenate([np.diff(part.offsets) for part in parts])
            values = np.concatenate(
                [part.values[part.offsets[0] : part.offsets[-1]] for part in parts]
            )
            features[name] = Jagged(values, np.concatenate([[0], np.cumsum(lengths)]))
        else:
            features[name] = np.concatenate(parts)
    return Block(
        np.concatenate([block.label for block in blocks]),
        np.concatenate([block.dense for block in blocks]),
        features,
    )


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
    if counts:
        found = joined([dataset.block("train", index) for index in range(len(counts))])
        assert_same(found, joined(blocks))


def test_a_chunk_is_one_uncompressed_record_batch_of_the_documented_types(tmp_path):
    write_dataset(tmp_path / "d", {"train": 5})
    table = Dataset.open(tmp_path / "d").chunk("train", 0)
    assert table.schema == arrow_schema(SCHEMA)
    assert table.schema.field("label").type == pa.float32()
    assert table.schema.field("dense").type == pa.list_(pa.float32(), 2)
    assert table.schema.field("a").type == pa.int32()
    assert table.schema.field("bag").type == pa.list_(pa.int32())
    assert table.column("label").num_chunks == 1


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


def test_row_blocks_lay_bags_end_to_end(tmp_path):
    block = write_dataset(tmp_path / "d", {"train": 20})["train"]
    rows = list(Dataset.open(tmp_path / "d").row_blocks("train"))
    assert len(rows) == 3
    assert all(part["bag"].dtype == np.int64 for part in rows)
    found = np.concatenate([part["bag"] for part in rows])
    np.testing.assert_array_equal(found, block.features["bag"].values)


def test_splits_may_be_missing(tmp_path):
    write_dataset(tmp_path / "d", {"train": 5, "valid": 0})
    dataset = Dataset.open(tmp_path / "d")
    assert dataset.num_samples("valid") == 0
    assert dataset.chunks("test") == ()


def test_a_chunk_that_the_manifest_forgot_is_named(tmp_path):
    write_dataset(tmp_path / "d", {"train": 20})
    (tmp_path / "d" / "chunks" / "train-00001.arrow").unlink()
    recommit(tmp_path / "d")
    with pytest.raises(ArtifactError, match=r"train-00001.* among 2 files"):
        Dataset.open(tmp_path / "d")


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


def test_a_truncated_chunk_is_found_by_its_size(tmp_path):
    write_dataset(tmp_path / "d", {"train": 20})
    chunk = tmp_path / "d" / "chunks" / "train-00000.arrow"
    chunk.write_bytes(chunk.read_bytes()[:-10])
    with pytest.raises(ArtifactError, match=r"expected \d+ bytes, got \d+"):
        Dataset.open(tmp_path / "d")


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.slice(2), "expected 7 samples, got 5"),
        (lambda table: table.drop_columns(["b"]), "column b of type int32, got no such column"),
        (
            lambda table: table.set_column(2, "a", [pa.array([1.0] * 7)]),
            "column a of type int32, got double",
        ),
        (
            lambda table: table.set_column(2, "a", [pa.array([None] * 7, pa.int32())]),
            "column a without nulls, got 7",
        ),
    ],
)
def test_chunks_that_do_not_fit_the_manifest_are_refused(tmp_path, change, message):
    dataset = alter(tmp_path / "d", change)
    with pytest.raises(ArtifactError, match=message):
        dataset.block("train", 0)


def test_lengths_that_do_not_add_up_are_refused(tmp_path):
    def break_offsets(table):
        offsets = pa.array([0, 2, 1, 3, 3, 3, 3, 3], pa.int32())
        bags = pa.ListArray.from_arrays(offsets, pa.array([1, 2, 3], pa.int32()))
        return table.set_column(4, "bag", [bags])

    dataset = alter(tmp_path / "d", break_offsets)
    with pytest.raises(ArtifactError, match="feature bag: expected lengths >= 0 with the sum"):
        dataset.block("train", 0)


def test_a_file_that_is_no_arrow_file_is_refused(tmp_path):
    write_dataset(tmp_path / "d", {"train": 7})
    (tmp_path / "d" / "chunks" / "train-00000.arrow").write_bytes(b"nothing of the kind")
    recommit(tmp_path / "d")
    with pytest.raises(ArtifactError, match="expected an Arrow file of 7 samples"):
        Dataset.open(tmp_path / "d").block("train", 0)
