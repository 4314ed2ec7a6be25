"""The lines with which a command ends on a terminal, from its figures."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hotrec.cli.launch import BRIEF
from hotrec.cli.made import command_text
from hotrec.cli.stage import is_in_sweep
from hotrec.cli.store import quoted
from hotrec.report.units import (
    show_bytes,
    show_count,
    show_frac,
    show_known,
    show_quality,
    show_seconds,
)
from hotrec.report.verdict import suspicion

Figures = Mapping[str, Any]
Line = tuple[str, Any]

# Indent of further lines of a text on a terminal.
_INDENT = 11
# The share of the rows by which the lookups of a dataset are described.
HOT_FRAC = 0.01
FEW_STEPS = 100
# Commands whose sweeps end with a table.
WITH_TABLE = ("plan", "train", "run")
_NEXT = {"prepare": "calibrate", "calibrate": "plan", "plan": "train"}
# What only the stage that was given it reads.
_OF_A_STAGE = ("append=", "overwrite=", "prune=", "calibrate.")


def print_closing(command: str, figures: Figures, words: Sequence[str] = ()) -> None:
    """Print the closing lines of a command on stderr, for a reader.

    Jobs of a sweep end with one table, and stages of ``hotrec run`` with the lines of that. A
    terminal gets sentences wrapped to its width, and unwrapped commands, to be pasted.

    Args:
        command: Its name.
        figures: Its result.
        words: Its words, for the suggested next command.
    """
    if BRIEF in os.environ or (command in WITH_TABLE and is_in_sweep()):
        return
    columns = shutil.get_terminal_size().columns if sys.stderr.isatty() else 0
    for what, text in [*_lines(command, figures), *_next_commands(command, figures, words)]:
        shown_line = f"{what:<10} {text}"
        if columns > _INDENT and not str(text).startswith("hotrec "):
            shown_line = textwrap.fill(
                shown_line,
                columns,
                subsequent_indent=" " * _INDENT,
                break_long_words=False,
                break_on_hyphens=False,
            )
        sys.stderr.write(f"{shown_line}\n")
    sys.stderr.flush()


def _lines(command: str, figures: Figures) -> Iterator[Line]:
    """What is known of the result, in the order of the table."""
    yield from quality_lines(figures, figures.get("eval_split", figures.get("split")))
    yield from (("measured", sentence) for sentence in figures.get("verdict", ()))
    steps, batch_size = figures.get("num_steps"), figures.get("batch_size", "")
    if steps is not None and steps < FEW_STEPS:
        yield (
            "few steps",
            f"too few to learn much: lower trainer.batch_size (now {batch_size}), or raise "
            "trainer.num_epochs",
        )
    for what, key, show in _TABLE:
        if command in _OF.get(key, (command,)) and figures.get(key) not in (None, 0, [], -1):
            yield what, show(figures[key])


def quality_lines(figures: Figures, split: str | None) -> list[Line]:
    """The AUC, of each label if there are several, and what is suspicious about it."""
    if figures.get("log_loss") is None:
        return []
    log_loss = f"log loss {show_quality(figures['log_loss'])}"
    aucs: dict[str, float | None] = dict(figures.get("auc_by_label") or {})
    aucs |= {name: of["auc"] for name, of in (figures.get("by_label") or {}).items()}
    text = show_known(show_quality, figures.get("auc"))
    if figures.get("auc") is None:
        text = "undefined (all samples have the same label)"
    if aucs:
        of_labels = ", ".join(f"{name} {show_known(show_quality, a)}" for name, a in aucs.items())
        text = f"{of_labels}; {text} is their mean"
    lines: list[Line] = [("AUC", f"{text} on {split or 'the scored files'}, {log_loss}")]
    entropy = figures.get("normalized_entropy")
    if entropy is not None and entropy > 1:
        text = f"than always predicting the rate of clicks: {entropy:.3g} times its log loss. Train"
        lines.append(("worse", f"{text} in fewer epochs, or with another learning rate"))
    return [*lines, *(("suspicious", sentence) for sentence in suspicion(figures))]


def shown(path: Path | str) -> Path:
    """The path from the current directory, if it is below that."""
    path, here = Path(path), Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _counts(value: Any) -> str:
    """A number, or one for each split or table."""
    if not isinstance(value, Mapping):
        return show_count(value)
    parts = ", ".join(f"{name} {show_count(num)}" for name, num in value.items())
    return f"{show_count(sum(value.values()))} ({parts})"


def _served(landmarks: Sequence[Figures]) -> str:
    """What the most-read rows of a dataset serve."""
    hot = next(of for of in landmarks if of["rows_frac"] == HOT_FRAC)
    text = f"the most-read {HOT_FRAC:.0%} serve {show_frac(hot['train'])} of the lookups"
    held_out = hot["heldout"]
    return text if held_out is None else f"{text}, and {show_frac(held_out)} of the held-out ones"


# A word, the figure that it stands for, and how that is shown.
_TABLE: tuple[tuple[str, str, Callable[[Any], object]], ...] = (
    ("dataset", "dataset", shown),
    ("samples", "num_samples", _counts),
    ("rows", "num_rows", _counts),
    ("left out", "num_skipped", lambda num: f"{show_count(num)} unreadable lines"),
    ("popular", "landmarks", _served),
    ("run", "run_dir", shown),
    ("steps", "num_steps", show_count),
    ("best step", "best_step", show_count),
    ("checkpoint", "checkpoint", str),
    # Without the trial's measurements of the others; plan.txt has all.
    ("chosen", "why", lambda why: f"{why.partition('; ')[0].rstrip('.')}."),
    ("hot rows", "hot_rows", show_count),
    ("hot bytes", "hot_bytes", show_bytes),
    ("speed", "samples_per_s", lambda rate: f"{rate:,.0f} samples/s"),
    ("costs", "costs", str),
    ("costs", "caveat", str),
    ("written", "output", shown),
    ("bytes", "num_bytes", show_bytes),
    ("took", "elapsed_s", show_seconds),
    ("plan", "plan_text", shown),
    ("page", "page", shown),
)
# The commands for which a figure is worth a line, if not for all.
_OF = {
    "samples_per_s": ("run", "train", "predict"),
    "elapsed_s": ("calibrate",),
    "num_rows": ("prepare", "export"),
    "checkpoint": ("evaluate", "export", "predict"),
    "num_steps": ("run", "train"),
    "num_samples": ("prepare", "predict", "evaluate"),
}


def _next_commands(command: str, figures: Figures, words: Sequence[str]) -> Iterator[Line]:
    """The commands that use a result."""
    if command in ("run", "train") and figures.get("finished", True):
        text = str(shown(figures["trained"] if command == "run" else figures["run_dir"]))
        is_plain = re.fullmatch(r"[\w.-]*/[\w./-]*", text)
        word = f"run_dir={text if is_plain else quoted(text)}"
        split = figures.get("eval_split", figures.get("split"))
        of_split = [f"split={split}"] if split not in (None, "test") else []
        yield "evaluate", command_text("evaluate", [word, *of_split])
        yield "export", command_text("export", [word, "output=exported"])
    if command == "compare" and "runs" in figures:
        runs = ",".join(quoted(str(shown(run))) for run in figures["runs"])
        compared = quoted(str(shown(Path(figures["compared"]).parent)))
        yield "report", command_text("report", [f"runs=[{runs}]", f"compared={compared}"])
    if command == "run":
        yield "next", figures["next"]
    if command in _NEXT:
        yield from _next_stage(command, figures, words)


def _next_stage(command: str, figures: Figures, words: Sequence[str]) -> Iterator[Line]:
    """The next command after a stage, with the words of this one."""
    own = [word for word in words if not word.startswith(_OF_A_STAGE)]
    given = dict(word.partition("=")[::2] for word in own)
    if command == "calibrate" and not {"data", "experiment"} & given.keys():
        return  # it has a fallback, a plan does not
    if command == "calibrate" and "plan.world_size" not in given:
        own.append(f"plan.world_size={given.get('launch.num_ranks', 1)}")
    if command == "plan":
        if given.get("plan.device", "auto") != "auto" or "planner.costs" in given:
            return  # for other machines
        own = [word for word in own if not word.startswith(("plan.", "launch.num_ranks="))]
        own.append(f"launch.num_ranks={figures['world_size']}")
    yield "next", command_text(_NEXT[command], own)
