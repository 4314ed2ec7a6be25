"""Tables as they were, while rows of them are updated."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hotrec.embedding.snapshot import Snapshot, keep

from hotrec.embedding import snapshot
from hotrec.embedding.adapt import Swaps, _demote
from hotrec.embedding.canonical import TensorPart

NUM_ROWS = 1000


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_PIECE_BYTES", 7 * 16)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_are_read_as_they_were_while_a_thread_updates_them(
    seed: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    flat, state = torch.rand(NUM_ROWS, 4).to(dtype), torch.rand(NUM_ROWS)
    before = (flat.clone(), state.clone())
    taken = Snapshot([flat, state])
    is_over = threading.Event()

    def update() -> None:
        while not is_over.is_set():
            rows = torch.randint(NUM_ROWS, (50,), generator=generator)
            for value in (flat, state):
                keep(value, rows)
                value[rows] += 1

    thread = threading.Thread(target=update)
    thread.start()
    try:
        # In any order, as tables that are ranges of rows of one tensor, and whole.
        for begin, end in ((600, 1000), (0, 250), (250, 600)):
            table = flat[begin:end]
            assert taken.watches(table)
            halves = [taken.read(table, 0, 90), taken.read(table, 90, end - begin)]
            assert torch.equal(torch.cat(halves), before[0][begin:end])
        assert torch.equal(taken.read(state, 0, NUM_ROWS), before[1])
    finally:
        is_over.set()
        thread.join()
    assert not torch.equal(flat, before[0])
    assert not any(table._kept for table in taken._tables)  # what has been read takes no memory
    taken.close()
    keep(flat, torch.arange(3))
    assert not taken.watches(flat)


def test_memory_beside_is_not_watched() -> None:
    whole = torch.rand(10, 4)
    taken = Snapshot([whole[:5]])
    assert [taken.watches(value) for value in (whole, whole[4:6], whole[:, :2], whole[1:5])] == [
        *(False, False, False),
        True,
    ]
    taken.close()


def test_a_row_that_was_hot_meanwhile_is_read_as_it_was() -> None:
    """It was cold, became hot, and is written back to its shard before it is read."""
    shard = TensorPart("t", (20, 4), torch.rand(10, 4), (10, 0), is_shard=True)
    replica = TensorPart("t", (20, 4), torch.rand(2, 4), (0, 0), torch.tensor([3, 14]))
    before = shard.value.clone()
    taken = Snapshot([shard.value])
    _demote(Swaps(np.array([2]), np.array([1]), np.array([14])), replica, shard)
    assert torch.equal(shard.value[4], replica.value[1])
    assert torch.equal(taken.read(shard.value, 0, 10), before)
    taken.close()
