"""The record that each rank keeps in the process group's store, and what follows from all of them.

The store is available as long as its server runs, even while a collective hangs or a peer is dead.
torchrun keeps the server in its own process on the first host, so it outlives every rank.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from hotrec.runtime.watchdog import COMMUNICATION, MAIN, PHASES

# A request is a small message to one server; a slower reply will not come.
_REQUEST_S = 10.0


class Record(NamedTuple):
    """The state that a rank publishes.

    Args:
        at_s: seconds since the epoch by its own clock; distinguishes its records.
        host_key: equal for processes in the same pid namespace; None if unknown.
        started: with the pid identifies its process, see ``started_at``.
        age_s: seconds since any of its threads moved.
        step: that its main thread is in; None outside steps.
        where: step, stage and line for messages.
        counts: number of stages entered, by thread.
        phase: one of PHASES, or empty.
        is_waiting: for other ranks, as far as detectable.
        is_unlimited: its stage may take long: see ``UNLIMITED``.
        left: why it has left; None while it participates.
    """

    rank: int
    at_s: float
    host: str
    host_key: str | None
    pid: int
    started: str | None
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


class Verdict(NamedTuple):
    """Why the run ends; written by the first rank that detects the loss, reported by all ranks.

    Args:
        text: the message, without advice.
        is_error: a rank raised its own error, which other ranks may have raised as well.
    """

    text: str
    is_error: bool = False


class Records:
    """One rank's view of all records. Methods raise RuntimeError if the store is unreachable.

    Args:
        store: a separate ``torch.distributed.Store``: one that another thread waits on would block.
        name: the same on every rank, another for every use of the store.
    """

    def __init__(self, store: Any, world_size: int, name: str) -> None:
        store.set_timeout(timedelta(seconds=_REQUEST_S))
        self._store = dist.PrefixStore(f"hotrec/watchdog/{name}", store)
        self._keys = [f"rank/{rank}" for rank in range(world_size)]
        self._can_get_many = store.has_extended_api()

    def publish(self, record: Record) -> None:
        self._store.set(self._keys[record.rank], json.dumps(record))

    def read(self) -> dict[int, Record]:
        """The last record of every rank that has published one, by rank, this one included."""
        # Reading a missing key would wait for it.
        if self._can_get_many and self._store.check(self._keys):
            texts = self._store.multi_get(self._keys)
        else:
            texts = [self._store.get(key) for key in self._keys if self._store.check([key])]
        records = [Record(*json.loads(text)) for text in texts]
        return {record.rank: record for record in records}

    def verdict(self) -> Verdict | None:
        """The verdict, if any rank has written one."""
        has_one = self._store.check(["verdict"])
        return Verdict(*json.loads(self._store.get("verdict"))) if has_one else None

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


def tell(of: Record, expected: str, seen: Iterable[str], waiting: Record | None = None) -> str:
    """The message of a verdict: the step of ``of``, what was expected, what was seen instead."""
    title = "before the first step" if of.step is None else f"step {of.step}"
    waits = "" if waiting is None else f"; rank {waiting.rank} waits in {waiting.where}"
    return f"{title}: {expected}{'; '.join(seen)}{waits}."


def tell_stuck(records: Mapping[int, Record], why: str) -> str:
    """The message when all ranks are alive without progress; names those that are behind."""
    ordered = [record for _, record in sorted(records.items())]
    behind = find_behind(ordered)
    if len(ordered) > 1 and not behind:
        places = "; ".join(f"rank {record.rank} in {record.where}" for record in ordered[:8])
        seen = f"none; all are alive at the same step: {places}. Check the network"
        return tell(ordered[0], f"{why}, got ", [seen])
    seen_of = (
        f"rank {record.rank} alive but not moving for {record.age_s:.0f} s in {record.where}"
        for record in behind or ordered
    )
    waiting = next((record for record in ordered if record not in behind), None)
    return tell((behind or ordered)[0], f"{why}, got ", seen_of, waiting if behind else None)


def find_behind(records: Sequence[Record]) -> list[Record]:
    """Stragglers; empty if all ranks are at the same step."""
    # Ranks start the same exchanges in the same order. If that is inconclusive, a rank that waits
    # for others is not behind, nor is one in a later phase of the step.
    for measure in (
        lambda record: record.counts.get(COMMUNICATION, 0),
        lambda record: record.counts[MAIN],
        lambda record: record.is_waiting,
        lambda record: PHASES.index(record.phase) if all(r.phase for r in records) else 0,
    ):
        least, most = min(map(measure, records)), max(map(measure, records))
        if least < most:
            return [record for record in records if measure(record) == least]
    return []
