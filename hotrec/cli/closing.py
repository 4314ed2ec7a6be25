"""The lines with which a command ends on a terminal, from its figures."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hotrec.cli.launch import BRIEF
from hotrec.cli.made import command_text
from hotrec.cli.stage import is_in_sweep
from hotrec.cli.store import quoted
from hotrec.planner.names import TORCHREC, plan_name
from hotrec.report.units import (
    show_bytes,
    show_count,
    show_frac,
    show_known,
    show_quality,
    show_seconds,
)
from hotrec.report.verdict import suspicion
from hotrec.runtime.run_dir import TRAINED

Figures = Mapping[str, Any]
Lines = list[tuple[str, Any]]


# Indent of further lines of a text on a terminal.
_INDENT = 11
# The share of the rows by which the profile of a dataset is described.
HOT_FRAC = 0.01
FEW_STEPS = 100
# Commands whose sweeps end with a table.
WITH_TABLE = ("plan", "train", "run")


def print_closing(command: str, figures: Figures, words: Sequence[str] = ()) -> None:
    """Print the closing lines of a command on stderr, for a reader.

    Jobs of a sweep end with one table, and stages of ``hotrec run`` with the lines of that.

    Args:
        command: Its name.
        figures: Its result.
        words: Its words, for the suggested next command.
    """
    if BRIEF in os.environ or (command in WITH_TABLE and is_in_sweep()):
        return
    lines = _LINES[command](figures) if command in _LINES else []
    print_lines([*lines, *_next_stage(command, figures, words)])


def print_lines(lines: Lines) -> None:
    """Print lines of a word and a text; without a text there is no line.

    A terminal gets sentences wrapped to its width, and unwrapped commands, to be pasted.
    """
    columns = shutil.get_terminal_size().columns if sys.stderr.isatty() else 0
    for what, text in lines:
        if text is not None:
            shown = f"{what:<10} {text}"
            if columns > _INDENT and not str(text).startswith("hotrec "):
                indent = " " * _INDENT
                shown = textwrap.fill(
                    shown,
                    columns,
                    subsequent_indent=indent,
                    break_long_words=False,
                    break_on_hyphens=False,
                )
            sys.stderr.write(f"{shown}\n")
    sys.stderr.flush()


def quality_lines(figures: Figures, split: str | None) -> Lines:
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
    lines: Lines = [("AUC", f"{text} on {split or 'the scored files'}, {log_loss}")]
    entropy = figures.get("normalized_entropy")
    if entropy is not None and entropy > 1:
        lines.append(
            (
                "worse",
                f"than always predicting the rate of clicks: {entropy:.3g} times its log loss. "
                "Train in fewer epochs, with trainer.early_stop_patience, or another learning rate",
            )
        )
    return [*lines, *(("suspicious", sentence) for sentence in suspicion(figures))]


def best_line(figures: Figures) -> Lines:
    """The reported checkpoint of a training run that tracked the best one."""
    best, last = figures.get("best_step"), figures.get("num_steps")
    if best is None or best < 0:
        return []
    if best == last:
        return [("best", f"step {best}, the last one")]
    is_kept = figures.get("eval_step") == best
    fate = "kept, reported and exported" if is_kept else "not kept: set trainer.keep_best=true"
    return [("best", f"step {best} of {last}, which is {fate}")]


def few_steps_line(figures: Figures) -> Lines:
    """What to do about a training run of few steps."""
    steps = figures.get("num_steps")
    if steps is None or steps >= FEW_STEPS:
        return []
    batch = f" (now {show_count(figures['batch_size'])})" if "batch_size" in figures else ""
    text = f"{show_count(steps)}, too few to learn much: lower trainer.batch_size{batch}"
    return [("steps", f"{text}, or raise trainer.num_epochs")]


def next_commands(run_dir: Path | str, split: str | None) -> Lines:
    """The commands that evaluate and export a run."""
    text = str(shown(Path(run_dir)))
    is_plain = re.fullmatch(r"[\w.-]*/[\w./-]*", text)
    word = f"run_dir={text if is_plain else quoted(text)}"
    of_split = [f"split={split}"] if split not in (None, "test") else []
    return [
        ("evaluate", command_text("evaluate", [word, *of_split])),
        ("export", command_text("export", [word, "output=exported"])),
    ]


def shown(path: Path) -> Path:
    """The path from the current directory, if it is below that."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _train(figures: Figures) -> Lines:
    run_dir, steps = shown(Path(figures["run_dir"])), show_count(figures["num_steps"])
    if not figures.get("finished"):
        return [("stopped", f"{run_dir} after step {steps}, saved")]
    what = f"{figures.get('model')} on {figures.get('dataset_name')}, {figures.get('placement')}"
    return [
        ("done", f"{run_dir}: {steps} steps, {what}"),
        *quality_lines(figures, figures.get("eval_split")),
        *best_line(figures),
        *few_steps_line(figures),
        *next_commands(run_dir, figures.get("eval_split")),
    ]


def _checkpoint(figures: Figures) -> tuple[str, str]:
    best = ", the best one, which the run keeps" if figures.get("is_best") else ""
    run_dir = shown(Path(figures["run_dir"]))
    return ("checkpoint", f"{figures['checkpoint']} of {run_dir}{best}")


def _evaluate(figures: Figures) -> Lines:
    where = f"{figures['split']} ({show_count(figures['num_samples'])} samples)"
    return [_checkpoint(figures), *quality_lines(figures, where)]


