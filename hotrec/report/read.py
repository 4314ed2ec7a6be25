"""Reads run directories, and raises one clear error for a file that cannot be read.

One of ``summary.json`` and ``metrics.jsonl`` is required, and all other files are optional; the
page lists the missing ones. ``hotrec/runtime/figures.py`` declares their fields.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from hotrec.artifact import read_record
from hotrec.config.groups import PlacementKind
from hotrec.planner.names import plan_name
from hotrec.runtime.figures import FIGURES
from hotrec.runtime.run_dir import EVAL, HOT_SET, METRICS, POINT, SUMMARY

Line = Mapping[str, Any]

# Files that the page shows as they are, and their titles.
TEXTS = {"config.yaml": "Configuration", "plan.txt": "Plan", "environment.json": "Environment"}
MAX_BYTES = 1 << 32  # of the lines of a run
WAIT_STAGE, OTHER_STAGE = "data_wait", "other"
# Fields that an unfinished run takes from its last line.
FROM_LINE = {key for key, figure in FIGURES.items() if figure.from_line}


@dataclass(frozen=True)
class Run:
    """One run directory.

    Args:
        path: The directory.
        name: Display name of the run, unique within a report: its configured name, or its plan's
            display name.
        summary: The fields of ``summary.json``, completed from the other files. A field that was
            not recorded is absent or None; one with parts is then empty.
        metrics: The lines of ``metrics.jsonl``.
        evals: The lines of ``eval.jsonl``.
        decisions: The lines of ``hot_set.jsonl``.
        texts: The files that the page shows unchanged, by file name.
        notes: Notes for the reader, such as missing files.
        overrides: The overrides of a job of a sweep, by key; empty for other runs.
        is_empty: Whether the job of a sweep ended before it recorded anything.
    """

    path: Path
    name: str
    summary: Mapping[str, Any]
    metrics: tuple[Line, ...]
    evals: tuple[Line, ...]
    decisions: tuple[Line, ...]
    texts: Mapping[str, str]
    notes: tuple[str, ...]
    overrides: Mapping[str, str]
    is_empty: bool

    @property
    def job(self) -> str:
        """Its name among the jobs of a sweep: 3, or 3/train if job 3 is of ``hotrec run``."""
        above, name = self.path.parent.name, self.path.name
        return f"{above}/{name}" if above.isdigit() and not name.isdigit() else name

    @property
    def splits(self) -> list[str]:
        return list(dict.fromkeys(str(line.get("split")) for line in self.evals))

    def by_name(self, name: str) -> Mapping[str, float]:
        """The parts of a figure; empty if not recorded."""
        found: Mapping[str, float] = self.summary[name]
        return found

    def number(self, name: str) -> float | None:
        """A figure, or ``<key>.<part>`` of one with parts; None if it was not recorded."""
        field, _, key = name.partition(".")
        value = self.by_name(field).get(key) if key else self.summary.get(name)
        per_step = self.by_name("cache").get("num_steps") if field == "cache" else 1
        return None if value is None or not per_step else float(value) / per_step

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """Steps and values of one field of ``metrics.jsonl``."""
        return series_of(self.metrics, name)

    def eval_series(self, name: str, split: str) -> tuple[list[float], list[float]]:
        """Steps and values of one field of ``eval.jsonl`` on one split."""
        return series_of([line for line in self.evals if line.get("split") == split], name)


def series_of(lines: Iterable[Line], name: str) -> tuple[list[float], list[float]]:
    """Steps and values of one field of lines, without those that lack it."""
    points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
    return [float(step) for step, _ in points], [float(value) for _, value in points]


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """Read run directories and jobs of a sweep.

    Jobs are named by the overrides in which they differ; runs with the same name are numbered.

    Raises:
        ValueError: If a directory is missing or contains no run, or one of its files is broken.
    """
    runs = [_read_run(Path(path)) for path in paths]
    if not runs:
        raise ValueError("report: expected at least one run directory, got none. Pass runs.")
    varied = varied_overrides(run for run in runs if not run.is_empty)
    names = [run.name if run.is_empty else _short_name(run, varied) for run in runs]
    numbers = [names[:position].count(name) + 1 for position, name in enumerate(names)]
    return [
        replace(run, name=f"{name} ({number})" if names.count(name) > 1 else name)
        for run, name, number in zip(runs, names, numbers, strict=True)
    ]


def find_jobs(sweep_dir: Path, *names: str) -> list[Path]:
    """The directories below with one of the named files, numbers by value."""
    folders = {path.parent for name in names for path in sweep_dir.rglob(name)}
    return sorted(folders, key=lambda path: [part.zfill(9) for part in path.parts])


def varied_overrides(runs: Iterable[Run]) -> list[str]:
    """The keys of overrides in which jobs of a sweep differ; other runs do not count."""
    jobs = [run.overrides for run in runs if run.overrides]
    keys = dict.fromkeys(key for overrides in jobs for key in overrides)
    return [key for key in keys if len({overrides.get(key) for overrides in jobs}) > 1]


def _short_name(run: Run, varied: Sequence[str]) -> str:
    """The varied overrides, by the last part of each key where that is unique."""
    ends = Counter(key.rpartition(".")[2] for key in varied)
    parts = []
    for key in varied:
        end = key.rpartition(".")[2]
        if key in run.overrides:
            parts.append(f"{end if ends[end] == 1 else key}={run.overrides[key]}")
    return ", ".join(parts) or run.name


def _read_run(path: Path) -> Run:
    if not path.is_dir():
        found = "a file" if path.exists() else "no such directory"
        raise ValueError(f"report run {path}: expected a run directory, got {found}.")
    is_empty = not (path / SUMMARY).exists() and not (path / METRICS).exists()
    if is_empty and not (path / POINT).exists():
        raise ValueError(
            f"report run {path}: expected {SUMMARY} or {METRICS}, got neither. Pass a directory "
            "written by `hotrec train`."
        )
    notes: list[str] = []
    recorded = _read_text(path / SUMMARY, notes)
    summary = {} if recorded is None else parse_object(recorded, str(path / SUMMARY))
    _check_numbers(str(path / SUMMARY), summary)
    metrics, evals = _read_lines(path / METRICS, notes), _read_lines(path / EVAL, notes)
    found_texts = {name: _read_text(path / name, notes) for name in TEXTS}
    for name, text in found_texts.items():
        if text is not None and name.endswith(".json"):
            parse_object(text, str(path / name))
    return Run(
        path=path,
        name=_shown_name(summary, path),
        summary=_complete(path, summary, metrics, evals, notes),
        metrics=metrics,
        evals=evals,
        decisions=_read_lines(path / HOT_SET, notes) if (path / HOT_SET).exists() else (),
        texts={name: text for name, text in found_texts.items() if text is not None},
        notes=tuple(notes),
        overrides=_read_overrides(path / POINT),
        is_empty=is_empty,
    )


def _shown_name(summary: Line, path: Path) -> str:
    """The configured name of a run, or its plan's."""
    name, placement = summary.get("name"), summary.get("placement")
    if placement is None or name not in {kind.name for kind in PlacementKind}:
        return str(name or path.name)
    return plan_name(str(placement), summary.get("hot_rows"))


