"""Slots for rows of host memory: which rows have one, and what is moved when."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import hotrec.embedding.cached_rows as cached_rows_module
import hotrec.embedding.slots as slots_module
from hotrec.embedding.cached_rows import CachedRows, RowMover
from hotrec.embedding.slots import SlotMap, TooFewSlotsError
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.runtime.comm_thread import CommunicationFuture
from hotrec.types import POPULAR_ROW, OptimizerKind, Placement, Tier
from tests.unit.embedding.setups import PARTITIONS, shard_here, some_features, split_model

NUM_ROWS, DIM = 20, 4
LAST = 1 << 30  # of no batch


def make_rows(
    num_slots: int = 6, popular: tuple[tuple[int, float], ...] = ()
) -> tuple[CachedRows, Any]:
    """Rows that hold their own numbers, with a state of zeros, and both in host memory."""
    weights = torch.arange(NUM_ROWS).float()[:, None].repeat(1, DIM)
    state = torch.zeros(NUM_ROWS)
    spec = OptimizerSpec(OptimizerKind.rowwise_adagrad, learning_rate=1.0)
    host = (weights, {"momentum1": state})
    rows = CachedRows(
        host, num_slots, np.array(list(popular), POPULAR_ROW), spec, torch.device("cpu")
    )
    return rows, SimpleNamespace(weights=weights, state=state)


def values(rows: CachedRows, slots: torch.Tensor) -> list[float]:
    rows.wait(LAST)
    return rows.read(slots)[:, 0].tolist()


def train(rows: CachedRows, number: int, *ids: int) -> None:
    """A batch whose gradients are ones."""
    slots = rows.reserve(torch.tensor(ids), number)
    rows.wait(number)
    rows.update(slots, torch.ones(len(ids), DIM), 1.0, 1)
    rows.release(number, is_changed=True)


def test_batches_in_flight_share_slots_and_keep_them() -> None:
    rows, _ = make_rows(num_slots=5)
    first = rows.reserve(torch.tensor([3, 7, 3]), 0)
    second = rows.reserve(torch.tensor([7, 8, 9]), 1)
    assert first[0] == first[2]
    assert second[0] == first[1]
    assert values(rows, first) == [3, 7, 3]
    assert values(rows, second) == [7, 8, 9]
    # Four are in use: one is free, and two rows need it.
    with pytest.raises(TooFewSlotsError) as error:
        rows.reserve(torch.tensor([1, 2, 7]), 2)
    assert (error.value.num_needed, error.value.num_slots) == (6, 5)


def test_released_rows_stay_until_their_slots_are_needed_those_looked_up_least_leave_first() -> (
    None
):
    rows, _ = make_rows(num_slots=4)
    for number, ids in enumerate([[1, 2, 3], [1, 2], [2], [4]]):
        rows.reserve(torch.tensor(ids), number)
        rows.release(number, is_changed=False)
    assert (rows.slots.num_misses, rows.slots.num_evictions, rows.slots.num_read) == (4, 0, 7)
    rows.reserve(torch.tensor([5, 6]), 4)
    assert rows.slots.num_evictions == 2
    rows.reserve(torch.tensor([1, 2]), 5)
    assert rows.slots.num_misses == 6


@pytest.mark.parametrize("most", [1, 3, 1 << 16])
def test_slots_begin_with_the_most_popular_rows(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of any size; rows without a slot are popular too, but fetched when they are read."""
    monkeypatch.setattr(cached_rows_module, "MAX_AT_ONCE", most)
    rows, _ = make_rows(
        num_slots=5, popular=((4, 0.5), (2, 0.1), (7, 0.2), *((11 + n, 0.3) for n in range(3)))
    )
    slots = rows.reserve(torch.tensor([11, 4, 11, 13]), 0)
    assert values(rows, slots) == [11, 4, 11, 13]
    assert rows.slots.num_misses == 0
    # Row 7 leaves.
    assert values(rows, rows.reserve(torch.tensor([2, 12]), 1)) == [2, 12]
    assert (rows.slots.num_misses, rows.slots.num_evictions) == (1, 1)


