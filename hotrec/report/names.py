"""Plans as a user knows them, from the names that runs and predictions record."""

from __future__ import annotations

from hotrec.report.units import show_count

TORCHREC, PLANNER = "torchrec", "planner"
# Placements that are another system's, by which they are named.
_SYSTEMS = {
    "fae": "FAE",
    "freq_cache": "frequency-aware cache",
    "hugectr": "HugeCTR's hybrid",
    "scars": "SCARS",
}


def plan_name(plan: str, hot_rows: float | None) -> str:
    """Such as ``hotrec, 1,650 hot rows`` or ``TorchRec's table-wise plan``.

    Args:
        plan: Such as ``hot_cold`` or ``torchrec table_wise``.
        hot_rows: Their number; None where it is not known.
    """
    kind, _, which = plan.partition(" ")
    if kind == TORCHREC:
        is_planner = which in ("", PLANNER)
        return "TorchRec's planner" if is_planner else f"TorchRec's {which.replace('_', '-')} plan"
    system = _SYSTEMS.get(kind, "hotrec")
    if hot_rows is None:
        return system
    return f"{system}, {show_count(hot_rows) if hot_rows else 'no'} hot rows"
