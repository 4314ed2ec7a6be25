"""Reads traces that ``hotrec.train.trace`` wrote, by name."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path

from hotrec.runtime.stages import RANGE_PREFIX


def read_events(path: Path) -> dict[str, list[str]]:
    """Names of the events in the order of time, by category.

    The categories are torch's, but "step", "stage" and "range" for hotrec's named ranges.
    """
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    found = defaultdict(list)
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        category, name = event["cat"], event["name"]
        if name.startswith(RANGE_PREFIX):
            name = name.removeprefix(RANGE_PREFIX)
            kinds = {"step ": "step", "end of ": "stage"}
            category = next((of for start, of in kinds.items() if name.startswith(start)), "range")
            name = name.removeprefix("end of ")
        if category not in ("user_annotation", "gpu_user_annotation"):
            found[category].append(name)
    return found
