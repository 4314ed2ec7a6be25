"""Progress that is seen: a bar on a terminal, and in the log a line every few seconds."""

from __future__ import annotations

import io
import logging
import os
import sys
import time
from typing import Any

from tqdm import tqdm

logger = logging.getLogger(__name__)

LINE_EVERY_S = 5.0
_BAR_EVERY_S = 0.1
_LARGE = 100_000  # from here on a bar shows 1.2M instead of 1234567
_DEFAULT_SIZE = (80, 24)


class Progress(tqdm):
    """The progress of one thing, on one rank; a context.

    ``update(n)`` counts on and ``set_postfix_str`` says what happens now. On a terminal that is a
    bar, which its end removes. Elsewhere the logger of this module gets lines, and on a terminal it
    gets them too, for the log file; see ``is_line_of_progress``.

    Args:
        what: What is being done.
        total: How many units there are; None if that is not known.
        unit: What is counted, in the plural; "s" for seconds of a budget.
        initial: How many are done already.
        is_shown: Whether this rank shows anything.
    """

    # tqdm would start a thread that looks after slow bars, beside which processes are forked.
    monitor_interval = 0

    def __init__(
        self,
        what: str,
        total: float | None = None,
        *,
        unit: str,
        initial: int = 0,
        is_shown: bool = True,
    ) -> None:
        self._is_bar = sys.stderr.isatty()
        self._next_line_s = time.monotonic() + LINE_EVERY_S
        self._start = initial
        is_budget = unit == "s"
        columns, lines = _terminal_size()
        super().__init__(
            desc=what,
            total=total,
            unit=f" {unit}",
            unit_scale=total is None or total >= _LARGE,
            initial=initial,
            disable=not is_shown,
            file=sys.stderr if self._is_bar else io.StringIO(),
            ncols=columns,
            nrows=lines,
            mininterval=_BAR_EVERY_S if self._is_bar else LINE_EVERY_S,
            miniters=1,
            leave=False,
            bar_format="{l_bar}{bar}| {n:.0f}/{total:.0f} s{postfix}" if is_budget else None,
        )

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Show the state, as tqdm asks to from time to time; a line if one is due."""
        now_s = time.monotonic()
        if now_s >= self._next_line_s and msg is None:
            self._next_line_s = now_s + LINE_EVERY_S
            logger.info("%s", self.line())
        return bool(super().display(msg, pos)) if self._is_bar else True

    def line(self) -> str:
        """The state in words, with the time that is left where the total is known."""
        state: dict[str, Any] = self.format_dict
        done, total, elapsed_s = state["n"], state["total"], state["elapsed"]
        per_s = (done - self._start) / elapsed_s if elapsed_s > 0 else 0.0
        unit = state["unit"].strip()
        parts = [f"{done:,.0f} {unit}"]
        if total:
            parts = [f"{done:,.0f} of {total:,.0f} {unit} ({min(1.0, done / total):.0%})"]
        if unit != "s":
            parts.append(f"{per_s:,.{0 if per_s >= 10 else 2}f} {unit}/s")
        if total and per_s:
            parts.append(f"{self.format_interval(max(0.0, total - done) / per_s)} left")
        if state["postfix"]:
            parts.append(state["postfix"])
        return f"{state['prefix']}: {', '.join(parts)}"


def is_line_of_progress(record: logging.LogRecord) -> bool:
    """Whether a record is a line that a terminal with a bar need not show."""
    return record.name == __name__


def _terminal_size() -> tuple[int, int]:
    """Columns and lines of the terminal; tqdm itself shows nothing on one that says it has none.

    Pseudo-terminals without a window say so: those of containers, schedulers and scripts.
    """
    try:
        found = os.get_terminal_size(sys.stderr.fileno())
    except (OSError, ValueError):  # no terminal, or no file
        return _DEFAULT_SIZE
    return found if all(found) else _DEFAULT_SIZE