def _read_overrides(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    overrides = parse_object(read_record(path), str(path)).get("overrides")
    if not isinstance(overrides, dict):
        raise ValueError(f"{path} overrides: expected values by key, got {overrides!r}. Delete it.")
    return {key: str(value) for key, value in overrides.items()}


def _read_text(path: Path, notes: list[str]) -> str | None:
    if not path.exists():
        notes.append(f"{path.name}: not recorded.")
        return None
    return read_record(path, MAX_BYTES)


def parse_object(text: str, where: str) -> dict[str, Any]:
    """The JSON object in a text; ``where`` names the text in an error message."""
    try:
        document = json.loads(text)
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{where}: expected JSON, got {error}. Fix or delete it.") from error
    if not isinstance(document, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(document).__name__}.")
    return document


def _read_lines(path: Path, notes: list[str]) -> tuple[Line, ...]:
    text = _read_text(path, notes) or ""
    lines = text.splitlines()
    if lines and not text.endswith("\n"):
        # A run that was killed, or is still being written, ends in the middle of a line.
        lines.pop()
        notes.append(f"{path.name}: skipped the incomplete last line.")
    parsed = []
    for number, line in enumerate(lines, start=1):
        where = f"{path} line {number}"
        document = parse_object(line, where)
        if not _is_number(document.get("step")):
            raise ValueError(f"{where}: expected a numeric 'step', got {document.get('step')!r}.")
        _check_numbers(where, document)
        parsed.append(document)
    return tuple(parsed)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_numbers(where: str, document: Line) -> None:
    """Refuse a figure of another type than declared; None is not recorded."""
    for name, value in document.items():
        figure = FIGURES.get(name)
        if value is None or figure is None or not figure.unit.is_number:
            continue
        numbers = value.values() if figure.parts and isinstance(value, dict) else [value]
        if isinstance(value, dict) != bool(figure.parts) or not all(map(_is_number, numbers)):
            expected = "numbers by name" if figure.parts else "a number"
            raise ValueError(f"{where} {name}: expected {expected}, got {value!r}.")


def _complete(
    path: Path, summary: Line, metrics: tuple[Line, ...], evals: tuple[Line, ...], notes: list[str]
) -> dict[str, Any]:
    """The summary, completed from the lines; an unfinished run has none."""
    last = {
        name: line[name]
        for line in (*metrics, *evals)
        for name in line
        if name in FROM_LINE and line[name] is not None and summary.get(name) is None
    }
    if metrics and summary.get("num_steps") is None:
        last["num_steps"] = metrics[-1]["step"]
    if last:
        notes.append(f"from the last logged line, not the summary: {', '.join(last)}.")
    if not summary.get("finished"):
        notes.append("the run has not finished; its figures are those up to its last line.")
    evaluated: Line = next((line for line in reversed(evals) if "day" not in line), {})
    complete: dict[str, Any] = {
        "eval_split": evaluated.get("split"),
        "num_eval_samples": evaluated.get("num_samples"),
        **summary,
        **last,
        **{key: summary.get(key) or {} for key, figure in FIGURES.items() if figure.parts},
        "auc_by_day": {line["day"]: line.get("auc") for line in evals if "day" in line},
        "sent_bytes": summary.get("sent_bytes") or _by_key(fmean, metrics, "sent_bytes"),
        "cache": summary.get("cache") or _by_key(sum, metrics, "cache"),
        "stage_s": _stages(summary, metrics),
        "finished": bool(summary.get("finished")),
    }
    if complete["sent_bytes"] and complete.get("sent_bytes_total") is None:
        complete["sent_bytes_total"] = sum(complete["sent_bytes"].values())
    cache = complete["cache"]
    if cache.get("num_rows") and "num_hits" in cache:
        complete["cache_hit_frac"] = cache["num_hits"] / cache["num_rows"]
    return complete


def _by_key(
    add_up: Callable[[list[float]], float], lines: Iterable[Line], name: str
) -> dict[str, float]:
    """The numbers by name of all lines added up, or their means."""
    recorded = [line[name] for line in lines if line.get(name)]
    keys = dict.fromkeys(key for numbers in recorded for key in numbers)
    return {key: add_up([n[key] for n in recorded if key in n]) for key in keys}


def _stages(summary: Line, metrics: tuple[Line, ...]) -> dict[str, float]:
    """Seconds by stage, with waiting for data first, which is otherwise a part of "other"."""
    stage_s = dict(summary.get("measured_stage_s") or _by_key(fmean, metrics, "stage_s"))
    waits = [float(line["data_wait_s"]) for line in metrics if line.get("data_wait_s") is not None]
    if not stage_s or not waits:
        return stage_s
    if OTHER_STAGE in stage_s:
        stage_s[OTHER_STAGE] = max(stage_s[OTHER_STAGE] - fmean(waits), 0.0)
    return {WAIT_STAGE: fmean(waits), **stage_s}
