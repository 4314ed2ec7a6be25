"""A thread on each rank that ends the process when the run has lost a rank.

It publishes this rank's record, its heartbeat, and reads those of the others. A rank is lost if it
has died, failed, or stopped sending heartbeats, or if no rank makes progress for ``limit_s``. A
slow rank is tolerated while it makes progress.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from textwrap import shorten
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from hotrec.runtime import watchdog as marks
from hotrec.runtime.postmortem import write_flight_recorder
from hotrec.runtime.ranks import RankError, Ranks, default_store
from hotrec.runtime.watchdog import EXIT_CODE, PROGRESS, UNLIMITED, Place
from hotrec.runtime.watchdog.record import (
    Record,
    Records,
    Verdict,
    host_key,
    started_at,
    tell,
    tell_stuck,
)

logger = logging.getLogger(__name__)

INTERVAL_S = 0.25
# With many ranks heartbeats are less frequent, so that one store can serve all of them.
_HEARTBEATS_PER_S = 512
# A rank is silent if no heartbeat has arrived for this long while this rank was reading them.
SILENT_S = 5.0
# How long the main thread gets to exit by itself when the run is lost: it has the error of the
# loss. NCCL's own watchdog may abort the process soon after an error.
GRACE_S = {"gloo": 2.0, "nccl": 0.0}
# A straggler is busy in half of this many samples of all ranks, and several times as often as
# others.
_NUM_LOOKS = 20
_STRAGGLER_FACTOR = 3

# Errors of an exchange with other ranks, in the words of gloo, NCCL, the store and its sockets.
_EXCHANGE_ERRORS = (
    *("gloo/transport", "Connection closed by peer", "Connection reset by peer", "Broken pipe"),
    *("Timed out waiting", "Socket Timeout"),
    *("NCCL error", "NCCL communicator", "ncclRemoteError", "ncclSystemError"),
)

# Number of uses of the store by this process, the same on every rank.
_uses = count()


class LostRank(RuntimeError):  # noqa: N818 (an event; the error is another rank's)
    """A rank has died, failed or stopped; the same text on every remaining rank."""


class Watchdog:
    """Watches the ranks in a ``with`` block, which every rank of the process group enters.

    If a rank is lost, every other rank raises ``LostRank``, or its process exits with ``EXIT_CODE``
    if the main thread cannot raise, with the same message in the log. An error of this rank
    propagates unchanged and is reported to the others. A single rank can only be stuck.

    Args:
        limit_s: seconds within which some rank has to make progress in a step, above 0. Start,
            first step and checkpoints only have the timeout of the collectives.
        advice: returns the last sentence of the message; called on demand.
        flight_recorder: directory in which every remaining rank writes its last collectives and the
            stacks of its threads when a rank is lost; None for none.
        once: calls its argument unless another rank has printed the same text.

    Raises:
        LostRank: instead of the error of a collective that failed; that error is its cause.
        RuntimeError: at the start, if the process group's store is unreachable.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        limit_s: float = 120.0,
        advice: Callable[[], str] = lambda: "Restart the run from its last checkpoint.",
        flight_recorder: Path | None = None,
        once: Callable[[str, Callable[[], None]], None] = lambda _, show: show(),
    ) -> None:
        self._rank, self._world_size = ranks.rank, ranks.world_size
        self._limit_s, self._silent_s = limit_s, min(SILENT_S, limit_s / 2)
        interval_s = max(INTERVAL_S, ranks.world_size / _HEARTBEATS_PER_S)
        self._interval_s = min(interval_s, self._silent_s / 5)
        self._advice = advice
        self._flight_recorder = flight_recorder
        self._once = once
        self._host, self._host_key = socket.gethostname(), host_key()
        self._error_place: Place | None = None
        self._left: str | None = None
        self._in_loader_s: float | None = None
        # The ranks on this host that are alive; None until all have published a record.
        self._near: dict[int, Record] | None = None
        # When each rank sent its last heartbeat, by its clock, and when this rank first read it.
        self._heard: dict[int, tuple[float, float]] = {}
        self._busy: Counter[int] = Counter()
        self._num_looks = 0
        self._is_straggler_reported = False
        self._must_stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hotrec-watchdog", daemon=True)

    def __enter__(self) -> Self:
        if not dist.is_initialized():  # a single process that uses the library
            return self
        store: Any = default_store()
        # torchrun keeps one store for all its restarts: the last one's verdict must not count.
        name = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_uses)}"
        self._store = Records(store.clone(), self._world_size, name)
        self._grace_s = GRACE_S[dist.get_backend()]
        PROGRESS.restart()
        self._publish()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._thread.is_alive():
            return
        # SIGTERM, which torchrun sends after a death, must not interrupt the diagnosis, nor what
        # follows if a rank is lost.
        is_quiet = error is not None and threading.current_thread() is threading.main_thread()
        handler = signal.signal(signal.SIGTERM, signal.SIG_IGN) if is_quiet else None
        self._must_stop.set()
        self._thread.join(timeout=30)
        if error is None:
            self._leave("finished")
            return
        verdict = self._find_cause(error)
        if verdict is not None and self._flight_recorder is not None:
            write_flight_recorder(self._flight_recorder, self._rank)
        self._leave(f"ended by {type(error).__name__}")
        if verdict is not None:
            raise self._lost(verdict) from error
        if is_quiet:
            signal.signal(signal.SIGTERM, handler)

    def _leave(self, reason: str) -> None:
        """Mark this process's exit as regular."""
        self._left = reason
        with suppress(RuntimeError):  # the store is gone
            self._publish()

    # The thread

    def _run(self) -> None:
        while not self._must_stop.wait(self._interval_s):
            try:
                verdict = self._look()
            except RuntimeError as error:
                logger.debug("watchdog: store unreachable: %s", error)
                is_stuck = PROGRESS.age_s >= self._limit_s and PROGRESS.stage not in UNLIMITED
                verdict = self._store_is_gone() if is_stuck else None
            if verdict is not None:
                self._end(verdict)

    def _look(self) -> Verdict | None:
        """Publish a heartbeat; returns a verdict if the run is lost."""
        self._publish()
        if verdict := self._store.verdict() or self._find_dead():
            return verdict
        # Detecting a silent rank takes a while: start early, to report in time.
        age_s = PROGRESS.age_s
        if age_s < self._limit_s - self._silent_s - 2 * self._interval_s:
            self._heard.clear()
            if self._rank == 0 and not self._is_straggler_reported:
                self._look_for_straggler()
            return None
        why = f"expected progress on all ranks within {self._limit_s:g} s"
        verdict = self._find_silent(why)
        return verdict or (self._find_stuck(why) if age_s >= self._limit_s else None)

    def _look_for_straggler(self) -> None:
        """Rank 0 counts how often each rank is busy while the others wait."""
        beats = self._store.read().values()
        if len(beats) < 2 or any(beat.step is None or beat.is_unlimited for beat in beats):
            return
        self._busy.update(beat.rank for beat in beats if not beat.is_waiting)
        self._num_looks += 1
        if self._num_looks < _NUM_LOOKS:
            return
        *_, (second, _), (most, rank) = sorted((self._busy[beat.rank], beat.rank) for beat in beats)
        if most >= max(_NUM_LOOKS / 2, _STRAGGLER_FACTOR * second):
            logger.warning(
                f"straggler: the others wait for rank {rank}, which was busy in "
                f"{most / _NUM_LOOKS:.0%} of the samples, no other rank in more than "
                f"{second / _NUM_LOOKS:.0%}. Check for other load on its host."
            )
            self._is_straggler_reported = True
        self._busy.clear()
        self._num_looks = 0

    def _end(self, verdict: Verdict) -> None:
        """Exit the process, unless the main thread does so in time."""
        if self._must_stop.wait(self._grace_s):
            return
        lost = self._lost(verdict)
        # In a thread, because the hanging code may hold the locks of the log.
        message = f"{lost} (this rank: {PROGRESS.describe()})"
        prefix = f"[rank {self._rank}] " if self._world_size > 1 else ""

        def show() -> None:
            os.write(2, f"{prefix}error: {lost}\n".encode())

        with suppress(OSError):
            self._once(f"error: {lost}", show)
        trace = (type(lost), lost, None)  # which keeps the record off the console
        log = threading.Thread(
            target=logger.critical, args=("%s", message), kwargs={"exc_info": trace}, daemon=True
        )
        log.start()
        log.join(timeout=5)
        # torchrun reads the time of the failure from this record. Without it a rank that torchrun
        # kills afterwards may count as the first failure, and determine the exit code.
        with suppress(OSError):
            get_error_handler().record_exception(lost)
        if self._flight_recorder is not None:
            write_flight_recorder(self._flight_recorder, self._rank)
        for worker in multiprocessing.active_children():  # SIGKILL also ends one that is stopped
            worker.kill()
        os._exit(EXIT_CODE)

    # The state of the ranks

    def _publish(self) -> None:
        self._store.publish(self._record())

    def _record(self) -> Record:
        place, pid = self._error_place or marks.place_of_thread(PROGRESS.main_thread), os.getpid()
        return Record(
            rank=self._rank,
            at_s=time.time(),
            host=self._host,
            host_key=self._host_key,
            pid=pid,
            started=started_at(pid),
            age_s=PROGRESS.age_s,
            step=PROGRESS.step,
            where=PROGRESS.describe(place),
            counts=PROGRESS.counts,
            phase=place.phase,
            is_waiting=place.is_waiting or PROGRESS.stage == marks.CHECK_UP,
            is_unlimited=PROGRESS.stage in UNLIMITED and not self._is_late_loader(place),
            left=self._left,
        )

    def _is_late_loader(self, place: Place) -> bool:
        """Whether the main thread has waited for a batch for too long, in any stage."""
        now_s = time.monotonic()
        self._in_loader_s = (self._in_loader_s or now_s) if place.phase == "loader" else None
        return self._in_loader_s is not None and now_s - self._in_loader_s >= self._limit_s

    def _find_dead(self) -> Verdict | None:
        """Ranks of this host whose process exited without leaving."""
        near = self._near
        if near is None:
            beats = self._store.read()
            key = self._host_key
            near = {
                r: beat for r, beat in beats.items() if key is not None and beat.host_key == key
            }
            self._near = near if len(beats) == self._world_size else None
        gone = [rank for rank, beat in near.items() if started_at(beat.pid) != beat.started]
        if not gone:
            return None
        beats = self._store.read()
        lost = [beats[rank] for rank in gone if not beats[rank].left]
        self._near = {rank: beat for rank, beat in near.items() if rank not in gone}
        if not lost:
            return None
        own = beats[self._rank]
        expected = f"expected {self._world_size} ranks, got {self._world_size - len(lost)}: "
        seen = (
            f"{beat.name} has died, last seen {max(0.0, own.at_s - beat.at_s):.1f} s ago in "
            f"{beat.where}"
            for beat in lost
        )
        return self._store.agree(tell(own, expected, seen, own))

    def _find_silent(self, why: str) -> Verdict | None:
        """Ranks without a new record for a while although this rank was reading.

        They are stopped or cut off, or their host is gone.
        """
        now_s, beats, seen = time.monotonic(), self._store.read(), []
        own = beats[self._rank]
        for rank, beat in sorted(beats.items()):
            at_s, since_s = self._heard.get(rank, (None, now_s))
            # Start and checkpoints may hold the interpreter's lock, even if steps are short.
            limit_s = SILENT_S if beat.is_unlimited else self._silent_s
            if at_s != beat.at_s:
                self._heard[rank] = beat.at_s, now_s
            elif rank != self._rank and not beat.left and now_s - since_s >= limit_s:
                silent_s = max(now_s - since_s, own.at_s - beat.at_s)
                seen.append(
                    f"no heartbeat from {beat.name} for {silent_s:.0f} s, last seen in {beat.where}"
                )
        return self._store.agree(tell(own, f"{why}, got ", seen, own)) if seen else None

    def _find_stuck(self, why: str) -> Verdict | None:
        """Ranks that are behind after no rank has made progress for too long."""
        beats = self._store.read()
        present = [beat for beat in beats.values() if not beat.left]
        if any(beat.is_unlimited or beat.age_s < self._limit_s for beat in present):
            return None
        return self._store.agree(tell_stuck(beats, why))

    def _find_cause(self, error: BaseException) -> Verdict | None:
        """The lost rank that caused an error of this rank; None if there is none.

        An error of this rank itself is reported to the others.
        """
        self._error_place = marks.place_of_error(error)
        text = shorten(f"{type(error).__name__}: {error}", 500)
        is_of_exchange = is_exchange_error(error)
        try:
            if is_of_exchange:
                return self._search(f"expected an exchange with all ranks ({text})", patient=True)
            if isinstance(error, SystemExit):
                # From SIGTERM, perhaps after a death that this rank has not detected yet.
                return self._store.verdict() or self._find_dead()
            if not isinstance(error, Exception) or isinstance(error, RankError):
                return None  # which all ranks have
            # An exchange that was interrupted by a death may cause what looks like an error of this
            # rank.
            why = "expected a heartbeat from all ranks after an error"
            verdict = self._search(why, patient=False)
            if verdict is not None and not verdict.is_error:
                return verdict
            self._agree_on_failure(self._record(), text)
        except RuntimeError:
            return self._store_is_gone() if is_of_exchange else None
        return None

    def _search(self, why: str, *, patient: bool) -> Verdict | None:
        """The verdict of another rank, a dead rank, a silent one.

        Args:
            patient: Wait long enough to detect a silent rank, and then name the rank that has left
                or is behind. Otherwise return None once all others have sent a heartbeat.
        """
        first = self._store.read()
        until_s = time.monotonic() + SILENT_S + 2 * self._interval_s
        while time.monotonic() < until_s:
            self._publish()
            if verdict := self._store.verdict() or self._find_dead() or self._find_silent(why):
                return verdict
            beats = self._store.read()
            others = [beats[rank] for rank in first if rank != self._rank]
            if not patient and all(b.left or b.at_s != first[b.rank].at_s for b in others):
                break
            time.sleep(self._interval_s / 5)
        if not patient:
            return None
        left = next((beat for beat in beats.values() if beat.left), None)
        if left is not None:
            return self._agree_on_failure(left, left.left or "")
        return self._store.agree(tell_stuck(beats, why))

    def _agree_on_failure(self, of: Record, text: str) -> Verdict:
        seen = f"an error on rank {of.rank} in {of.where}: {text}"
        said = tell(of, "expected all ranks to continue, got ", [seen])
        return self._store.agree(said, is_error=True)

    def _store_is_gone(self) -> Verdict:
        return Verdict(
            f"{PROGRESS.describe(self._error_place)}: expected a reply of the store on rank "
            "0's host, got none: that host or its launcher is down."
        )

    def _lost(self, verdict: Verdict) -> LostRank:
        return LostRank(f"{verdict.text} {self._advice()}")


def is_exchange_error(error: BaseException) -> bool:
    """Whether an error, or one that caused it, came from an exchange with other ranks."""
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause) if isinstance(cause, RuntimeError | OSError) else ""
        if isinstance(cause, dist.DistError) or any(words in text for words in _EXCHANGE_ERRORS):
            return True
        # SIGTERM, which torchrun sends after a death, may arrive while the error propagates.
        cause = cause.__context__ if isinstance(cause, SystemExit) else cause.__cause__
    return False
