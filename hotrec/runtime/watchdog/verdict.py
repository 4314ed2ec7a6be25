"""Which rank is missing, from what all ranks have told of themselves."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass

from hotrec.runtime.watchdog.place import NOWHERE, PHASES, Place
from hotrec.runtime.watchdog.position import CHECK_UP, COMMUNICATION, MAIN, UNLIMITED, Lane

_EXCHANGES = {CHECK_UP, "ids_exchange", "rows_exchange", "grads_exchange", "hot_exchange"}


@dataclass(frozen=True)
class RankState:
    """What a rank tells of itself with every heartbeat.

    Args:
        beat: heartbeats so far.
        at_s: when, seconds since the epoch by its own clock; for messages, not for decisions.
        host: its name.
        host_key: the same for processes that can see one another's process ids.
        age_s: seconds since any of its lanes moved.
        passed: the stage that its main lane left last; None if unknown.
        left: why it no longer takes part; None while it does.
    """

    rank: int
    beat: int
    at_s: float
    host: str
    host_key: str
    pid: int
    age_s: float
    lanes: Mapping[str, Lane]
    passed: str | None = None
    place: Place = NOWHERE
    left: str | None = None

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> RankState:
        told = json.loads(text)
        told["lanes"] = {name: Lane(**lane) for name, lane in told["lanes"].items()}
        told["place"] = Place(**told["place"])
        return cls(**told)

    @property
    def main(self) -> Lane | None:
        return self.lanes.get(MAIN)

    @property
    def step(self) -> int | None:
        """The step that its main lane is in; None outside steps."""
        return self.main.step if self.main else None

    @property
    def is_waiting(self) -> bool:
        """Whether its main lane waits for other ranks, as far as that shows."""
        is_exchanging = self.main is not None and self.main.stage in _EXCHANGES
        return is_exchanging or self.place.is_waiting

    @property
    def is_unlimited(self) -> bool:
        """Whether it does what may take long: see ``position.UNLIMITED``."""
        return self.main is None or self.main.stage in UNLIMITED

    def where(self) -> str:
        """E.g. "step 41 (after row_lookup; backward, at a.py:12 f); communication: idle"."""
        details = [f"after {self.passed}"] if self.passed else []
        details += [str(self.place)] if str(self.place) else []
        text = str(self.main) if self.main else "no stage"
        text += f" ({'; '.join(details)})" if details else ""
        others = [f"{name}: {lane}" for name, lane in self.lanes.items() if name != MAIN]
        return "; ".join([text, *others])


@dataclass(frozen=True)
class Verdict:
    """What went wrong; the first rank that knows writes it, and all ranks say the same.

    Args:
        ranks: those that are missing; empty if nobody can be told from the others.
        text: the message, without advice.
        is_error: the rank raised an error of its own, which other ranks may have raised as well.
    """

    ranks: tuple[int, ...]
    text: str
    is_error: bool = False

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Verdict:
        told = json.loads(text)
        return cls(tuple(told["ranks"]), told["text"], told["is_error"])


def dead(states: Collection[RankState], world_size: int, seen_by: RankState) -> Verdict:
    """These ranks' processes are gone.

    Args:
        seen_by: the state of the rank that says so.
    """
    ranks = tuple(state.rank for state in states)
    seen = [
        f"rank {state.rank} (process {state.pid} on {state.host}) has died, last seen "
        f"{max(0.0, seen_by.at_s - state.at_s):.1f} s ago in {state.where()}"
        for state in states
    ]
    left = f"{_at(seen_by)}: expected {world_size} ranks, got {world_size - len(ranks)}"
    return Verdict(ranks, f"{left}: {'; '.join(seen)}{_waits(seen_by)}.")


def silent(
    states: Collection[RankState],
    silence_s: Mapping[int, float],
    expected: str,
    seen_by: RankState,
) -> Verdict:
    """These ranks give no sign of life: stopped, cut off, or their host is gone.

    Args:
        silence_s: seconds by rank in which nothing was heard of them.
        expected: such as "expected all ranks to go on within 60 s".
        seen_by: the state of the rank that says so.
    """
    seen = [
        f"no sign of life from rank {state.rank} (process {state.pid} on {state.host}) for "
        f"{max(silence_s[state.rank], seen_by.at_s - state.at_s):.0f} s, last seen in "
        f"{state.where()}"
        for state in states
    ]
    ranks = tuple(state.rank for state in states)
    return Verdict(ranks, f"{_at(seen_by)}: {expected}, got {'; '.join(seen)}{_waits(seen_by)}.")


def failed(state: RankState, error: str) -> Verdict:
    """This rank has raised an error of its own."""
    return Verdict(
        (state.rank,),
        f"{_at(state)}: expected all ranks to go on, got an error on rank {state.rank} in "
        f"{state.where()}: {error}.",
        is_error=True,
    )


def behind(states: Mapping[int, RankState], expected: str) -> Verdict:
    """All ranks are alive and none moves: the one that the others wait for, as far as it shows.

    Args:
        states: by rank.
        expected: such as "expected all ranks to go on within 60 s".
    """
    late = find_behind(states)
    ordered = [state for _, state in sorted(states.items())]
    if not late:
        stand = "; ".join(f"rank {state.rank} in {state.where()}" for state in ordered[:8])
        return Verdict(
            (),
            f"{_at(ordered[0])}: {expected}, got none moving; all are alive and none is behind: "
            f"{stand}. Look at the network.",
        )
    seen = [
        f"rank {rank} alive but not moving for {states[rank].age_s:.0f} s in {states[rank].where()}"
        for rank in late
    ]
    waiting = next(state for state in ordered if state.rank not in late)
    return Verdict(
        tuple(late), f"{_at(states[late[0]])}: {expected}, got {'; '.join(seen)}{_waits(waiting)}."
    )


def find_behind(states: Mapping[int, RankState]) -> list[int]:
    """The ranks that the others wait for; empty if they all stand alike."""
    for lane in (COMMUNICATION, MAIN):
        if all(lane in state.lanes for state in states.values()):
            late = _smallest({rank: state.lanes[lane].count for rank, state in states.items()})
            if late:
                return late
    late = _smallest({rank: int(state.is_waiting) for rank, state in states.items()})
    if late:
        return late
    if all(state.place.phase for state in states.values()):
        return _smallest({rank: PHASES.index(state.place.phase) for rank, state in states.items()})
    return []


def _smallest(values: Mapping[int, int]) -> list[int]:
    """The ranks of the smallest value, unless all have it."""
    least = min(values.values())
    late = sorted(rank for rank, value in values.items() if value == least)
    return late if len(late) < len(values) else []


def _at(state: RankState) -> str:
    return f"step {state.step}" if state.step is not None else "before the first step"


def _waits(state: RankState) -> str:
    return f"; rank {state.rank} waits in {state.where()}"