def test_only_changed_rows_are_written_back_with_their_state() -> None:
    rows, host = make_rows(num_slots=4)
    row_bytes = 4 * DIM + 4
    train(rows, 0, 1, 2)
    assert host.weights[1, 0] == 1
    rows.flush()  # as before an evaluation
    assert rows.written_bytes == 2 * row_bytes
    rows.reserve(torch.tensor([3, 4]), 1)
    rows.release(1, is_changed=False)
    rows.reserve(torch.tensor([5, 6, 7, 8]), 2)
    rows.release(2, is_changed=False)
    rows.flush()  # writes no more, and waits
    assert rows.written_bytes == 2 * row_bytes
    train(rows, 3, 5, 6)
    rows.reserve(torch.tensor([9, 10, 11, 12]), 4)  # rows 7 and 8 leave unchanged
    rows.flush()
    assert rows.written_bytes == 4 * row_bytes + 4 * row_bytes  # of a batch that holds slots, too
    assert host.weights[:5, 0].tolist() == [0, 0, 1, 3, 4]
    assert host.state[:5].tolist() == [0, 1, 1, 0, 0]


@pytest.mark.parametrize("last", [20, 30, 149])
def test_slots_that_begin_anew_evict_as_those_of_a_resumed_run(last: int) -> None:
    """Whose batches are counted from 0, while those of the run that went on are not."""

    def evictions(after: int) -> list[list[int]]:
        slots = SlotMap(400, 60, np.empty(0, POPULAR_ROW), torch.device("cpu"))
        slots.clear(after)
        random = np.random.default_rng(3)
        batches = [torch.from_numpy(random.choice(400, 20, replace=False)) for _ in range(120)]
        # Rows whose known reads differ in the last of 31 batches only.
        for ahead, rows in enumerate(batches[:32]):
            slots.foresee(rows, after + 1 + ahead)
        evicted = []
        for at, rows in enumerate(batches):
            number = after + 1 + at
            evicted.append(slots.reserve(rows, number)[1].out_rows.tolist())
            slots.release(number, is_changed=True)
            if at + 32 < len(batches):
                slots.foresee(batches[at + 32], number + 32)
        return evicted

    assert evictions(last) == evictions(-1)
    assert sum(map(len, evictions(-1))) > 1000


def test_rows_that_were_written_in_host_memory_are_read_after_a_restart() -> None:
    rows, host = make_rows(popular=((0, 0.5),))
    rows.reserve(torch.tensor([0, 5]), 7)
    rows.flush()
    host.weights += 100
    rows.restart()
    assert values(rows, rows.reserve(torch.tensor([0, 5]), 0)) == [100, 105]


