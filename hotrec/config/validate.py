"""Checks of the finished configuration: limits of single keys, and the rules of its sections.

They run on the object that OmegaConf makes: Hydra builds schemas with ``'???'`` in them, which a
``__post_init__`` would meet.
"""

from __future__ import annotations

import math
import operator
from dataclasses import fields, is_dataclass
from typing import Any

_LEAST, _MOST = -(2**63), 2**63 - 1
WORDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def validate(section: Any, key: str = "") -> None:
    """Check a configuration object, or one section of it, with all its contents.

    Args:
        section: A dataclass of the configuration.
        key: Its full key; messages start with it.

    Raises:
        ValueError: starting with the full key, with the expected and the actual value.
    """
    prefix = f"{key}." if key else ""
    for item in fields(section):
        value, name = getattr(section, item.name), f"{prefix}{item.name}"
        entries = _entries(name, value)
        least = item.metadata["limits"].get("size", 0)
        if len(entries) < least:
            number = "one value" if least == 1 else f"{least} values"
            raise ValueError(f"{name}: expected at least {number}, got {value}.")
        for full_key, entry in entries.items():
            if is_dataclass(entry):
                validate(entry, full_key)
            elif entry is not None:
                _check_limits(full_key, entry, item.metadata["limits"])
    for holds, message in section.rules() if hasattr(section, "rules") else ():
        if not holds:
            # Messages about the section itself start with a colon.
            raise ValueError(f"{key if message[0] == ':' else prefix}{message}")


def _entries(key: str, value: Any) -> dict[str, Any]:
    if isinstance(value, list):
        return {f"{key}[{index}]": entry for index, entry in enumerate(value)}
    if isinstance(value, dict):
        return {f"{key}.{name}": entry for name, entry in value.items()}
    return {key: value}


def _check_limits(key: str, value: Any, limits: dict[str, float]) -> None:
    if isinstance(value, str):  # of a key that may be a number too; rules check texts
        return
    if isinstance(value, int) and not _LEAST <= value <= _MOST:
        got = f"one of {value.bit_length() + 1} bits"
        raise ValueError(
            f"{key}: expected an integer of at most 64 bits, got {got}. Choose a smaller one."
        )
    bounds = {name: limit for name, limit in limits.items() if name in WORDS}
    if isinstance(value, float) and not math.isfinite(value) and bounds.get("le") != math.inf:
        raise ValueError(f"{key}: expected a finite number, got {value}.")
    if not all(getattr(operator, name)(value, limit) for name, limit in bounds.items()):
        wanted = " and ".join(f"{WORDS[name]} {limit}" for name, limit in bounds.items())
        raise ValueError(f"{key}: expected a value {wanted}, got {value}.")
