"""Memory of the runs: what the tables were predicted to take and took, and the peaks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from hotrec.report.page import build_missing
from hotrec.report.read import Run
from hotrec.report.units import NOT_RECORDED, show_bytes, show_error

CAPTION = (
    "Each figure is that of the rank with most, so parts need not add up to the whole. A plan "
    "predicts the memory of the tables: rows, their gradients and optimizer state, caches and the "
    "router's maps. Peaks hold dense layers, activations, messages and libraries as well. An error "
    "is predicted minus measured, in percent of the measured. On CPU all memory is the host's."
)
PLACES = {"device": "on the device", "host": "on the host"}
PEAKS = {
    "peak_allocated_bytes": "Peak on the device, allocated",
    "peak_reserved_bytes": "Peak on the device, reserved",
    "peak_resident_bytes": "Peak on the host, resident",
}


def build_memory(runs: Sequence[Run]) -> str:
    """The section's HTML: a table for each run that counted its memory."""
    shown = [run for run in runs if run.number("peak_resident_bytes") is not None]
    parts = [f"<p>{CAPTION}</p>"] if shown else []
    parts += [f"<h3>{escape(run.name)}</h3>{build_table(run)}" for run in shown]
    missing = [run for run in runs if run not in shown]
    parts += [build_missing(f"{run.name}, memory: {NOT_RECORDED}.") for run in missing]
    return "\n".join(parts)


def build_table(run: Run) -> str:
    """Of the device and the host the tables, then what they hold; then the peaks."""
    rows = []
    by_kind = {"device": run.device_bytes_by_kind, "host": run.host_bytes_by_kind}
    for place, where in PLACES.items():
        predicted = run.number(f"predicted_{place}_bytes")
        measured = run.number(f"measured_{place}_bytes")
        error = run.number(f"{place}_bytes_error_frac")
        if predicted or measured:
            rows.append(_row(f"Tables {where}", predicted, measured, error))
        for kind, num_bytes in by_kind[place].items():
            if num_bytes:
                rows.append(_row(f"{kind.replace('_', ' ')} {where}", None, num_bytes, None))
    for name, label in PEAKS.items():
        peak = run.number(name)
        if peak is not None:
            rows.append(_row(label, None, peak, None))
    head = "".join(f"<th>{text}</th>" for text in ("Memory", "Predicted", "Measured", "Error"))
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _row(
    label: str, predicted: float | None, measured: float | None, error_frac: float | None
) -> str:
    texts = ["" if value is None else show_bytes(value) for value in (predicted, measured)]
    texts.append("" if error_frac is None else show_error(error_frac))
    return f"<tr><td>{escape(label)}</td>{''.join(f'<td>{text}</td>' for text in texts)}</tr>"
