"""Display names of plans, from the names in the records of runs and predictions."""

from __future__ import annotations

TORCHREC, PLANNER = "torchrec", "planner"
# Placements of other systems, which are named after the system.
_SYSTEMS = {
    "fae": "FAE",
    "freq_cache": "frequency-aware cache",
    "scars": "SCARS",
}


def plan_name(plan: str, hot_rows: float | None) -> str:
    """Such as ``hotrec, 1,650 hot rows`` or ``TorchRec's table-wise plan``.

    Args:
        plan: Such as ``hot_cold`` or ``torchrec table_wise``.
        hot_rows: Their number; None if unknown.
    """
    kind, _, which = plan.partition(" ")
    if kind == TORCHREC:
        is_planner = which in ("", PLANNER)
        return "TorchRec's planner" if is_planner else f"TorchRec's {which.replace('_', '-')} plan"
    system = _SYSTEMS.get(kind, "hotrec")
    if hot_rows is None:
        return system
    return f"{system}, {f'{hot_rows:,.0f}' if hot_rows else 'no'} hot rows"