def _export(figures: Figures) -> Lines:
    size = show_bytes(figures["num_bytes"])
    rows = f"{show_count(figures['num_rows'])} rows as {figures['rows']}"
    return [
        ("exported", f"{shown(Path(figures['output']))}: {rows}, {size}"),
        _checkpoint(figures),
        *quality_lines(figures, figures.get("split")),
    ]


def _predict(figures: Figures) -> Lines:
    num_files, num_skipped = figures["num_files"], figures["num_skipped"]
    text = f"{shown(Path(figures['output']))}: {show_count(figures['num_samples'])} samples"
    text += f" of {num_files} file{'s' * (num_files != 1)}"
    text += f", {show_count(num_skipped)} skipped" if num_skipped else ""
    return [("scored", text), _checkpoint(figures), *quality_lines(figures, None)]


def _report(figures: Figures) -> Lines:
    return [*(("said", text) for text in figures["verdict"]), ("page", shown(figures["page"]))]


def _prepare(figures: Figures) -> Lines:
    splits = figures["num_samples"]
    of_splits = ", ".join(f"{name} {show_count(num)}" for name, num in splits.items())
    rows = figures["num_rows"]
    text = f"{shown(Path(figures['dataset']))}: {show_count(sum(splits.values()))} samples"
    text += f" ({of_splits}), {show_count(sum(rows.values()))} rows in {len(rows)} tables"
    skipped = figures.get("num_skipped")
    left_out = f"{show_count(skipped)} unreadable lines" if skipped else None
    hot = next(of for of in figures["landmarks"] if of["rows_frac"] == HOT_FRAC)
    served = f"the most-read {HOT_FRAC:.0%} of the rows serve {show_frac(hot['train'])}"
    served += f" of {show_count(figures['num_lookups'])} lookups"
    if hot["heldout"] is not None:
        served += f", and {show_frac(hot['heldout'])} of the held-out ones"
    return [("dataset", text), ("left out", left_out), ("hot rows", served)]


def _calibrate(figures: Figures) -> Lines:
    # Warnings about them are below their table, just above.
    where = f"{shown(Path(figures['costs']))}: {figures['origin']} on {figures['name']}"
    return [("costs", f"{where} in {show_seconds(figures['elapsed_s'])}")]


def _plan(figures: Figures) -> Lines:
    hot = None
    if "hot_rows" in figures:
        hot = f"{show_count(figures['hot_rows'])} of {show_count(figures['total_rows'])}"
        hot += f", {show_bytes(figures['hot_bytes'])} on each rank"
    return [
        ("chosen", figures.get("why")),
        ("hot rows", hot),
        ("page", shown(Path(figures["plan_text"]))),
    ]


def _next_stage(command: str, figures: Figures, words: Sequence[str]) -> Lines:
    """The next command after a stage, with the words of this one."""
    stage = _NEXT.get(command)
    if stage is None:
        return []
    own = [word for word in words if not word.startswith(_OF_A_STAGE)]
    given = dict(word.partition("=")[::2] for word in own)
    if command == "calibrate" and not {"data", "experiment"} & given.keys():
        return []  # it has a fallback, a plan does not
    if command == "calibrate" and "plan.world_size" not in given:
        own.append(f"plan.world_size={given.get('launch.num_ranks', 1)}")
    if command == "plan":
        if given.get("plan.device", "auto") != "auto" or "planner.costs" in given:
            return []  # for other machines
        own = [word for word in own if not word.startswith(("plan.", "launch.num_ranks="))]
        own.append(f"launch.num_ranks={figures['world_size']}")
    return [("next", command_text(stage, own))]


def _run(figures: Figures) -> Lines:
    trained = figures["trained"]
    run_dir, split = Path(figures["run_dir"]) / TRAINED, figures["split"]
    hot = f"{show_count(trained['hot_rows'])} of {show_count(trained['total_rows'])}"
    if str(trained.get("placement")).startswith(TORCHREC):
        hot += f": {plan_name(trained['placement'], 0)} was trained"
    speed = trained.get("samples_per_s")
    return [
        *quality_lines(figures["quality"], split),
        *best_line(trained),
        *few_steps_line(trained),
        # Without the trial's measurements of the others; plan.txt has all.
        ("chosen", figures["why"] and f"{figures['why'].partition('; ')[0].rstrip('.')}."),
        *(("measured", sentence) for sentence in figures["verdict"] if figures["is_compared"]),
        ("speed", f"{speed:,.0f} samples/s" if speed else None),
        ("hot rows", hot),
        ("costs", figures["caveat"]),
        ("page", figures["page"]),
        *next_commands(run_dir, split),
        ("next", figures["next"]),
    ]


def _compare(figures: Figures) -> Lines:
    runs = [str(shown(Path(run))) for run in figures["runs"]]
    compared = shown(Path(figures["compared"]).parent)
    words = [f"runs=[{','.join(map(quoted, runs))}]", f"compared={quoted(str(compared))}"]
    return [
        *(("measured", sentence) for sentence in figures["verdict"]),
        ("report", command_text("report", words)),
    ]


_LINES: Mapping[str, Callable[[Figures], Lines]] = {
    "run": _run,
    "prepare": _prepare,
    "calibrate": _calibrate,
    "plan": _plan,
    "train": _train,
    "evaluate": _evaluate,
    "compare": _compare,
    "export": _export,
    "predict": _predict,
    "report": _report,
}
_NEXT = {"prepare": "calibrate", "calibrate": "plan", "plan": "train"}
# What only the stage that was given it reads.
_OF_A_STAGE = ("append=", "overwrite=", "prune=", "calibrate.")
