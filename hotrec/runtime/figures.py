"""Every figure that a training run records, declared once.

``metrics.jsonl``, ``eval.jsonl``, ``hot_set.jsonl`` and ``summary.json`` take no other keys;
``suspicious`` is derived when an evaluation ends; ``cache_hit_frac``, ``auc_by_day`` and the
interleaved plans' when a run is read. The
labels and units on pages, at the metrics server and in the documentation come from here, and so
does the reduction over ranks. A new metric is a row of this table and the code that computes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Unit(Enum):
    """The unit of a figure's values, in the words of the documentation."""

    seconds = "seconds"
    bytes = "bytes"
    count = "number"
    frac = "fraction"
    error = "fraction, with its sign"
    rate = "per second"
    quality = "quality"
    number = "value"
    text = "text"
    flag = "true or false"
    document = "JSON"

    @property
    def is_number(self) -> bool:
        return self not in (Unit.text, Unit.flag, Unit.document)


class Reduce(Enum):
    """The reduction over ranks, in the words of the documentation."""

    first = "rank 0"  # or the same on every rank
    mean = "mean"
    sum = "sum"
    max = "largest"
    ratio = "ratio of the sums or means"  # computed where the figure is recorded


@dataclass(frozen=True)
class Figure:
    """A figure of a run.

    Args:
        key: Its key in the records; ``<key>.<part>`` is a part of a figure with parts.
        label: The name shown with the number; ``{}`` stands for the part.
        unit: The unit of its values.
        over_ranks: The reduction over ranks.
        better: "more" or "less" if one is better. Pages then compare bytes and quality with a
            baseline, but never times, because the machine's state changes between runs.
        parts: The kind of its parts' names; its value is then a number for each part.
        from_line: Whether the last line is used for a run without a summary.
        in_sweep: Whether the table of a sweep shows it.
    """

    key: str
    label: str
    unit: Unit
    over_ranks: Reduce = Reduce.first
    better: str = ""
    parts: str = ""
    from_line: bool = False
    in_sweep: bool = False


