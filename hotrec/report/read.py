"""Reads run directories, and raises one clear error for a file that cannot be read.

All files but one of ``summary.json`` and ``metrics.jsonl`` are optional; the page says what is
missing.

``metrics.jsonl``
    A line per logged step: ``step``, ``num_samples`` (since the start), ``loss``, ``lr``,
    ``samples_per_s``, ``step_p50_s``, ``step_p90_s``, ``data_wait_s`` (per step), ``sent_bytes``
    {collective: bytes per step and rank}, ``bound_bytes`` (per step and rank), ``hot_lookup_frac``,
    ``elapsed_s``, and the stages of the step, nested as ``stage_s`` {stage: seconds per step} or
    flat as ``stage_s.<stage>``. A run with device caches has ``cache``, summed over the ranks and
    the ``num_steps`` steps since the previous line: ``num_lookups``, ``num_rows`` (distinct in a
    step), ``num_hits``, ``num_misses``, ``num_conflict_misses``, ``num_evictions``,
    ``read_bytes``, ``written_bytes``.
``eval.jsonl``
    A line per evaluation: ``step``, ``split``, ``auc``, ``log_loss``, ``normalized_entropy``,
    ``num_samples``, ``elapsed_s``.
``summary.json``
    The settings and results of the whole run, see ``NUMERIC``, and ``name``, ``placement``,
    ``model``, ``finished``, ``sent_bytes``, ``stage_s`` and ``cache`` as above. A run that was
    predicted or whose stages were measured has ``predicted_stage_s``, ``measured_stage_s`` and
    ``slowest_rank_stage_s`` by stage. An error is (predicted - measured) / measured.
``environment.json``, ``config.yaml``, ``plan.txt`` (else ``plan.json``)
    Shown as they are.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from hotrec.artifact import Artifact, check_made_from, read_artifact
from hotrec.report.units import (
    show_bytes,
    show_count,
    show_error,
    show_frac,
    show_quality,
    show_rate,
    show_seconds,
)

Line = Mapping[str, Any]

SUMMARY, METRICS, EVAL = "summary.json", "metrics.jsonl", "eval.jsonl"
ENVIRONMENT, CONFIG = "environment.json", "config.yaml"
PLANS = ("plan.txt", "plan.json")
STAGE_PREFIX = "stage_s."
WAIT_STAGE, OTHER_STAGE, COARSE_STAGE = "data_wait", "other", "compute_and_communicate"
# A summary that lacks one of these takes it from the last line of metrics.jsonl or eval.jsonl.
FROM_METRICS = (
    "samples_per_s",
    "step_p50_s",
    "step_p90_s",
    "exposed_communication_s",
    "bound_bytes",
    "hot_lookup_frac",
)
FROM_EVAL = ("auc", "log_loss", "normalized_entropy")
COMPARED = ("predicted_stage_s", "measured_stage_s", "slowest_rank_stage_s")
BY_KIND = ("device_bytes_by_kind", "host_bytes_by_kind")
CACHE = (
    "num_steps",
    "num_lookups",
    "num_rows",
    "num_hits",
    "num_misses",
    "num_conflict_misses",
    "num_evictions",
    "read_bytes",
    "written_bytes",
)


@dataclass(frozen=True)
class Measure:
    """A figure of the summary, and how the comparison of runs shows it.

    Args:
        name: The field of the summary.
        label: What the reader sees, with the unit where the numbers do not show it.
        show: Writes the number.
        against: How it is compared with the baseline: "ratio", "difference" or not at all.
    """

    name: str
    label: str
    show: Callable[[float], str]
    against: str = ""


GROUPS: Mapping[str, tuple[Measure, ...]] = {
    "Setting": (
        Measure("world_size", "Ranks", show_count),
        Measure("batch_size", "Batch per rank, samples", show_count),
        Measure("num_steps", "Steps", show_count),
    ),
    "Quality, held out": (
        Measure("auc", "AUC", show_quality, "difference"),
        Measure("log_loss", "Log loss", show_quality, "difference"),
        Measure("normalized_entropy", "Normalized entropy", show_quality, "difference"),
    ),
    "Speed": (
        Measure("step_p50_s", "Step time, median", show_seconds, "ratio"),
        Measure("step_p90_s", "Step time, 90th percentile", show_seconds, "ratio"),
        Measure("samples_per_s", "Samples, all ranks", show_rate, "ratio"),
        Measure("data_wait_frac", "Waiting for data, share of the time", show_frac),
        Measure("exposed_communication_s", "Exposed communication, mean", show_seconds, "ratio"),
        Measure(
            "slowest_rank_exposed_communication_s",
            "Exposed communication, slowest rank",
            show_seconds,
            "ratio",
        ),
        Measure(
            "exposed_communication_frac", "Exposed communication, share of the step", show_frac
        ),
    ),
    "Prediction": (
        Measure("predicted_step_s", "Step time, predicted", show_seconds),
        Measure("measured_step_s", "Step time, median of the compared steps", show_seconds),
        Measure("step_error_frac", "Error of the step time", show_error),
        Measure("sent_bytes_error_frac", "Error of the bytes sent", show_error),
        Measure("device_bytes_error_frac", "Error of the tables' device memory", show_error),
        Measure("host_bytes_error_frac", "Error of the tables' host memory", show_error),
    ),
    "Memory, the rank with most": (
        Measure("measured_device_bytes", "Tables on the device", show_bytes, "ratio"),
        Measure("measured_host_bytes", "Tables on the host", show_bytes, "ratio"),
        Measure("peak_allocated_bytes", "Peak on the device, allocated", show_bytes, "ratio"),
        Measure("peak_reserved_bytes", "Peak on the device, reserved", show_bytes, "ratio"),
        Measure("peak_resident_bytes", "Peak on the host, resident", show_bytes, "ratio"),
    ),
    "Traffic, per step and rank": (
        Measure("sent_bytes_total", "Bytes sent", show_bytes, "ratio"),
        Measure("bound_bytes", "Lower bound of exact training", show_bytes),
    ),
    "Hot rows": (
        Measure("hot_rows", "Hot rows", show_count),
        Measure("hot_rows_frac", "Hot rows, share of all rows", show_frac),
        Measure("hot_lookup_frac", "Lookups that hit a hot row", show_frac),
    ),
}
MEASURES = {measure.name: measure for group in GROUPS.values() for measure in group}
# All numeric fields of the summary, and those of a logged line.
NUMERIC = (
    *MEASURES,
    "total_rows",
    "predicted_sent_bytes",
    "predicted_device_bytes",
    "predicted_host_bytes",
    "compared_from_step",
    "grad_clip_norm",
)
PEAKS = tuple(name for name in MEASURES if name.startswith("peak"))
LINE_NUMERIC = (*FROM_METRICS, *FROM_EVAL, *PEAKS, "loss", "data_wait_s")


@dataclass(frozen=True)
class Run:
    """One run directory.

    Args:
        path: The directory.
        name: The name of the run, unique within a report.
        summary: The fields of ``summary.json``, completed from the other files. A field that was
            not recorded is absent.
        metrics: The lines of ``metrics.jsonl``.
        evals: The lines of ``eval.jsonl``.
        sent_bytes: Bytes per step and rank, by collective; empty if not recorded.
        stage_s: Seconds per step, by stage, in the order recorded; empty if not recorded.
        by_part: The fields ``COMPARED`` (seconds by stage) and ``BY_KIND`` (bytes of the rank with
            most, by what they hold) of the summary; empty if not recorded.
        cache: What the device caches did in ``num_steps`` steps, summed over the ranks; empty if
            no rank has one.
        texts: The files that the page shows as they are, by file name.
        notes: What the reader should know, such as files that are missing.
    """

    path: Path
    name: str
    summary: Mapping[str, Any]
    metrics: tuple[Line, ...] = ()
    evals: tuple[Line, ...] = ()
    sent_bytes: Mapping[str, float] = field(default_factory=dict)
    stage_s: Mapping[str, float] = field(default_factory=dict)
    by_part: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    cache: Mapping[str, float] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def splits(self) -> list[str]:
        return list(dict.fromkeys(str(line.get("split")) for line in self.evals))

    def number(self, name: str) -> float | None:
        """A numeric field of the summary, or None if it was not recorded."""
        value = self.summary.get(name)
        return None if value is None else float(value)

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """Steps and values of one field of ``metrics.jsonl``."""
        return _series(self.metrics, name)

    def eval_series(self, name: str, split: str) -> tuple[list[float], list[float]]:
        """Steps and values of one field of ``eval.jsonl`` on one split."""
        return _series([line for line in self.evals if line.get("split") == split], name)


def _series(lines: Iterable[Line], name: str) -> tuple[list[float], list[float]]:
    points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
    return [float(step) for step, _ in points], [float(value) for _, value in points]


def read_coverage(profile: Path, partition: Path | None) -> tuple[Artifact, Artifact | None]:
    """Open a profile and, where given, a partition made from it.

    Raises:
        ArtifactError: If one of them is missing or altered, or the partition was made from another
            profile.
    """
    profile_artifact = read_artifact(profile, kind="profile")
    if partition is None:
        return profile_artifact, None
    partition_artifact = read_artifact(partition, kind="partition")
    check_made_from(partition_artifact, profile_artifact)
    return profile_artifact, partition_artifact


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """Read run directories; runs with the same name are numbered.

    Raises:
        ValueError: If a directory is missing or holds no run, or one of its files is broken.
    """
    runs = [_read_run(Path(path)) for path in paths]
    if not runs:
        raise ValueError("report: expected at least one run directory, got none. Pass runs.")
    totals, seen = Counter(run.name for run in runs), Counter[str]()
    unique = []
    for run in runs:
        seen[run.name] += 1
        is_shared = totals[run.name] > 1
        unique.append(replace(run, name=f"{run.name} ({seen[run.name]})") if is_shared else run)
    return unique


def _read_run(path: Path) -> Run:
    if not path.is_dir():
        found = "a file" if path.exists() else "no such directory"
        raise ValueError(f"report run {path}: expected a run directory, got {found}.")
    if not (path / SUMMARY).exists() and not (path / METRICS).exists():
        raise ValueError(
            f"report run {path}: expected {SUMMARY} or {METRICS}, got neither. "
            f"Pass a directory that `hotrec train` wrote."
        )
    notes: list[str] = []
    where = str(path / SUMMARY)
    summary = parse_object(_read_text(path / SUMMARY, notes) or "{}", where)
    metrics, evals = _read_lines(path / METRICS, notes), _read_lines(path / EVAL, notes)
    _complete_summary(summary, metrics, evals, notes)
    _check_numbers(where, summary, NUMERIC)
    sent_bytes = _named_numbers(where, "sent_bytes", summary)
    if not sent_bytes:
        sent_bytes = _mean_by_key([line.get("sent_bytes") or {} for line in metrics])
    if sent_bytes and summary.get("sent_bytes_total") is None:
        summary["sent_bytes_total"] = sum(sent_bytes.values())
    return Run(
        path=path,
        name=str(summary.get("name") or path.name),
        summary=summary,
        metrics=metrics,
        evals=evals,
        sent_bytes=sent_bytes,
        stage_s=_read_stages(path, summary, metrics),
        by_part={name: _named_numbers(where, name, summary) for name in (*COMPARED, *BY_KIND)},
        cache=_read_cache(path, summary, metrics),
        texts=_read_texts(path, notes),
        notes=tuple(notes),
    )


def _read_text(path: Path, notes: list[str]) -> str | None:
    if not path.exists():
        notes.append(f"{path.name}: not recorded.")
        return None
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8 text, got {error}. Delete it.") from error


def parse_object(text: str, where: str) -> dict[str, Any]:
    """The JSON object in a text; ``where`` names the text in an error message."""
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
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
        notes.append(f"{path.name}: the last line is incomplete and was left out.")
    parsed = []
    for number, line in enumerate(lines, start=1):
        where = f"{path} line {number}"
        document = parse_object(line, where)
        if not _is_number(document.get("step")):
            raise ValueError(f"{where}: expected a numeric 'step', got {document.get('step')!r}.")
        _check_numbers(where, document, LINE_NUMERIC)
        for name in ("sent_bytes", "stage_s"):
            _named_numbers(where, name, document)
        parsed.append(document)
    return tuple(parsed)


def _read_texts(path: Path, notes: list[str]) -> dict[str, str]:
    plan = next((name for name in PLANS if (path / name).exists()), PLANS[0])
    found = {name: _read_text(path / name, notes) for name in (CONFIG, plan, ENVIRONMENT)}
    texts = {name: text for name, text in found.items() if text is not None}
    if ENVIRONMENT in texts:
        parse_object(texts[ENVIRONMENT], str(path / ENVIRONMENT))
    return texts


def _complete_summary(
    summary: dict[str, Any],
    metrics: tuple[Line, ...],
    evals: tuple[Line, ...],
    notes: list[str],
) -> None:
    completed = []
    for names, lines in ((FROM_METRICS, metrics), (FROM_EVAL, evals)):
        for name in names:
            recorded = [line[name] for line in lines if line.get(name) is not None]
            if summary.get(name) is None and recorded:
                summary[name] = recorded[-1]
                completed.append(name)
    if summary.get("num_steps") is None and metrics:
        summary["num_steps"] = metrics[-1]["step"]
        completed.append("num_steps")
    if completed:
        notes.append(f"from the last logged line, not the summary: {', '.join(completed)}.")
    if summary.get("finished") is not True:
        notes.append("the run has not finished; its figures are those up to its last line.")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_numbers(where: str, document: Line, names: Iterable[str]) -> None:
    for name in names:
        value = document.get(name)
        if value is not None and not _is_number(value):
            raise ValueError(f"{where} {name}: expected a number, got {value!r}.")


def _named_numbers(where: str, name: str, document: Line) -> dict[str, float]:
    value = document.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(_is_number(part) for part in value.values()):
        raise ValueError(f"{where} {name}: expected numbers by name, got {value!r}.")
    return {str(key): float(part) for key, part in value.items()}


def _read_cache(path: Path, summary: Line, metrics: tuple[Line, ...]) -> dict[str, float]:
    """The cache figures of the summary, or the sums over the lines of a run without them."""
    total = _cache_figures(str(path / SUMMARY), summary)
    lines = [_cache_figures(f"{path / METRICS} step {line['step']}", line) for line in metrics]
    counted = [line for line in lines if line]
    if total or not counted:
        return total
    return {name: sum(line[name] for line in counted) for name in CACHE}


def _cache_figures(where: str, line: Line) -> dict[str, float]:
    figures = _named_numbers(where, "cache", line)
    if figures and (not figures.keys() >= set(CACHE) or figures["num_steps"] <= 0):
        raise ValueError(
            f"{where} cache: expected {', '.join(CACHE)}, over at least one step, got {figures}. "
            "Remove the key to report the run without it."
        )
    return figures


def _read_stages(path: Path, summary: Line, metrics: tuple[Line, ...]) -> dict[str, float]:
    """Seconds by stage, with waiting for data first, which is otherwise a part of "other".

    A run without stages has two: waiting for data, and the rest of the median step.
    """
    where = str(path / SUMMARY)
    stage_s = (
        _stages(where, summary)
        or _named_numbers(where, "measured_stage_s", summary)
        or _mean_by_key([_stages(str(path / METRICS), line) for line in metrics])
    )
    waits = [float(line["data_wait_s"]) for line in metrics if line.get("data_wait_s") is not None]
    if WAIT_STAGE in stage_s or not waits:
        return stage_s
    wait_s = fmean(waits)
    step_s = summary.get("step_p50_s")
    if OTHER_STAGE in stage_s:
        stage_s[OTHER_STAGE] = max(stage_s[OTHER_STAGE] - wait_s, 0.0)
    if not stage_s and step_s is not None:
        stage_s = {COARSE_STAGE: max(float(step_s) - wait_s, 0.0)}
    return {WAIT_STAGE: wait_s, **stage_s} if stage_s else {}


def _stages(where: str, line: Line) -> dict[str, float]:
    """The stages of a line, nested or flat."""
    flat = {k.removeprefix(STAGE_PREFIX): v for k, v in line.items() if k.startswith(STAGE_PREFIX)}
    return _named_numbers(where, "stage_s", line) | _named_numbers(where, "flat", {"flat": flat})


def _mean_by_key(lines: list[dict[str, float]]) -> dict[str, float]:
    keys = dict.fromkeys(key for line in lines for key in line)
    return {key: fmean(float(line[key]) for line in lines if key in line) for key in keys}
