"""Progressive evaluation: each day of the training split is evaluated before it is trained on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from hotrec.data.batch import Batch
from hotrec.train.evaluate import Quality
from hotrec.train.run_log import read_lines

NEXT_DAY = "next_day"  # the split of its lines in eval.jsonl


@dataclass(frozen=True)
class NextDay:
    """A day to evaluate, and the number of its batches, the same on every rank."""

    name: str
    num_batches: int


@dataclass
class DaysAhead:
    """The evaluations at the end of each day.

    Args:
        days: The next days, by the steps after which they are evaluated, in increasing order.
        batches: The batches of these days, one day after the other.
        evaluated: Earlier results: lines of eval.jsonl.
    """

    days: Mapping[int, NextDay]
    batches: Iterable[Batch]
    evaluated: list[dict[str, Any]] = field(default_factory=list)

    def start(self) -> None:
        """Start the loader's workers, persistent across days."""
        self._batches = iter(self.batches)

    def take(self, step: int) -> Iterator[Batch]:
        """The batches of the day that is due after ``step``."""
        return islice(self._batches, self.days[step].num_batches)

    def add_quality(self, step: int, quality: Quality) -> None:
        """Store the result for the summary."""
        self.evaluated.append({"day": self.days[step].name, "step": step, **quality.to_json()})


def read_evaluated(eval_file: Path, last_step: int) -> list[dict[str, Any]]:
    """The evaluations of next days up to a step that a run has recorded; none for a new run."""
    if last_step == 0:
        return []
    return [
        {name: value for name, value in line.items() if name not in ("split", "elapsed_s")}
        for line in read_lines(eval_file)
        if line.get("split") == NEXT_DAY and line["step"] <= last_step
    ]