_seconds, _bytes, _count, _frac, _error, _rate, _quality, _number, _text, _flag, _document = Unit
_first, _mean, _sum, _max, _ratio = Reduce
_more, _less = "more", "less"
_line: Any = {"from_line": True}
_sweep: Any = {"in_sweep": True}
# Settings, which are not numbers and come first on pages; and figures that pages do not show side
# by side.
RUN, ELSEWHERE = "Run", "Not side by side"
# By their heading on the page, in the order of the page.
GROUPS: Mapping[str, tuple[Figure, ...]] = {
    RUN: (
        Figure("dataset_name", "Dataset", _text),
        Figure("eval_split", "Evaluated on", _text),
        Figure("placement", "Placement", _text),
        Figure("model", "Model", _text),
        Figure("precision", "Precision of the dense layers", _text),
        Figure("compile", "Dense layers compiled", _flag),
        Figure("finished", "Finished", _flag),
    ),
    "Setting": (
        Figure("world_size", "Ranks", _count),
        Figure("batch_size", "Batch per rank, samples", _count),
        Figure("num_steps", "Steps", _count),
        Figure("grad_clip_norm", "Gradients of the dense layers clipped to", _number),
    ),
    "Quality, held out": (
        Figure("auc", "AUC", _quality, _first, _more, **_line, **_sweep),
        Figure("log_loss", "Log loss", _quality, _first, _less, **_line, **_sweep),
        Figure("normalized_entropy", "Normalized entropy", _quality, _first, _less, **_line),
        Figure("gauc", "GAUC", _quality, _first, _more, **_line),
        Figure("gauc_samples_frac", "Samples that count in the GAUC", _frac, **_line),
        Figure("recall_at", "Recall@{}", _quality, _first, _more, parts="k"),
        Figure("ndcg_at", "NDCG@{}", _quality, _first, _more, parts="k"),
        Figure("ranked_samples_frac", "Positive samples whose item is ranked", _frac),
        Figure("num_eval_samples", "Samples evaluated", _count, _sum),
        Figure("eval_step", "Step of the model evaluated", _count),
        Figure("best_step", "Step of the best model, by the first split", _count),
    ),
    "Speed": (
        Figure("step_p50_s", "Step time, median", _seconds, _first, _less, **_line, **_sweep),
        Figure("step_p90_s", "Step time, 90th percentile", _seconds, _first, _less, **_line),
        Figure("samples_per_s", "Samples, all ranks", _rate, _first, _more, **_line),
        Figure("data_wait_frac", "Waiting for data, share of the time", _frac, _first, _less),
        Figure(
            "work_balance",
            "Work of the busiest rank, over the mean",
            _number,
            _ratio,
            _less,
            **_line,
        ),
        Figure(
            "exposed_communication_s",
            "Exposed communication, mean",
            _seconds,
            _mean,
            _less,
            **_line,
        ),
        Figure(
            "slowest_rank_exposed_communication_s",
            "Exposed communication, slowest rank",
            _seconds,
            _max,
            _less,
        ),
        Figure(
            "exposed_communication_frac",
            "Exposed communication, share of the step",
            _frac,
            _ratio,
            _less,
        ),
    ),
    "Interleaved plans, by hotrec compare": (
        Figure("interleaved_step_s", "Step time", _seconds, _mean, _less),
        Figure("home_lookups_frac", "Lookups on the sample's rank", _frac, _sum),
        Figure("owner_balance", "Busiest owner of rows, over the mean", _number, _ratio),
    ),
    "Prediction": (
        Figure("predicted_step_s", "Step time, predicted", _seconds),
        Figure("measured_step_s", "Step time, median of the compared steps", _seconds, _mean),
        Figure("step_error_frac", "Error of the step time", _error),
        Figure("predicted_sent_bytes", "Bytes sent, predicted", _bytes),
        Figure("sent_bytes_error_frac", "Error of the bytes sent", _error),
        Figure("predicted_device_bytes", "Tables on the device, predicted", _bytes),
        Figure("device_bytes_error_frac", "Error of the tables' device memory", _error),
        Figure("predicted_host_bytes", "Tables on the host, predicted", _bytes),
        Figure("host_bytes_error_frac", "Error of the tables' host memory", _error),
    ),
    "Stages of a step, against the prediction": (
        Figure("predicted_stage_s", "{}, predicted", _seconds, parts="stage"),
        Figure("measured_stage_s", "{}, measured", _seconds, _mean, parts="stage"),
        Figure("slowest_rank_stage_s", "{}, on its slowest rank", _seconds, _max, parts="stage"),
    ),
    "Memory, the rank with most": (
        Figure("measured_device_bytes", "Tables on the device", _bytes, _max, _less),
        Figure("measured_host_bytes", "Tables on the host", _bytes, _max, _less),
        Figure("peak_allocated_bytes", "Peak on the device, allocated", _bytes, _max, _less),
        Figure("peak_reserved_bytes", "Peak on the device, reserved", _bytes, _max, _less),
        Figure("peak_resident_bytes", "Peak on the host, resident", _bytes, _max, _less),
    ),
    "Traffic, per step and rank": (
        Figure("sent_bytes_total", "Bytes sent", _bytes, _mean, _less, **_sweep),
        Figure("bound_bytes", "Lower bound of exchanging rows", _bytes, _mean, **_line),
        Figure("between_hosts_bytes", "Of these between hosts", _bytes, _mean, _less, **_line),
        Figure(
            "between_hosts_bound_bytes",
            "Lower bound between hosts, a row once per host",
            _bytes,
            _mean,
            **_line,
        ),
    ),
    "Hot rows": (
        Figure("hot_rows", "Hot rows", _count),
        Figure("hot_rows_frac", "Hot rows, share of all rows", _frac),
        Figure("hot_lookup_frac", "Lookups that hit a hot row", _frac, _ratio, **_line),
        Figure("hot_set.num_moved", "Rows that became hot in training", _count),
        Figure("hot_set.moved_bytes", "Bytes broadcast for them", _bytes),
        Figure("hot_set.pause_s", "Pause of all decisions and moves", _seconds),
    ),
    "Device caches, per step of all ranks": (
        Figure("cache_hit_frac", "Hit rate, of distinct rows", _frac, _ratio),
        Figure("cache.num_rows", "Distinct rows", _count, _sum),
        Figure("cache.num_misses", "Misses, read from the host", _count, _sum),
        Figure("cache.num_conflict_misses", "Conflict misses (full set), used there", _count, _sum),
        Figure("cache.num_evictions", "Evictions", _count, _sum),
        Figure("cache.read_bytes", "Read over the bus", _bytes, _sum),
        Figure("cache.written_bytes", "Written over the bus", _bytes, _sum),
    ),
    "Quality by day, before training on it": (
        Figure("auc_by_day", "AUC of {}", _quality, _first, _more, parts="day"),
    ),
    "Quality by label": (
        Figure("auc_by_label", "AUC of {}", _quality, _first, _more, parts="label"),
        Figure("log_loss_by_label", "Log loss of {}", _quality, _first, _less, parts="label"),
        Figure("gauc_by_label", "GAUC of {}", _quality, _first, _more, parts="label"),
    ),
    "Tables by kind, the rank with most": (
        Figure("device_bytes_by_kind", "{} on the device", _bytes, _max, parts="kind"),
        Figure("host_bytes_by_kind", "{} on the host", _bytes, _max, parts="kind"),
    ),
    ELSEWHERE: (
        Figure("step", "Steps made", _count),
        Figure("num_samples", "Samples trained; in eval.jsonl, evaluated", _count, _sum),
        Figure("loss", "Training loss of the last step", _quality, _mean, _less),
        Figure("lr", "Learning rate of the first part of the optimizer", _number),
        Figure("elapsed_s", "Time since the start", _seconds),
        Figure("data_wait_s", "Waiting for data, per step", _seconds, _mean, _less),
        Figure("stage_s", "Stages of a step, medians", _seconds, _mean, parts="stage"),
        Figure("compared_from_step", "First step that is compared with the prediction", _count),
        Figure("sent_bytes", "Bytes sent per step and rank", _bytes, _mean, parts="collective"),
        Figure("cache", "Counters of the device caches", _number, _sum, parts="counter"),
        Figure("cache.num_steps", "Steps in which they were counted", _count),
        Figure("cache.num_lookups", "Lookups", _count, _sum),
        Figure("cache.num_hits", "Distinct rows that were there", _count, _sum),
        Figure("cache.wait_s", "Waiting of the exchange for slots", _seconds, _sum),
        Figure("hot_set", "Decisions of which rows are hot", _number, parts="sum"),
        Figure("hot_set.num_decisions", "Decisions", _count),
        Figure("hot_set.hot_share", "Share of the lookups that the hot rows serve", _frac),
        Figure("hot_set.best_share", "Maximum share that as many hot rows can serve", _frac),
        Figure("split", "Split evaluated", _text),
        Figure("day", "Day evaluated before it is trained on", _text),
        Figure("days", "Evaluations of all such days", _document),
        Figure("by_label", "Quality of each of several labels", _document),
        Figure("quality", "Quality on each split", _document),
        Figure("last_quality", "Quality after the last step, if another one is kept", _document),
        Figure("best_log_loss", "Log loss of the best model", _quality, _first, _less),
        Figure("best_auc", "The same with trainer.best_by=auc", _quality, _first, _more),
        Figure("best_gauc", "The same with trainer.best_by=gauc", _quality, _first, _more),
        Figure("best_recall_at", "The same with trainer.best_by=recall_at", _quality, better=_more),
        Figure("best_ndcg_at", "The same with trainer.best_by=ndcg_at", _quality, better=_more),
        Figure("suspicious", "Columns that predict too well", _document),
        Figure("name", "Name of the run", _text),
        Figure("dataset", "Content hash of the dataset", _text),
        Figure("generation", "Generation of the dataset", _count),
        Figure("label_weights", "Weights of the labels", _number, parts="label"),
        Figure("policy", "Policy that chose the hot rows", _text),
        Figure("optimizer", "Optimizer", _text),
        Figure("pipeline", "Pipeline", _text),
        Figure("wire", "Type of rows and gradients when sent", _text),
        Figure("order", "Order of the samples", _text),
        Figure("assign", "Which rank gets a sample", _text),
        Figure("all_hot_samples_frac", "Samples that read hot rows alone", _frac),
        Figure("total_rows", "Rows of all tables", _count),
    ),
}
FIGURES = {figure.key: figure for group in GROUPS.values() for figure in group}


