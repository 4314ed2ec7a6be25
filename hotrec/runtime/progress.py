"""Progress display: a bar on a terminal, and a log line every few seconds."""

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
    """The progress of one activity on one rank; a context.

    ``update(n)`` advances, ``set_postfix_str`` sets a note. A terminal shows a bar that is removed
    at the end. The logger of this module gets lines in any case, on a terminal for the log file
    only; see ``is_line_of_progress``.

    Args:
        what: The activity.
        total: The number of units; None if unknown.
        unit: The counted unit, in the plural; "s" for seconds of a budget.
        initial: The number of units already done.
        is_shown: Whether this rank shows anything.
    """

    # tqdm would start a thread to monitor slow bars, while processes are forked.
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
        """Show the state, called by tqdm from time to time; a line if one is due."""
        now_s = time.monotonic()
        if now_s >= self._next_line_s and msg is None:
            self._next_line_s = now_s + LINE_EVERY_S
            logger.info("%s", self.line())
        return bool(super().display(msg, pos)) if self._is_bar else True

    def line(self) -> str:
        """The state in words, with the remaining time if the total is known."""
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
    """Whether a record is a progress line, redundant on a terminal with a bar."""
    return record.name == __name__


def _terminal_size() -> tuple[int, int]:
    """Columns and lines of the terminal; tqdm itself shows nothing on one of size 0.

    Pseudo-terminals without a window have that size: in containers, schedulers and scripts.
    """
    try:
        found = os.get_terminal_size(sys.stderr.fileno())
    except (OSError, ValueError):  # no terminal, or no file
        return _DEFAULT_SIZE
    return found if all(found) else _DEFAULT_SIZE
