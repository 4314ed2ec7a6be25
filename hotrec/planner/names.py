"""Plans as a user knows them, from the names that runs and predictions record."""

from __future__ import annotations

TORCHREC, PLANNER = "torchrec", "planner"
# Placements that are another system's, by which they are named.
_SYSTEMS = {
    "fae": "FAE",
    "freq_cache": "frequency-aware cache",
    "hugectr": "HugeCTR's hybrid",  # of runs made while hotrec had it
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
    return f"{system}, {f'{hot_rows:,.0f}' if hot_rows else 'no'} hot rows"


def candidate_name(name: str, hot_rows: float) -> str:
    """Such as ``hotrec, no hot rows, look_ahead``.

    Args:
        name: Of a prediction: ``hot_cold look_ahead``, or ``torchrec planner base``, with the tier
            before the pipeline if it is not the default. Another name stays what it is.
        hot_rows: Their number.
    """
    kind, *more = name.split(" ")
    if kind not in (TORCHREC, "hot_cold", "all_cold"):
        return name
    if kind == TORCHREC and more:
        kind = f"{kind} {more.pop(0)}"
    return ", ".join([plan_name(kind, hot_rows), *more])
