"""Which rank takes which sample of a global batch, by itself and in the loader."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrec.artifact import scratch_directory
from hotrec.data.all_hot import write_all_hot
from hotrec.data.batch import Batch
from hotrec.data.chunks import ChunkWriter, Dataset, Jagged, commit_dataset
from hotrec.data.gather import select_bags
from hotrec.data.loader import make_loader
from hotrec.data.locality import NOBODY, ByOwner, Shard, assign_by_owner
from hotrec.data.order import Piece, SampleOrder, select_pieces
from hotrec.types import Feature, Partition, Schema, Table
from tests.unit.data.logs import ONE_HOT_SCHEMA, SCHEMA, random_block, write_dataset

NO_HOT: dict[str, np.ndarray] = {}


def int64(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def owner_of_everything(schema: Schema, world_size: int, hot: dict[str, np.ndarray]) -> ByOwner:
    shards = {}
    for table in schema.tables:
        block = -(-table.num_rows // world_size)
        ranks = range(-(-table.num_rows // block))
        shards[table.name] = [Shard(rank * block, rank) for rank in ranks]
    return ByOwner(schema, shards, hot)


# The rule.


def test_samples_go_to_their_rows_and_those_that_lose_most_choose_first() -> None:
    # Samples 0, 1, 2 all want rank 1, which has room for 2; sample 1 has the least to lose.
    samples = int64(0, 0, 0, 1, 1, 2, 2, 3)
    owners = int64(1, 1, 0, 1, 0, 1, 1, NOBODY)
    rows = int64(10, 11, 1, 12, 1, 13, 14, 99)
    assigned = assign_by_owner(owners, rows, samples, int64(2, 2))
    assert assigned.tolist() == [1, 0, 1, 0]


def test_a_row_that_many_read_pulls_nobody() -> None:
    # Row 5 of rank 0 is read by all, the rows of rank 1 by one sample each.
    samples, rows = int64(0, 1, 2, 3, 2, 3), int64(5, 5, 5, 5, 7, 8)
    owners = int64(0, 0, 0, 0, 1, 1)
    assert assign_by_owner(owners, rows, samples, int64(2, 2)).tolist() == [0, 0, 1, 1]


def test_without_cold_rows_samples_stay_as_read() -> None:
    owners = np.full(6, NOBODY)
    assigned = assign_by_owner(owners, np.arange(6), np.arange(6), int64(3, 2, 1))
    assert assigned.tolist() == [0, 0, 0, 1, 1, 2]


def test_ranks_without_room_get_nothing() -> None:
    owners = int64(1, 2, 2)
    assigned = assign_by_owner(owners, int64(0, 1, 2), int64(0, 1, 1), int64(1, 1, 0))
    assert sorted(assigned.tolist()) == [0, 1]


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 40), st.integers(1, 5), st.integers(0, 200), st.integers(0, 2**31))
def test_every_rank_gets_its_share(
    num_samples: int, num_ranks: int, num_ids: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    num_ids = num_ids if num_samples else 0
    share, extra = divmod(num_samples, num_ranks)
    shares = share + (np.arange(num_ranks) < extra)
    owners = rng.integers(NOBODY, num_ranks, num_ids)
    rows, samples = rng.integers(0, 30, num_ids), rng.integers(0, max(num_samples, 1), num_ids)
    assigned = assign_by_owner(owners, rows, samples, shares)
    assert np.bincount(assigned, minlength=num_ranks).tolist() == shares.tolist()
    assert np.array_equal(assigned, assign_by_owner(owners, rows, samples, shares))


# Owners of rows.


def test_owners_are_those_of_the_shards_and_hot_rows_have_none() -> None:
    schema = Schema(
        dense=(),
        features=(Feature("x", "b"), Feature("y", "a"), Feature("z", "pooled")),
        tables=(Table("a", 10), Table("pooled", 3), Table("b", 7)),
    )
    shards = {"a": [Shard(0, 0), Shard(4, 1), Shard(8, 2)], "b": [Shard(0, 2)]}
    by_owner = ByOwner(schema, shards, {"a": int64(9, 0), "b": int64(6)})
    of_a = [-1, 0, 0, 0, 1, 1, 1, 1, 2, -1]
    of_b = [2, 2, 2, 2, 2, 2, -1]
    assert by_owner.owners(np.arange(20)).tolist() == [*of_a, -1, -1, -1, *of_b]
    # Feature-major: x reads b, y reads a, z reads a table without owners.
    values, lengths = int64(0, 6, 5, 3, 1), np.array([1, 1, 2, 0, 1, 0], np.int32)
    assigned = by_owner(values, lengths, int64(0, 1, 1))
    assert assigned.tolist() == [1, 2]  # sample 0 reads b's 0 of rank 2, and a's 5 and 3
    again = pickle.loads(pickle.dumps(by_owner))
    assert again(values, lengths, int64(0, 1, 1)).tolist() == [1, 2]


def test_shards_that_leave_rows_out_are_refused() -> None:
    for first_rows in ([1], [0, 5, 5], [0, 6, 3]):
        shards = {"t_a": [Shard(first_row, 0) for first_row in first_rows]}
        with pytest.raises(ValueError, match=r"shards of table t_a: expected first rows that rise"):
            ByOwner(SCHEMA, shards, NO_HOT)


# Pieces and bags.


def test_pieces_and_bags_of_some_samples() -> None:
    pieces = [Piece(3, int64(5, 1, 4)), Piece(0, int64(2)), Piece(1, int64(7, 6))]
    selected = select_pieces(pieces, int64(0, 2, 5))
    assert [(piece.chunk, piece.rows.tolist()) for piece in selected] == [(3, [5, 4]), (1, [6])]
    assert select_pieces(pieces, int64()) == []
    values, lengths = np.arange(7), np.array([2, 0, 1, 1, 3, 0], np.int32)
    of_two = select_bags(values, lengths, int64(0, 1), 2)
    assert [part.tolist() for part in of_two] == [[0, 1, 3, 4, 5, 6], [2, 0, 1, 3]]
    of_last = select_bags(values, lengths, int64(2), 2)
    assert [part.tolist() for part in of_last] == [[2], [1, 0]]
    assert of_last[1].dtype == np.int32


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_global_pieces_are_those_of_all_ranks(world_size: int) -> None:
    sizes = [7, 11, 4]
    orders = [
        SampleOrder(sizes, batch_size=2, rank=r, world_size=world_size, seed=1, shuffle=True)
        for r in range(world_size)
    ]
    for epoch, step in ((0, 0), (1, 1), (0, (22 - 1) // (2 * world_size))):
        of_ranks = [
            [(piece.chunk, row) for piece in order.pieces(epoch, step) for row in piece.rows]
            for order in orders
        ]
        assert [len(samples) for samples in of_ranks] == orders[0].shares(step).tolist()
        together = [
            (piece.chunk, row)
            for piece in orders[-1].global_pieces(epoch, step)
            for row in piece.rows
        ]
        assert together == sum(of_ranks, [])


# The loader.


def loaded(path: Path, world_size: int, **arguments: Any) -> list[list[Batch]]:
    """Batches by rank."""
    return [
        list(
            make_loader(
                path,
                "train",
                batch_size=4,
                rank=rank,
                world_size=world_size,
                seed=5,
                epochs=2,
                **arguments,
            )
        )
        for rank in range(world_size)
    ]


def samples_of(batch: Batch) -> list[int]:
    return [int(n) for n, w in zip(batch.dense[:, 0], batch.weights, strict=True) if w == 1]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("schema", [SCHEMA, ONE_HOT_SCHEMA], ids=["multi_hot", "one_hot"])
def test_the_global_batches_stay_and_samples_stay_whole(
    tmp_path: Path, schema: Schema, world_size: int
) -> None:
    block = write_dataset(tmp_path / "d", {"train": 45}, schema=schema)["train"]
    by_owner = owner_of_everything(schema, world_size, {"t_a": np.arange(6)})
    as_read = loaded(tmp_path / "d", world_size)
    assigned = loaded(tmp_path / "d", world_size, assign=by_owner)
    has_moved = False
    for before, after in zip(zip(*as_read, strict=True), zip(*assigned, strict=True), strict=True):
        ids_before, ids_after = (
            [samples_of(batch) for batch in of_ranks] for of_ranks in (before, after)
        )
        assert sorted(sum(ids_before, [])) == sorted(sum(ids_after, []))
        assert [len(samples) for samples in ids_before] == [len(samples) for samples in ids_after]
        has_moved = has_moved or ids_before != ids_after
        for batch, samples in zip(after, ids_after, strict=True):
            assert batch.num_global_samples == before[0].num_global_samples
            if not samples:
                assert batch.weights.tolist() == [0.0]
                continue
            assert torch.equal(batch.labels, torch.from_numpy(block.label[samples]))
            assert torch.equal(batch.dense, torch.from_numpy(block.dense[samples]))
            assert batch.sparse.stride() == len(samples)
            for name, jagged in batch.sparse.to_dict().items():
                ids = block.features[name]
                for position, sample in enumerate(samples):
                    if isinstance(ids, Jagged):
                        expected = ids.values[ids.offsets[sample] : ids.offsets[sample + 1]]
                    else:
                        expected = ids[sample : sample + 1]
                    assert jagged.to_dense()[position].tolist() == expected.tolist()
    assert has_moved == (world_size > 1)


def test_all_hot_batches_stay_as_read_and_mixed_ones_are_assigned(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", {"train": 90})
    hot = {"t_a": np.arange(9), "t_b": np.arange(900)}
    samples = write_all_hot(
        Dataset.open(tmp_path / "d"),
        "train",
        Partition({"t_a": 10, "t_b": 1000}, hot),
        partition_hash="p",
        output=tmp_path / "all_hot",
    )
    by_owner = owner_of_everything(SCHEMA, 2, hot)
    for is_all_hot in (True, False):
        subset = samples.subset(is_all_hot=is_all_hot)
        as_read = loaded(tmp_path / "d", 2, subset=subset)
        assigned = loaded(tmp_path / "d", 2, subset=subset, assign=by_owner)
        assert len(assigned[0]) == len(as_read[0]) > 4
        has_moved = False
        for step in range(len(as_read[0])):
            before, after = (
                [samples_of(of_rank[step]) for of_rank in each] for each in (as_read, assigned)
            )
            assert sorted(sum(before, [])) == sorted(sum(after, []))
            assert [len(each) for each in before] == [len(each) for each in after]
            has_moved = has_moved or before != after
        assert has_moved == (not is_all_hot)


def test_a_resumed_loader_goes_on_and_refuses_another_assignment(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", {"train": 45})
    by_owner = owner_of_everything(SCHEMA, 2, NO_HOT)

    def make(**arguments: Any) -> Any:
        return make_loader(
            tmp_path / "d",
            "train",
            batch_size=4,
            rank=1,
            world_size=2,
            epochs=2,
            num_workers=2,
            **arguments,
        )

    whole = [samples_of(batch) for batch in make(assign=by_owner)]
    loader = make(assign=by_owner)
    batches = iter(loader)
    first = [samples_of(next(batches)) for _ in range(5)]
    state = loader.state_dict()
    resumed = make(assign=by_owner)
    resumed.load_state_dict(state)
    assert first + [samples_of(batch) for batch in resumed] == whole
    other = make()
    other.load_state_dict(state)
    with pytest.raises(ValueError, match=r"assign: expected 'as_read', got 'by_owner'"):
        next(iter(other))


def test_positions_from_before_are_as_read(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", {"train": 45})
    loader = iter(make_loader(tmp_path / "d", "train", batch_size=4, rank=0, world_size=1).dataset)
    state = loader.state_dict()
    identity = {key: value for key, value in state["identity"].items() if key != "assign"}
    loader.load_state_dict({**state, "identity": identity, "next_step": 3})
    assert loader.state_dict()["next_step"] == 3


# What it saves.


def remote_rows(values_FS: np.ndarray, ranks_S: np.ndarray, owner_of: ByOwner) -> int:
    """Distinct rows that a rank reads and another one holds, over all ranks."""
    num_rows = 5000
    total = 0
    for rank in range(int(ranks_S.max()) + 1):
        keys = values_FS[:, ranks_S == rank] + np.arange(len(values_FS))[:, None] * num_rows
        owners = owner_of.owners(np.unique(keys))
        total += int(np.count_nonzero((owners != rank) & (owners != NOBODY)))
    return total


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("num_hot", [0, 50])
def test_skewed_samples_ask_for_fewer_rows_of_others(num_ranks: int, num_hot: int) -> None:
    num_features, num_rows, size = 8, 5000, 512
    names = [f"t{index}" for index in range(num_features)]
    schema = Schema(
        (), tuple(Feature(n, n) for n in names), tuple(Table(n, num_rows) for n in names)
    )
    rng = np.random.default_rng(1)
    by_rank = rng.permutation(num_rows)
    prob = np.arange(1, num_rows + 1) ** -1.05
    drawn = rng.choice(num_rows, (num_features, size * num_ranks), p=prob / prob.sum())
    values_FS = by_rank[drawn]
    by_owner = owner_of_everything(schema, num_ranks, dict.fromkeys(names, by_rank[:num_hot]))
    shares = np.full(num_ranks, size)
    assigned = by_owner(values_FS.ravel(), np.ones(values_FS.size, np.int32), shares)
    as_read = np.repeat(np.arange(num_ranks), size)
    before, after = (remote_rows(values_FS, ranks, by_owner) for ranks in (as_read, assigned))
    assert after < 0.9 * before, (before, after)


def test_a_bad_id_stops_all_ranks_at_once(tmp_path: Path) -> None:
    """All of them read it, not the one alone that gets the sample."""
    block = random_block(20)
    block.features["a"][15] = 10
    with scratch_directory(tmp_path / "d", kind="dataset") as scratch:
        writer = ChunkWriter(scratch, "train", SCHEMA, 8)
        writer.write(block)
        commit_dataset(scratch, tmp_path / "d", SCHEMA, {"train": writer.close()}, {})
    for rank in range(2):
        loader = make_loader(
            tmp_path / "d",
            "train",
            batch_size=10,
            rank=rank,
            world_size=2,
            assign=owner_of_everything(SCHEMA, 2, NO_HOT),
        )
        with pytest.raises(ValueError, match=r"table t_a: expected rows in 0\.\.9, got row 10"):
            next(iter(loader))
