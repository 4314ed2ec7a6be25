"""The runs side by side: which figures, in which order, against which baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hotrec.report.read import Run
from hotrec.report.units import (
    show_bytes,
    show_count,
    show_error,
    show_frac,
    show_quality,
    show_rate,
    show_ratio,
    show_seconds,
)

BASELINE_PLACEMENT = "torchrec"


@dataclass(frozen=True)
class Figure:
    """A row of the table.

    Args:
        name: field of the summary.
        label: what the reader sees, with the unit where the numbers do not show it.
        show: number to text.
        against: how it is set against the baseline: "ratio", "difference" or "".
    """

    name: str
    label: str
    show: Callable[[float], str]
    against: str = ""


GROUPS: tuple[tuple[str, tuple[Figure, ...]], ...] = (
    (
        "Setting",
        (
            Figure("world_size", "Ranks", show_count),
            Figure("batch_size", "Batch per rank, samples", show_count),
            Figure("num_steps", "Steps", show_count),
        ),
    ),
    (
        "Quality, held out",
        (
            Figure("auc", "AUC", show_quality, "difference"),
            Figure("log_loss", "Log loss", show_quality, "difference"),
            Figure("normalized_entropy", "Normalised entropy", show_quality, "difference"),
        ),
    ),
    (
        "Speed",
        (
            Figure("step_p50_s", "Step time, median", show_seconds, "ratio"),
            Figure("step_p90_s", "Step time, 90th percentile", show_seconds, "ratio"),
            Figure("samples_per_s", "Samples, all ranks", show_rate, "ratio"),
            Figure("data_wait_frac", "Waiting for data, share of the time", show_frac),
            Figure("exposed_communication_s", "Exposed communication, mean", show_seconds, "ratio"),
            Figure(
                "slowest_rank_exposed_communication_s",
                "Exposed communication, slowest rank",
                show_seconds,
                "ratio",
            ),
            Figure(
                "exposed_communication_frac", "Exposed communication, share of the step", show_frac
            ),
        ),
    ),
    (
        "Prediction",
        (
            Figure("predicted_step_s", "Step time, predicted", show_seconds),
            Figure("measured_step_s", "Step time, median of the steps compared", show_seconds),
            Figure("step_error_frac", "Error of the step, of the measured", show_error),
            Figure("sent_bytes_error_frac", "Error of the bytes sent, of the measured", show_error),
            Figure("device_bytes_error_frac", "Error of the tables' device memory", show_error),
            Figure("host_bytes_error_frac", "Error of the tables' host memory", show_error),
        ),
    ),
    (
        "Memory, the rank with most",
        (
            Figure("measured_device_bytes", "Tables, on the device", show_bytes, "ratio"),
            Figure("measured_host_bytes", "Tables, on the host", show_bytes, "ratio"),
            Figure("peak_allocated_bytes", "Peak on the device, allocated", show_bytes, "ratio"),
            Figure("peak_reserved_bytes", "Peak on the device, reserved", show_bytes, "ratio"),
            Figure("peak_resident_bytes", "Peak on the host, resident", show_bytes, "ratio"),
        ),
    ),
    (
        "Traffic, per step and rank",
        (
            Figure("sent_bytes_total", "Bytes sent", show_bytes, "ratio"),
            Figure("bound_bytes", "Lower bound of exact training", show_bytes),
        ),
    ),
    (
        "Hot rows",
        (
            Figure("hot_rows", "Hot rows", show_count),
            Figure("hot_rows_frac", "Hot rows, share of all rows", show_frac),
            Figure("hot_lookup_frac", "Lookups that hit a hot row", show_frac),
        ),
    ),
)


def choose_baseline(runs: Sequence[Run], name: str | None) -> Run | None:
    """The run that the others are set against: the named one, else the first of TorchRec's own.

    Raises:
        ValueError: if the name is no run's.
    """
    if name is None:
        return next((r for r in runs if r.placement.startswith(BASELINE_PLACEMENT)), None)
    for run in runs:
        if run.name == name:
            return run
    raise ValueError(
        f"report baseline: expected one of the runs {[run.name for run in runs]}, got {name!r}."
    )


def choose_focus(runs: Sequence[Run], baseline: Run | None) -> Run:
    """The run that the headline is about: the first split into hot and cold, else the first other.

    A run counts as split when it has both hot rows and cold ones.
    """
    others = [run for run in runs if run is not baseline] or list(runs)
    for run in others:
        frac = run.number("hot_rows_frac")
        if frac is not None and 0.0 < frac < 1.0:
            return run
    return others[0]


def show_against(figure: Figure, run: Run, baseline: Run | None) -> str:
    """The run's figure set against the baseline's; empty for the baseline itself."""
    if baseline is None or run is baseline or not figure.against:
        return ""
    value, reference = run.number(figure.name), baseline.number(figure.name)
    if value is None or reference is None:
        return ""
    if figure.against == "ratio":
        return show_ratio(value, reference)
    return f"{value - reference:+.4f}"
