"""Hot rows that follow the data during a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotrec.embedding.adapt import AdaptiveHotSet
from hotrec.runtime import watchdog
from hotrec.train.schedule import Segment

if TYPE_CHECKING:
    from hotrec.train.parts import Parts


class HotSet:
    """Decides every so many steps which rows are hot.

    Args:
        of_model: The hot rows of the model; None where they stay those of the plan.
        every_steps: Steps between decisions, also after the last step: a run that is resumed from
            it has the hot rows of a longer one. 0 for none.
    """

    def __init__(self, of_model: AdaptiveHotSet | None = None, every_steps: int = 0) -> None:
        self.of_model, self.every_steps = of_model, every_steps

    def adapt(self, segment: Segment, parts: Parts) -> None:
        """Decide after a segment, if due, with the pipeline drained; collective."""
        if self.of_model is not None and parts.is_due(segment, self.every_steps):
            watchdog.enter(watchdog.MAIN, watchdog.ADAPTATION, segment.last_step)
            parts.metrics.add_decision(self.of_model.adapt())
