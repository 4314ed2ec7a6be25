"""A thread on each rank that tells the others how this rank is, and looks how they are.

It ends the process when the run cannot go on: a rank has died, has failed, or nothing moves for
``limit_s``. A rank that is slow is left alone as long as it moves.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from hotrec.runtime.postmortem import write_flight_recorder
from hotrec.runtime.ranks import RankError
from hotrec.runtime.watchdog.board import Board, BoardError, host_key, started_at
from hotrec.runtime.watchdog.errors import (
    EXIT_CODE,
    LostRank,
    is_of_others,
    one_line,
    tell_torchrun,
)
from hotrec.runtime.watchdog.place import Place, place_of, place_of_error
from hotrec.runtime.watchdog.position import Position
from hotrec.runtime.watchdog.slowest import Slowest
from hotrec.runtime.watchdog.verdict import RankState, Verdict, behind, dead, failed, silent

logger = logging.getLogger(__name__)

BEAT_S = 0.25
# With many ranks less often, so that one store can answer all of them.
_BEATS_PER_S = 512
# A rank whose heartbeat has not come for so long, while one listened, is silent.
SILENT_S = 5.0
# How long the main thread gets to end by itself when the run is lost.
GRACE_S = 2.0
# After SIGTERM, which torchrun sends when a rank has died: how long and how often to look.
_ALARM_S, _ALARM_BEAT_S = 3.0, 0.05


class Watchdog:
    """Watches this rank and, through the board, the others.

    Args:
        board: of the run; used by this object only.
        rank: this one.
        world_size: W.
        position: where this rank stands.
        limit_s: seconds without any movement after which a step is given up.
        advice: what to do about a lost rank, for the message; asked when it is needed.
        grace_s: how long the main thread gets to end by itself when a rank has died.
        flight_recorder: directory for this rank's last collectives when the run is lost; None to
            leave none.
    """

    def __init__(
        self,
        board: Board,
        rank: int,
        world_size: int,
        position: Position,
        *,
        limit_s: float,
        advice: Callable[[], str],
        grace_s: float = GRACE_S,
        flight_recorder: Path | None = None,
    ) -> None:
        self._board = board
        self._rank, self._world_size = rank, world_size
        self._position = position
        self._limit_s = limit_s
        self._advice = advice
        self._grace_s = grace_s
        self._flight_recorder = flight_recorder
        self._silent_s = min(SILENT_S, limit_s / 2)
        self._beat_s = min(max(BEAT_S, world_size / _BEATS_PER_S), self._silent_s / 5)
        self._beat = 0
        self._left: str | None = None
        self._place: Place | None = None  # of the error, once there is one
        self._host, self._host_key = socket.gethostname(), host_key()
        self._processes: dict[int, tuple[int, str | None]] = {}  # pid and start, on this host
        self._known: set[int] = {rank}
        self._heard: dict[int, tuple[int, float]] = {}  # beat, and when it was first seen
        self._slowest = Slowest() if rank == 0 else None
        self._is_cut_off = False
        self._alarm_until_s = 0.0
        self._ears, self.waker = socket.socketpair()
        for end in (self._ears, self.waker):
            end.setblocking(False)
        self._must_stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hotrec-watchdog", daemon=True)

    def start(self) -> None:
        """Tell the first state and begin to watch.

        Raises:
            BoardError: if the store does not answer.
        """
        self._tell()
        self._thread.start()

    def stop(self) -> None:
        """End the thread; what it was about to say is left to the caller."""
        self._must_stop.set()
        self._wake()
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    def leave(self, reason: str) -> None:
        """Tell the others that this rank no longer takes part; the last thing to call."""
        self.stop()
        self._left = reason
        try:
            self._tell()
        except BoardError:
            logger.debug("the store is gone before rank %d could say goodbye", self._rank)

    def explain(self, error: BaseException) -> LostRank | None:
        """What to raise instead of ``error``; None if it is this rank's own fault or unexplained.

        An error of this rank's own is told to the others. Takes some heartbeats if no rank is
        plainly dead.
        """
        self.stop()
        self._place = place_of_error(error)
        try:
            if isinstance(error, SystemExit) and not is_of_others(error):
                # Of SIGTERM, perhaps after a death that this rank has not felt yet.
                verdict = self._board.verdict() or self._find_gone()
                return self._lost(verdict) if verdict else None
            if is_of_others(error):
                return self._lost(self._search(error))
            if not isinstance(error, Exception) or isinstance(error, RankError):
                return None  # which all ranks have
            # An exchange that a death cut short may leave what then looks like a fault in here.
            if (verdict := self._check_others()) and not verdict.is_error:
                return self._lost(verdict)
            self._board.settle(failed(self._state(), one_line(error)))
            return None
        except BoardError:
            return self._lost(self._store_is_gone()) if is_of_others(error) else None

    def write_flight_recorder(self) -> None:
        """Leave this rank's last collectives; for a process that is about to end."""
        if self._flight_recorder is not None:
            write_flight_recorder(self._flight_recorder, self._rank)

    def _lost(self, verdict: Verdict) -> LostRank:
        return LostRank(f"{verdict.text} {self._advice()}", verdict.ranks)

    # The thread

    def _run(self) -> None:
        while not self._must_stop.is_set():
            is_alarmed = time.monotonic() < self._alarm_until_s
            if self._hears_sigterm(_ALARM_BEAT_S if is_alarmed else self._beat_s):
                self._alarm_until_s = time.monotonic() + _ALARM_S
            if self._must_stop.is_set():
                return
            try:
                verdict = self._look()
                self._is_cut_off = False
            except BoardError as error:
                verdict = self._look_without_board(error)
            if verdict is not None:
                self._end(verdict)

    def _hears_sigterm(self, timeout_s: float) -> bool:
        ready, _, _ = select.select([self._ears], [], [], timeout_s)
        return bool(ready) and signal.SIGTERM in self._ears.recv(4096)

    def _wake(self) -> None:
        with suppress(OSError):  # it is full, and so awake, or closed
            self.waker.send(b"\0")

    def _look(self) -> Verdict | None:
        """One heartbeat: tell, and what there is to say about the run; usually nothing."""
        self._tell()
        if verdict := self._board.verdict() or self._find_gone():
            return verdict
        age_s = self._position.age_s
        # Hearing whether a rank is silent takes a while: begin early, to speak in time.
        if age_s > self._limit_s - self._silent_s - 2 * self._beat_s:
            return self._judge(age_s)
        self._heard.clear()
        self._look_for_slowest()
        return None

    def _judge(self, age_s: float) -> Verdict | None:
        """Nothing has moved here for a while: who is missing?"""
        states = self._hear()
        if age_s < self._limit_s:
            return None
        expected = f"expected all ranks to go on within {self._limit_s:g} s"
        if late := self._silent(states):
            return self._board.settle(silent(late, self._silence_s(late), expected, self._state()))
        # Alive, in what may take long: see UNLIMITED.
        if any(state.is_unlimited for state in states.values()):
            return None
        still = all(state.age_s >= self._limit_s for state in states.values() if not state.left)
        return self._board.settle(behind(states, expected)) if still else None

    def _look_without_board(self, error: BoardError) -> Verdict | None:
        if not self._is_cut_off:
            logger.warning("watchdog: the store does not answer: %s", error)
            self._is_cut_off = True
        is_stuck = not self._state().is_unlimited and self._position.age_s >= self._limit_s
        return self._store_is_gone() if is_stuck else None

    def _look_for_slowest(self) -> None:
        if self._slowest is None or self._slowest.is_told or self._state().is_unlimited:
            return
        if message := self._slowest.add(self._board.states().values()):
            logger.warning(message)

    def _end(self, verdict: Verdict) -> None:
        """End the process, unless the main thread does: it has the error that goes with it."""
        if self._must_stop.wait(self._grace_s):
            return
        message = f"{self._lost(verdict)} (this rank: {self._state().where()})"
        # In a thread, since what hangs may hold the locks of the log.
        telling = threading.Thread(target=logger.critical, args=("%s", message), daemon=True)
        telling.start()
        telling.join(timeout=5)
        tell_torchrun(message)
        self.write_flight_recorder()
        os._exit(EXIT_CODE)

    # What is known

    def _state(self) -> RankState:
        return RankState(
            rank=self._rank,
            beat=self._beat,
            at_s=time.time(),
            host=self._host,
            host_key=self._host_key,
            pid=os.getpid(),
            age_s=self._position.age_s,
            lanes=self._position.lanes(),
            passed=self._position.last_passed,
            place=self._place or place_of(self._position.main_thread),
            left=self._left,
        )

    def _tell(self) -> None:
        self._beat += 1
        self._board.tell(self._state())

    def _find_gone(self) -> Verdict | None:
        """Ranks of this host whose process is gone without having left."""
        if len(self._known) < self._world_size:
            self._get_to_know(self._board.states().values())
        gone = [
            rank
            for rank, (pid, started) in self._processes.items()
            if started is None or started_at(pid) != started
        ]
        if not gone:
            return None
        states = self._board.states()
        lost = [states[rank] for rank in gone if states[rank].left is None]
        for rank in gone:
            del self._processes[rank]
        return self._board.settle(dead(lost, self._world_size, self._state())) if lost else None

    def _get_to_know(self, states: Iterable[RankState]) -> None:
        for state in states:
            if state.rank not in self._known:
                self._known.add(state.rank)
                if state.host_key == self._host_key and not state.left:
                    self._processes[state.rank] = (state.pid, started_at(state.pid))

    def _hear(self) -> dict[int, RankState]:
        """All states; remembers since when each rank's heartbeat has not changed."""
        states = self._board.states()
        now_s = time.monotonic()
        for rank, state in states.items():
            if rank not in self._heard or self._heard[rank][0] != state.beat:
                self._heard[rank] = (state.beat, now_s)
        return states

    def _listened_s(self, rank: int) -> float:
        return time.monotonic() - self._heard[rank][1]

    def _silent(self, states: dict[int, RankState]) -> list[RankState]:
        return [
            state
            for rank, state in sorted(states.items())
            if rank != self._rank and not state.left and self._listened_s(rank) >= self._silent_s
        ]

    def _silence_s(self, states: Iterable[RankState]) -> dict[int, float]:
        return {state.rank: self._listened_s(state.rank) for state in states}

    def _search(self, error: BaseException) -> Verdict:
        """Whose fault an error in a collective is."""
        expected = f"expected an exchange with all ranks ({one_line(error)})"
        until_s = time.monotonic() + self._silent_s + 2 * self._beat_s
        while True:
            self._tell()
            if verdict := self._board.verdict() or self._find_gone():
                return verdict
            states = self._hear()
            if late := self._silent(states):
                return self._board.settle(
                    silent(late, self._silence_s(late), expected, self._state())
                )
            is_over = time.monotonic() > until_s
            left = [state for state in states.values() if state.left]
            if left and is_over:
                return self._board.settle(failed(left[0], f"{left[0].left}"))
            if is_over:
                return self._board.settle(behind(states, expected))
            time.sleep(_ALARM_BEAT_S)

    def _check_others(self) -> Verdict | None:
        """A verdict if there is one or a rank is gone; None once all others have been heard."""
        first = self._board.states()
        expected = "expected a sign of life from all ranks after an error"
        while True:
            self._tell()
            if verdict := self._board.verdict() or self._find_gone():
                return verdict
            states = self._hear()
            if late := self._silent(states):
                silence_s = self._silence_s(late)
                return self._board.settle(silent(late, silence_s, expected, self._state()))
            if all(
                state.left or rank == self._rank or state.beat > first[rank].beat
                for rank, state in states.items()
                if rank in first
            ):
                return None
            time.sleep(_ALARM_BEAT_S)

    def _store_is_gone(self) -> Verdict:
        return Verdict(
            (0,),
            f"{self._state().where()}: expected an answer from the store that the host of rank 0 "
            "keeps, got none: that host or its launcher is gone.",
        )
