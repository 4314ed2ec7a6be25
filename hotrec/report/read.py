"""Reading run directories: what was recorded, and one clear error for what cannot be read."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Line = Mapping[str, Any]

SUMMARY, METRICS, EVAL = "summary.json", "metrics.jsonl", "eval.jsonl"
ENVIRONMENT, CONFIG = "environment.json", "config.yaml"
PLANS = ("plan.txt", "plan.json")
STAGE_PREFIX = "stage_s."
WAIT_STAGE, OTHER_STAGE, COARSE_STAGE = "data_wait", "other", "compute_and_communicate"
# Fields of the summary that a missing or unfinished one takes from the last line of metrics.jsonl,
# or for a quality figure from the last line of eval.jsonl.
FROM_METRICS = (
    "samples_per_s",
    "step_p50_s",
    "step_p90_s",
    "exposed_communication_s",
    "bound_bytes",
    "hot_lookup_frac",
)
PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_resident_bytes")
FROM_EVAL = ("auc", "log_loss", "normalized_entropy")
NUMERIC = (
    *FROM_METRICS,
    *FROM_EVAL,
    "world_size",
    "batch_size",
    "num_steps",
    "data_wait_frac",
    "slowest_rank_exposed_communication_s",
    "exposed_communication_frac",
    "sent_bytes_total",
    "hot_rows",
    "total_rows",
    "hot_rows_frac",
    "predicted_step_s",
    "measured_step_s",
    "step_error_frac",
    "predicted_sent_bytes",
    "sent_bytes_error_frac",
    "compared_from_step",
    "grad_clip_norm",
    *PEAKS,
    "predicted_device_bytes",
    "measured_device_bytes",
    "device_bytes_error_frac",
    "predicted_host_bytes",
    "measured_host_bytes",
    "host_bytes_error_frac",
)
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
LINE_NUMERIC = (*FROM_METRICS, *FROM_EVAL, *PEAKS, "loss", "data_wait_s")


@dataclass(frozen=True)
class Run:
    """One run directory, read.

    Args:
        path: the directory.
        name: unique among the runs of a report.
        summary: the fields of ``summary.json``, completed from the other files; a field that was
            not recorded is absent.
        metrics: lines of ``metrics.jsonl``.
        evals: lines of ``eval.jsonl``.
        sent_bytes: bytes per step and rank, by collective; empty when not recorded.
        stage_s: seconds per step, by stage, in the order recorded; empty when not recorded.
        predicted_stage_s: the same, as predicted before the run.
        measured_stage_s: the same, over the steps that are compared with the prediction.
        slowest_rank_stage_s: the same, of the slowest rank in each stage.
        device_bytes_by_kind: memory of the tables on the device, by what it holds, of each the rank
            with most.
        host_bytes_by_kind: the same on the host.
        cache: what the device caches did in "num_steps" steps, added up over ranks; empty where no
            rank has one.
        texts: contents of the files that the page shows as they are, by file name.
        notes: what the reader should know, such as files that are absent.
    """

    path: Path
    name: str
    summary: Mapping[str, Any]
    metrics: tuple[Line, ...] = ()
    evals: tuple[Line, ...] = ()
    sent_bytes: Mapping[str, float] = field(default_factory=dict)
    stage_s: Mapping[str, float] = field(default_factory=dict)
    predicted_stage_s: Mapping[str, float] = field(default_factory=dict)
    measured_stage_s: Mapping[str, float] = field(default_factory=dict)
    slowest_rank_stage_s: Mapping[str, float] = field(default_factory=dict)
    device_bytes_by_kind: Mapping[str, float] = field(default_factory=dict)
    host_bytes_by_kind: Mapping[str, float] = field(default_factory=dict)
    cache: Mapping[str, float] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def placement(self) -> str:
        return str(self.summary.get("placement", ""))

    def number(self, name: str) -> float | None:
        """A numeric field of the summary, or None when it was not recorded."""
        value = self.summary.get(name)
        return None if value is None else float(value)

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """Steps and values of one field of ``metrics.jsonl``."""
        return _series(self.metrics, name)

    def eval_series(self, name: str, split: str) -> tuple[list[float], list[float]]:
        """Steps and values of one field of ``eval.jsonl`` on one split."""
        return _series([line for line in self.evals if line.get("split") == split], name)

    @property
    def splits(self) -> list[str]:
        return list(dict.fromkeys(str(line.get("split")) for line in self.evals))


def _series(lines: Iterable[Line], name: str) -> tuple[list[float], list[float]]:
    points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
    return [float(step) for step, _ in points], [float(value) for _, value in points]


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """Read run directories; runs of one name are told apart by a number.

    Raises:
        ValueError: if a directory is missing, holds no run, or a file of it is not what it claims.
    """
    runs = [_read_run(Path(path)) for path in paths]
    if not runs:
        raise ValueError("report: expected at least one run directory, got none. Pass runs.")
    totals = Counter(run.name for run in runs)
    seen: Counter[str] = Counter()
    unique = []
    for run in runs:
        seen[run.name] += 1
        is_shared = totals[run.name] > 1
        name = f"{run.name} ({seen[run.name]})" if is_shared else run.name
        unique.append(Run(**{**vars(run), "name": name}))
    return unique


def _read_run(path: Path) -> Run:
    if not path.is_dir():
        raise ValueError(
            f"report run {path}: expected a run directory, got "
            f"{'a file' if path.exists() else 'no such directory'}. Correct the path."
        )
    if not (path / SUMMARY).exists() and not (path / METRICS).exists():
        raise ValueError(
            f"report run {path}: expected {SUMMARY} or {METRICS}, got neither. "
            f"Pass a directory that `hotrec train` wrote."
        )
    notes: list[str] = []
    summary = dict(_read_object(path / SUMMARY, notes))
    metrics = _read_lines(path / METRICS, notes)
    evals = _read_lines(path / EVAL, notes)
    _complete_summary(summary, metrics, evals, notes)
    _check_numbers(str(path / SUMMARY), summary, NUMERIC)
    sent_bytes = _named_numbers(str(path / SUMMARY), "sent_bytes", summary.get("sent_bytes"))
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
        **{
            name: _named_numbers(str(path / SUMMARY), name, summary.get(name))
            for name in (*COMPARED, *BY_KIND)
        },
        cache=_read_cache(path, summary, metrics),
        texts=_read_texts(path, notes),
        notes=tuple(notes),
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8 text, got {error}. Delete or mend it.") from error


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: expected JSON, got {error}. Mend or delete it.") from error
    if not isinstance(document, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(document).__name__}.")
    return document


def _read_object(path: Path, notes: list[str]) -> dict[str, Any]:
    if not path.exists():
        notes.append(f"{path.name}: not recorded.")
        return {}
    return _parse(_read_text(path), str(path))


def _read_lines(path: Path, notes: list[str]) -> tuple[Line, ...]:
    if not path.exists():
        notes.append(f"{path.name}: not recorded.")
        return ()
    text = _read_text(path)
    lines = text.splitlines()
    if lines and not text.endswith("\n"):
        # A run that is being written, or was killed, ends in the middle of a line.
        lines.pop()
        notes.append(f"{path.name}: the last line is incomplete and was left out.")
    parsed = []
    for number, line in enumerate(lines, start=1):
        document = _parse(line, f"{path} line {number}")
        if not _is_number(document.get("step")):
            raise ValueError(
                f"{path} line {number}: expected a numeric 'step', got {document.get('step')!r}."
            )
        _check_numbers(f"{path} line {number}", document, LINE_NUMERIC)
        for name in ("sent_bytes", "stage_s"):
            _named_numbers(f"{path} line {number}", name, document.get(name))
        parsed.append(document)
    return tuple(parsed)


def _read_texts(path: Path, notes: list[str]) -> dict[str, str]:
    texts = {}
    plan = next((name for name in PLANS if (path / name).exists()), PLANS[0])
    for name in (CONFIG, plan, ENVIRONMENT):
        if (path / name).exists():
            texts[name] = _read_text(path / name)
        else:
            notes.append(f"{name}: not recorded.")
    if ENVIRONMENT in texts:
        _parse(texts[ENVIRONMENT], str(path / ENVIRONMENT))
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


def _named_numbers(where: str, name: str, value: object) -> dict[str, float]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(_is_number(part) for part in value.values()):
        raise ValueError(f"{where} {name}: expected numbers by name, got {value!r}.")
    return {str(key): float(part) for key, part in value.items()}


def _read_cache(path: Path, summary: Line, metrics: tuple[Line, ...]) -> dict[str, float]:
    """What the summary says of all steps; of a run without one, what its lines add up to."""
    total = _cache_figures(str(path / SUMMARY), summary)
    lines = [_cache_figures(f"{path / METRICS} step {line['step']}", line) for line in metrics]
    counted = [line for line in lines if line]
    if total or not counted:
        return total
    return {name: math.fsum(line[name] for line in counted) for name in CACHE}


def _cache_figures(where: str, line: Line) -> dict[str, float]:
    figures = _named_numbers(where, "cache", line.get("cache"))
    missing = [name for name in CACHE if name not in figures]
    if figures and (missing or figures["num_steps"] <= 0):
        raise ValueError(
            f"{where} cache: expected {', '.join(CACHE)}, of at least one step, got {figures}. "
            "Take the key out to report the run without it."
        )
    return figures


def _read_stages(path: Path, summary: Line, metrics: tuple[Line, ...]) -> dict[str, float]:
    """The breakdown of a step, waiting for data in front: it is a part of the stage "other".

    Without stages the coarsest one: waiting for data, and the rest of the median step.
    """
    where = str(path / SUMMARY)
    stage_s = _stages(where, summary)
    if not stage_s:
        stage_s = _named_numbers(where, "measured_stage_s", summary.get("measured_stage_s"))
    if not stage_s:
        stage_s = _mean_by_key([_stages(str(path / METRICS), line) for line in metrics])
    waits = [float(line["data_wait_s"]) for line in metrics if line.get("data_wait_s") is not None]
    if WAIT_STAGE in stage_s or not waits:
        return stage_s
    wait_s = math.fsum(waits) / len(waits)
    step_s = summary.get("step_p50_s")
    if OTHER_STAGE in stage_s:
        stage_s[OTHER_STAGE] = max(stage_s[OTHER_STAGE] - wait_s, 0.0)
    if not stage_s and step_s is not None:
        stage_s = {COARSE_STAGE: max(float(step_s) - wait_s, 0.0)}
    return {WAIT_STAGE: wait_s, **stage_s} if stage_s else {}


def _stages(where: str, line: Line) -> dict[str, float]:
    """The stages of a line, nested or flat."""
    nested = _named_numbers(where, "stage_s", line.get("stage_s"))
    flat = {k.removeprefix(STAGE_PREFIX): v for k, v in line.items() if k.startswith(STAGE_PREFIX)}
    return nested | _named_numbers(where, STAGE_PREFIX + "*", flat)


def _mean_by_key(lines: list[dict[str, float]]) -> dict[str, float]:
    keys = dict.fromkeys(key for line in lines for key in line)
    means = {}
    for key in keys:
        values = [float(line[key]) for line in lines if key in line]
        means[key] = math.fsum(values) / len(values)
    return means
