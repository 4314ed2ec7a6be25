"""Which rank the others wait for, by looking at all of them again and again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hotrec.runtime.watchdog.verdict import RankState

_NUM_LOOKS = 20
# A rank that is busy so many times as often as any other is worth a line.
_FACTOR = 3.0


class Slowest:
    """Counts, look by look, which ranks are busy and which wait for others."""

    def __init__(self) -> None:
        self.is_told = False
        self._num_looks = 0
        self._num_busy: Counter[int] = Counter()

    def add(self, states: Iterable[RankState]) -> str | None:
        """Count one look at all ranks; a message, once, if one rank holds up the others."""
        together = list(states)
        if any(state.step is None or state.is_unlimited for state in together):
            return None
        self._num_looks += 1
        self._num_busy.update(s.rank for s in together if not s.is_waiting)
        if self._num_looks < _NUM_LOOKS or len(together) < 2:
            return None
        fracs = {s.rank: self._num_busy[s.rank] / self._num_looks for s in together}
        (first, most), (_, second), *_ = sorted(fracs.items(), key=lambda item: -item[1])
        # What was long ago counts less and less.
        self._num_looks //= 2
        for rank in self._num_busy:
            self._num_busy[rank] //= 2
        if most < _FACTOR * max(second, 1 / _NUM_LOOKS):
            return None
        self.is_told = True
        return (
            f"the others wait for rank {first}: it was busy in {most:.0%} of the looks, no other "
            f"rank in more than {second:.0%}. See whether something else runs on its host."
        )
