"""A callback of your own for ``trainer.callbacks``: leaves a note when a run has ended."""

from collections.abc import Mapping
from typing import Any

from hotrec.train.callbacks import Callback


class Notify(Callback):
    """Keeps the best AUC, and writes it into the run's directory at the end."""

    best = 0.0

    def on_evaluate(self, line: Mapping[str, Any]) -> None:
        """A split was evaluated."""
        self.best = max(self.best, line["auc"] or 0.0)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """The run has ended."""
        if self.run_dir is not None:
            text = f"{summary['name']}: {summary['num_steps']} steps, best AUC {self.best:.4f}\n"
            (self.run_dir / "note.txt").write_text(text)