def check_declared(record: Mapping[str, Any], within: str = "") -> None:
    """Refuse a figure of a line or a summary that is not declared.

    Raises:
        ValueError: If there is one.
    """
    for key, value in record.items():
        name = within + key
        if name not in FIGURES:
            raise ValueError(
                f"figure {name}: expected one that is declared in hotrec/runtime/figures.py, got "
                f"{value!r} for another one. Declare it there."
            )
        if isinstance(value, Mapping) and any(other.startswith(f"{name}.") for other in FIGURES):
            check_declared(value, f"{name}.")


def over_ranks(of_ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One value for each figure, from the values of all ranks; None where a rank has none.

    Args:
        of_ranks: The same figures of every rank, in the order of ranks.
    """
    return {
        key: _reduce(FIGURES[key].over_ranks, [values[key] for values in of_ranks])
        for key in of_ranks[0]
    }


def _reduce(how: Reduce, values: Sequence[Any]) -> Any:
    assert how is not Reduce.ratio, "a ratio cannot be computed from the ranks' ratios"
    first = values[0]
    if how is Reduce.first or any(value is None for value in values):
        return first if how is Reduce.first else None
    if isinstance(first, Mapping):
        return {part: _reduce(how, [value[part] for value in values]) for part in first}
    if how is Reduce.max:
        return max(values)
    return sum(values) / len(values) if how is Reduce.mean else sum(values)


def of_sum(key: str, total: Any, count: int) -> Any:
    """The value of a figure, from the sum over ranks, or over steps of ranks; of each part."""
    if isinstance(total, Mapping):
        return {part: of_sum(key, of_part, count) for part, of_part in total.items()}
    how = FIGURES[key].over_ranks
    assert how in (Reduce.mean, Reduce.sum), f"{key} is not a sum over ranks: {how}"
    return total / count if how is Reduce.mean else total