def test_a_row_is_fetched_after_its_write_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the mover is: row 1 leaves with its update, and comes back at once."""
    rows, _ = make_rows(num_slots=2)
    train(rows, 0, 1, 2)
    is_waited_for, put_back = threading.Event(), rows._mover.put_back
    monkeypatch.setattr(rows._mover, "put_back", lambda *of: (is_waited_for.wait(9), put_back(*of)))
    result = CommunicationFuture.result

    def note_and_wait(future: CommunicationFuture[Any], *given: Any) -> Any:
        if any(future is written for _, written in rows._mover._leaving):
            is_waited_for.set()
        return result(future, *given)

    monkeypatch.setattr(CommunicationFuture, "result", note_and_wait)
    rows.reserve(torch.tensor([3, 4]), 1)
    rows.release(1, is_changed=False)
    slots = rows.reserve(torch.tensor([1, 2]), 2)
    assert values(rows, slots) == [0, 1]


def test_a_batch_does_not_wait_for_rows_of_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = make_rows()
    first = rows.reserve(torch.tensor([3, 4]), 0)
    rows.wait(0)
    may_move, gather = threading.Event(), rows._mover.gather
    monkeypatch.setattr(rows._mover, "gather", lambda *of: (may_move.wait(10), gather(*of))[1])
    second = rows.reserve(torch.tensor([5]), 1)
    rows.wait(0)
    assert rows.read(first)[:, 0].tolist() == [3, 4]
    assert not may_move.is_set()
    may_move.set()
    assert values(rows, second) == [5]


def test_a_failure_of_the_mover_reaches_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = make_rows()

    def fail(*_: Any) -> None:
        raise RuntimeError("no such memory")

    monkeypatch.setattr(rows._mover, "gather", fail)
    rows.reserve(torch.tensor([3]), 0)
    with pytest.raises(RuntimeError, match="no such memory"):
        rows.wait(0)


@pytest.mark.usefixtures("one_rank")
def test_another_pipeline_reads_rows_and_does_not_train_them() -> None:
    placement = Placement.alike(PARTITIONS["mixed"], Tier.CACHED, 0.5)
    model = shard_here(split_model(placement), placement)
    with pytest.raises(RuntimeError, match="expected the pipeline look_ahead"):
        model(some_features()).sum().backward()
    rows, _ = make_rows()
    found = rows.look_up(torch.tensor([2, 0]))
    torch.testing.assert_close(found, rows.memory()[0][[2, 0]].float())


@pytest.mark.parametrize("window", [0, 1, 5, 31])
def test_rows_leave_that_known_batches_read_last_or_not_and_then_seldom(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a search of the known batches; each batch holds its slots until two later ones."""
    monkeypatch.setattr("hotrec.embedding.slots.EXAMINED", 24)  # all slots
    rng = np.random.default_rng(window)
    batches = [np.unique(rng.integers(0, 60, 6) * rng.integers(0, 2, 6)) for _ in range(150)]
    slots = SlotMap(60, 24, np.empty(0, POPULAR_ROW), torch.device("cpu"))
    counts, here, known, num_ranked = np.zeros(60), set[int](), 0, 0
    for number, batch in enumerate(batches):
        while window and known < min(number + window, len(batches)):
            slots.foresee(torch.from_numpy(batches[known]), known)
            known += 1
        slots.release(number - 3, is_changed=True)
        _, moves = slots.reserve(torch.from_numpy(batch), number)
        assert sorted(moves.in_rows.tolist()) == sorted(set(batch.tolist()) - here)

        reads = {
            row: next((n for n in range(number + 1, known) if row in batches[n]), np.inf)
            for row in here
        }
        left = set(moves.out_rows.tolist())
        held = set(np.concatenate(batches[max(0, number - 2) : number + 1]).tolist())
        assert left <= here - held
        worth = {row: (-reads[row], counts[row]) for row in here - held}
        kept = [worth[row] for row in here - held - left]
        if left and kept:
            num_ranked += 1
            most = max(worth[row] for row in left)
            assert most[0] <= min(of for of, _ in kept)
            if most[0] == -np.inf:  # counts are compared where nothing is known, in float32
                least = min((times for of, times in kept if of == -np.inf), default=np.inf)
                assert most[1] <= least * (1 + 1e-6)
        if left:
            expected = min(max(known, number + 1), *(reads[row] for row in left))
            assert moves.next_read(float(moves.out_worth)) == expected
        here = (here - left) | set(batch.tolist())
        counts *= 2 ** (-1 / slots_module.HALF_LIFE)
        counts[batch] += 1
    assert num_ranked > 50


def test_more_batches_than_have_bits_are_known_in_turn() -> None:
    """A pipeline that begins announces all of its batches before the first has slots."""
    slots = SlotMap(100, 4, np.empty(0, POPULAR_ROW), torch.device("cpu"))
    for number in range(50):
        slots.foresee(torch.tensor([number]), number)
    missed = []
    for number in range(50):
        slots.release(number - 1, is_changed=True)
        missed.append(slots.reserve(torch.tensor([number]), number)[1].in_rows.tolist())
    assert missed == [[number] for number in range(50)]
    assert not slots._reads.any()


@pytest.mark.parametrize("number", [5, 30, 31, 77])
def test_the_next_read_of_rows_that_leave_is_never_said_too_late(number: int) -> None:
    """Whatever other batches read the row after it, and however the bits are turned."""
    for ahead in range(1, 31):
        for others in ((), range(ahead + 1, 31), (30,)):
            slots = SlotMap(10, 1, np.empty(0, POPULAR_ROW), torch.device("cpu"))
            slots.reserve(torch.tensor([3]), number - 1)
            for read in sorted({ahead, *others}):
                slots.foresee(torch.tensor([3]), number + read)
            slots.release(number - 1, is_changed=True)
            moves = slots.reserve(torch.tensor([4]), number)[1]
            assert moves.out_rows.tolist() == [3]
            found = moves.next_read(float(moves.out_worth))
            # Where all of more than 24 batches read it, float32 may round up to one earlier.
            assert number + ahead - (len(others) > 22) <= found <= number + ahead


def test_rows_in_half_precision_are_rounded_anew_at_every_write() -> None:
    host, value = torch.zeros(NUM_ROWS, DIM, dtype=torch.bfloat16), 1 + 2**-8
    mover = RowMover([host], [torch.zeros(1, DIM)], torch.device("cpu"))
    written = []
    for moment in range(64):
        mover.put_back(torch.tensor([3]), [torch.full((1, DIM), value)], moment)
        written.append(host[3].float())
    # Halfway between its neighbours: each column is now the one, now the other.
    assert torch.stack(written).unique().tolist() == [1, 1 + 2**-7]
    assert torch.stack(written).std(0).min() > 0
