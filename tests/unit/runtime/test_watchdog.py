"""What the watchdog concludes from what the ranks tell, and what they tell."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from hotrec.runtime.ranks import Ranks
from hotrec.runtime.stages import mark
from hotrec.runtime.watchdog import COMMUNICATION, MAIN, STEP, LostRank, enter, watching
from hotrec.runtime.watchdog.board import Board, BoardError, started_at
from hotrec.runtime.watchdog.errors import is_of_others, one_line
from hotrec.runtime.watchdog.place import Place, place_of, place_of_error
from hotrec.runtime.watchdog.position import CHECKPOINT, EVALUATION, METRICS, Lane, positioned
from hotrec.runtime.watchdog.slowest import Slowest
from hotrec.runtime.watchdog.verdict import RankState, Verdict, behind, dead, find_behind, silent

WAITING = Place("backward", "wire.py:1 all_to_all", is_waiting=True)
COMPUTING = Place("forward", "model.py:7 forward", is_waiting=False)


def state(rank: int, *, step: int = 41, place: Place = COMPUTING, count: int = 9) -> RankState:
    return RankState(
        rank=rank,
        beat=3,
        at_s=1000.0,
        host=f"host-{rank}",
        host_key="key",
        pid=100 + rank,
        age_s=61.0,
        lanes={MAIN: Lane(STEP, step, 61.0, count)},
        passed="row_lookup",
        place=place,
    )


def with_communication(told: RankState, stage: str, count: int) -> RankState:
    lane = Lane(stage, told.step, 61.0, count)
    return replace(told, lanes={**told.lanes, COMMUNICATION: lane})


def test_states_and_verdicts_survive_the_way_through_the_store() -> None:
    told = with_communication(state(1), "rows_exchange", 5)
    assert RankState.from_text(told.to_text()) == told
    verdict = Verdict((1, 3), "two are gone")
    assert Verdict.from_text(verdict.to_text()) == verdict


def test_where_a_rank_stands() -> None:
    told = with_communication(state(1), "rows_exchange", 5)
    assert told.where() == (
        "step 41 (after row_lookup; forward, at model.py:7 forward); "
        "communication: rows_exchange of step 41"
    )
    assert not told.is_unlimited
    saving = replace(told, lanes={MAIN: Lane(CHECKPOINT, 40, 1.0, 3)})
    assert saving.is_unlimited
    assert saving.where().startswith("checkpoint of step 40 (")
    evaluating = replace(told, lanes={MAIN: Lane(EVALUATION, 40, 1.0, 3)})
    assert not evaluating.is_unlimited
    measuring = replace(told, lanes={MAIN: Lane(METRICS, 40, 1.0, 3)})
    assert measuring.is_unlimited


@pytest.mark.parametrize(
    ("states", "late"),
    [
        ([state(0), state(1, step=40, count=8), state(2)], [1]),  # an earlier stage
        ([state(0, place=WAITING), state(1), state(2, place=WAITING)], [1]),
        ([state(0), state(1, place=Place("loader", "", is_waiting=False))], [1]),
        ([state(0, place=Place("backward", "", is_waiting=False)), state(1)], [1]),
        ([state(0, place=WAITING), state(1, place=WAITING)], []),
        ([state(0), state(1)], []),
        ([state(0), state(1, place=Place("", "", is_waiting=False))], []),
        (  # exchanges are the same everywhere, so fewer begun is behind, whatever else shows
            [
                with_communication(state(0), "rows_exchange", 6),
                with_communication(state(1, place=WAITING), "ids_exchange", 5),
            ],
            [1],
        ),
    ],
)
def test_who_is_behind(states: list[RankState], late: list[int]) -> None:
    assert find_behind({told.rank: told for told in states}) == late


def test_messages_name_rank_step_and_stage() -> None:
    seen_by = replace(state(0, place=WAITING), at_s=1000.5)
    verdict = dead([state(1)], 3, seen_by)
    assert verdict.ranks == (1,)
    assert verdict.text == (
        "step 41: expected 3 ranks, got 2: rank 1 (process 101 on host-1) has died, last seen "
        "0.5 s ago in step 41 (after row_lookup; forward, at model.py:7 forward); rank 0 waits in "
        "step 41 (after row_lookup; backward, waiting for others, at wire.py:1 all_to_all)."
    )
    verdict = silent([state(1)], {1: 60.2}, "expected all ranks to go on within 60 s", seen_by)
    assert verdict.ranks == (1,)
    assert (
        "within 60 s, got no sign of life from rank 1 (process 101 on host-1) for 60 s, last"
        in (verdict.text)
    )
    states = {0: seen_by, 1: state(1)}
    verdict = behind(states, "expected all ranks to go on within 60 s")
    assert verdict.ranks == (1,)
    assert "got rank 1 alive but not moving for 61 s in step 41 (after row_lookup; forward," in (
        verdict.text
    )
    alike = behind({0: seen_by, 1: replace(seen_by, rank=1)}, "expected all ranks to go on")
    assert alike.ranks == ()
    assert "none is behind: rank 0 in step 41" in alike.text


def test_the_slowest_is_told_once_and_only_if_it_stands_out() -> None:
    slowest = Slowest()
    told = [slowest.add([state(0, place=WAITING), state(1)]) for _ in range(20)]
    assert told[:-1] == [None] * 19
    assert told[-1] is not None
    assert "wait for rank 1" in told[-1]
    assert slowest.is_told
    balanced = Slowest()
    for turn in range(200):
        places = [WAITING, COMPUTING] if turn % 2 else [COMPUTING, WAITING]
        states = [state(rank, place=place) for rank, place in enumerate(places)]
        assert balanced.add(states) is None


def test_position_counts_stages() -> None:
    enter(MAIN, STEP, 1)  # nothing to tell it to
    with positioned() as position:
        assert position.age_s == 0
        for step in (1, 2):
            enter(MAIN, STEP, step)
            mark("row_lookup")
        enter(COMMUNICATION, "rows_exchange", 2)
        assert position.last_passed == "row_lookup"
        lanes = position.lanes()
        enter(MAIN, "evaluation", 2)
        assert position.last_passed is None
    enter(MAIN, STEP, 3)
    assert (lanes[MAIN].step, lanes[MAIN].count) == (2, 2)
    assert (lanes[COMMUNICATION].stage, lanes[COMMUNICATION].count) == ("rows_exchange", 1)
    assert str(position.lanes()[MAIN]) == "evaluation of step 2"


def test_place_of_a_thread_is_a_line_of_ours() -> None:
    goes_on, stands = threading.Event(), threading.Event()

    def compute() -> None:
        stands.set()
        goes_on.wait()

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        stands.wait()
        deadline = time.monotonic() + 10
        while not (place := place_of(thread.ident or 0)).is_waiting:
            assert time.monotonic() < deadline
        assert place.line.startswith("test_watchdog.py:")
        assert place.line.endswith(" compute")
    finally:
        goes_on.set()
        thread.join()
    assert str(place_of(thread.ident or 0)) == ""


def test_place_of_an_error() -> None:
    def forward() -> None:
        raise ArithmeticError("enough")

    with pytest.raises(ArithmeticError) as caught:
        forward()
    place = place_of_error(caught.value)
    assert place.phase == "forward"
    assert place.line.endswith(" forward")


def test_which_errors_are_of_others() -> None:
    gloo = RuntimeError(
        "[/w/gloo/transport/tcp/pair.cc:5] Connection closed by peer [127.0.0.1]:7. "
        "This is typically caused by a remote worker crashing."
    )
    assert is_of_others(gloo)
    assert one_line(gloo) == "RuntimeError: Connection closed by peer [127.0.0.1]:7"
    assert is_of_others(dist.DistNetworkError("x"))
    assert not is_of_others(ValueError("Connection closed by peer"))
    assert not is_of_others(RuntimeError("step 3: expected a finite loss, got nan."))
    wrapped = RuntimeError("could not save")
    wrapped.__cause__ = gloo
    assert is_of_others(wrapped)
    stopped = SystemExit(143)
    assert not is_of_others(stopped)
    stopped.__context__ = gloo
    assert is_of_others(stopped)


def test_board(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 2)
    boards = [Board(dist.PrefixStore("x", store), rank, 2, "0") for rank in range(2)]
    boards[1].tell(state(1))
    assert boards[0].states() == {1: state(1)}
    assert boards[0].verdict() is None
    first = Verdict((1,), "rank 1 has died")
    assert boards[0].settle(first) == first
    assert boards[1].settle(Verdict((0,), "no, rank 0")) == first
    assert boards[1].verdict() == first
    other_use = Board(dist.PrefixStore("x", store), 0, 2, "1")
    assert other_use.verdict() is None


def test_a_store_that_is_gone() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    board = Board(client, 0, 2, "0")
    board.tell(state(0))
    del server
    with pytest.raises(BoardError):
        board.states()


def test_processes_that_are_gone() -> None:
    assert started_at(os.getpid()) == started_at(os.getpid()) is not None
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert started_at(child.pid) is not None
    child.kill()
    deadline = time.monotonic() + 10
    while started_at(child.pid) is not None:  # a zombie is gone, too
        assert time.monotonic() < deadline
    child.wait()
    child.communicate()
    assert started_at(child.pid) is None


def test_one_rank_has_nobody_to_watch() -> None:
    import torch

    ranks = Ranks(0, 1, 0, 1, torch.device("cpu"))
    threads = threading.active_count()
    with watching(ranks):
        assert threading.active_count() == threads
    with pytest.raises(ValueError, match="mine"), watching(ranks):
        raise ValueError("mine")
    assert issubclass(LostRank, RuntimeError)
