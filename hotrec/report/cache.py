"""Device caches of the runs: how often they had the row, and what crossed the bus because of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from hotrec.report.read import Run
from hotrec.report.units import show_bytes, show_count, show_frac

CAPTION = (
    "All ranks and their caches together, training steps only. A step asks once for each distinct "
    "row: a hit is in the device's cache, a miss is brought in from host memory. In a conflict "
    "miss it is used there, since rows of the same step take every slot of its set. An evicted row "
    "is written back. Over the bus go rows, and the optimizer state that no cache holds."
)
NUM_STEPS = "num_steps"
SHARES = {
    "num_hits": "Hit rate, of distinct rows",
    "num_conflict_misses": "Conflict misses, of distinct rows",
}
PER_STEP = {
    "num_lookups": ("Lookups per step", show_count),
    "num_rows": ("Distinct rows per step", show_count),
    "num_misses": ("Misses per step, with conflicts", show_count),
    "num_evictions": ("Evictions per step", show_count),
    "read_bytes": ("Read over the bus per step", show_bytes),
    "written_bytes": ("Written over the bus per step", show_bytes),
}


def build_caches(runs: Sequence[Run]) -> str:
    """The section's HTML: a table with a column for each run that counted; empty without one."""
    shown = [run for run in runs if run.cache]
    if not shown:
        return ""
    heads = "".join(f'<th class="name">{escape(run.name)}</th>' for run in shown)
    columns = [_texts(run.cache) for run in shown]
    rows = "".join(
        f"<tr><td>{label}</td>{''.join(f'<td>{column[label]}</td>' for column in columns)}</tr>"
        for label in columns[0]
    )
    return (
        f'<p>{CAPTION}</p><div class="wide"><table><thead><tr><th></th>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _texts(cache: Mapping[str, float]) -> dict[str, str]:
    num_rows, num_steps = cache["num_rows"], cache[NUM_STEPS]
    texts = {
        label: show_frac(cache[name] / num_rows) if num_rows else "no lookups"
        for name, label in SHARES.items()
    }
    for name, (label, show) in PER_STEP.items():
        texts[label] = show(cache[name] / num_steps)
    return texts
