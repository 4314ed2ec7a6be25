"""What a run leaves in its directory: metrics.jsonl, eval.jsonl, summary.json, TensorBoard."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any


class RunLog:
    """Writes metrics.jsonl, eval.jsonl, summary.json and TensorBoard events, each line at once.

    Only rank 0 opens one with a directory; with None nothing is written, so callers need not ask.

    Args:
        run_dir: the run's directory, or None.
        start_step: the step that the run starts from. Lines of later steps, which a run that was
            killed after its last checkpoint has left, are dropped.
    """

    def __init__(self, run_dir: Path | None, *, start_step: int) -> None:
        self._run_dir = run_dir
        self._board: Any = None
        if run_dir is None:
            return
        # Imported here: it costs a second, and only one rank writes.
        from torch.utils.tensorboard import SummaryWriter

        run_dir.mkdir(parents=True, exist_ok=True)
        for name in ("metrics.jsonl", "eval.jsonl"):
            _drop_later_lines(run_dir / name, start_step)
        self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=start_step + 1)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._board is not None:
            self._board.close()

    def write_metrics(self, line: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl; its numbers go to TensorBoard under train/."""
        self._append("metrics.jsonl", line, prefix="train")

    def write_eval(self, line: Mapping[str, Any]) -> None:
        """One line of eval.jsonl; its numbers go to TensorBoard under the name of the split."""
        self._append("eval.jsonl", line, prefix=str(line["split"]))

    def write_summary(self, document: Mapping[str, Any]) -> None:
        """summary.json, replaced as a whole."""
        if self._run_dir is not None:
            text = json.dumps(document, indent=2, allow_nan=False) + "\n"
            replace_text(self._run_dir / "summary.json", text)

    def _append(self, name: str, line: Mapping[str, Any], *, prefix: str) -> None:
        if self._run_dir is None:
            return
        with (self._run_dir / name).open("a") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
        for key, value in line.items():
            parts = value.items() if isinstance(value, Mapping) else [("", value)]
            for part, number in parts:
                if isinstance(number, int | float) and key != "step":
                    tag = "/".join(filter(None, [prefix, key, part]))
                    self._board.add_scalar(tag, number, line["step"])
        self._board.flush()


def replace_text(path: Path, text: str) -> None:
    """Write a file so that a reader finds the old text or the new, whole."""
    partial = path.with_name(f".{path.name}.tmp")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _drop_later_lines(path: Path, last_step: int) -> None:
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            step = json.loads(line)["step"]
        except json.JSONDecodeError:
            continue  # the line that the killed run was writing
        if step <= last_step:
            kept.append(line + "\n")
    replace_text(path, "".join(kept))
