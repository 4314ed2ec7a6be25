"""The last events of each user, and from them the history of each new event.

An event does not see events of the same instant: they may be duplicates of it, or of the same page,
and their labels are its own. So of each user the last events before the last instant are kept, and
the last ones at it. Everything works on whole blocks of events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hotrec.data.columns import offsets_of
from hotrec.data.hashing import Hashes
from hotrec.data.numbering import Numbering
from hotrec.types import Rows

Values = npt.NDArray[Any]
TIME = ""  # the column of times, among the names of the others
_MIN_USERS, _WIDTH_STEP = 1024, 8


@dataclass(frozen=True)
class EventHistories:
    """The histories of n events.

    Args:
        columns: The columns of these and of earlier events of their users, (E,) by name.
        positions: The events of all histories, int64 (K,), the oldest first in each.
        lengths: The length of each history, int64 (n,).
        back: The first event that is earlier than one of its user before it, with the time of that
            one; None if there is none.
    """

    columns: Mapping[str, Values]
    positions: Rows
    lengths: Rows
    back: tuple[int, float] | None


class LastEvents:
    """The last events of each user, in arrays of users x events.

    Args:
        max_length: The length of a history.
        types: The type of each column by name, with ``TIME``.
    """

    def __init__(self, max_length: int, types: Mapping[str, Any]) -> None:
        self._max_length = max_length
        self._users = Numbering()
        self._num_events = np.zeros(0, np.int64)  # of each user
        self._columns = {name: np.zeros((0, 0), of) for name, of in types.items()}

    def add(self, users: Hashes, columns: Mapping[str, Values]) -> EventHistories:
        """Add events in the order of time, and find their histories.

        Args:
            users: The hash of the user of each event, uint64 (n,).
            columns: The columns of the events, (n,) by name.
        """
        slots = self._users.add(users)
        self._reserve(len(self._users), 0)
        present = np.unique(slots)
        num_old = self._num_events[present]
        width = next(iter(self._columns.values())).shape[1]
        at = _ranges(present * width, num_old)
        owners = np.concatenate([np.repeat(present, num_old), slots])
        # Stable: of each user the earlier events first, then the new ones in their order.
        order = np.argsort(owners, kind="stable")
        found = {
            name: np.concatenate([stored.reshape(-1)[at], columns[name]])[order]
            for name, stored in self._columns.items()
        }
        owners, times, number = owners[order], found[TIME], np.arange(order.size)
        is_first = np.append(True, owners[1:] != owners[:-1])[: order.size]
        is_later = is_first | np.append(True, times[1:] != times[:-1])[: order.size]
        user_begins = np.maximum.accumulate(np.where(is_first, number, 0))
        instants = np.maximum.accumulate(np.where(is_later, number, 0))
        places = np.empty_like(order)
        places[order] = number
        new = places[at.size :]
        begins = np.maximum(user_begins[new], instants[new] - self._max_length)
        lengths = instants[new] - begins
        self._keep(present, is_first, instants, found)
        # Not of the events from before: a tail is checked where its file is read.
        is_back = (np.append(False, times[1:] < times[:-1])[: order.size] & ~is_first)[new]
        back = None
        if is_back.any():
            first = int(np.argmax(is_back))
            back = first, float(times[new[first] - 1])
        return EventHistories(found, _ranges(begins, lengths), lengths, back)

    def _keep(
        self, present: Rows, is_first: Values, instants: Rows, found: Mapping[str, Values]
    ) -> None:
        """Keep the last events of each user of sorted events."""
        size, number = self._max_length, np.arange(is_first.size)
        begins = np.flatnonzero(is_first)
        ends = np.append(begins[1:], is_first.size)[: begins.size]
        last_instant = instants[ends - 1]
        of_event = np.cumsum(is_first) - 1
        until = last_instant[of_event]
        is_kept = number >= ends[of_event] - size
        is_kept |= (number < until) & (number >= until - size)
        num_kept = np.bincount(of_event[is_kept], minlength=present.size)
        self._reserve(0, int(num_kept.max(initial=0)))
        self._num_events[present] = num_kept
        width = next(iter(self._columns.values())).shape[1]
        at = _ranges(present * width, num_kept)
        for name, stored in self._columns.items():
            stored.reshape(-1)[at] = found[name][is_kept]

    def _reserve(self, num_users: int, num_events: int) -> None:
        have, width = next(iter(self._columns.values())).shape
        users, events = have, width
        if num_users > have:
            users = max(2 * have, num_users, _MIN_USERS)
        if num_events > width:
            events = -(-num_events // _WIDTH_STEP) * _WIDTH_STEP
        if (users, events) == (have, width):
            return
        for name, stored in self._columns.items():
            grown = np.zeros((users, events), stored.dtype)
            grown[:have, :width] = stored
            self._columns[name] = grown
        self._num_events = np.append(self._num_events, np.zeros(users - have, np.int64))

    def events(self) -> tuple[Hashes, dict[str, Values]]:
        """The users and columns of all kept events, in order of each user."""
        num_events = self._num_events[: len(self._users)]
        width = next(iter(self._columns.values())).shape[1]
        at = _ranges(np.arange(num_events.size) * width, num_events)
        columns = {name: stored.reshape(-1)[at] for name, stored in self._columns.items()}
        return np.repeat(self._users.hashes(), num_events), columns


def _ranges(begins: Rows, lengths: Rows) -> Rows:
    """The numbers from each begin on, as many as each length, int64 (K,)."""
    offsets = offsets_of(lengths)
    return np.arange(offsets[-1]) + np.repeat(begins - offsets[:-1], lengths)
