"""Fields of the configuration: what a key means, its default, its limits."""

from __future__ import annotations

import copy
from dataclasses import field
from typing import Any

MISSING: Any = "???"  # OmegaConf's mark of a value that must be given


def key(
    meaning: str,
    default: Any = MISSING,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> Any:
    """A field of the configuration: what it means, its default, and its limits."""
    limits = {"at_least": at_least, "above": above, "at_most": at_most, "below": below}
    metadata = {"meaning": meaning, "limits": {k: v for k, v in limits.items() if v is not None}}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(meaning: str, kind: type) -> Any:
    """A field that is a dataclass of its own."""
    return field(default_factory=kind, metadata={"meaning": meaning, "limits": {}})
