"""Several checks on the same ranks: a spawn costs seconds, a check far less."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def run_checks(checks: list[Callable[[], None]]) -> dict[str, str | None]:
    """Every check in one spawn; a failure on one rank leaves the others at its next collective.

    Returns:
        By name of the check, None or the tracebacks of the ranks that failed.
    """
    found: dict[str, str | None] = {}
    for check in checks:
        try:
            check()
            verdict = None
        except Exception:
            verdict = traceback.format_exc()
        verdicts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(verdicts, verdict)
        found[check.__name__] = "\n".join(filter(None, verdicts)) or None
    return found
