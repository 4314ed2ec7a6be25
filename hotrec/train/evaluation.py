"""The evaluations of a run: of its splits and of upcoming days, and their consequences."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from hotrec.data.batch import Batch
from hotrec.runtime.ranks import same_verdict
from hotrec.train.ahead import NEXT_DAY, DaysAhead
from hotrec.train.alternate import Alternation
from hotrec.train.best import BestQuality
from hotrec.train.checkpoint import Checkpoints, keep_best
from hotrec.train.evaluate import evaluate
from hotrec.train.metrics import Metrics
from hotrec.train.pipelines import Pipeline
from hotrec.train.ranking import Ranking
from hotrec.train.schedule import Segment
from hotrec.train.signals import signals_held_back


class Evaluation:
    """Evaluates splits at an interval and at the end, and each day before it is trained on.

    Args:
        metrics: Records the evaluations.
        splits: Loaders by split, restarted for each evaluation. The first one is evaluated during
            training, all at the end; the summary reports the last.
        every_steps: Steps between evaluations during training; 0 for none.
        ahead: The evaluations at the end of each day.
        best: Early stopping and best-checkpoint tracking; saved with the checkpoint.
        alternation: The order that depends on the loss; saved with the loader.
        checkpoints: Where the checkpoint of the best evaluation is kept.
        ranking: The items that each evaluation ranks; None for none.
    """

    def __init__(
        self,
        metrics: Metrics,
        splits: Mapping[str, Iterable[Batch]] | None = None,
        *,
        every_steps: int = 0,
        ahead: DaysAhead | None = None,
        best: BestQuality | None = None,
        alternation: Alternation | None = None,
        checkpoints: Checkpoints | None = None,
        ranking: Ranking | None = None,
    ) -> None:
        self.every_steps, self.best = every_steps, best
        self._metrics, self._checkpoints = metrics, checkpoints
        self._splits, self._ahead, self._ranking = splits or {}, ahead, ranking
        self._trackers: list[Alternation | BestQuality] = [
            tracker for tracker in (alternation, best) if tracker is not None
        ]

    @property
    def ends(self) -> Collection[int]:
        """Steps after which a day is evaluated."""
        return self._ahead.days if self._ahead is not None else ()

    @property
    def must_stop(self) -> bool:
        """Whether early stopping ends the run."""
        return self.best is not None and self.best.must_stop

    def wants_checkpoint(self, step: int) -> bool:
        """Whether the run ends after ``step``, or its checkpoint is the one to keep."""
        return self.best is not None and (self.must_stop or self.best.is_kept_at(step))

    @property
    def days(self) -> dict[str, Any]:
        """The results of the days, for the summary."""
        return {} if self._ahead is None else {"days": self._ahead.evaluated}

    def start_workers(self) -> None:
        """Start the persistent workers of the loaders.

        After the first step, threads of the process group run Python code for gradient hooks, and a
        process forked meanwhile can hang (CPython before 3.11.10, gh-112275).
        """
        # Starting a loader draws a random number, which must not affect training.
        with torch.random.fork_rng(devices=[]), signals_held_back():
            loaders = [*self._splits.values()]
            loaders += [] if self._ranking is None else [self._ranking.catalogue]
            same_verdict(lambda: [iter(batches) for batches in loaders])
            if self._ahead is not None:
                same_verdict(self._ahead.start)

    def make_up(self, pipeline: Pipeline, num_steps: int) -> None:
        """Run the evaluation that the resumed run missed after its last step; collective.

        An uninterrupted run would have used this loss to choose the next block, or to end.
        """
        step = self._metrics.position.step
        is_due = self.every_steps > 0 and step % self.every_steps == 0
        is_unknown = any(not tracker.knows(step) for tracker in self._trackers)
        if is_due and 0 < step < num_steps and is_unknown:
            self._evaluate(pipeline)
            self._keep_best(step)
        self._evaluate_ahead(pipeline)

    def run(self, segment: Segment, pipeline: Pipeline, *, must_stop: bool) -> None:
        """Run the evaluations due after a segment, unless the run must stop; collective.

        The end of the run is not evaluated here, but by ``finish``.
        """
        if must_stop:
            return
        if not segment.is_last and self._metrics.is_due(segment, self.every_steps):
            self._evaluate(pipeline)
        self._evaluate_ahead(pipeline)

    def finish(self, pipeline: Pipeline) -> None:
        """Evaluate all splits after the last step; collective."""
        step = self._metrics.position.step
        for index, (split, batches) in enumerate(self._splits.items()):
            quality = evaluate(pipeline, batches, step=step, ranking=self._ranking)
            self._metrics.add_quality(split, quality)
            if self.best is None:
                continue
            if index == 0 and not self.best.knows(step):
                self.best.add_quality(step, quality)
                self._keep_best(step)
            self.best.add_split(step, split, quality)

    def _evaluate(self, pipeline: Pipeline) -> None:
        """Evaluate the first split; all others, too, if this is the best to keep.

        The kept model is reported on them, and the run continues from it.
        """
        step, best = self._metrics.position.step, self.best
        for index, (split, batches) in enumerate(self._splits.items()):
            if index > 0 and (best is None or not best.is_kept_at(step)):
                break
            quality = evaluate(pipeline, batches, step=step, ranking=self._ranking)
            self._metrics.add_quality(split, quality)
            trackers: Sequence[Alternation | BestQuality] = self._trackers if index == 0 else ()
            for tracker in trackers:
                if not tracker.knows(step):
                    tracker.add_quality(step, quality)
            if best is not None:
                best.add_split(step, split, quality)

    def _evaluate_ahead(self, pipeline: Pipeline) -> None:
        """Evaluate the day that is due after the last step, if one is."""
        step, ahead = self._metrics.position.step, self._ahead
        if ahead is not None and step in ahead.days:
            quality = evaluate(pipeline, ahead.take(step), step=step, ranking=self._ranking)
            self._metrics.add_quality(NEXT_DAY, quality, day=ahead.days[step].name)
            ahead.add_quality(step, quality)

    def _keep_best(self, step: int) -> None:
        """Keep the checkpoint after ``step`` if it is the best; collective."""
        best, checkpoints = self.best, self._checkpoints
        if best is not None and checkpoints is not None and best.is_kept_at(step):
            same_verdict(lambda: keep_best(checkpoints, step))
