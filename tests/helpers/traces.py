"""Reads traces that ``hotrec.train.trace`` wrote, by thread and name."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hotrec.runtime.stages import RANGE_PREFIX
from hotrec.train.trace import STEP_PREFIX


def thread_names(events: Sequence[dict[str, Any]]) -> dict[Any, str]:
    return {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}


def read_events(path: Path) -> dict[str, list[tuple[str, str]]]:
    """Thread and name of the events in the order of time, by category.

    The categories are torch's, but "step" and "range" for hotrec's named ranges.
    """
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    names = thread_names(events)
    found = defaultdict(list)
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        category, name = event["cat"], event["name"]
        if name.startswith(RANGE_PREFIX):
            category = "step" if name.startswith(STEP_PREFIX) else "range"
        thread = names.get(event["tid"], str(event["tid"]))
        found[category].append((thread, name.removeprefix(RANGE_PREFIX)))
    return found
