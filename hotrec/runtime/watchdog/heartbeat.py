"""Heartbeats in the process group's store, and the diagnosis of a lost rank.

The store is available as long as its server runs, even while a collective hangs or a peer is dead.
torchrun keeps the server in its own process on the first host, so it outlives every rank.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from hotrec.runtime.watchdog.progress import COMMUNICATION, MAIN, PHASES

# A request is a small message to one server; a slower reply will not come.
_REQUEST_S = 10.0


class Heartbeat(NamedTuple):
    """The state that a rank publishes.

    Args:
        at_s: seconds since the epoch by its own clock; distinguishes its heartbeats.
        host_key: equal for processes in the same pid namespace; None if unknown.
        age_s: seconds since any of its threads moved.
        step: that its main thread is in; None outside steps.
        where: step, stage and line for messages.
        counts: number of stages entered, by thread.
        phase: one of PHASES, or empty.
        is_waiting: for other ranks, as far as detectable.
        is_unlimited: its stage may take long: see ``progress.UNLIMITED``.
        left: why it has left; None while it participates.
    """

    rank: int
    at_s: float
    host: str
    host_key: str | None
    pid: int
    age_s: float
    step: int | None
    where: str
    counts: Mapping[str, int]
    phase: str
    is_waiting: bool
    is_unlimited: bool
    left: str | None = None

    @property
    def name(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"

    @property
    def title(self) -> str:
        """The first words of a message."""
        return "before the first step" if self.step is None else f"step {self.step}"


class Verdict(NamedTuple):
    """Why the run ends; written by the first rank that detects the loss, reported by all ranks.

    Args:
        text: the message, without advice.
        is_error: a rank raised its own error, which other ranks may have raised as well.
    """

    text: str
    is_error: bool = False


class Store:
    """One rank's view of all heartbeats. Methods raise RuntimeError if the store is unreachable.

    Args:
        store: a separate ``torch.distributed.Store``: one that another thread waits on would block.
        name: the same on every rank, another for every use of the store.
    """

    def __init__(self, store: Any, world_size: int, name: str) -> None:
        store.set_timeout(timedelta(seconds=_REQUEST_S))
        self._store = dist.PrefixStore(f"hotrec/watchdog/{name}", store)
        self._keys = [f"rank/{rank}" for rank in range(world_size)]
        self._can_get_many = store.has_extended_api()

    def publish(self, beat: Heartbeat) -> None:
        self._store.set(self._keys[beat.rank], json.dumps(beat))

    def read(self) -> dict[int, Heartbeat]:
        """The last heartbeat of every rank that has published one, by rank, this one included."""
        # Reading a missing key would wait for it.
        if self._can_get_many and self._store.check(self._keys):
            texts = self._store.multi_get(self._keys)
        else:
            texts = [self._store.get(key) for key in self._keys if self._store.check([key])]
        beats = [Heartbeat(*json.loads(text)) for text in texts]
        return {beat.rank: beat for beat in beats}

    def verdict(self) -> Verdict | None:
        """The verdict, if any rank has written one."""
        if not self._store.check(["verdict"]):
            return None
        return Verdict(*json.loads(self._store.get("verdict")))

    def agree(self, text: str, *, is_error: bool = False) -> Verdict:
        """Write a verdict unless there is one; returns the stored one, the same on every rank."""
        own = json.dumps(Verdict(text, is_error))
        return Verdict(*json.loads(self._store.compare_set("verdict", "", own)))


def host_key() -> str | None:
    """Identifies this boot of the host and the pid namespace, if available."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def started_at(pid: int) -> str | None:
    """Distinguishes a process from a later one with the same pid.

    None if it has exited, including zombies.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]


def dead(lost: Sequence[Heartbeat], world_size: int, seen_by: Heartbeat) -> str:
    """The message of ``seen_by`` on ranks whose processes are gone."""
    seen = (
        f"{beat.name} has died, last seen {max(0.0, seen_by.at_s - beat.at_s):.1f} s ago in "
        f"{beat.where}"
        for beat in lost
    )
    expected = f"expected {world_size} ranks, got {world_size - len(lost)}"
    return f"{seen_by.title}: {expected}: {'; '.join(seen)}{_waits(seen_by)}."


def silent(lost: Mapping[int, float], beats: Mapping[int, Heartbeat], rank: int, why: str) -> str:
    """The message of ``rank`` on ranks that are stopped or cut off, or whose host is gone.

    Args:
        lost: seconds without a new heartbeat, by rank.
        why: such as "expected progress on all ranks within 60 s".
    """
    seen = (
        f"no heartbeat from {beats[late].name} for "
        f"{max(silence_s, beats[rank].at_s - beats[late].at_s):.0f} s, last seen in "
        f"{beats[late].where}"
        for late, silence_s in lost.items()
    )
    return f"{beats[rank].title}: {why}, got {'; '.join(seen)}{_waits(beats[rank])}."


def failed(beat: Heartbeat, error: str) -> str:
    """The message on a rank that has raised an error of its own."""
    got = f"got an error on rank {beat.rank} in {beat.where}: {error}."
    return f"{beat.title}: expected all ranks to continue, {got}"


def stuck(beats: Mapping[int, Heartbeat], why: str) -> str:
    """The message when all ranks are alive without progress; names those that are behind."""
    ordered = [beat for _, beat in sorted(beats.items())]
    if len(ordered) == 1:
        got = f"got none for {ordered[0].age_s:.0f} s in {ordered[0].where}"
        return f"{ordered[0].title}: {why}, {got}."
    behind = find_behind(ordered)
    if not behind:
        places = "; ".join(f"rank {beat.rank} in {beat.where}" for beat in ordered[:8])
        got = f"got none; all are alive at the same step: {places}. Check the network."
        return f"{ordered[0].title}: {why}, {got}"
    seen = (
        f"rank {beat.rank} alive but not moving for {beat.age_s:.0f} s in {beat.where}"
        for beat in behind
    )
    waiting = next(beat for beat in ordered if beat not in behind)
    return f"{behind[0].title}: {why}, got {'; '.join(seen)}{_waits(waiting)}."


def find_behind(beats: Sequence[Heartbeat]) -> list[Heartbeat]:
    """Stragglers; empty if all ranks are at the same step."""
    # Ranks start the same exchanges in the same order. If that is inconclusive, a rank that waits
    # for others is not behind, nor is one in a later phase of the step.
    for measure in (
        lambda beat: beat.counts.get(COMMUNICATION, 0),
        lambda beat: beat.counts[MAIN],
        lambda beat: beat.is_waiting,
        lambda beat: PHASES.index(beat.phase) if all(b.phase for b in beats) else 0,
    ):
        least, most = min(map(measure, beats)), max(map(measure, beats))
        if least < most:
            return [beat for beat in beats if measure(beat) == least]
    return []


def _waits(beat: Heartbeat) -> str:
    return f"; rank {beat.rank} waits in {beat.where}"
