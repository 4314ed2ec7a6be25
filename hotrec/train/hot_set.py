"""Hot rows that follow the data during a run."""

from __future__ import annotations

from hotrec.embedding.adapt import AdaptiveHotSet
from hotrec.runtime import watchdog
from hotrec.train.metrics import Metrics
from hotrec.train.schedule import Segment


class HotSet:
    """Chooses the hot rows at an interval of steps.

    Args:
        metrics: Records the decisions.
        of_model: The hot rows of the model; None if they stay those of the plan.
        every_steps: Steps between decisions, also after the last step, so that a resumed run has
            the hot rows of a longer one. 0 for none.
    """

    def __init__(
        self, metrics: Metrics, of_model: AdaptiveHotSet | None = None, every_steps: int = 0
    ) -> None:
        self.of_model, self.every_steps, self._metrics = of_model, every_steps, metrics

    def run(self, segment: Segment) -> None:
        """Decide after a segment, if due; collective."""
        if self.of_model is not None and self._metrics.is_due(segment, self.every_steps):
            watchdog.enter(watchdog.MAIN, watchdog.ADAPTATION, segment.last_step)
            self._metrics.add_decision(self.of_model.adapt())
