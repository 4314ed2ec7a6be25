"""Fields of the configuration: meaning, default and limits of a key are in one place.

The meaning is for the configuration reference; ``hotrec.config.validate`` checks the limits, and
``rules`` of a section that has them. Hydra uses the dataclasses as structured configurations, so
they are not ``frozen``, have no ``Literal``, and check nothing on construction.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")
# What ``rules`` of a section yields: whether something holds, and what is said otherwise, after the
# section's key.
Rules = Iterator[tuple[bool, str]]
MISSING: Any = "???"  # OmegaConf's mark of a required value

# The choices of each group that have a dataclass of their own, filled by ``option``.
VARIANTS: dict[str, dict[str, type]] = {}


def key(meaning: str, default: Any = MISSING, **limits: float) -> Any:
    """A field with its meaning, default and limits.

    Args:
        meaning: What the key sets, for the configuration reference.
        default: Its default; a list or mapping is copied.
        limits: ``ge``, ``gt``, ``le`` and ``lt`` bound the value, or each value of a list or
            mapping; ``size`` is the minimum number of values. A float must be finite unless
            ``le=math.inf`` is set.
    """
    metadata = {"meaning": meaning, "limits": limits}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(meaning: str, kind: type) -> Any:
    """A field that is itself a dataclass."""
    return field(default_factory=kind, metadata={"meaning": meaning, "limits": {}})


@dataclass_transform()
def option(group: str, kind: Enum) -> Callable[[type[T]], type[T]]:
    """Make a class the dataclass of the choice ``group=kind``."""

    def register(cls: type[T]) -> type[T]:
        cls.__annotations__ = {
            "kind": type(kind).__name__,
            **cls.__dict__.get("__annotations__", {}),
        }
        cls.kind = key(f"choose it with {group}=", kind)  # type: ignore[attr-defined]
        VARIANTS.setdefault(group, {})[kind.name] = dataclass(cls)
        return cls

    return register
