"""The records of a run directory."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hotrec.artifact import ArtifactError, read_record
from hotrec.runtime.figures import check_declared
from hotrec.runtime.run_dir import EVAL, HOT_SET, METRICS, SUMMARY

logger = logging.getLogger(__name__)

RECORDS = (METRICS, EVAL, HOT_SET)
_MAX_BYTES = 4 << 30
# Takes each line of the records with its prefix: "train", "hot_set" or the split.
Listener = Callable[[str, Mapping[str, Any]], None]


class RunLog:
    """Writes the .jsonl files, summary.json and TensorBoard events of a run, each line at once.

    Args:
        run_dir: The run's directory; None, as on all ranks but the first, writes nothing.
        start_step: The step that the run starts from. Lines of later steps, from a run that was
            killed after its last checkpoint, are dropped.
        listeners: Called with each line after it is written.
    """

    def __init__(
        self, run_dir: Path | None, *, start_step: int, listeners: Sequence[Listener] = ()
    ) -> None:
        self._run_dir = run_dir
        self._listeners = listeners
        self._board: Any = None
        if run_dir is None:
            return
        # Imported here: it costs a second, and only one rank writes.
        from torch.utils.tensorboard import SummaryWriter

        run_dir.mkdir(parents=True, exist_ok=True)
        for name in RECORDS:
            _drop_later_lines(run_dir / name, start_step)
        self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=start_step + 1)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        if self._board is not None:
            self._board.close()

    def write_summary(self, document: Mapping[str, Any]) -> None:
        """Replace summary.json atomically.

        Raises:
            ValueError: On every rank, if a figure in it is not declared.
        """
        check_declared(document)
        if self._run_dir is not None:
            text = json.dumps(document, indent=2, allow_nan=False) + "\n"
            replace_text(self._run_dir / SUMMARY, text)

    def append(self, name: str, prefix: str, line: Mapping[str, Any]) -> None:
        """Append a line to a file; its numbers go to TensorBoard under ``prefix``/.

        Raises:
            ValueError: On every rank, if a figure in it is not declared.
        """
        figures = {key: value for key, value in line.items() if key != "step"}
        check_declared({prefix: figures} if name == HOT_SET else figures)
        if self._run_dir is None:
            return
        with (self._run_dir / name).open("a") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
        for tag, number in numbers_of(line, prefix).items():
            self._board.add_scalar(tag, number, line["step"])
        self._board.flush()
        for listen in self._listeners:
            listen(prefix, line)


def numbers_of(line: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """The numbers of a line by name, ``prefix/key`` or ``prefix/key/part``; without its step."""
    found: dict[str, float] = {}
    for key, value in line.items():
        if isinstance(value, Mapping):
            found |= numbers_of(value, f"{prefix}/{key}")
        elif isinstance(value, int | float) and key != "step":
            found[f"{prefix}/{key}"] = float(value)
    return found


def replace_text(path: Path, text: str) -> None:
    """Replace a file atomically: a reader finds the old text or the new."""
    partial = path.with_name(f".{path.name}.tmp")
    try:
        with partial.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def check_records(run_dir: Path) -> None:
    """Raise ArtifactError if a record of the run cannot be continued; call before anything else."""
    for name in RECORDS:
        path = run_dir / name
        if path.exists() and not path.is_file():
            raise ArtifactError(
                f"{path}: expected a record of the run, got a directory, a pipe or a device. "
                "Remove it; the checkpoint is enough to resume."
            )


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a record without damaged ones, for example after a kill.

    A warning counts the skipped lines, except for the last one, which a killed run was writing.
    """
    if not path.exists():
        return []
    # A record grows with the run: only an endless file is refused.
    texts = read_record(path, max_bytes=_MAX_BYTES, errors="replace").splitlines()
    lines = [_parse_line(text) for text in texts]
    num_damaged = lines[:-1].count(None) + (bool(texts) and "}" in texts[-1] and lines[-1] is None)
    if num_damaged:
        logger.warning(
            "%s: skipped %d damaged lines; the run resumes from its checkpoint",
            *(path, num_damaged),
        )
    return [line for line in lines if line is not None]


def _parse_line(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_line = isinstance(line, dict) and type(line.get("step")) is int
    return line if is_line else None


def _drop_later_lines(path: Path, last_step: int) -> None:
    if not path.exists():
        return
    kept = [json.dumps(line) for line in read_lines(path) if line["step"] <= last_step]
    if last_step == 0:  # begins anew: even lines of step 0 are of another run
        kept = []
    replace_text(path, "".join(f"{line}\n" for line in kept))
