"""Display names of plans, from the names in the records of runs and predictions."""

from __future__ import annotations

TORCHREC, PLANNER = "torchrec", "planner"
# Placements of other systems, which are named after the system.
_SYSTEMS = {
    "fae": "FAE",
    "freq_cache": "frequency-aware cache",
    "hugectr": "HugeCTR's hybrid",  # in runs of versions that had it
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


def candidate_name(name: str, hot_rows: float) -> str:
    """Such as ``hotrec, no hot rows, look_ahead``.

    Args:
        name: Of a prediction: ``hot_cold look_ahead``, or ``torchrec planner base``, with the tier
            before the pipeline if it is not the default. Other names are returned unchanged.
        hot_rows: Their number.
    """
    kind, *more = name.split(" ")
    if kind not in (TORCHREC, "hot_cold", "all_cold"):
        return name
    if kind == TORCHREC and more:
        kind = f"{kind} {more.pop(0)}"
    return ", ".join([plan_name(kind, hot_rows), *more])
